"""The dry run: what a run would take, for every shipped recipe, without a model, a prompt file or a
network.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.estimate.run import Estimate, estimate_recipe
from ebbflow.models.base import ModelError
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.optimizer_config import OptimizerConfig
from tasks import plan_run as plan
from tasks import start_run as start
from tasks.deployment import DeploymentConfig, DeploymentError
from tasks.fit import _iterate_changes, compare_needs, find_machine
from tasks.pod_configs import AcceleratedConfig, TrainingGroupConfig
from workflows.post_training import dry_run

RECIPES = sorted((Path(__file__).parents[2] / "workflows" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_planned(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(path)
    monkeypatch.chdir(tmp_path)
    text = dry_run(recipe=recipe)
    assert f"# digest {recipe.digest}" in text
    assert f"every one of rounds: {recipe.rounds}" in text
    for index, stage in enumerate(recipe.stages):
        label = recipe.stage_label(0, index)
        samples = stage.steps * stage.prompts_per_step if stage.kind == "online" else stage.prompts
        work = text[text.index("every one of rounds") : text.index("GiB that a whole run keeps")]
        (row,) = [
            line
            for line in work.splitlines()
            if line.split()[:2] == label.split() and "," in line or f"{label}  " in line
        ]
        assert f"{samples * stage.group_size if stage.takes_prompts else 0:,}" in row
        assert f"{label} training" in text
    assert "GiB that a whole run keeps" in text
    assert not list(tmp_path.iterdir())


def test_the_machines_are_those_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    group = TrainingGroupConfig(cpu=4, mem="64Gi", gpus=1, accelerator="nvidia-h100")
    decided = DeploymentConfig(
        train_processes=8, accelerated=AcceleratedConfig(gpus=1, mem="99Gi"), training_group=group
    )
    monkeypatch.setattr(plan, "DEPLOYMENT", decided)
    text = dry_run(recipe=load_recipe(RECIPES[0].with_name("tiny.yaml")))
    assert (
        "accelerated (text encoding, rollouts, online stages in one process, evaluations):"
        " processes 1, cores 2,"
        " 99Gi, 1 x GPU" in text
    )
    assert (
        "training_group (offline training, online stages with placement: colocated): processes 8,"
        " cores 32, 64Gi, 8 x nvidia-h100" in text
    )
    assert "processes in an offline or a colocated stage: 8" in text


def test_tokens_that_cannot_be_shared_are_refused_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_recipe(RECIPES[0].with_name("tiny.yaml"))
    sharing = DeploymentConfig(train_context_parallel=2)
    for module, task in ((plan, dry_run), (start, start.start_run)):
        monkeypatch.setattr(module, "DEPLOYMENT", sharing)
        with pytest.raises(
            ModelError,
            match="train_context_parallel = 2: the tokens of GlyphModel cannot be shared, as",
        ):
            task(recipe=recipe)


ONE_H100 = DeploymentConfig(
    accelerated=AcceleratedConfig(gpus=1, accelerator="nvidia-h100", mem="128Gi")
)
WAN = RECIPES[0].with_name("wan22_5b.yaml")


def load_wan_in_process() -> Recipe:
    """All 5 billion parameters in one process."""
    recipe = load_recipe(WAN)
    (stage,) = recipe.stages
    in_process = stage.model_copy(update={"placement": "in_process"})
    return recipe.model_copy(update={"stages": [in_process]})


def test_a_run_that_does_not_fit_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "DEPLOYMENT", ONE_H100)
    with pytest.raises(DeploymentError) as error:
        dry_run(recipe=load_wan_in_process())
    text = str(error.value)
    needs = (
        r"1\.1 online training needs 1\d\d\.\d GiB, and accelerated gives it 71\.1 GiB of"
        r" nvidia-h100: "
    )
    assert re.search(
        needs + r"set stages\.0\.placement: ray and stages\.0\.resources\.training\.count: \d+ \(",
        text,
    )
    assert re.search(
        r"evaluation needs 9\d\.\d GiB, .*set policy\.train: lora .*, or set"
        r" accelerated\.accelerator to nvidia-h200",
        text,
    )


def test_a_colocated_stage_that_does_not_fit_is_refused_by_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "DEPLOYMENT", ONE_H100)
    with pytest.raises(
        DeploymentError,
        match=r"1\.1 online training needs 1\d\d\.\d GiB, and training_group gives it 4\.0 GiB of"
        r" main memory: raise training_group\.mem",
    ):
        dry_run(recipe=load_recipe(WAN))


def test_what_is_proposed_fits() -> None:
    small = DeploymentConfig(accelerated=AcceleratedConfig(gpus=1, gpu_memory="13Gi", mem="64Gi"))
    made = estimate_recipe(load_recipe(RECIPES[0].with_name("sd35_medium_ocr.yaml")))
    (misfit,) = [
        line for line in compare_needs(made, small)[1] if line.startswith("1.1 online training")
    ]
    (size,) = re.findall(r"set stages\.0\.micro_batch: (\d+) ", misfit)
    (stage,) = made.recipe.stages
    changed = made.recipe.model_copy(
        update={"stages": [stage.model_copy(update={"micro_batch": int(size)})]}
    )
    assert not any(
        line.startswith("1.1 online training")
        for line in compare_needs(estimate_recipe(changed), small)[1]
    )


def offline_wan(**model: object) -> Estimate:
    """All 5 billion parameters in an offline stage, whose rollouts hold the weights and three
    copies of them.
    """
    recipe = load_recipe(WAN)
    data = {
        "model": recipe.model.model_dump() | model,
        "stages": [{"kind": "offline", "algorithm": {"name": "diffusion_nft"}}],
    }
    return estimate_recipe(Recipe.model_validate(data), processes=8)


def misfit(made: Estimate, role: str, **keys: object) -> list[str]:
    group = TrainingGroupConfig(gpus=1, accelerator="nvidia-h200", **keys)
    small = DeploymentConfig(
        train_processes=8,
        accelerated=AcceleratedConfig(gpus=1, gpu_memory="70Gi", **keys),
        training_group=group,
    )
    return [
        line for line in compare_needs(made, small)[1] if line.startswith(f"1.1 offline {role}")
    ]


def test_offloading_is_proposed_where_main_memory_holds_what_it_offloads() -> None:
    made = offline_wan()
    (holds,), (lacks,) = (misfit(made, "rollout", mem=mem) for mem in ("128Gi", "64Gi"))
    assert "set model.cpu_offload: true (" in holds
    assert "cpu_offload" not in lacks
    assert "set policy.train: lora (" in lacks


def test_what_the_optimizer_cannot_do_is_not_proposed() -> None:
    """Neither more processes nor main memory; of a state that can be divided, both are."""

    def proposed(name: str) -> set[str]:
        made = offline_wan()
        (stage,) = made.recipe.stages
        recipe = made.recipe.model_copy(
            update={"stages": [stage.model_copy(update={"optimizer": OptimizerConfig(name=name)})]}
        )
        changes = list(
            _iterate_changes(replace(made, recipe=recipe, processes=1), "1.1 offline training")
        )
        return {words.partition(":")[0] for _, words in changes} & {
            "train_processes",
            "model.cpu_offload",
        }

    assert proposed("adamw") == {"train_processes", "model.cpu_offload"}
    assert proposed("adamw_8bit") == set()


def test_what_is_offloaded_must_fit_into_the_main_memory_of_the_pod() -> None:
    made = offline_wan(cpu_offload=True)
    waiting = made.memory["1.1 offline training"].offloaded + made.main_memory
    (line,) = misfit(made, "training", mem="64Gi")
    short = math.ceil(8 * waiting / 2**30 - 64)
    assert line.startswith(
        f"1.1 offline training keeps {waiting / 2**30:.1f} GiB in main memory, and training_group"
        " gives it 8.0 GiB: "
    )
    assert f"raise training_group.mem by {short}Gi" in line
    assert not misfit(made, "training", mem=f"{64 + short}Gi")


def test_encoders_and_samples_must_fit_into_the_main_memory_of_the_pod() -> None:
    """Each rank of a pod keeps its own text encoders there, also without ``model.cpu_offload``."""
    made = offline_wan()
    memory = made.memory["1.1 offline training"]
    assert memory.offloaded == 0
    waiting = memory.main_memory_bytes
    needed = math.ceil(8 * waiting / 2**30)
    (line,) = misfit(made, "training", mem="16Gi")
    assert line == (
        f"1.1 offline training keeps {waiting / 2**30:.1f} GiB in main memory, and training_group"
        f" gives it 2.0 GiB: raise training_group.mem by {needed - 16}Gi"
    )
    assert not misfit(made, "training", mem=f"{needed}Gi")


def test_actors_share_the_main_memory_of_a_pod_by_their_gpus() -> None:
    recipe = load_recipe(WAN)
    training = {"training": {"count": 4, "gpus": 1}}
    stages = [{"kind": "online", "placement": "ray", "resources": training}]
    data = {"model": recipe.model.model_dump() | {"cpu_offload": True}, "stages": stages}
    made = estimate_recipe(Recipe.model_validate(data))

    def shares(gpus: int) -> float:
        workers = [{"gpus": gpus, "mem": "64Gi"}]
        deployment = DeploymentConfig.model_validate(
            {"ray_cluster": {"accelerator": "nvidia-h100", "workers": workers}}
        )
        return find_machine(made, "1.1 online training", deployment).main_memory / 2**30

    assert (shares(1), shares(2), shares(8)) == (64, 32, 16)


def test_a_gpu_of_unknown_kind_is_not_judged_and_one_of_a_given_size_is() -> None:
    made = estimate_recipe(load_wan_in_process())

    def verdict(**keys: object) -> str:
        lines, _ = compare_needs(
            made, DeploymentConfig(accelerated=AcceleratedConfig(gpus=1, **keys))
        )
        return next(line for line in lines if "1.1 online training" in line)

    assert verdict().endswith("unknown")
    assert verdict(gpu_memory="500Gi").endswith("fits")
    assert verdict(gpu_memory="24Gi").endswith("DOES NOT FIT")


def test_a_training_group_is_compared_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = estimate_recipe(load_recipe(RECIPES[0].with_name("tiny.yaml")), processes=4)
    group = TrainingGroupConfig(mem="1Gi")
    offline = next(name for name in made.memory if name.endswith("offline training"))
    assert (
        find_machine(made, offline, DeploymentConfig(train_processes=4, training_group=group)).bytes
        == 2**30 / 4
    )


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(recipe=load_recipe(RECIPES[0].with_name("tiny.yaml")))
    assert "what each process needs, of its machine's memory" in text
    assert "GiB that a whole run keeps" not in capsys.readouterr().out
