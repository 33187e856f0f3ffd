"""What is trained, what its copies are, and that a policy folder brings all of it back."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer

from ebbflow.models import load_model
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    PolicyError,
    PolicyMetadata,
    read_policy_metadata,
    write_base_policy,
)
from tests.parameters import move, same, values

FULL = PolicyConfig(train="full")
LORA = PolicyConfig(train="lora", rank=4, alpha=12)
BOTH = pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])


@pytest.fixture
def predict(model):
    """``predict(model)``: the velocity at fixed points."""
    latents = torch.randn(3, *model.latent_shape, generator=torch.Generator().manual_seed(1))

    def velocity(of):
        with torch.no_grad():
            return of.predict_velocity(
                latents, torch.tensor([1.0, 0.5, 0.1]), of.encode_texts(["ABCD", "WXYZ", "Q"])
            )

    return velocity


def metadata_of(config, **rest):
    return PolicyMetadata(
        base_digest="base", recipe_digest="recipe", config=config, version=3, **rest
    )


@BOTH
def test_a_new_policy_is_the_base(model, predict, config):
    before = predict(model)
    policy = Policy(model, config, seed=0)
    assert torch.equal(predict(model), before)
    with policy.use_copy("reference"):
        assert torch.equal(predict(model), before)


def test_full_trains_the_transformer_and_lora_only_its_adapters(base_folder):
    for config in (FULL, LORA):
        model = load_model(base_folder)
        policy = Policy(model, config, seed=0)
        trained = {name for name, p in model.transformer.named_parameters() if p.requires_grad}
        assert policy.parameters.keys() == trained
        assert not any(p.requires_grad for p in model.text_encoder.parameters())
        everything = {name for name, _ in model.transformer.named_parameters()}
        assert trained == (
            everything if config is FULL else {name for name in everything if "lora_" in name}
        )
    # Every attention projection of every block gets two factors.
    blocks = len(model.list_blocks())
    targets = len(model.lora_targets)
    assert blocks * targets - 1 <= len(trained) / 2 <= blocks * targets


def test_adapters_depend_on_the_seed_and_not_on_the_state_of_torch(base_folder):
    def adapters(seed, torch_seed):
        torch.manual_seed(torch_seed)
        policy = Policy(load_model(base_folder), LORA, seed)
        return values(policy), torch.rand(())

    first, after_first = adapters(0, 1)
    again, after_again = adapters(0, 1)
    elsewhere, _ = adapters(0, 2)
    other, _ = adapters(1, 1)
    assert same(first, again)
    assert same(first, elsewhere)
    assert not same(first, other)
    assert after_first == after_again == torch.rand((), generator=torch.Generator().manual_seed(1))


@BOTH
def test_using_a_copy_predicts_with_it_and_puts_everything_back(model, predict, config):
    policy = Policy(model, config, 0)
    base = predict(model)
    move(policy)
    trained = predict(model)
    before = values(policy)
    assert not torch.allclose(trained, base, atol=1e-4)
    with policy.use_copy("reference"):
        assert torch.equal(predict(model), base)
        assert not model.predict_velocity(
            torch.zeros(1, *model.latent_shape), torch.ones(1), model.encode_texts(["A"])
        ).requires_grad
    assert same(values(policy), before)
    assert torch.equal(predict(model), trained)
    with policy.use_copy("current"):
        assert torch.equal(predict(model), trained)


@BOTH
def test_swapping_in_a_copy_copies_nothing(model, config):
    policy = Policy(model, config, 0)
    own = {name: p.data_ptr() for name, p in policy.parameters.items()}
    with policy.use_copy("reference"):
        assert {name: p.data_ptr() for name, p in policy.parameters.items()} == {
            name: value.data_ptr() for name, value in policy.copies["reference"].items()
        }
    assert {name: p.data_ptr() for name, p in policy.parameters.items()} == own


@pytest.mark.parametrize("dora", [False, True])
def test_the_reference_leaves_out_adapters_that_add_zero(model, predict, dora):
    """Not those of DoRA, which divide by a norm that rounds."""
    policy = Policy(model, LORA.model_copy(update={"dora": dora}), 0)
    with_adapters = predict(model)
    move(policy)
    products = []
    for name, module in model.transformer.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *_: products.append(1))
    with policy.use_copy("reference"):
        assert torch.equal(predict(model), with_adapters)
    assert bool(products) == dora
    trained = predict(model)
    assert products
    assert not torch.equal(trained, with_adapters)
    assert all(parameter.requires_grad for parameter in policy.parameters.values())


def test_compiled_blocks_predict_the_reference_with_the_graphs_of_the_policy(model, predict):
    policy = Policy(model, LORA, 0)
    base = predict(model)
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.list_blocks():
        block.compile(dynamic=False, backend=count_graphs)
    predict(model)
    num_graphs = len(graphs)
    assert num_graphs
    with policy.use_copy("reference"):
        assert torch.equal(predict(model), base)
    assert len(graphs) == num_graphs


def test_merged_adapters_predict_the_same_and_leave_the_same_bytes(model, predict):
    policy = Policy(model, LORA, 0)
    move(policy)
    before = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    separate = predict(model)
    products = []
    hooks = [
        module.register_forward_hook(lambda *_: products.append(1))
        for name, module in model.transformer.named_modules()
        if name.endswith(("lora_A.default", "lora_B.default"))
    ]
    with policy.merge_adapters():
        merged = predict(model)
    assert hooks
    assert not products
    assert 0 < (merged - separate).abs().max() < 1e-5 * separate.abs().max()
    with policy.use_copy("reference"):
        base = predict(model)
        with policy.merge_adapters():
            assert (
                (predict(model) - base).abs().max()
                < 1e-5 * base.abs().max()
                < 1e-2 * (merged - base).abs().max()
            )
    assert same(model.transformer.state_dict(), before)
    assert torch.equal(predict(model), separate)
    assert products


def test_adapters_are_not_merged_into_weights_that_are_rounded(model, predict):
    """Half a unit in the last place of bfloat16 is more than most adapters add."""
    policy = Policy(model, LORA, 0)
    move(policy)
    before = values(policy)
    with policy.merge_adapters("bfloat16"):
        assert not any(
            layer.merged_adapters
            for layer in model.transformer.modules()
            if isinstance(layer, LoraLayer)
        )
    assert same(values(policy), before)


@pytest.mark.parametrize(
    ("size", "kept", "error"),
    [(1e-4, (0.0, 0.1), 0.9), (1e-3, (0.4, 0.6), 0.7), (1e-2, (0.9, 1.1), 0.1)],
)
def test_a_sum_that_is_rounded_to_bfloat16_loses_an_adapter_or_is_off(size, kept, error):
    """Of an adapter with the norm ``size`` of its weight's, ``kept`` is the share that the rounded
    sum has along it, and ``error`` a part of its norm by which the sum is off at least.
    """
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(512, 512, generator=generator)).bfloat16().float()
    adapter = torch.randn(512, 16, generator=generator) @ torch.randn(16, 512, generator=generator)
    adapter *= size * weight.norm() / adapter.norm()
    difference = (weight + adapter).bfloat16().float() - weight
    share = (difference * adapter).sum() / adapter.square().sum()
    assert kept[0] < share < kept[1]
    assert (difference - adapter).norm() > error * adapter.norm()


@BOTH
def test_using_puts_everything_back_after_an_exception(model, predict, config):
    policy = Policy(model, config, 0)
    move(policy)
    before = values(policy)
    with pytest.raises(RuntimeError, match="on purpose"), policy.use_copy("reference"):
        raise RuntimeError("on purpose")
    assert same(values(policy), before)
    assert torch.is_grad_enabled()


def test_an_unknown_copy_is_an_error_that_changes_nothing(model):
    policy = Policy(model, FULL, 0)
    before = values(policy)
    with pytest.raises(KeyError, match="old"), policy.use_copy("old"):
        pass
    assert same(values(policy), before)


def test_copies_do_not_follow_the_policy(model):
    policy = Policy(model, FULL, 0)
    policy.ensure_copy("old")
    start = values(policy)
    move(policy)
    policy.ensure_copy("old")
    assert same(policy.copies["old"], start)
    assert same(policy.copies["reference"], start)
    policy.snapshot_copy("old")
    assert same(policy.copies["old"], values(policy))


@given(st.floats(0, 1))
def test_blending_a_copy_follows_its_decay(decay):
    policy = object.__new__(Policy)
    policy.offloaded = False
    policy.parameters = {
        "w": torch.nn.Parameter(torch.tensor([1.0, -2.0])),
        "x": torch.nn.Parameter(torch.tensor([[4.0]])),
    }
    policy.copies = {"old": {"w": torch.tensor([3.0, 5.0]), "x": torch.tensor([[0.0]])}}
    policy.blend_copy("old", decay)
    assert policy.copies["old"]["w"].tolist() == pytest.approx(
        [1 + 2 * decay, -2 + 7 * decay], abs=1e-5
    )
    assert policy.copies["old"]["x"].item() == pytest.approx(4 - 4 * decay, abs=1e-5)
    assert policy.parameters["w"].tolist() == [1, -2]


def test_blend_at_its_ends_is_exact(model):
    policy = Policy(model, FULL, 0)
    policy.snapshot_copy("old")
    start = values(policy)
    move(policy)
    policy.blend_copy("old", 1.0)
    assert same(policy.copies["old"], start)
    policy.blend_copy("old", 0.0)
    assert same(policy.copies["old"], values(policy))


@BOTH
def test_a_saved_policy_comes_back_exactly(base_folder, model, predict, tmp_path, config):
    base = predict(model)
    policy = Policy(model, config, 0)
    policy.snapshot_copy("old")
    move(policy)
    policy.blend_copy("old", 0.3)
    trained = values(policy)
    old = dict(policy.copies["old"])
    written = metadata_of(policy.config, copies=("old",), stages=("1.1 online",))
    policy.save_folder(tmp_path / "policy", written)
    verify_folder(tmp_path / "policy")

    again = load_model(base_folder)
    loaded = Policy(again, config, seed=99)
    reference = values(loaded)
    assert (
        loaded.load_folder(tmp_path / "policy", to_train=True)
        == written
        == read_policy_metadata(tmp_path / "policy")
    )
    assert same(values(loaded), trained)
    assert same(loaded.copies["old"], old)
    assert torch.equal(predict(again), predict(model))
    assert same(loaded.copies["reference"], reference)
    with loaded.use_copy("reference"):
        assert torch.equal(predict(again), base)
    with loaded.use_copy("old"), policy.use_copy("old"):
        assert torch.equal(predict(again), predict(model))
    kept = loaded.copies["old"]
    loaded.ensure_copy("old")
    assert loaded.copies["old"] is kept
    served = Policy(load_model(base_folder), config, seed=99)
    served.load_folder(tmp_path / "policy")
    assert same(values(served), trained)
    assert served.copies.keys() == {"reference"}


@BOTH
def test_the_same_policy_is_saved_as_the_same_bytes(model, tmp_path, config):
    policy = Policy(model, config, 0)
    move(policy)
    for number in range(6):
        policy.save_folder(tmp_path / str(number), metadata_of(config))
    assert len({verify_folder(tmp_path / str(number)) for number in range(6)}) == 1


@BOTH
def test_ranks_that_do_not_write_leave_nothing(model, tmp_path, config):
    Policy(model, config, 0).save_folder(tmp_path / "policy", metadata_of(config), write=False)
    assert not list(tmp_path.iterdir())


@BOTH
def test_the_base_policy_has_no_weights_of_its_own(model, predict, tmp_path, config):
    write_base_policy(tmp_path / "policy", "base", "recipe", config)
    base = predict(model)
    policy = Policy(model, config, 0)
    read = policy.load_folder(tmp_path / "policy")
    assert (read.version, read.copies, read.stages) == (0, (), ())
    assert torch.equal(predict(model), base)
    assert {path.name for path in (tmp_path / "policy").rglob("*")} == {
        "policy.json",
        "manifest.json",
        "COMMIT",
    }


def test_adapters_add_alpha_over_rank_times_the_product_of_their_factors(
    base_folder, model, predict
):
    policy = Policy(model, LORA, 0)
    move(policy, 0.05)
    merged = load_model(base_folder)
    weights = dict(merged.transformer.named_parameters())
    with torch.no_grad():
        for name, first in policy.parameters.items():
            if ".lora_A." in name:
                second = policy.parameters[name.replace(".lora_A.", ".lora_B.")]
                weights[name.replace("lora_A.default.", "")] += (
                    LORA.alpha / LORA.rank * second @ first
                )
    assert (predict(merged) - predict(model)).abs().max() < 1e-5


def test_diffusers_loads_the_adapters_with_their_alpha(
    base_folder, open_pipeline, model, predict, tmp_path
):
    policy = Policy(model, LORA, 0)
    move(policy, 0.05)
    policy.save_folder(tmp_path / "policy", metadata_of(LORA, copies=()))
    pipeline = open_pipeline(base_folder)
    peer = load_model(base_folder)
    before = predict(peer)
    pipeline.load_lora_weights(tmp_path / "policy")
    peer.transformer = pipeline.transformer
    assert (predict(peer) - predict(model)).abs().max() < 1e-5
    assert (predict(peer) - before).abs().max() > 1e-2


def test_diffusers_loads_the_full_weights(model, predict, base_folder, tmp_path):
    policy = Policy(model, FULL, 0)
    move(policy)
    policy.save_folder(tmp_path / "policy", metadata_of(FULL))
    peer = load_model(base_folder)
    peer.transformer = SD3Transformer2DModel.from_pretrained(
        tmp_path / "policy" / "transformer"
    ).eval()
    assert torch.equal(predict(peer), predict(model))


@BOTH
def test_another_kind_of_policy_is_refused(base_folder, model, tmp_path, config):
    Policy(model, config, 0).save_folder(tmp_path / "policy", metadata_of(config))
    for other in (
        LORA if config is FULL else FULL,
        PolicyConfig(train=config.train, rank=5, alpha=12),
    ):
        policy = Policy(load_model(base_folder), other, 0)
        before = values(policy)
        with pytest.raises(
            PolicyError, match="policy holds a policy of .*the recipe asks for .*use its own recipe"
        ):
            policy.load_folder(tmp_path / "policy")
        assert same(values(policy), before)


def test_a_damaged_or_unfinished_folder_is_refused(model, base_folder, tmp_path):
    policy = Policy(model, LORA, 0)
    move(policy)
    folder = tmp_path / "policy"

    def refused(error, match):
        fresh = Policy(load_model(base_folder), LORA, 0)
        before = values(fresh)
        with pytest.raises(error, match=match):
            fresh.load_folder(folder)
        assert same(values(fresh), before)

    refused(ArtifactError, "no COMMIT")
    policy.save_folder(folder, metadata_of(LORA))
    weights = next(folder.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(ArtifactError, weights.name)
    weights.write_bytes(whole)
    (folder / "COMMIT").unlink()
    refused(ArtifactError, "no COMMIT")


def test_a_folder_of_something_else_is_no_policy(base_folder, model):
    with pytest.raises(PolicyError, match="no policy folder"):
        Policy(model, FULL, 0).load_folder(base_folder)


def test_the_card_is_strict(tmp_path):
    text = json.loads(metadata_of(FULL).model_dump_json())
    assert PolicyMetadata.model_validate(text) == metadata_of(FULL)
    with pytest.raises(ValueError, match="extra"):
        PolicyMetadata.model_validate({**text, "extra": 1})
