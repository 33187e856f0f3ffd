"""docs/extending.md: its code is that of examples/, its examples run, and its errors are those that
appear.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.registry import find_algorithm
from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import Prompt, PromptError
from ebbflow.evaluation.serve import generate_images
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import compute_transition
from ebbflow.models import load_model
from ebbflow.models.families.glyph import encode_grey_images
from ebbflow.models.prepare import copy_base_folder
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.algorithms import CustomAlgorithmConfig
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.registry import configure_reward
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rewards.combine import RewardError, load_scorer
from ebbflow.rollouts.generate import generate_samples
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.update import PolicyUpdater
from tests.extension_cases import (
    CONTRAST,
    COPY,
    DOC,
    EXAMPLES,
    FADING,
    MODEL,
    REINFORCE,
    ROOT,
    SHIFTED,
    SOUP,
)
from tests.forked import run_forked


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_the_code_of_the_page_is_that_of_the_examples():
    shown = dict(
        re.findall(r"^`(examples/\S+)`\n\n```\w+\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
    )
    files = [
        file
        for kind in ("*.py", "*.yaml")
        for file in EXAMPLES.rglob(kind)
        # The recipe of docs/data.md needs no code.
        if file.name not in ("__init__.py", "glyph_sft.yaml")
    ]
    assert shown == {str(file.relative_to(ROOT)): file.read_text() for file in files}


def test_the_page_counts_the_lines_of_the_examples():
    rows = re.findall(r"^\| \[.*\| (\d+) \|$", DOC, re.MULTILINE)
    files = (
        "reinforce",
        "contrast",
        "fading",
        "sign_descent",
        "second_copy",
        "soup",
        "shifted",
        "text_file",
    )
    texts = [(EXAMPLES / "mine" / f"{name}.py").read_text() for name in files]
    assert rows == [str(len(text.splitlines())) for text in texts]


@pytest.mark.parametrize(
    "statement", sorted(set(re.findall(r"^from ebbflow[\w.]* import [\w, ]+$", DOC, re.MULTILINE)))
)
def test_every_import_of_the_page_is_right(statement):
    exec(statement, {})


def test_the_links_of_the_page_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", DOC)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


CHECK = [str(Path(sys.executable).with_name("ebbflow")), "check", str(EXAMPLES / "recipe.yaml")]


def test_check_accepts_a_recipe_that_uses_them_all(tmp_path, base_folder):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base").symlink_to(base_folder)
    # The package lies beside the recipe: no PYTHONPATH leads to it.
    done = run_forked(CHECK, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, timeout=300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "resolved.yaml").write_text(done.stdout)
    resolved = load_recipe(tmp_path / "runs" / "resolved.yaml")
    assert resolved == load_recipe(EXAMPLES / "recipe.yaml")
    assert (
        resolved.stages[0].window.kind == "random"
    )  # which the algorithm asked for, not the recipe
    assert resolved.stages[0].hyper_parameters.negatives == 0.5
    assert set(resolved.plugin_paths) == {SHIFTED, CONTRAST, COPY, SOUP}


def test_check_says_what_to_do_when_the_package_is_not_on_the_path(tmp_path):
    # A copy in a folder without the package, which would be found beside the recipe.
    (tmp_path / "recipe.yaml").write_bytes((EXAMPLES / "recipe.yaml").read_bytes())
    environment = os.environ | {"PYTHONPATH": ""}
    command = [*CHECK[:2], str(tmp_path / "recipe.yaml")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    found = [re.sub(r"^\S+/recipe.yaml:\d+: ", "", line) for line in done.stderr.splitlines()[1:]]
    assert found == [line for line in DOC.splitlines() if "No module named 'mine'" in line]


def stage(kind="online", path=REINFORCE["path"], **options):
    return {
        "stages": [
            {"kind": kind, "algorithm": {"name": "custom", "path": path, "options": options}}
        ]
    }


@pytest.mark.parametrize(
    "changes",
    [
        stage(path="mine.reinforce:ALGORITM"),
        stage(path="mine.reinforce:loss"),
        stage(negative=0.5),
        stage("offline"),
        {"model": {"family": SHIFTED}},
    ],
    ids=["no such name", "no algorithm", "misspelt option", "wrong stage", "family without a path"],
)
def test_a_recipe_that_cannot_be_run_is_refused_as_the_page_shows(changes):
    with pytest.raises(RecipeError) as refused:
        Recipe.model_validate(changes)
    assert str(refused.value).removeprefix("this recipe cannot be run:\n") + "\n" in DOC


@pytest.mark.parametrize(
    ("path", "error"),
    [("mine.contrast:Brightness", RecipeError), ("mine.reinforce:ReinforceConfig", RewardError)],
)
def test_the_first_task_refuses_a_wrong_reward_as_the_page_shows(tmp_path, path, error):
    recipe = Recipe.model_validate({"output": str(tmp_path), "rewards": [{"name": path}]})
    with pytest.raises(error) as refused:
        check_recipe(recipe, "https://mlflow.example", on_cluster=False)
    assert str(refused.value) in DOC.splitlines()


def test_the_first_task_refuses_a_wrong_family(tmp_path, base_folder):
    def first_task(family):
        recipe = Recipe.model_validate(
            {"output": str(tmp_path), "model": {"family": family, "path": str(base_folder)}}
        )
        check_recipe(recipe, "https://mlflow.example", on_cluster=False)

    first_task(SHIFTED)
    with pytest.raises(
        RecipeError,
        match="the module 'mine.shifted' has no 'ShiftedGlif'; did you mean 'ShiftedGlyph'",
    ):
        first_task("mine.shifted:ShiftedGlif")


@pytest.fixture
def train(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage of an algorithm; returns the updater, its parameters before, logged
    metrics and the record.
    """

    def run(algorithm, judge=scorer, **online):
        recipe = make_recipe(online={"algorithm": algorithm, "reference": {"weight": 0}, **online})
        ctx = StageContext(recipe, 0, 0)
        model = load_model(base_folder)
        recorder = MetricsRecorder()
        updater = PolicyUpdater(Policy(model, recipe.policy, 0), ctx.online_config)
        before = {name: value.detach().clone() for name, value in updater.policy.parameters.items()}
        record = run_online_stage(
            ctx, open_local_workers(ctx, updater, judge), make_prompts(6), recorder
        )
        return updater, before, recorder.metrics_rows, record

    return run


def test_an_online_stage_trains_with_the_algorithm(train):
    updater, before, logged, record = train(REINFORCE)
    assert any(
        not torch.equal(value, before[name]) for name, value in updater.policy.parameters.items()
    )
    assert (record.algorithm, record.optimizer_steps, len(logged)) == (
        "mine.reinforce:ALGORITHM",
        2,
        2,
    )
    for metrics in logged:
        assert metrics.keys() >= {"loss", "reinforce/log_prob", "grad_norm", "reward/mean"}
        assert all(np.isfinite(value) for value in metrics.values())


def test_at_ratio_one_it_is_the_policy_gradient_of_flow_grpo(train):
    """The gradient of A rho at rho = 1 is that of A log_prob, and the first update of fresh samples
    is there.
    """
    same = {
        "steps": 1,
        "sampler": {"name": "flow_sde", "steps": 4},
        "window": {"kind": "fixed", "size": 2},
    }
    updaters = [train(algorithm, **same)[0] for algorithm in (REINFORCE, {"name": "flow_grpo"})]
    gradients = [
        torch.cat([value.grad.flatten() for value in updater.policy.parameters.values()])
        for updater in updaters
    ]
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("negatives", [0.0, 0.25, 1.0])
def test_its_option_reaches_the_loss(negatives):
    given = CustomAlgorithmConfig(path=REINFORCE["path"], options={"negatives": negatives})
    algorithm = find_algorithm(given)
    hyper = given.load_algorithm()[1]
    log_prob = torch.tensor([-0.5, -0.25, 2.0], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 0.0])
    nothing = torch.zeros(3)
    rows = TrajectoryRows(None, log_prob, nothing, nothing, {}, advantage)
    loss, metrics = algorithm.loss(rows, hyper)
    loss.sum().backward()
    assert loss.tolist() == [1.0, -0.25 * negatives, 0.0]
    assert log_prob.grad.tolist() == [-2.0, negatives, 0.0]
    assert metrics["reinforce/log_prob"].tolist() == log_prob.tolist()


def test_the_stage_gets_its_defaults_and_the_recipe_overrides_them():
    plain = OnlineStageConfig.model_validate({"algorithm": REINFORCE})
    assert (plain.sampler.name, plain.window.kind, plain.window.size) == ("flow_sde", "random", 2)
    changed = OnlineStageConfig.model_validate(
        {"algorithm": REINFORCE, "sampler": {"name": "dance_sde"}, "window": {"size": 1}}
    )
    assert (changed.sampler.name, changed.window.kind, changed.window.size) == (
        "dance_sde",
        "random",
        1,
    )


def scored(images):
    prompts = [None] * len(images)  # which this reward does not look at
    return load_scorer([configure_reward(CONTRAST, weight=0.5)], [])(
        np.asarray(images, np.uint8), prompts
    )


def test_the_reward_has_the_scale_that_it_states():
    halves = np.zeros((8, 8, 3))
    halves[:, 4:] = 255
    table = scored([np.full((8, 8, 3), 77), halves, halves / 5])
    assert table.metrics["Contrast"] == pytest.approx([0, 1, 0.2], abs=1e-12)
    assert table.metrics["brightness"] == pytest.approx([77 / 255, 0.5, 0.1])
    assert np.array_equal(table.reward, 0.5 * table.metrics["Contrast"])


def test_the_reward_is_of_the_image_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 32, 3))
    together = scored(images).reward
    assert together.tolist() == [scored(images[i : i + 1]).reward[0] for i in range(5)]
    assert together.tolist() == scored(images[::-1]).reward[::-1].tolist()


def test_a_stage_trains_on_the_reward(train):
    logged = train({"name": "flow_grpo"}, judge=load_scorer([configure_reward(CONTRAST)], []))[2]
    assert all(
        metrics["score/Contrast"] == pytest.approx(metrics["reward/mean"]) for metrics in logged
    )
    assert all(0 < metrics["score/Contrast"] < 1 for metrics in logged)


def test_a_reward_that_reads_no_text_takes_prompts_without_one(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(
        "".join(
            f"a {colour} bird\n"
            for colour in ("red", "green", "blue", "white", "black", "grey", "pink")
        )
    )
    prompts = {"source": str(file), "validation": 2, "held_out": 2}
    changes = {"model": {"family": SHIFTED, "path": "base"}, "prompts": prompts}
    stages = [{"kind": "online", "prompts_per_step": 3}]
    recipe = Recipe.model_validate(changes | {"stages": stages, "rewards": [{"name": CONTRAST}]})
    table, _ = prepare_prompt_table(recipe, file)
    assert table.num_rows == 7
    with pytest.raises(PromptError):
        prepare_prompt_table(
            Recipe.model_validate(changes | {"stages": stages}), file
        )  # the default reward is the OCR


@pytest.fixture
def shifted(base_folder):
    return load_model(base_folder, MODEL)


def draw(model, prompts, seed=0):
    """Images of the deterministic sampler with the recipe's default number of steps."""
    keys = SampleKeys(seed, [0] * len(prompts), [0] * len(prompts))
    return model.decode_latents(
        generate_samples(
            model, model.encode_texts(prompts), keys, SamplerConfig(steps=Recipe().evaluation.steps)
        ).latents
    )


def test_the_family_has_the_schedule_of_diffusers_with_that_shift(shifted, model):
    peer = FlowMatchEulerDiscreteScheduler(shift=3.0)
    for steps in (2, 7):
        peer.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
        torch.testing.assert_close(shifted.compute_sigmas(steps), peer.sigmas)
        assert (shifted.compute_sigmas(steps)[1:-1] > model.compute_sigmas(steps)[1:-1]).all()


def test_the_family_rolls_out(shifted, model):
    images = draw(shifted, ['"EBBS"', '"FLOW"'])
    assert images.shape == (2, 16, 32, 3)
    assert not np.array_equal(images, draw(model, ['"EBBS"', '"FLOW"']))
    assert torch.equal(shifted.encode_images(images), encode_grey_images(images[..., 0]))


def test_a_copied_base_model_is_of_the_family(base_folder, tmp_path):
    copy_base_folder(base_folder, tmp_path / "copy", MODEL)
    assert torch.equal(
        load_model(tmp_path / "copy", MODEL).compute_sigmas(4),
        load_model(base_folder, MODEL).compute_sigmas(4),
    )


def test_a_registered_policy_is_served_by_its_family(
    base_folder, tmp_path, shifted, model, monkeypatch
):
    monkeypatch.setenv("EBBFLOW_ALLOW_CODE", SHIFTED)
    for family, drawn in ((SHIFTED, shifted), ("glyph", model)):
        folder = tmp_path / family.replace(":", "-")
        write_base_policy(
            folder,
            verify_folder(base_folder),
            "recipe",
            PolicyConfig(),
            ModelConfig(family=family, path="base"),
        )
        (served,) = generate_images(
            base_folder, folder, [Prompt(0, '"EBBS"', "", None, "", "", "{}")], [0]
        )
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(served.image))), draw(drawn, ['"EBBS"'])[0]
        )


# A sampler, an engine, a stage kind


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"sampler": {"name": "mine.fading:FADIN"}}, "sampler.name"),
        ({"sampler": {"name": "mine.fading:Transition"}}, "sampler.name"),
        ({"sampler": {"name": "fading"}}, "sampler.name"),
        ({"engine": "copy"}, "engine"),
    ],
    ids=["no such name", "no sampler", "neither a name nor a path", "an engine that is neither"],
)
def test_a_sampler_or_engine_that_is_none_is_refused_as_the_page_shows(changes, lines):
    with pytest.raises(RecipeError) as refused:
        Recipe.model_validate({"stages": [{"kind": "online", **changes}]})
    shown = str(refused.value).removeprefix("this recipe cannot be run:\n")
    assert lines.split(".")[0] in shown
    assert shown in DOC.splitlines()


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "mine.second_copy:Second"},
        {"kind": "custom", "path": "mine.soup:average_with_bas"},
    ],
    ids=["engine", "stage kind"],
)
def test_the_first_task_refuses_a_path_that_leads_nowhere(tmp_path, changes):
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "offline", **changes}]}
    )
    with pytest.raises(RecipeError, match="has no '(Second|average_with_bas)'; did you mean"):
        check_recipe(recipe, "https://mlflow.example", on_cluster=False)


def test_the_sampler_is_an_sde_whose_noise_fades():
    sigmas = torch.linspace(1, 0, 5)
    latents = torch.randn(3, 2, 4)
    velocity = torch.randn(3, 2, 4)
    early, late = (compute_transition(FADING, latents, velocity, sigmas, step) for step in (0, 2))
    assert type(early.sampler).__name__ == "Fading"
    assert early.std.item() == pytest.approx(0.5 * 1.0 * 0.25**0.5)
    assert late.std.item() == pytest.approx(early.std.item() / 2)
    rows = compute_transition(FADING, latents, velocity, sigmas, torch.tensor([0, 2, 2]))
    torch.testing.assert_close(rows.mean[0], early.mean[0])
    torch.testing.assert_close(rows.mean[1:], late.mean[1:])
    torch.testing.assert_close(
        compute_transition(FADING, latents, velocity, sigmas, 1, eta=0.0).mean,
        latents - 0.25 * velocity,
    )


def test_a_stage_trains_on_the_trajectories_of_the_sampler(train):
    updater, before, logged, _ = train(
        {"name": "mix_grpo"}, sampler={"name": FADING, "steps": 4, "eta": 0.7}
    )
    assert any(
        not torch.equal(value, before[name]) for name, value in updater.policy.parameters.items()
    )
    assert all(
        metrics["ratio/deviation"] < 1e-3 for metrics in logged
    )  # training scores the steps that rollouts sampled


def test_a_deterministic_sampler_of_ones_own_has_no_log_probs(monkeypatch):
    monkeypatch.setattr("mine.fading.Fading.eta", None)
    assert not SamplerConfig(name=FADING).is_stochastic
    with pytest.raises(RecipeError, match="needs the log-probabilities of a stochastic sampler"):
        Recipe.model_validate({"stages": [{"kind": "online", "sampler": {"name": FADING}}]})
