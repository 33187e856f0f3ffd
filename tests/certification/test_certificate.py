"""The certificate: right engines pass, and each planted fault fails its own line and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import planted_engines as engines
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from benchmarks.tiny_models import build_tiny
from ebbflow.certification.adapter import EngineSetup, NotSupportedError
from ebbflow.certification.bench import Bench, CertificateSettings, build_prompts
from ebbflow.certification.certificate import CertificateError, read_certificate
from ebbflow.certification.certify import certify_engine, open_certified_engine
from ebbflow.certification.page import write_page
from ebbflow.certification.weight_lines import group_layers
from ebbflow.cli import main
from ebbflow.data.images import split_condition_images
from ebbflow.flow.noise import generate_initial_noise
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.registry.signing import create_key_pair

LORA = PolicyConfig(train="lora", rank=4, alpha=8)
DORA = PolicyConfig(train="lora", rank=4, alpha=4, dora=True)
# Four steps are the fewest: a share is measured from three, and the last one is not recorded.
QUICK = CertificateSettings(steps=4, samples=1, adapters=(LORA,), updates=10, layers=4)
LORA_LINE = "LoRA of rank 4 and alpha 8"


@pytest.fixture(scope="module")
def model(tiny_recipe):
    return tiny_recipe("sd3", {"guidance": 4.0, "max_tokens": 32}).model


@pytest.fixture(scope="module")
def certify(model):
    """``certify(engine)``: its certificate on a tiny SD3."""

    def run(engine, settings=QUICK, precision=None, config=None):
        config = config or model
        return certify_engine(
            "planted", engine, Path(config.path), config, precision, settings=settings
        )

    return run


def test_a_request_for_several_latents_names_the_noise_of_the_model(tmp_path):
    build_tiny("ltx2", tmp_path / "base")
    size = {"height": 64, "width": 64, "frames": 9, "max_tokens": 16}
    config = ModelConfig(family="ltx2", path=str(tmp_path / "base"), **size)
    model = load_model(tmp_path / "base", config)
    prompts = build_prompts("ltx2")
    bench = Bench(
        None, QUICK, None, SimpleNamespace(model=model), prompts, model.encode_prompts(prompts)
    )
    request = bench.build_request([0], 2)
    expected = generate_initial_noise(model.latent_shape, request.keys)
    assert torch.equal(request.generate_noise(0), expected)


@pytest.mark.parametrize(("family", "count"), [("wan_flf2v", 2), ("flux2_edit", 1)])
def test_a_certificate_has_as_many_images_as_the_family_needs(family, count):
    prompts = build_prompts(family)
    assert {len(split_condition_images(prompt.image or b"")) for prompt in prompts} == {count}


def list_failed(certificate):
    return {line.name for line in certificate.lines if line.verdict == "failed"}


def describe(certificate):
    return write_page(certificate, "test")


@pytest.mark.parametrize(
    "engine",
    [
        engines.RecordsNoMeans,
        engines.KeepsEveryVersion,
        engines.EncodesTexts,
        pytest.param(engines.ResumesRight, marks=pytest.mark.exhaustive),
        pytest.param(engines.OffersFlowSdeAlone, marks=pytest.mark.exhaustive),
    ],
)
def test_a_right_engine_passes(certify, engine):
    certificate = certify(engine, replace(QUICK, adapters=()))
    assert certificate.verdict == "passed", describe(certificate)
    verdicts = {line.name: line.verdict for line in certificate.lines}
    encodes = hasattr(engine, "encode_prompts")
    assert verdicts.pop("text encoding") == ("passed" if encodes else "not supported")
    assert verdicts.pop("every adapted layer") == "not supported"
    assert set(verdicts.values()) == {"passed"}


def test_the_engine_of_the_trainer_passes_with_every_kind_of_weights(certify):
    certificate = certify(open_certified_engine("diffusers"), replace(QUICK, adapters=(LORA, DORA)))
    verdicts = {line.name: line.verdict for line in certificate.lines}
    assert verdicts.pop("text encoding") == "not supported"
    assert set(verdicts.values()) == {"passed"}, describe(certificate)
    assert {"every adapted layer", LORA_LINE, "DoRA of rank 4 and alpha 4"} < set(verdicts)
    assert all(line.measures for line in certificate.lines if line.verdict == "passed")


FAULTS_OF_ADAPTERS = [
    (engines.IgnoresAdapters, LORA_LINE),
    (engines.WrongAlpha, LORA_LINE),
    (engines.IgnoresOneLayer, "every adapted layer"),
]
FAULTS = [
    (engines.LosesAParameter, "full weights"),
    (engines.OnePushLate, "weight versions"),
    (engines.TakesOlderPushes, "weight versions"),
    (engines.SkipsSmallUpdates, "drift"),
    (engines.ShiftedSchedule, "schedule"),
    (engines.NoiseOfAnotherStream, "noise"),
    (engines.NoiseDependsOnTheBatch, "batch invariance"),
    (engines.GuidanceTwice, "guidance"),
    (engines.MixesPrompts, "prompts"),
    (engines.LargerStd, "transition"),
    (engines.SummedLogProbs, "log-probs"),
    (engines.OtherNetwork, "base model"),
    (engines.ResumesFromAnotherStep, "cut and resumed requests"),
    (engines.TruncatesTexts, "text encoding"),
    (engines.EncodesToNan, "text encoding"),
    (engines.OverflowsOnALongPrompt, "base model"),
]
MORE_FAULTS = [
    (engines.OneRequestLate, "weight versions"),
    (engines.AnswersOldRequestsWithNewWeights, "weight versions"),
    (engines.OtherStart, "noise"),
    (engines.DropsNegativePrompts, "guidance"),
]


def list_cases(faults, *marks):
    return [pytest.param(*fault, marks=marks, id=fault[0].__name__) for fault in faults]


@pytest.mark.parametrize(
    ("engine", "line"),
    list_cases(FAULTS) + list_cases(MORE_FAULTS, pytest.mark.exhaustive),
)
def test_a_planted_fault_fails_its_line_alone(certify, engine, line):
    # Without adapters, which these faults do not touch, and which cost as much as all the rest.
    certificate = certify(engine, replace(QUICK, adapters=()))
    assert list_failed(certificate) == {line}, describe(certificate)
    assert certificate.verdict == "failed"


@pytest.mark.parametrize(("engine", "line"), list_cases(FAULTS_OF_ADAPTERS))
def test_a_fault_of_adapters_fails_its_line_alone(certify, engine, line):
    certificate = certify(engine)
    assert list_failed(certificate) == {line}, describe(certificate)


def test_ignored_magnitudes_fail_dora_alone(certify):
    certificate = certify(engines.IgnoresMagnitudes, replace(QUICK, adapters=(LORA, DORA)))
    assert list_failed(certificate) == {"DoRA of rank 4 and alpha 4"}, describe(certificate)


def test_an_engine_that_generates_nothing_does_not_pass(certify):
    certificate = certify(engines.EncodesTextsAlone, replace(QUICK, adapters=()))
    verdicts = {line.name: line.verdict for line in certificate.lines}
    assert verdicts["text encoding"] == "passed"
    assert verdicts["base model"] == "not supported"
    assert certificate.verdict == "not measured"


def test_an_engine_that_crashes_fails_and_the_certificate_says_with_what(certify):
    certificate = certify(engines.Crashes, replace(QUICK, adapters=()))
    notes = [line.note for line in certificate.lines if line.verdict == "failed"]
    assert notes
    assert "ZeroDivisionError: planted" in notes[0]


def multiply_in_halves(inputs, weight, bias=None):
    """Sum the products of ``linear`` in another order."""
    half = inputs.shape[-1] // 2
    product = inputs[..., :half] @ weight[:, :half].T + inputs[..., half:] @ weight[:, half:].T
    return product if bias is None else product + bias


class SumsInAnotherOrder(engines.PlainEngine):
    def denoise(self, request):
        with patch.object(functional, "linear", multiply_in_halves):
            return super().denoise(request)


@pytest.mark.parametrize(
    "engine",
    # The engine without any difference passes where one with more of them does.
    [pytest.param(engines.PlainEngine, marks=pytest.mark.exhaustive), SumsInAnotherOrder],
)
def test_bfloat16_passes(certify, model, engine):
    config = model.model_copy(update={"precision": "bfloat16"})
    certificate = certify(engine, replace(QUICK, samples=2), config=config)
    assert not list_failed(certificate), describe(certificate)


def test_what_a_recipe_rejects_is_not_supported(model):
    engine = open_certified_engine("vllm_omni")
    setup = EngineSetup(Path(model.path), model, DORA, "float32", 4)
    with pytest.raises(NotSupportedError, match="without policy.rslora and policy.dora"):
        engine(setup)


def test_layers_are_taken_alone_or_by_kind_and_block():
    names = [
        f"blocks.{block}.{layer}.lora_{side}.default.weight"
        for block in range(3)
        for layer in ("to_q", "to_k")
        for side in "AB"
    ]
    assert len(dict(group_layers(names, 6))) == 6
    groups = dict(group_layers(names, 5))
    assert list(groups) == [
        "blocks.*.to_q",
        "blocks.*.to_k",
        "blocks.0.*",
        "blocks.1.*",
        "blocks.2.*",
    ]
    assert all(sum(name in group for group in groups.values()) == 2 for name in names)


def test_a_certificate_is_signed_and_a_changed_one_is_refused(certify, tmp_path, monkeypatch):
    private, public = create_key_pair(tmp_path / "keys")
    monkeypatch.setenv("EBBFLOW_SIGNING_KEY", str(private))
    file = tmp_path / "certificate.json"
    file.write_text(certify(engines.Crashes, replace(QUICK, adapters=())).sign().to_json())
    monkeypatch.delenv("EBBFLOW_SIGNING_KEY")
    monkeypatch.setenv("EBBFLOW_VERIFY_KEYS", str(public))
    assert len(read_certificate(file).check_signature()) == 16
    shown = CliRunner().invoke(main, ["check-certificate", str(file)])
    assert shown.exit_code == 1
    assert "planted with sd3: failed" in shown.output
    content = json.loads(file.read_text())
    for line in content["lines"]:
        line["verdict"] = "passed"
    file.write_text(json.dumps(content))
    with pytest.raises(CertificateError, match="not what was signed"):
        read_certificate(file).check_signature()
    content["signature"] = ""
    file.write_text(json.dumps(content))
    with pytest.raises(CertificateError, match="has no signature"):
        read_certificate(file).check_signature()


def test_the_command_wants_the_family_of_a_folder(tmp_path):
    result = CliRunner().invoke(main, ["certify", "diffusers", str(tmp_path)])
    assert result.exit_code == 1
    assert "say its --family" in result.output


def test_a_nan_never_passes(certify, tmp_path):
    class GivesNan(engines.PlainEngine):
        def choose_noise(self, request, index):
            return request.generate_noise(index) * torch.nan

    certificate = certify(GivesNan, replace(QUICK, adapters=()))
    assert {"noise", "base model", "log-probs"} <= list_failed(certificate)
    file = tmp_path / "certificate.json"
    file.write_text(certificate.to_json())
    assert read_certificate(file).verdict == "failed"
