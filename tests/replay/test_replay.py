"""``ebbflow replay`` of a tracked run: what it finds, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlflow.artifacts
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result

from ebbflow.cli import main
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.records import TrackedRun
from ebbflow.data.schema import PROMPTS
from ebbflow.models.hub import HubError
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.replay import tracked_step
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.tables import read_table, read_table_metadata
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store, find_run
from ebbflow.training.policy_metadata import METADATA, PolicyMetadata, write_base_policy
from ebbflow.training.replay import ReplayError

HOSTILE = "<b>&"
STEPS = 2


class Ran(NamedTuple):
    """A run of two rounds of an online stage, and its recipe as a file."""

    tracked: TrackedRun
    recipe: Path

    @property
    def folder(self) -> Path:
        return Path(self.tracked.folder)

    def replay(
        self,
        target: Path,
        *arguments: str,
        run: str | None = None,
        stage: str = "2.1",
        step: int = 1,
    ) -> Result:
        options = ["--stage", stage, "--step", str(step), "--output", str(target), *arguments]
        return CliRunner().invoke(main, ["replay", run or str(self.folder), *options])

    def dumped(self, stage: str, step: int) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The samples of a step as the stage dumped them."""
        client = connect_to_store(self.tracked.tracking_uri)
        node = find_run(
            client,
            self.tracked.experiment_id,
            {"ebbflow.node": stage, "mlflow.parentRunId": self.tracked.run_id},
        )
        assert node
        uri = f"{node.info.artifact_uri}/dumps/step-{step:05d}/rollouts"
        folder = Path(
            mlflow.artifacts.download_artifacts(uri, tracking_uri=self.tracked.tracking_uri)
        )
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        return rows, [(folder / row["image"]).read_bytes() for row in rows]


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
    make_recipe: Callable[..., Recipe],
    make_prompts: Callable[..., list[Prompt]],
    base_folder: Path,
) -> Ran:
    """What a local run leaves in its folder and in MLflow, made by the functions that the tasks
    call.
    """
    output = tmp_path_factory.mktemp("runs")
    watched = {"dumps": {"every": 1, "samples": 100}, "optimizer": {"lr": 1e-2}, "steps": STEPS}
    (online, _) = make_recipe(online=watched).model_dump(mode="json")["stages"]
    settings = {
        "rewards": [{"name": "similarity"}],
        "guardrails": [],
        "evaluation": {"steps": 3},
        "rounds": 2,
    }
    recipe = Recipe.model_validate({"output": str(output), "stages": [online]} | settings)
    tracked = start_run(recipe, None)
    nodes = Path(tracked.folder) / "nodes"
    shutil.copytree(base_folder, nodes / "ebbflow-base" / "base")
    hostile = [Prompt(**vars(prompt) | {"target": HOSTILE}) for prompt in make_prompts(5)]
    (nodes / "ebbflow-prompts").mkdir()
    table = nodes / "ebbflow-prompts" / "prompts.parquet"
    write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in hostile], PROMPTS), table)
    folder = nodes / "ebbflow-start" / "policy"
    write_base_policy(folder, verify_folder(base_folder), recipe.digest, recipe.policy)
    for index in range(recipe.rounds):
        ctx = StageContext(recipe, index, 0)
        trained = nodes / f"ebbflow-{index}" / "policy"
        with open_node_run(tracked, ctx.stage_label) as run_logger:
            folders = StageFolders(base_folder, folder, table, trained)
            train_online_folder(ctx, folders, MetricsRecorder(run_logger))
        folder = trained
    path = output / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": str(output)}))
    return Ran(tracked, path)


@pytest.fixture
def broken(ran: Ran, tmp_path: Path) -> Iterator[Ran]:
    """The run, in whose folder a test may change things."""
    kept = tmp_path / "kept"
    shutil.copytree(ran.folder, kept)
    yield ran
    shutil.rmtree(ran.folder)
    shutil.move(kept, ran.folder)


@pytest.mark.parametrize(("stage", "step"), [("1.1", 0), ("1.1 online", 1), ("2.1", 1)])
def test_a_step_has_the_bytes_scores_and_advantages_of_its_dump(
    ran: Ran, tmp_path: Path, stage: str, step: int
) -> None:
    done = ran.replay(tmp_path / "shown", stage=stage, step=step)
    assert done.exit_code == 0, done.output
    label = f"{stage.split()[0]} online"
    assert f"8 samples of {label}, step {step}, with the statistics that were logged" in done.output
    rows, pictures = ran.dumped(label, step)
    table = read_table(tmp_path / "shown" / "samples.parquet").to_pylist()
    assert [row["image"] for row in table] == pictures
    for name in (
        "prompt_id",
        "sample",
        "seed",
        "prompt",
        "target",
        "policy_version",
        "reward",
        "failure",
        "advantage",
    ):
        assert [row[name] for row in table] == [row[name] for row in rows], name
    assert [row["similarity"] for row in table] == [row["scores"]["similarity"] for row in rows]
    about = read_table_metadata(tmp_path / "shown" / "samples.parquet")
    assert (about["run_id"], about["stage"], about["step"]) == (ran.tracked.run_id, label, step)
    assert about["replayed"]["reward/mean"] == about["logged"]["reward/mean"]
    assert "loss" in about["logged"]


def test_the_page_shows_the_best_sample_first_and_prompts_as_text(ran: Ran, tmp_path: Path) -> None:
    assert ran.replay(tmp_path / "shown").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "shown").iterdir()) == [
        "index.html",
        "samples.parquet",
    ]
    page = (tmp_path / "shown" / "index.html").read_text()
    assert HOSTILE not in page
    assert "target &lt;b&gt;&amp;" in page
    assert page.count("data:image/png;base64,") == 8
    assert "Scores and advantages have the statistics that the run logged." in page
    sections = re.split("<section[^>]*>", page)[1:3]
    shown = [
        [float(value) for value in re.findall(r"<span>reward</span><b>([^<]*)</b>", text)]
        for text in sections
    ]
    assert all(rewards == sorted(rewards, reverse=True) and len(rewards) == 4 for rewards in shown)
    means = [sum(rewards) / len(rewards) for rewards in shown]
    assert means == sorted(means, reverse=True)
    assert '<th scope="row">grad_norm</th>' in page


def test_a_run_is_found_by_its_id_too(ran: Ran, tmp_path: Path) -> None:
    done = ran.replay(tmp_path / "shown", "--recipe", str(ran.recipe), run=ran.tracked.run_id)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "shown" / "index.html").is_file()


def test_what_differs_from_the_log_is_named(ran: Ran, tmp_path: Path) -> None:
    client = connect_to_store(ran.tracked.tracking_uri)
    node = find_run(
        client,
        ran.tracked.experiment_id,
        {"ebbflow.node": "1.1 online", "mlflow.parentRunId": ran.tracked.run_id},
    )
    assert node
    logged = {
        metric.step: metric.value
        for metric in client.get_metric_history(node.info.run_id, "reward/max")
    }
    client.log_metric(node.info.run_id, "reward/max", logged[0] + 1, step=0)
    done = ran.replay(tmp_path / "shown", stage="1.1", step=0)
    assert done.exit_code == 0
    assert "not what was logged: reward/max" in done.output
    page = (tmp_path / "shown" / "index.html").read_text()
    assert "Not what was logged: reward/max." in page
    assert '<th scope="row">≠ reward/max</th>' in page


@pytest.mark.parametrize("kind", ["folder", "file", "link to a folder", "dangling link"])
def test_a_target_that_is_in_use_is_left_alone(ran: Ran, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("mine")
    if kind == "folder":
        other.rename(target)
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(other if kind == "link to a folder" else tmp_path / "nowhere")
    done = ran.replay(target)
    assert (done.exit_code, done.output) == (
        1,
        f"{target} exists and is no empty folder; name a new one\n",
    )
    if kind == "file":
        assert target.read_text() == "mine"
    elif kind != "dangling link":
        assert [path.name for path in target.iterdir()] == ["precious"]


def test_an_empty_target_is_used(ran: Ran, tmp_path: Path) -> None:
    assert ran.replay(tmp_path).exit_code == 0
    assert (tmp_path / "index.html").is_file()


REFUSED = {
    "no such stage": ({"stage": "3.1"}, "the run has no stage '3.1', only 1.1 online, 2.1 online"),
    "no such step": ({"step": STEPS}, f"1.1 online has the steps 0 to {STEPS - 1}, not {STEPS}"),
    "no such run": ({"run": "0" * 32}, "is neither a folder nor a run of this MLflow store"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_named(
    ran: Ran, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    done = ran.replay(
        tmp_path / "shown", "--recipe", str(ran.recipe), **({"stage": "1.1"} | options)
    )
    assert done.exit_code == 1
    assert says in done.output
    assert not (tmp_path / "shown").exists()


def test_a_folder_that_is_no_run_is_refused(ran: Ran, tmp_path: Path) -> None:
    (ran.folder.parent / "glyph-other").mkdir(exist_ok=True)
    done = ran.replay(tmp_path / "shown", run=str(ran.folder.parent / "glyph-other"))
    assert done.exit_code == 1
    assert "has no run 'other'" in done.output
    nowhere = ran.replay(tmp_path / "shown", run=str(tmp_path))
    assert "no MLflow store at" in nowhere.output


def test_damaged_folders_are_passed_over(broken: Ran, tmp_path: Path, base_folder: Path) -> None:
    weights = next((broken.folder / "nodes" / "ebbflow-base").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = broken.replay(tmp_path / "shown")
    assert done.exit_code == 1
    assert "is neither in" in done.output
    assert "name its folder with --base" in done.output
    given = broken.replay(tmp_path / "shown", "--base", str(base_folder))
    assert given.exit_code == 0, given.output
    policy = next((broken.folder / "nodes" / "ebbflow-0").rglob("*.safetensors"))
    policy.write_bytes(policy.read_bytes()[:-1] + b"x")
    done = broken.replay(tmp_path / "other", "--base", str(base_folder))
    assert done.exit_code == 1
    assert "has no policy folder after 1.1 online, which 2.1 online began with" in done.output


@pytest.mark.parametrize("fails", [False, True])
def test_a_base_from_the_hub_is_the_one_in_its_cache(
    broken: Ran, tmp_path: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    shutil.rmtree(broken.folder / "nodes" / "ebbflow-base")
    asked = []

    def cached_base(pretrained: ModelConfig) -> Path:
        asked.append(pretrained)
        if fails:
            raise HubError("owner/name cannot be fetched")
        return base_folder

    monkeypatch.setattr(tracked_step, "cache_base_folder", cached_base)
    model = ModelConfig(family="sd3", path="owner/name", revision="0" * 40)
    policy = PolicyMetadata(
        base_digest=verify_folder(base_folder),
        recipe_digest="r" * 64,
        config=PolicyConfig(),
        model=model,
    )
    run = tracked_step._open_run(str(broken.folder), None)
    if fails:
        with pytest.raises(ReplayError, match="name its folder with --base"):
            tracked_step._find_base(run, policy, None, tmp_path)
    else:
        assert tracked_step._find_base(run, policy, None, tmp_path) == base_folder
    assert asked == [model]


def test_another_base_is_not_taken(ran: Ran, tmp_path: Path) -> None:
    done = ran.replay(
        tmp_path / "shown", "--base", str(ran.folder / "nodes" / "ebbflow-start" / "policy")
    )
    assert done.exit_code == 1
    assert "name its folder with --base" in done.output


def test_a_recipe_that_was_changed_in_the_store_is_refused(ran: Ran, tmp_path: Path) -> None:
    client = connect_to_store(ran.tracked.tracking_uri)
    place = Path(
        mlflow.artifacts.download_artifacts(
            run_id=ran.tracked.run_id,
            artifact_path="recipe.yaml",
            tracking_uri=ran.tracked.tracking_uri,
        )
    )
    before = place.read_text()
    client.log_text(ran.tracked.run_id, before.replace("seed: 0", "seed: 1"), "recipe.yaml")
    done = ran.replay(tmp_path / "shown")
    client.log_text(ran.tracked.run_id, before, "recipe.yaml")
    assert done.exit_code == 1
    assert "is not the recipe that it was started with" in done.output


def test_a_stage_of_a_branch_began_with_the_policy_before_all_branches():
    merges = [{"algorithm": {"name": "distillation", "teacher": f"branch:{name}"}} for name in "ab"]
    given = [{}, {"branch": "a"}, {"branch": "b"}, {"branch": "a"}, *merges]
    stages = [{"kind": "online"} | stage for stage in given]
    recipe = Recipe.model_validate({"rounds": 2, "branches": {"a": {}, "b": {}}, "stages": stages})
    first = ("1.1 online", "1.5 online", "1.6 online")
    before = {
        2: ("2.1 online",),
        3: ("2.1 online", "2.2 online a"),
        4: ("2.1 online",),
        5: ("2.1 online", "2.5 online"),
    }
    for stage, own in before.items():
        assert tuple(tracked_step._iterate_labels_before(StageContext(recipe, 1, stage))) == (
            *first,
            *own,
        )


@pytest.mark.parametrize("starts_from", ["base model", "trained policy"])
def test_a_stage_that_is_trained_once_is_no_stage_of_later_rounds(
    starts_from: str, tmp_path: Path
) -> None:
    data = {"path": "pictures"}
    stages = [
        {"kind": "offline", "algorithm": {"name": "sft"}, "only_from_base": True, "data": data},
        {"kind": "online"},
    ]
    recipe = Recipe.model_validate({"rounds": 2, "stages": stages})
    first = ("1.1 offline",) if starts_from == "base model" else ()
    # what each policy folder of such a run has behind it, in the order of the nodes
    histories = [(), first, (*first, "1.2 online"), (*first, "1.2 online", "2.2 online")]
    for node, history in enumerate(dict.fromkeys(histories)):
        folder = tmp_path / "nodes" / str(node) / "policy"
        metadata = PolicyMetadata(
            base_digest="base", recipe_digest=recipe.digest, config=recipe.policy, stages=history
        )
        with write_new_folder(folder) as unfinished:
            (unfinished / METADATA).write_text(metadata.model_dump_json())
    run: Any = SimpleNamespace(folder=tmp_path, recipe=recipe)
    for label, history in (("1.2 online", first), ("2.2 online", (*first, "1.2 online"))):
        ctx = tracked_step._find_stage(recipe, label)
        assert tracked_step._find_policy_before(run, ctx)[1].stages == history
    with pytest.raises(ReplayError, match="no stage '2.1', only 1.1 offline, 1.2 online, 2.2"):
        tracked_step._find_stage(recipe, "2.1")
