"""Where training starts: an earlier policy or a published LoRA computes what it did before,
whatever its rank and scale.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from training_cases import FULL, LORA

from ebbflow.models import load_model
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.export import export_pipeline
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata, read_policy_metadata
from ebbflow.training.start import write_start_policy
from tests.parameters import move


@pytest.fixture
def predict():
    def at_fixed_points(model):
        with torch.no_grad():
            latents = torch.randn(
                3, *model.latent_shape, generator=torch.Generator().manual_seed(0)
            )
            return model.predict_velocity(
                latents, torch.tensor([1.0, 0.5, 0.1]), model.encode_texts(["ABCD", "WXYZ", "Q"])
            )

    return at_fixed_points


@pytest.fixture
def publish(base_folder, tmp_path):
    """``publish(rank, alpha, targets)``: a LoRA in diffusers' own layout, and the model that
    carries it.
    """

    def make(rank=3, alpha=6, targets=("attn.to_q", "attn.to_k")):
        model = load_model(base_folder)
        folder = tmp_path / "published"
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
        model.transformer.add_adapter(config)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.transformer.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        model.pipeline_class.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(model.transformer),
            transformer_lora_adapter_metadata=model.transformer.peft_config["default"].to_dict(),
        )
        return folder, model

    return make


def started(base, source, policy, folder):
    """The model with the policy that training would start with."""
    recipe = Recipe.model_validate({"policy": {**policy, "start": {"path": str(source)}}})
    write_start_policy(recipe, base, source, folder, str(source))
    model = load_model(base)
    Policy(model, recipe.policy, 0).load_folder(folder, to_train=True)
    return model


@pytest.mark.parametrize(("rank", "alpha"), [(3, 6), (3, 1), (8, 4), (8, 8)], ids=str)
def test_a_published_lora_computes_the_same_under_another_rank_and_scale(
    base_folder, publish, predict, tmp_path, rank, alpha
):
    source, published = publish(rank, alpha)
    wanted = predict(published)
    base = predict(load_model(base_folder))
    assert (wanted - base).abs().max() > 0.01
    model = started(
        base_folder, source, {"train": "lora", "rank": 8, "alpha": 4}, tmp_path / "policy"
    )
    torch.testing.assert_close(predict(model), wanted, rtol=0, atol=1e-5)
    metadata = read_policy_metadata(tmp_path / "policy")
    assert (metadata.version, metadata.start, metadata.base_digest) == (
        0,
        str(source),
        verify_folder(base_folder),
    )


def test_the_reference_of_a_started_policy_is_the_base(base_folder, publish, predict, tmp_path):
    source, _ = publish()
    recipe = Recipe.model_validate({"policy": {"train": "lora", "start": {"path": str(source)}}})
    write_start_policy(recipe, base_folder, source, tmp_path / "policy", str(source))
    model = load_model(base_folder)
    policy = Policy(model, recipe.policy, 0)
    policy.load_folder(tmp_path / "policy", to_train=True)
    with policy.use_copy("reference"):
        torch.testing.assert_close(
            predict(model), predict(load_model(base_folder)), rtol=0, atol=1e-6
        )


def test_one_file_will_do(base_folder, publish, predict, tmp_path):
    source, published = publish()
    (file,) = source.glob("*.safetensors")
    model = started(base_folder, file, {"train": "lora"}, tmp_path / "policy")
    torch.testing.assert_close(predict(model), predict(published), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("published", "policy", "message"),
    [
        (
            {"rank": 9},
            {"train": "lora", "rank": 8},
            "has rank 9 at .* policy.rank = 8; set policy.rank to 9",
        ),
        (
            {"targets": ["ff.net.2"]},
            {"train": "lora"},
            "adapts transformer_blocks.0.ff.net.2, which policy.targets leave out",
        ),
        ({}, {"train": "full"}, "policy.train is 'full'; set policy.train to lora"),
    ],
    ids=["rank", "targets", "full"],
)
def test_what_does_not_fit_is_refused(base_folder, publish, tmp_path, published, policy, message):
    source, _ = publish(**published)
    with pytest.raises(PolicyError, match=message):
        started(base_folder, source, policy, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_what_is_no_lora_is_refused(base_folder, tmp_path):
    (tmp_path / "some.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(
        PolicyError, match="some.safetensors cannot be read as a LoRA of this model"
    ):
        started(base_folder, tmp_path / "some.safetensors", {"train": "lora"}, tmp_path / "policy")


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_an_earlier_policy_goes_on_with_its_weights(base_folder, model, predict, tmp_path, config):
    policy = Policy(model, config, 0)
    move(policy)
    metadata = PolicyMetadata(
        base_digest=verify_folder(base_folder), recipe_digest="r", config=config, version=7
    )
    policy.save_folder(tmp_path / "earlier", metadata)
    keys = config.model_dump(exclude={"start"})
    again = started(base_folder, tmp_path / "earlier", keys, tmp_path / "policy")
    assert torch.equal(predict(again), predict(model))
    policy.save_folder(tmp_path / "foreign", metadata.model_copy(update={"base_digest": "0" * 64}))
    with pytest.raises(PolicyError, match="was trained from base model 000000000000"):
        started(base_folder, tmp_path / "foreign", keys, tmp_path / "never")


def test_a_lora_keeps_its_digits_on_a_rounded_base(base_folder, publish, tmp_path):
    """The base's precision is not that of the adapters: trained parameters are float32."""
    source, published = publish(rank=2, alpha=2)
    recipe = Recipe.model_validate(
        {
            "model": {"precision": "bfloat16"},
            "policy": {"train": "lora", "rank": 2, "alpha": 2, "start": {"path": str(source)}},
        }
    )
    write_start_policy(recipe, base_folder, source, tmp_path / "policy", str(source))
    model = load_model(base_folder, recipe.model)
    policy = Policy(model, recipe.policy, 0)
    policy.load_folder(tmp_path / "policy", to_train=True)
    wanted = dict(published.transformer.named_parameters())
    for name in (name for name in wanted if "lora_" in name):
        assert torch.equal(policy.parameters[name], wanted[name]), name


def test_adapters_of_the_text_encoders_are_not_dropped_silently(base_folder, publish, tmp_path):
    source, _ = publish()
    (file,) = source.glob("*.safetensors")
    save_file(load_file(file) | {"text_encoder.layer.lora_A.weight": torch.ones(3, 4)}, file)
    with pytest.raises(PolicyError, match="adapts text_encoder too, which training leaves alone"):
        started(base_folder, file, {"train": "lora"}, tmp_path / "policy")


def test_of_several_files_one_must_be_named(base_folder, publish, tmp_path):
    source, _ = publish()
    (file,) = source.glob("*.safetensors")
    (source / "other.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(
        PolicyError,
        match="should hold one .safetensors file and holds other.safetensors, pytorch_lora_weights",
    ):
        started(base_folder, source, {"train": "lora"}, tmp_path / "policy")


def test_a_start_needs_a_path():
    with pytest.raises(RecipeError, match="policy: start needs the 'path'"):
        Recipe.model_validate({"policy": {"train": "lora", "start": {}}})


def test_an_export_keeps_changes_that_sixteen_bits_would_lose(base_folder, predict, tmp_path):
    config = ModelConfig(precision="bfloat16")
    model = load_model(base_folder, config)
    policy = Policy(model, LORA, 0)
    move(policy, 1e-3)
    metadata = PolicyMetadata(
        base_digest=verify_folder(base_folder),
        recipe_digest="r",
        config=LORA,
        version=1,
        model=config,
    )
    policy.save_folder(tmp_path / "policy", metadata)
    export_pipeline(base_folder, tmp_path / "policy", tmp_path / "exported")
    merged = dict(load_model(tmp_path / "exported").transformer.named_parameters())
    base = dict(load_model(base_folder).transformer.named_parameters())
    firsts = [name for name in policy.parameters if "lora_A" in name]
    for name in firsts:
        second = policy.parameters[name.replace("lora_A", "lora_B")]
        wanted = LORA.alpha / LORA.rank * second @ policy.parameters[name]
        plain = name.replace(".lora_A.default", "")
        torch.testing.assert_close(merged[plain] - base[plain], wanted.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_an_exported_policy_needs_no_adapters(base_folder, model, predict, tmp_path, config):
    policy = Policy(model, config, 0)
    move(policy)
    policy.save_folder(
        tmp_path / "policy",
        PolicyMetadata(
            base_digest=verify_folder(base_folder), recipe_digest="r", config=config, version=1
        ),
    )
    export_pipeline(base_folder, tmp_path / "policy", tmp_path / "exported")
    exported = load_model(tmp_path / "exported")
    assert not any("lora" in name for name in exported.transformer.state_dict())
    torch.testing.assert_close(predict(exported), predict(model), rtol=0, atol=1e-5)
