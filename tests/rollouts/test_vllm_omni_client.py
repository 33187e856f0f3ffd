"""The trainer's side of the vLLM-Omni engine, against stand-ins for the other side: one that
generates, and some that fail.

``make test-vllm-omni`` runs the engine itself.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.rollouts import vllm_omni
from ebbflow.rollouts.generate import Diffusers, generate_samples
from ebbflow.rollouts.vllm_omni import VARIABLE, EngineError, VllmOmni
from ebbflow.rollouts.weights import compute_checksum
from ebbflow.rollouts.wire import Task, pack_rollouts, serve_calls
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy

pytestmark = pytest.mark.any_cpu

TEXTS = ["two cats", "a red bicycle", "snow", "a boat", "the sea"]
SDE = SamplerConfig(name="flow_sde", steps=4)

# Plain Python, for torch takes seconds to import: it follows the protocol as far as the test says.
STAND_IN = """
    import json, math, os, socket, struct, sys
    connection = socket.socket(fileno=int(sys.argv[1]))
    read = connection.makefile("rb")
    def take():
        (length,) = struct.unpack("<Q", read.read(8))
        header = json.loads(read.read(length))
        for _, dtype, shape in header.pop("tensors"):
            assert dtype == "float32"
            read.read(4 * math.prod(shape))
        return header
    def give(header):
        head = json.dumps(header | {"tensors": []}).encode()
        connection.sendall(struct.pack("<Q", len(head)) + head)
    print("a stand-in begins", flush=True)
"""


class Generating:
    """The other side in a thread of this process, with a model of its own."""

    def __init__(self):
        self.calls = []
        self.files = []
        self.applied = {"layers": 1, "norm": 0.0}

    def open(self, header, tensors):
        self.header = header
        self.model = load_model(
            vllm_omni.Path(header["base"]), ModelConfig.model_validate(header["model"])
        )
        return {}, {}

    def take(self, header, tensors):
        self.calls.append(header)
        self.files.append(load_file(header["file"]))
        return {"sha256": compute_checksum(self.files[-1])} | self.applied, {}

    def generate(self, header, tensors):
        task = Task.unpack_message(header, tensors)
        self.calls.append({"call": "generate", "rows": len(task.keys)})
        rollouts = generate_samples(
            self.model, task.conditioning, task.keys, task.sampler, task.plan
        )
        return {}, pack_rollouts(rollouts, self.model.decode_latents(rollouts.latents))

    def start(self, python, log):
        ours, theirs = vllm_omni.socket.socketpair()
        calls = {
            "open": self.open,
            "load_lora": self.take,
            "load_weights": self.take,
            "generate": self.generate,
        }
        threading.Thread(target=serve_calls, args=(theirs, calls), daemon=True).start()
        return ours, subprocess.Popen([sys.executable, "-c", ""])


@pytest.fixture
def other(monkeypatch):
    """The side that generates; engines opened in the test talk to it."""
    side = Generating()
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setattr(vllm_omni, "_start_process", side.start)
    return side


@pytest.fixture
def ctx(tiny_recipe):
    def make(model=None, **rest):
        stage = {
            "kind": "online",
            "algorithm": {"name": "flow_grpo"},
            "sampler": SDE.model_dump(),
            "micro_batch": 2,
        }
        model = {"guidance": 3.0, "max_tokens": 16} | (model or {})
        return StageContext(tiny_recipe("sd3", model, stages=[stage], **rest), 0, 0)

    return make


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """``stand_in(code)``: what engines start in this test, after it has greeted."""

    def write(code):
        package = tmp_path / "ebbflow_vllm_omni"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(textwrap.dedent(STAND_IN) + textwrap.dedent(code))
        monkeypatch.setenv(VARIABLE, sys.executable)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def open_engine(ctx):
    return VllmOmni(ctx, vllm_omni.Path(ctx.recipe.model.path))


def prompts(texts):
    return [
        Prompt(index, text, "", None, "test", "train", "{}") for index, text in enumerate(texts)
    ]


@pytest.mark.parametrize("plan", [Plan((0, 1), (0, 1)), Plan((1,), (1,), 0.5), None], ids=str)
def test_a_request_is_cut_and_comes_back_as_from_the_reference(other, ctx, plan):
    ctx = ctx()
    engine = open_engine(ctx)
    model = load_model(vllm_omni.Path(ctx.recipe.model.path), ctx.recipe.model)
    reference = Diffusers(ctx, Policy(model, ctx.recipe.policy, 0))
    conditioning = model.encode_prompts(prompts(TEXTS))
    keys = SampleKeys(3, [4, 5, 6, 7, 8], [1, 1, 1, 1, 2])
    assert conditioning.negative is not None
    found, images = engine.generate(conditioning, keys, SDE, plan)
    wanted, pictures = reference.generate(conditioning, keys, SDE, plan)
    assert other.calls == [{"call": "generate", "rows": rows} for rows in (2, 2, 1)]
    assert torch.equal(found.latents, wanted.latents)
    assert np.array_equal(images, pictures)
    if plan:
        for name, values in wanted.trajectory.list_columns().items():
            assert torch.equal(getattr(found.trajectory, name), values), name
    else:
        assert found.trajectory is None


def test_the_engine_draws_as_the_recipe_says_in_the_precision_of_rollouts(other, ctx):
    rough = ctx({"precision": "bfloat16"})
    open_engine(rough)
    assert other.header["model"]["precision"] == "bfloat16"
    assert (other.header["model"]["height"], other.header["model"]["guidance"]) == (64, 3.0)
    assert other.header["threads"] == rough.recipe.threads
    assert other.header["deterministic"] is False
    fine = ctx()
    stage = fine.config.model_copy(update={"rollout_precision": "bfloat16"})
    open_engine(
        replace(
            fine, recipe=fine.recipe.model_copy(update={"stages": [stage], "deterministic": True})
        )
    )
    assert other.header["deterministic"] is True
    assert other.header["model"]["precision"] == "bfloat16"


def test_lora_is_one_file_with_its_rank_and_alpha_and_does_not_stay(other, ctx):
    engine = open_engine(ctx(policy={"train": "lora", "rank": 4, "alpha": 12}))
    weights = {
        "blocks.0.to_q.lora_A.default.weight": torch.randn(4, 6),
        "blocks.0.to_q.lora_B.default.weight": torch.zeros(6, 4),
    }
    engine.load(weights)
    (call,), (file,) = other.calls, other.files
    assert (call["call"], call["rank"], call["alpha"]) == ("load_lora", 4, 12)
    assert file.keys() == weights.keys()
    assert all(torch.equal(file[name], values) for name, values in weights.items())
    assert not vllm_omni.Path(call["file"]).exists()


@pytest.mark.parametrize("applied", [(1, 18.0), (2, 50.91), (2, 8.485)])
def test_an_engine_that_adapts_other_layers_or_by_another_scale_is_refused(other, ctx, applied):
    """Two layers of norm 6, scaled by 3: 18 * sqrt(2) in all."""
    engine = open_engine(ctx(policy={"train": "lora", "rank": 4, "alpha": 12}))
    weights = {}
    for block in range(2):
        weights[f"blocks.{block}.to_q.lora_A.default.weight"] = torch.eye(4, 9)
        weights[f"blocks.{block}.to_q.lora_B.default.weight"] = 3 * torch.eye(6, 4)
    layers, norm = applied
    other.applied = {"layers": layers, "norm": norm}
    with pytest.raises(
        EngineError, match=f"adapts {layers} layers .* the policy 2 by one of 25.46"
    ):
        engine.load(weights)
    with pytest.raises(EngineError, match="was closed"):
        engine.load(weights)


def test_an_engine_whose_adapters_are_rounded_is_taken(other, ctx):
    engine = open_engine(ctx(policy={"train": "lora", "rank": 4, "alpha": 12}))
    weights = {
        "blocks.0.to_q.lora_A.default.weight": torch.randn(4, 9),
        "blocks.0.to_q.lora_B.default.weight": torch.randn(6, 4),
    }
    first, second = weights.values()
    norm = 3 * (second.bfloat16().float() @ first.bfloat16().float()).norm().item()
    other.applied = {"layers": 1, "norm": norm}
    engine.load(weights)


def test_full_weights_go_in_buckets_and_the_last_one_says_so(other, ctx, monkeypatch):
    monkeypatch.setattr(
        vllm_omni,
        "split_into_buckets",
        lambda weights: [{name: values} for name, values in weights.items()],
    )
    engine = open_engine(ctx(policy={"train": "full"}))
    weights = {name: torch.randn(3) for name in "abc"}
    engine.load(weights)
    assert [(call["call"], call["last"]) for call in other.calls] == [
        ("load_weights", last) for last in (False, False, True)
    ]
    assert all(
        torch.equal(file[name], weights[name])
        for name, file in zip("abc", other.files, strict=True)
    )


def test_what_was_changed_on_the_way_is_never_generated_with(other, ctx, monkeypatch):
    def spoil(weights, file):
        save(weights | {"b": weights["b"] * (1 + 1e-7)}, file)

    save = vllm_omni.save_file
    ctx = ctx(policy={"train": "full"})
    engine = open_engine(ctx)
    weights = {"a": torch.ones(3), "b": torch.ones(3)}
    engine.load(weights)
    monkeypatch.setattr(vllm_omni, "save_file", spoil)
    with pytest.raises(EngineError, match="load_weights.*checksum") as error:
        engine.load(weights)
    assert compute_checksum(weights)[:12] in str(error.value)
    assert compute_checksum(other.files[-1])[:12] in str(error.value)
    with pytest.raises(EngineError, match="generate: the engine was closed"):
        engine.generate(nothing(), SampleKeys(0, [0], [0]), SDE)


def test_an_interrupted_push_leaves_no_engine_with_half_of_the_weights(other, ctx, monkeypatch):
    def interrupt(weights, file):
        if "b" in weights:
            raise OSError("no space left on device")
        save(weights, file)

    save = vllm_omni.save_file
    monkeypatch.setattr(vllm_omni, "save_file", interrupt)
    monkeypatch.setattr(
        vllm_omni,
        "split_into_buckets",
        lambda weights: [{name: values} for name, values in weights.items()],
    )
    engine = open_engine(ctx(policy={"train": "full"}))
    with pytest.raises(OSError, match="no space"):
        engine.load({"a": torch.ones(3), "b": torch.ones(3)})
    assert len(other.files) == 1
    with pytest.raises(EngineError, match="generate: the engine was closed"):
        engine.generate(nothing(), SampleKeys(0, [0], [0]), SDE)


def test_an_interrupted_call_does_not_leave_its_answer_to_the_next_one(stand_in, ctx, monkeypatch):
    def interrupt(connection):
        raise KeyboardInterrupt

    stand_in("take(); give({}); take(); give({})")
    engine = open_engine(ctx())
    with monkeypatch.context() as patch:
        patch.setattr(vllm_omni, "receive_message", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(nothing(), SampleKeys(0, [0], [0]), SDE)
    with pytest.raises(EngineError, match="generate: the engine was closed"):
        engine.generate(nothing(), SampleKeys(0, [0], [0]), SDE)


def nothing():
    return vllm_omni.Conditioning({"embeds": torch.zeros(1, 2, 3)})


def test_a_process_that_dies_while_it_starts_shows_its_last_lines(stand_in, ctx):
    stand_in("print('there is no such file: model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(
        EngineError,
        match=r"open: .*exit code 3(.|\n)*a stand-in begins\nthere is no such file: model",
    ):
        open_engine(ctx())


def test_a_process_that_dies_at_work_is_told_and_stays_closed(stand_in, ctx):
    stand_in(
        "take(); give({}); take(); print('out of memory', flush=True); os.kill(os.getpid(), 9)"
    )
    engine = open_engine(ctx())
    with pytest.raises(EngineError, match=r"generate: .*exit code -9(.|\n)*out of memory"):
        engine.generate(nothing(), SampleKeys(0, [0], [0]), SDE)
    with pytest.raises(EngineError, match="load_weights: the engine was closed"):
        engine.load({"a": torch.ones(1)})


def test_an_error_of_the_other_side_names_the_call(stand_in, ctx):
    stand_in(
        "take(); give({}); print('trace', flush=True); take(); give({'error': 'ValueError: no such"
        " layer'}); take()"
    )
    engine = open_engine(ctx())
    with pytest.raises(EngineError, match=r"load_weights: .*ValueError: no such layer(.|\n)*trace"):
        engine.load({"a": torch.ones(1)})
    assert engine._process.poll() is not None


@pytest.mark.parametrize("obeys", [True, False])
def test_closing_ends_the_process(stand_in, ctx, obeys, monkeypatch):
    monkeypatch.setattr(vllm_omni, "SECONDS_TO_END", 10 if obeys else 0.2)
    stand_in(
        "take(); give({}); "
        + ("read.read(); sys.exit(7)" if obeys else "import time; time.sleep(60)")
    )
    engine = open_engine(ctx())
    engine.close()
    assert engine._process.returncode == (7 if obeys else -9)
    engine.close()


def test_it_does_not_join_the_trainers_process_group_and_stays_offline(stand_in, ctx, monkeypatch):
    for name in vllm_omni.GROUP:
        monkeypatch.setenv(name, "1")
    stand_in(
        "take(); give({'error': json.dumps({name: os.environ.get(name) for name in ('RANK',"
        " 'MASTER_PORT', 'HF_HUB_OFFLINE')})})"
    )
    with pytest.raises(
        EngineError, match='"RANK": null, "MASTER_PORT": null, "HF_HUB_OFFLINE": "1"'
    ):
        open_engine(ctx())


def test_without_its_environment_it_says_what_to_set(ctx, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    with pytest.raises(EngineError, match=f"{VARIABLE} = '/no/such/python'.*engine: diffusers"):
        open_engine(ctx())


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_other_families_are_refused(kind):
    stages = [{"kind": kind, "engine": "vllm_omni"}]
    with pytest.raises(
        RecipeError,
        match="stages.0.engine = 'vllm_omni' generates with .*qwen_image.*sd3.*family = 'lumina2'",
    ):
        Recipe.model_validate(
            {"model": {"family": "lumina2", "path": "somewhere"}, "stages": stages}
        )


def test_every_environment_has_the_engine_that_its_package_was_written_for():
    root = vllm_omni.Path(__file__).parents[2] / "containers"
    dependencies = tomllib.loads((root / "vllm_omni" / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    (pin,) = [line for line in dependencies if line.startswith("vllm-omni==")]
    for name in ("vllm-omni.txt", "vllm-omni-cpu.txt"):
        pins = (root / name).read_text().splitlines()
        assert f"{pin} \\" in pins
        assert any(line.startswith("pyarrow==") for line in pins)
