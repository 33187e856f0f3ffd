"""Networks in bfloat16 without autocast: an adapted layer against float64, its gradients, what is
cast how often, and which models keep autocast.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from benchmarks.tiny_models import build_tiny
from ebbflow.models import load_model, predict
from ebbflow.models.base import Conditioning
from ebbflow.models.fused_kernels import ComplexRotaryAttention, FusedRMSNorm, fuse_kernels
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.bfloat16 import BFloat16LoraLinear, CastTogether
from ebbflow.training.policy import Policy
from tests.pretend_cuda.device import pretend_cuda

LORA = PolicyConfig(train="lora", rank=4, alpha=8)
ROUNDING = 2.0**-8
"""Of bfloat16, relative."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "sd3"
    build_tiny("sd3", folder)
    return folder


def open_policy(folder, config=LORA, **keys):
    """A policy of SD3's family in bfloat16, with adapters that are not zero."""
    keys = {"precision": "bfloat16", "height": 64, "width": 64} | keys
    model = load_model(folder, ModelConfig(family="sd3", path=str(folder), **keys))
    policy = Policy(model, config, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise)
    return policy


def predict_row(policy, gradient=False):
    model = policy.model
    generator = torch.Generator().manual_seed(1)
    config = model.transformer.config
    tensors = {
        "embeds": torch.randn(2, 12, config.joint_attention_dim, generator=generator),
        "pooled": torch.randn(2, config.pooled_projection_dim, generator=generator),
    }
    latents = torch.randn(2, *model.latent_shape, generator=generator)
    conditioning = Conditioning({name: value.bfloat16() for name, value in tensors.items()})
    with torch.set_grad_enabled(gradient):
        return predict(model, latents, torch.tensor([0.9, 0.2]), conditioning)


def find_layer(policy):
    return next(m for m in policy.model.transformer.modules() if isinstance(m, BFloat16LoraLinear))


def test_an_adapted_layer_rounds_once(folder):
    layer = find_layer(open_policy(folder))
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = layer.get_base_layer()
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    scaling = layer.scaling["default"]
    exact = nn.functional.linear(x.double(), base.weight.double(), base.bias.double())
    exact += scaling * (x.double() @ first.double().T @ second.double().T)
    with torch.no_grad():
        output = layer(x)
    assert output.dtype == torch.bfloat16
    error = (output.double() - exact).norm() / exact.norm()
    assert error < 2 * ROUNDING


def test_adapters_of_zero_change_no_byte(folder):
    policy = open_policy(folder)
    policy.assign_parameters(policy.copies["reference"])
    with_adapters = predict_row(policy)
    for layer in policy.model.transformer.modules():
        if isinstance(layer, BFloat16LoraLinear):
            layer.merged_adapters.append("default")
    assert torch.equal(predict_row(policy), with_adapters)


def test_gradients_are_those_of_float32_up_to_rounding(folder):
    exact = open_policy(folder, precision="float32")
    rounded = open_policy(folder)
    gradients = []
    for policy in (exact, rounded):
        predict_row(policy, gradient=True).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters.values()]))
    assert gradients[1].dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert similarity > 0.99


def watch_flux(folder, family, width):
    """The arguments that a network of the FLUX family gets, in bfloat16 under a LoRA."""
    build_tiny(family, folder)
    config = ModelConfig(
        family=family, path=str(folder), precision="bfloat16", height=32, width=width
    )
    model = Policy(load_model(folder, config), LORA, seed=0).model
    seen = {}

    def watch(module, arguments, keys):
        seen.update(keys)
        raise StopIteration

    model.transformer.register_forward_pre_hook(watch, with_kwargs=True)
    widths = model.transformer.config
    tensors = {"embeds": torch.zeros(1, 300, widths.joint_attention_dim)}
    if family == "flux":
        tensors["pooled"] = torch.zeros(1, widths.pooled_projection_dim)
    latents = torch.zeros(1, *model.latent_shape)
    with torch.no_grad(), pytest.raises(StopIteration):
        predict(model, latents, torch.tensor([0.7]), Conditioning(tensors))
    return seen


def test_positions_are_not_rounded(tmp_path):
    seen = watch_flux(tmp_path / "flux", "flux", width=4160)
    assert seen["hidden_states"].dtype == torch.bfloat16
    columns = seen["img_ids"][:, 2].unique()
    assert len(columns) > 257  # bfloat16 has no odd number above 256
    assert torch.equal(columns.long(), torch.arange(len(columns)))


def test_flux_2_gets_its_time_and_its_positions_exactly(tmp_path):
    seen = watch_flux(tmp_path / "flux2", "flux2", width=32)
    # The network begins by rounding the time to the precision of the latents.
    assert torch.equal(seen["timestep"].to(seen["hidden_states"].dtype), torch.tensor([0.7]))
    assert torch.equal(seen["txt_ids"][0, :, 3].long(), torch.arange(300))


def test_recomputed_activations_give_the_same_gradients(folder):
    gradients = []
    for checkpointing in (False, True):
        policy = open_policy(folder, gradient_checkpointing=checkpointing)
        policy.model.transformer.train()
        predict_row(policy, gradient=True).square().mean().backward()
        gradients.append({name: p.grad for name, p in policy.parameters.items()})
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


def test_a_copy_is_what_predicts_while_it_is_in_use(folder):
    policy = open_policy(folder)
    current = predict_row(policy)
    with policy.use_copy("reference"):
        base = predict_row(policy)
    assert not torch.equal(base, current)
    assert torch.equal(predict_row(policy), current)
    assert find_layer(policy).casts is None


def test_all_adapters_are_cast_by_one_operation(folder):
    with pretend_cuda() as device:
        policy = open_policy(folder)
        assert find_layer(policy).weight.device.type == "cuda"
        device.kernels.clear()
        model = policy.model
        config = model.transformer.config
        conditioning = Conditioning(
            {
                "embeds": torch.zeros(1, 12, config.joint_attention_dim, device="cuda").bfloat16(),
                "pooled": torch.zeros(1, config.pooled_projection_dim, device="cuda").bfloat16(),
            }
        )
        latents = torch.zeros(1, *model.latent_shape, device="cuda")
        sigma = torch.full((1,), 0.5, device="cuda")
        device.kernels.clear()
        with torch.no_grad():
            predict(model, latents, sigma, conditioning)
        assert device.kernels["aten::_foreach_copy_"] == 1


def test_the_cast_of_several_tensors_passes_gradients_back():
    values = [torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)]
    first, unused = CastTogether.apply(*values)
    assert torch.equal(first, values[0].bfloat16())
    assert unused.dtype == torch.bfloat16
    first.float().sum().backward()
    assert torch.equal(values[0].grad, torch.ones(3))
    assert values[1].grad is None


def test_a_fused_norm_is_the_networks_own_up_to_rounding():
    norm = RMSNorm(16, eps=1e-6).bfloat16()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(4, 16).bfloat16()
    expected = norm(x)
    norm.__class__ = FusedRMSNorm
    torch.testing.assert_close(norm(x), expected, rtol=4 * ROUNDING, atol=0)
    assert torch.equal(norm(x.float()), RMSNorm.forward(norm, x.float())), "other types as before"


def run_flux(transformer):
    generator = torch.Generator().manual_seed(2)
    widths = transformer.config
    positions = torch.zeros(12, 3)
    positions[:, 1:] = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0))
    latents = torch.randn(2, 12, widths.in_channels, generator=generator, dtype=transformer.dtype)
    latents.requires_grad_()
    velocity = transformer(
        hidden_states=latents,
        encoder_hidden_states=torch.randn(
            2, 5, widths.joint_attention_dim, generator=generator, dtype=transformer.dtype
        ),
        pooled_projections=torch.randn(
            2, widths.pooled_projection_dim, generator=generator, dtype=transformer.dtype
        ),
        timestep=torch.tensor([0.3, 0.8], dtype=transformer.dtype),
        guidance=torch.ones(2, dtype=transformer.dtype),
        img_ids=positions,
        txt_ids=torch.zeros(5, 3),
        return_dict=False,
    )[0]
    velocity.square().mean().backward()
    return velocity.detach(), latents.grad


def test_the_attention_of_flux_as_a_complex_product_is_the_networks_own(tmp_path):
    build_tiny("flux", tmp_path / "flux")
    config = ModelConfig(family="flux", path=str(tmp_path / "flux"), height=64, width=64)
    transformer = load_model(tmp_path / "flux", config).transformer.double()
    expected = run_flux(transformer)
    fuse_kernels(transformer)
    processors = set(map(type, transformer.attn_processors.values()))
    assert processors == {ComplexRotaryAttention}
    # The rotation itself is in float32 on both sides.
    for fused, own in zip(run_flux(transformer), expected, strict=True):
        error = (fused - own).norm() / own.norm()
        assert error < 2.0**-20


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        (LORA, "float32"),
        (LORA, "float16"),
        (LORA.model_copy(update={"dora": True}), "bfloat16"),
        (PolicyConfig(), "bfloat16"),
    ],
)
def test_everything_else_keeps_autocast(folder, config, precision):
    policy = open_policy(folder, config, precision=precision)
    assert not hasattr(policy.model, "bfloat16_pass")
    assert predict_row(policy).isfinite().all()


def test_a_family_of_a_user_keeps_autocast(folder, monkeypatch):
    from ebbflow.models.families.sd3 import SD3Model

    monkeypatch.setattr(SD3Model, "runs_without_autocast", False)
    assert not hasattr(open_policy(folder).model, "bfloat16_pass")
