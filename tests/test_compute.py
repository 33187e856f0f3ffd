"""What a recipe with ``deterministic`` sets, and that every kind of process that computes sets it
before anything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

import ebbflow.evaluation.evaluate as evaluation
import ebbflow.rewards.combine as rewards
import ebbflow.training.distributed as distributed
from ebbflow import compute
from ebbflow.compute import (
    GPUS,
    VARIABLES,
    GpuError,
    log_device,
    read_driver_version,
    set_up_process,
    use_deterministic_kernels,
)
from ebbflow.online.loop import run_online_stage
from ebbflow.online.ray_actor import WorkerActor, open_reward_worker
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.online import WorkersConfig
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import policy_io
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import changed, same, values

PLAIN = Recipe(threads=1)
DETERMINISTIC = Recipe(threads=1, deterministic=True)
ON_IMPORT = """
import json, os, sys
from ebbflow.compute import set_up_process
from ebbflow.recipe import Recipe

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not seen:
            variables = json.loads(sys.argv[1])
            seen.append({variable: os.environ.get(variable) for variable in variables})

seen = []
sys.meta_path.insert(0, Watch())
assert "torch" not in sys.modules
set_up_process(Recipe(deterministic=True))
print(json.dumps(seen))
"""


class Reached(Exception):
    """What a test stops a process with, once it would compute."""


def state() -> dict[str, object]:
    """What this process has set."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


SET = {"deterministic": True, "warns": False, "cudnn": (True, False), **VARIABLES}


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """The state of a new process, before and after."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "another value")
        monkeypatch.delenv(name)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_a_recipe_that_asks_for_nothing_sets_nothing():
    before = state()
    set_up_process(PLAIN)
    assert state() == before
    assert not before["deterministic"]


def test_setting_up_a_process_sets_every_option():
    set_up_process(DETERMINISTIC)
    assert state() == SET


def test_threads_are_set_either_way(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    for deterministic in (False, True):
        set_up_process(Recipe(threads=3, deterministic=deterministic))
    assert seen == [3, 3]


def test_an_operation_without_a_deterministic_kernel_is_refused_by_name():
    values = torch.zeros(2)
    twice = torch.tensor([0, 0])
    values.put_(twice, torch.ones(2))
    set_up_process(DETERMINISTIC)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        values.put_(twice, torch.ones(2))


def test_the_variables_are_there_before_torch():
    command = [sys.executable, "-c", ON_IMPORT, json.dumps(list(VARIABLES))]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [VARIABLES]


def test_a_cuda_that_has_started_without_the_variables_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        RuntimeError,
        match="CUDA has started in this process without CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ):
        use_deterministic_kernels()
    use_deterministic_kernels()  # the next task of the same process, whose variables are there
    assert state() == SET


# GPUs that a machine was asked for.

DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    "  (dvs-builder@U22-I3-AF03-09-1)\nGCC version:  gcc version 12.2.0\n"
)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Writes what the kernel module says of itself."""
    file = tmp_path / "version"
    monkeypatch.setattr(compute, "DRIVER_FILE", file)
    return file


@pytest.mark.parametrize("cuda", [None, "13.0"])
@pytest.mark.parametrize("requested", [None, "", "0"])
def test_a_machine_without_gpus_computes_on_its_cpu(monkeypatch, requested, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv(GPUS, raising=False)
    if requested is not None:
        monkeypatch.setenv(GPUS, requested)
    set_up_process(PLAIN)


@pytest.mark.parametrize(
    ("cuda", "visible", "text", "words"),
    [
        (None, None, None, r"torch \S+ is a build without CUDA; install the one from PyPI"),
        ("13.0", "", DRIVER, "CUDA_VISIBLE_DEVICES='' hides every GPU; unset it"),
        ("13.0", None, DRIVER, r"driver is 570.86.15, .* CUDA 13.0 needs 580.65.06 or newer"),
        ("12.8", None, None, r"driver is not there, .* CUDA 12.8 needs 525.60.13 or newer"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_refused_by_its_reason(
    monkeypatch, driver, cuda, visible, text, words
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv(GPUS, "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if text:
        driver.write_text(text)
    with pytest.raises(GpuError, match=f"^{GPUS}=2, .* torch sees none: .*{words}") as error:
        set_up_process(PLAIN)
    assert str(error.value).endswith(f"set 'gpus' to 0 or unset {GPUS}")


def test_a_gpu_that_torch_sees_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(GPUS, "1")
    set_up_process(PLAIN)


def test_a_number_of_gpus_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(GPUS, "all")
    with pytest.raises(GpuError, match=f"{GPUS}=all is not a number; give the number of GPUs"):
        set_up_process(PLAIN)


def test_a_ray_actor_with_a_gpu_that_torch_does_not_see_is_refused(monkeypatch):
    monkeypatch.setattr("ebbflow.online.ray_actor.register_tensor_serializer", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    actor = WorkerActor("training", WorkersConfig(gpus=1), [])
    with pytest.raises(GpuError, match=r"^resources.training.gpus = 1 on \S+ asks for a GPU"):
        actor.open(lambda *arguments: None, context(PLAIN))


def test_the_device_is_logged_once_and_becomes_tags(monkeypatch, driver, caplog):
    driver.write_text(DRIVER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    log_device.cache_clear()
    with caplog.at_level("INFO"):
        tags = log_device()
        assert log_device() == tags
    log_device.cache_clear()
    assert tags == {
        "ebbflow.device": "NVIDIA H100 80GB HBM3",
        "ebbflow.driver": "570.86.15",
        "ebbflow.cuda": "12.8",
        "ebbflow.cudnn": "91300",
        "ebbflow.torch": torch.__version__,
    }
    (line,) = caplog.messages
    assert line.startswith("computing on device NVIDIA H100 80GB HBM3, driver 570.86.15, cuda 12.8")


def test_a_machine_without_nvidias_driver_has_no_version(driver):
    assert read_driver_version() is None


# Every kind of process.


def stop_at(monkeypatch, module, name):
    """End where a module's function is called, and keep the state there."""
    seen = []

    def reached(*arguments, **named):
        seen.append(state())
        raise Reached

    monkeypatch.setattr(module, name, reached)
    return seen


def context(recipe):
    return StageContext(recipe, 0, 1)


def test_pods_that_load_the_model(monkeypatch, tmp_path):
    """Online stages in one process, rollouts and training of offline ones, the start policy, pairs,
    replays.
    """
    seen = stop_at(monkeypatch, policy_io, "load_model")
    with pytest.raises(Reached):
        policy_io.open_model(DETERMINISTIC, tmp_path)
    assert seen == [SET]


def test_evaluation_sets_up_its_process_first(monkeypatch, tmp_path):
    seen = stop_at(monkeypatch, evaluation, "read_policy_metadata")
    with pytest.raises(Reached):
        evaluation.evaluate_folder(DETERMINISTIC, tmp_path, tmp_path, tmp_path, "label", tmp_path)
    assert seen == [SET]


def arguments_of_a_task(monkeypatch, module):
    """What its body gets, with inputs that are only handed on."""
    monkeypatch.setattr(module, "make_node_output", lambda *named: None)
    monkeypatch.setattr(module, "fetch_artifact", lambda artifact: None, raising=False)
    return {
        "recipe": DETERMINISTIC,
        "run": SimpleNamespace(),
        "prompts": None,
        "round": 0,
        "stage": 1,
    }


def test_ranks_before_they_join_their_group(monkeypatch):
    from tasks import train_offline, training_group

    seen = stop_at(monkeypatch, distributed, "join_process_group")
    given = arguments_of_a_task(monkeypatch, training_group) | {
        "base": None,
        "policy": SimpleNamespace(global_step=0),
        "rollouts": [],
        "advantages": None,
    }
    with pytest.raises(Reached):
        train_offline.train_offline.task_function(**given)
    assert seen == [SET]


def test_pods_that_score_before_they_load_a_network(monkeypatch):
    import ebbflow.data.prompts as prompts
    import ebbflow.storage.tables as tables
    import ebbflow.tracking.child_run as child_run
    from tasks import score_rollouts as module

    seen = stop_at(monkeypatch, rewards, "load_scorer")
    monkeypatch.setattr(tables, "read_table_metadata", lambda shard: {"shard": 0})
    monkeypatch.setattr(tables, "read_column", lambda shard, name: pa.chunked_array([[0]]))
    monkeypatch.setattr(prompts, "read_prompts", lambda *arguments: [])
    monkeypatch.setattr(child_run, "open_node_run", lambda run, node: torch.no_grad())
    with pytest.raises(Reached):
        module.score_rollouts.task_function(
            **arguments_of_a_task(monkeypatch, module), rollouts=None
        )
    assert seen == [SET]


@pytest.mark.parametrize("role", ["training", "rollout", "reward"])
def test_ray_actors_before_they_open_a_worker(monkeypatch, role):
    monkeypatch.setattr("ebbflow.online.ray_actor.register_tensor_serializer", lambda: None)
    actor = WorkerActor(role, WorkersConfig(), [])
    actor.open(lambda *arguments: state(), context(DETERMINISTIC))
    assert actor.opened == SET


def test_reward_workers_take_threads_from_their_actor(monkeypatch):
    seen = stop_at(monkeypatch, sys.modules[open_reward_worker.__module__], "load_scorer")
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("ebbflow.online.ray_actor.register_tensor_serializer", lambda: None)
    with pytest.raises(Reached):
        WorkerActor("reward", WorkersConfig(), []).open(
            open_reward_worker, StageContext(DETERMINISTIC, 0, 0), None, 0
        )
    assert (threads, seen) == ([1], [SET])


# With a recipe.


@pytest.mark.parametrize("name", ["mix_grpo", "awm", "dgpo"])
def test_on_a_cpu_every_operation_has_a_deterministic_kernel_and_bytes_stay(
    name, make_recipe, make_prompts, base_folder, scorer
):
    after = []
    for deterministic in (False, True):
        recipe = make_recipe(
            online={"algorithm": {"name": name}, "steps": 1}, deterministic=deterministic
        )
        ctx = StageContext(recipe, 0, 0)
        policy = Policy(policy_io.open_model(recipe, base_folder), recipe.policy, 0)
        for copy in ctx.following_copies:
            policy.ensure_copy(copy)
        before = values(policy)
        workers = open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config), scorer)
        run_online_stage(ctx, workers, make_prompts(6), MetricsRecorder())
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert changed(policy, before)
        after.append(values(policy))
    assert same(*after)


@pytest.mark.parametrize("attention", ["flash", "sage", "_flash_3_hub", "xformers", "flex"])
def test_attention_that_is_not_torchs_own_is_refused(attention):
    """torch cannot know how it adds, and would not refuse it."""
    model = {"family": "sd3", "path": "base", "attention": attention}
    with pytest.raises(
        RecipeError, match=f"model.attention = '{attention}'.*take native, or leave it out"
    ):
        Recipe.model_validate({"deterministic": True, "model": model})
    assert Recipe.model_validate({"model": model}).model.attention == attention


@pytest.mark.parametrize("attention", [None, "native", "_native_math", "_native_cudnn"])
def test_torchs_own_attention_is_taken(attention):
    model = {"family": "sd3", "path": "base", "attention": attention}
    assert Recipe.model_validate({"deterministic": True, "model": model}).deterministic
