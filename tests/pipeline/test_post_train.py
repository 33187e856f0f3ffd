"""The whole pipeline, twice: once from nothing, once with what the first run left behind."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow.artifacts
import mlflow.pyfunc
import pandas as pd
import pytest
from mlflow import MlflowClient

from ebbflow.replay.tracked_step import replay_step
from ebbflow.run_list import list_runs
from ebbflow.verification.checks import verify_version
from tests.metrics_page import unexplained
from tests.pipeline.conftest import run_pipeline


@pytest.fixture(scope="module")
def listening() -> set[str]:
    """Addresses at which a process of the first run listened, as the kernel writes them."""
    return set()


@pytest.fixture(scope="module")
def first(workplace: Path, listening: set[str]) -> dict[str, Any]:
    return _finished(workplace, {}, lambda session: listening.update(_listening(session)))


@pytest.fixture(scope="module")
def second(workplace: Path, first: dict[str, Any]) -> dict[str, Any]:
    # What the tiny recipe learns may or may not pass the gate; the second run is to meet a champion
    # in any case.
    _client(workplace).set_registered_model_alias(
        "ebbflow-tiny", "champion", first["model_version"]
    )
    return _finished(workplace, {})


def _finished(
    workplace: Path, changes: dict[str, Any], watch: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Run to the end; the summary of the run, with its folder under ``folder``."""
    before = set((workplace / "runs").glob("*/summary.json"))
    done = run_pipeline(workplace, changes, watch=watch)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = set((workplace / "runs").glob("*/summary.json")) - before
    return json.loads(path.read_text()) | {"folder": path.parent, "printed": done.stdout}


def _listening(session: int) -> set[str]:
    """Addresses at which the processes of a session listen: ``0100007F`` is 127.0.0.1
    (proc_pid_net(5)).
    """
    owned = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                owned |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {
        line[1].partition(":")[0]
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in owned
    }


def _client(workplace: Path) -> MlflowClient:
    uri = f"sqlite:///{workplace}/runs/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_it_ends_with_a_report_and_numbers(first: dict[str, Any]) -> None:
    assert set(first) >= {
        "before",
        "after",
        "seconds",
        "promoted",
        "mlflow_run_id",
        "model_version",
    }
    assert {"ocr", "exact_match", "similarity"} <= set(first["before"])
    assert set(first["before"]) == set(first["after"])
    assert {"1.1 online", "1.2 offline", "base model", "total"} <= set(first["seconds"])
    page = (first["folder"] / "report.html").read_text()
    assert "1.1 online" in page
    assert first["mlflow_run_id"] in page


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")
def test_it_listens_on_no_address_but_loopback(first: dict[str, Any], listening: set[str]) -> None:
    assert listening, "the ranks of the offline stage talk to each other"
    assert listening <= {"0100007F", "00000000000000000000000001000000"}


def test_a_person_reads_a_table_the_verdict_and_where_everything_is(first: dict[str, Any]) -> None:
    printed = first["printed"]
    assert "1.2 offline" in printed
    verdict = (
        "PROMOTED: ebbflow-tiny version 1"
        if first["promoted"]
        else "NOT PROMOTED: ebbflow-tiny version 1"
    )
    end = printed[printed.index(verdict) :]
    assert "95% interval [" in end
    assert f"report  {first['folder']}/report.html\n" in end
    for name in ("policy", "base"):
        assert f"{name:8}{first[name]}\n" in end
        assert (Path(first[name]) / "COMMIT").is_file()
    assert f"load    {first['load']}\n" in end
    assert "ebbflow draw ebbflow-tiny@" in end
    # With the outputs of the workflow, which pyflyte prints, and each reason of a refusal.
    assert len(end.replace(str(first["folder"]), "runs/x")) < 2500


def test_the_run_is_listed(workplace: Path, first: dict[str, Any]) -> None:
    (listed,) = [run for run in list_runs(workplace / "runs") if run.name == first["folder"].name]
    assert (listed.recipe, listed.seed, listed.state) == ("tiny", "0", "finished")
    assert listed.reward == (first["before"]["reward"], first["after"]["reward"])


def test_every_node_has_one_child_run(workplace: Path, first: dict[str, Any]) -> None:
    client = _client(workplace)
    parent = client.get_run(first["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    children = client.search_runs(
        [parent.info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'",
        max_results=100,
    )
    names = sorted(child.info.run_name for child in children)
    assert names == sorted(
        [
            "prompts",
            "base model",
            "start",
            "before evaluation",
            "1.1 online",
            "1.1 online evaluation",
            "1.2 offline rollout 0",
            "1.2 offline rollout 1",
            "1.2 offline scoring 0",
            "1.2 offline scoring 1",
            "1.2 offline advantages",
            "1.2 offline",
            "1.2 offline evaluation",
            "candidate",
            "gate",
            "gate scores",
            "registry",
            *(["promotion"] if first["promoted"] else []),
            "report",
        ]
    )
    assert {child.info.status for child in children} == {"FINISHED"}


def test_training_metrics_are_complete(workplace: Path, first: dict[str, Any]) -> None:
    client = _client(workplace)
    experiment = client.get_run(first["mlflow_run_id"]).info.experiment_id
    where = f"tags.`mlflow.parentRunId` = '{first['mlflow_run_id']}' and tags.`ebbflow.node` = "
    (online,) = client.search_runs([experiment], where + "'1.1 online'")
    assert set(online.data.metrics) >= {
        *(
            "reward/mean",
            "reward/min",
            "reward/max",
            "reward/std",
            "group/size",
            "group/zero_std_share",
        ),
        *(
            "advantage/mean",
            "advantage/std",
            "ratio/mean",
            "clip/up",
            "clip/down",
            "kl/reference",
            "velocity_drift",
        ),
        *("grad_norm", "grad_variance", "lr", "loss", "images_per_second"),
        *(
            f"{unit}/{phase}"
            for unit in ("seconds", "ms_per_image")
            for phase in ("rollout", "scoring", "training")
        ),
    }
    steps = [metric.step for metric in client.get_metric_history(online.info.run_id, "reward/mean")]
    assert steps == [0, 1]
    (offline,) = client.search_runs([experiment], where + "'1.2 offline'")
    assert set(offline.data.metrics) >= {
        "loss",
        "grad_norm",
        "velocity_drift",
        "lr",
        "ms_per_image/training",
    }
    (evaluation,) = client.search_runs([experiment], where + "'1.2 offline evaluation'")
    assert any(
        file.path.startswith("images") for file in client.list_artifacts(evaluation.info.run_id)
    )


def test_the_parent_has_the_curves_of_all_stages(workplace: Path, first: dict[str, Any]) -> None:
    client = _client(workplace)
    run_id = first["mlflow_run_id"]
    series = {
        key: [metric.step for metric in client.get_metric_history(run_id, key)]
        for key in client.get_run(run_id).data.metrics
    }
    offline_steps = series["stage 1.2 offline/loss"]
    assert series["stage 1.1 online/loss"] == [0, 1]
    assert offline_steps == list(range(2, 2 + len(offline_steps)))
    assert series["reward/train"] == [0, 1, 2], "the rollouts of the offline stage are one point"
    assert (
        series["reward/held_out"] == series["reward/validation"] == [0, 2, 2 + len(offline_steps)]
    )
    assert [one.dataset.name for one in client.get_run(run_id).inputs.dataset_inputs] == ["prompts"]


def test_every_metric_that_a_run_logs_is_explained(workplace: Path, first: dict[str, Any]) -> None:
    client = _client(workplace)
    run_id = first["mlflow_run_id"]
    parent = client.get_run(run_id)
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'", max_results=100
    )
    own = {re.sub(r"^stage \d+\.\d+ \w+/", "", key) for key in parent.data.metrics}
    logged = own.union(*(child.data.metrics for child in children))
    assert len(logged) > 50
    assert unexplained(logged) == []


def test_the_policy_is_a_model_that_draws(workplace: Path, first: dict[str, Any]) -> None:
    client = _client(workplace)
    version = client.get_model_version("ebbflow-tiny", first["model_version"])
    assert version.tags["ebbflow.run_id"] == first["mlflow_run_id"]
    assert version.tags["ebbflow.base_digest"]
    assert (
        client.get_model_version_by_alias("ebbflow-tiny", "challenger").version >= version.version
    )
    model = mlflow.pyfunc.load_model(
        client.get_model_version_download_uri("ebbflow-tiny", version.version)
    )
    images = model.predict(pd.DataFrame({"prompt": ["WXYZ", "WXYZ", "WXYZ"], "seed": [1, 2, 1]}))[
        "image"
    ]
    assert images[0].startswith(b"\x89PNG")
    assert images[0] == images[2] != images[1]


def test_the_version_verifies_itself(workplace: Path, first: dict[str, Any]) -> None:
    uri = f"sqlite:///{workplace}/runs/mlflow.db"
    _, checks = verify_version(uri, f"ebbflow-tiny/{first['model_version']}", again=True)
    found = {check.name: check.status for check in checks}
    del found["alias"]  # another test may have moved it by hand
    assert found.pop("signature") == "not stored", "no key is configured"
    assert set(found.values()) == {"ok"}
    assert found.keys() >= {"gate", "pictures again", "scores again"}


@pytest.mark.parametrize("stage", ["1.1 online", "1.2 offline"])
def test_a_training_step_is_replayed_as_it_was_logged(
    first: dict[str, Any], tmp_path: Path, stage: str
) -> None:
    done = replay_step(str(first["folder"]), stage, 1, tmp_path / "replayed")
    assert done.logged["reward/mean"] == done.samples.metrics["reward/mean"]
    assert done.differing == []


def test_again_gives_the_same_bytes_from_a_cached_base(
    workplace: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert first["seconds"]["base model"] > 0
    assert second["seconds"]["base model"] == 0
    # The policy is the same; its held-out scores are of the new noise of another look.
    assert second["before"].keys() == first["before"].keys()
    assert second["before"] != first["before"]
    assert first["model_version"] != second["model_version"]
    assert _commit(workplace, first) == _commit(workplace, second)


def _commit(workplace: Path, finished: dict[str, Any]) -> str:
    """The checksum over everything in the registered policy's folder."""
    uri = _client(workplace).get_model_version_download_uri(
        "ebbflow-tiny", finished["model_version"]
    )
    (commit,) = Path(mlflow.artifacts.download_artifacts(uri)).rglob("policy/COMMIT")
    return commit.read_text()


def test_a_champion_is_not_replaced_by_its_equal(
    workplace: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    client = _client(workplace)
    assert not second["promoted"]
    assert (
        str(client.get_model_version_by_alias("ebbflow-tiny", "champion").version)
        == first["model_version"]
    )
    assert (
        str(client.get_model_version_by_alias("ebbflow-tiny", "challenger").version)
        == second["model_version"]
    )
    where = (
        f"tags.`mlflow.parentRunId` = '{second['mlflow_run_id']}' and tags.`ebbflow.node` ="
        " 'champion evaluation'"
    )
    (met,) = client.search_runs([client.get_run(second["mlflow_run_id"]).info.experiment_id], where)
    # The look of the first run is over: the champion is scored with the new noise of the second.
    assert client.get_run(second["mlflow_run_id"]).data.tags["ebbflow.look"] == "1"
    assert met.data.metrics["reward/held_out"] != first["after"]["reward"]
    looks = [tag for tag in client.get_registered_model("ebbflow-tiny").tags if "look" in tag]
    assert {f"ebbflow.look.{one['mlflow_run_id']}" for one in (first, second)} <= set(looks)


@pytest.mark.exhaustive
def test_lora_run_trains_and_registers_an_adapter(workplace: Path, first: dict[str, Any]) -> None:
    lora = _finished(
        workplace,
        {
            "policy": {"train": "lora", "rank": 4, "alpha": 8},
            "promotion": {"model_name": "tiny-lora"},
        },
    )
    assert lora["seconds"]["base model"] == 0
    client = _client(workplace)
    source = client.get_model_version_download_uri("tiny-lora", lora["model_version"])
    loaded = mlflow.pyfunc.load_model(source)
    assert loaded.predict(pd.DataFrame({"prompt": ["WXYZ"], "seed": [1]}))["image"][0].startswith(
        b"\x89PNG"
    )
