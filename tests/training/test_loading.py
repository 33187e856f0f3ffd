"""Weights that a policy reads from their files: the bytes of a model that was loaded whole, cast
before they go to the device, and of several ranks each reads its shards alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from benchmarks.tiny_models import build_tiny
from ebbflow.models import ModelError, load_model
from ebbflow.models.base import Model
from ebbflow.models.weight_files import WEIGHTS, WeightFiles
from ebbflow.recipe.model import ModelConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.distributed import join_process_group
from ebbflow.training.policy import Policy
from ebbflow.training.sharding import gather_tensor
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

CONFIGS = {
    "lora": PolicyConfig(train="lora", rank=4),
    "dora": PolicyConfig(train="lora", rank=4, dora=True),
    "full": PolicyConfig(),
}
FAMILIES = {"sd3": {}, "flux": {}, "wan_a14b": {"expert": "both"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``folder("sd3")``: a tiny model whose network was published in float32."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = tmp_path_factory.mktemp("tiny") / name
            build_tiny(name, built[name])
        return built[name]

    return build


def open_model(folder: Path, name: str, precision: Precision, weights_later: bool) -> Model:
    config = ModelConfig(family=name, path=str(folder), precision=precision, **FAMILIES[name])
    return load_model(folder, config, weights_later=weights_later)


def list_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return dict(policy.model.transformer.named_parameters()) | {
        f"buffer {name}": value for name, value in policy.model.transformer.named_buffers()
    }


@pytest.mark.parametrize("name", ["sd3", "flux", "wan_a14b"])
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_are_read_later_are_those_of_a_loaded_model(folder, name, case, precision):
    whole = Policy(open_model(folder(name), name, precision, False), CONFIGS[case], 0)
    later = Policy(open_model(folder(name), name, precision, True), CONFIGS[case], 0)
    assert not hasattr(later.model, "pending_weights")
    expected = list_tensors(whole)
    tensors = list_tensors(later)
    assert tensors.keys() == expected.keys()
    assert later.parameters.keys() == whole.parameters.keys()
    for key, value in tensors.items():
        assert value.dtype == expected[key].dtype, key
        assert value.requires_grad == expected[key].requires_grad, key
        assert torch.equal(value, expected[key]), key


def test_a_missing_weight_is_named(folder, tmp_path):
    source = folder("sd3")
    for file in source.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    file = tmp_path / "transformer" / WEIGHTS
    weights = load_file(file)
    del weights["proj_out.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"the weight proj_out.weight is missing.*fetch it again"):
        open_model(tmp_path, "sd3", "float32", True)


def test_a_quantised_weight_is_refused(folder, tmp_path):
    shutil.copytree(folder("sd3"), tmp_path / "quantised")
    file = tmp_path / "quantised" / "transformer" / WEIGHTS
    weights = load_file(file)
    weights["proj_out.weight"] = weights["proj_out.weight"].to(torch.int8)
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"the weight proj_out.weight is quantised \(I8\)"):
        open_model(tmp_path / "quantised", "sd3", "float32", True)


def read_as_rank(folder: Path, case: str, cpu_offload: bool) -> None:
    """As one of two ranks: read its shards, and compare the whole with a model loaded at once."""
    read_elements = 0
    read_tensor = WeightFiles.read_tensor

    def count_elements(files: WeightFiles, name: str, rows: slice = slice(None)) -> torch.Tensor:
        nonlocal read_elements
        tensor = read_tensor(files, name, rows)
        read_elements += tensor.numel()
        return tensor

    with join_process_group(cpu_offload), pytest.MonkeyPatch.context() as patch:
        expected = Policy(open_model(folder, "sd3", "bfloat16", False), CONFIGS[case], 0)
        model = open_model(folder, "sd3", "bfloat16", True)
        patch.setattr(WeightFiles, "read_tensor", count_elements)
        policy = Policy(model, CONFIGS[case], 0, shard=True, cpu_offload=cpu_offload)
        parameters = dict(policy.model.transformer.named_parameters())
        for key, value in expected.model.transformer.named_parameters():
            assert isinstance(parameters[key], DTensor)
            assert torch.equal(gather_tensor(parameters[key].detach()), value), key
        whole = sum(
            value.numel()
            for key, value in expected.model.transformer.named_parameters()
            if "lora_" not in key
        )
        if case != "dora":  # the norms of whole weights
            assert read_elements < 0.52 * whole, "a rank reads its own half"


@pytest.mark.parametrize("case", CONFIGS)
def test_a_rank_reads_its_shards_alone(folder, case):
    as_two_ranks(read_as_rank, folder("sd3"), case, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["lora", "full"])
def test_offloaded_shards_are_read_into_main_memory(folder, case):
    as_two_ranks(read_as_rank, folder("sd3"), case, True)
