"""The engine ``sglang`` against a stub of its protocol (``sglang_stub``): what a right server
passes, and what refuses each wrong one. SGLang itself is not run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sglang_stub as stubs
import torch

from ebbflow.certification.bench import CertificateSettings
from ebbflow.certification.certify import certify_engine, open_certified_engine
from ebbflow.certification.page import write_page
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.offline.rollouts import write_shard
from ebbflow.online.loop import run_online_stage
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers
from ebbflow.recipe import RecipeError
from ebbflow.recipe.choices import ParityConfig, SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.parity import ParityError, measure_parity, plan_parity_samples
from ebbflow.rollouts.sglang import URL, Sglang
from ebbflow.rollouts.sglang_server import SglangServer
from ebbflow.rollouts.vllm_omni import EngineError
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import read_table
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

LORA = PolicyConfig(train="lora", rank=4, alpha=8)
RSLORA = PolicyConfig(train="lora", rank=4, alpha=8, rslora=True)
# Four steps are the fewest: a share is measured from three, and the last one is not recorded.
QUICK = CertificateSettings(steps=4, samples=1, adapters=(LORA,), updates=3, layers=2)
SDE = SamplerConfig(name="flow_sde", steps=5)
KEYS = SampleKeys(3, [4, 4, 5, 5], [0, 1, 0, 2**40])
SMALL = {
    "group_size": 3,
    "prompts_per_step": 2,
    "micro_batch": 3,
    "updates_per_step": 1,
    "window": {"kind": "fixed", "size": 2},
    "sampler": {"name": "flow_sde", "steps": 4},
    "shared_initial_noise": False,
}
TEXTS = {4: "two cats", 5: "a red bicycle leans against a blue wall"}
PROMPTS = [
    Prompt(number, TEXTS[number], "blurry, low quality", None, "test", "train", "{}")
    for number in KEYS.prompt_ids
]


@pytest.fixture
def open_stub(tiny_recipe, monkeypatch, request):
    """``open_stub(Stub, family, **keys)``: (stub, engine, policy) of a tiny model, for a stage with
    these keys.
    """

    def make(kind=stubs.Stub, family="sd3", **keys):
        model = {"guidance": 4.0, "max_tokens": 32}
        stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "engine": "sglang"}
        policy = keys.pop("policy", {"train": "lora", "rank": 4, "alpha": 12})
        stage = keys.pop("stage", stage)
        recipe = tiny_recipe(family, model, stages=[{**stage, **keys}], policy=policy)
        ctx = StageContext(recipe, 0, 0)
        base = Path(recipe.model.path)
        stub = kind(base, recipe.model)
        served = stubs.serve(stub)
        monkeypatch.setenv(URL, served.__enter__())
        request.addfinalizer(lambda: served.__exit__(None, None, None))
        engine = Sglang(ctx, base)
        request.addfinalizer(engine.close)
        make.ctx = ctx
        return stub, engine, Policy(load_model(base, recipe.model), recipe.policy, 0)

    return make


def change_policy(policy, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_A" not in name:
                size = 0.2 if "lora_B" in name else 0.02
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def push(engine, policy):
    engine.load({name: values.detach().clone() for name, values in policy.parameters.items()})


def pass_gate(engine, policy, sampler=SDE):
    """Generate and measure as a stage does."""
    sampler, plan = plan_parity_samples(sampler)
    conditioning = policy.model.encode_prompts(PROMPTS)
    rollouts, images = engine.generate(conditioning, KEYS, sampler, plan, prompts=PROMPTS)
    assert images.shape == (4, *engine.size, 3)
    return measure_parity(
        policy,
        rollouts.trajectory,
        conditioning,
        KEYS,
        sampler,
        ParityConfig(samples=4),
        has_own_noise=True,
    )


@pytest.mark.parametrize("family", ["sd3", "qwen_image", "flux"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_gate_passes_a_right_server_with_changed_weights(open_stub, family, train):
    policy = {"train": train, **({"rank": 4, "alpha": 12} if train == "lora" else {})}
    _, engine, policy = open_stub(family=family, policy=policy)
    change_policy(policy)
    push(engine, policy)
    for name in ("flow_sde", "cps"):
        metrics = pass_gate(engine, policy, SamplerConfig(name=name, steps=5))
        assert metrics["parity/mean_shift"] < 1e-3
        assert metrics["parity/weights_effect"] == pytest.approx(1, abs=0.02)


def test_adapters_are_merged_with_the_scale_of_rslora(open_stub):
    policy = {"train": "lora", "rank": 4, "alpha": 8, "rslora": True}
    _, engine, policy = open_stub(policy=policy)
    change_policy(policy)
    push(engine, policy)
    assert pass_gate(engine, policy)["parity/weights_effect"] == pytest.approx(1, abs=0.02)


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (stubs.IgnoresUpdates, r"the engine shows -?0\.0\d of what training has changed"),
        (stubs.OneUpdateLate, "of what training has changed"),
        (stubs.OtherSchedule, "the engine denoises along the sigmas"),
        (stubs.SwappedGuidance, "denoising steps are not those of the training policy"),
        (stubs.OtherLogProbs, "log-probs are not those of its own denoising steps"),
    ],
)
def test_the_gate_refuses_a_wrong_server(open_stub, kind, message):
    _, engine, policy = open_stub(kind)
    push(engine, policy)
    # As after the first update, whose guidance shows from the start.
    if kind in (stubs.IgnoresUpdates, stubs.OneUpdateLate):
        change_policy(policy)
        push(engine, policy)
    with pytest.raises(ParityError, match=message):
        pass_gate(engine, policy)


@pytest.mark.any_cpu
def test_a_server_that_skips_names_is_refused_at_the_push(open_stub):
    _, engine, policy = open_stub(stubs.FusesProjections)
    change_policy(policy)
    with pytest.raises(EngineError, match=r"tensor_checker: .*checksum mismatch.*to_q"):
        push(engine, policy)
    with pytest.raises(EngineError, match="was closed"):
        push(engine, policy)


@pytest.mark.any_cpu
def test_a_server_that_loses_samples_is_refused(open_stub):
    _, engine, policy = open_stub(stubs.LosesSamples)
    push(engine, policy)
    with pytest.raises(EngineError, match="samples were asked for, and SGLang returned"):
        pass_gate(engine, policy)


@pytest.mark.any_cpu
def test_a_sampler_of_a_validation_that_the_server_lacks_is_named(open_stub):
    _, engine, policy = open_stub()
    conditioning = policy.model.encode_prompts(PROMPTS)
    with pytest.raises(EngineError, match=r"not dpm_solver; .*evaluation\.sampler"):
        engine.generate(
            conditioning, KEYS, SamplerConfig(name="dpm_solver", steps=4), prompts=PROMPTS
        )


@pytest.mark.any_cpu
def test_an_error_of_the_server_is_told_with_its_words(open_stub):
    class Fails(stubs.Stub):
        def generate(self, body):
            raise RuntimeError("out of memory")

    _, engine, policy = open_stub(Fails)
    with pytest.raises(EngineError, match=r"rollout/generate: HTTP 500: .*out of memory"):
        pass_gate(engine, policy)


class AnswersInPart(stubs.Stub):
    """Dies in the middle of an answer: its end is missing."""

    declares_bytes = 10**6


class AnswersAPage(stubs.Stub):
    """As a proxy in front of a server that is gone."""

    def answer(self, path, body):
        return b"<html>Bad gateway</html>"


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AnswersInPart, r"update_weights_from_disk: no answer from SGLang \(IncompleteRead"),
        (AnswersAPage, r"the answer cannot be read .*Bad gateway.*EBBFLOW_SGLANG_URL"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_of_the_engine(open_stub, kind, message):
    _, engine, policy = open_stub(kind)
    with pytest.raises(EngineError, match=message):
        push(engine, policy)


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(EngineError, match="EBBFLOW_SGLANG_URL holds") as error:
        SglangServer("http://someone:secret@127.0.0.1:30000")
    assert "secret" not in str(error.value)


@pytest.mark.any_cpu
def test_without_a_server_the_error_names_the_variable(open_stub, monkeypatch):
    _, engine, policy = open_stub()
    engine.server.url = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match=URL):
        pass_gate(engine, policy)


def test_a_sample_has_the_same_noise_alone_and_among_others(open_stub):
    stub, engine, policy = open_stub(micro_batch=3)
    push(engine, policy)
    conditioning = policy.model.encode_prompts(PROMPTS)
    together, _ = engine.generate(conditioning, KEYS, SDE, Plan((0,), (0,)), prompts=PROMPTS)
    counts = [
        body["num_outputs_per_prompt"] for path, body in stub.requests if path.endswith("/generate")
    ]
    # Samples 0 and 1 of prompt 4 in one request; 0 and 2^40 of prompt 5 are no neighbours.
    assert counts == [2, 1, 1]
    for row in range(4):
        rows = slice(row, row + 1)
        alone, _ = engine.generate(
            conditioning.select_rows(rows),
            KEYS.select_samples(rows),
            SDE,
            Plan((0,), (0,)),
            prompts=PROMPTS[rows],
        )
        assert torch.equal(alone.trajectory.states[0, 0], together.trajectory.states[row, 0])


@pytest.mark.any_cpu
def test_recorded_steps_may_have_gaps(open_stub):
    _, engine, policy = open_stub()
    push(engine, policy)
    conditioning = policy.model.encode_prompts(PROMPTS)
    plan = Plan((0, 1, 3), (1, 3))
    rollouts, _ = engine.generate(conditioning, KEYS, SDE, plan, prompts=PROMPTS)
    trajectory = rollouts.trajectory
    assert trajectory.states.shape[:2] == (4, 4)
    assert trajectory.steps.tolist() == [1, 3]
    assert trajectory.log_probs.shape == (4, 2)
    assert trajectory.means is None
    final, _ = engine.generate(conditioning, KEYS, SDE, prompts=PROMPTS)
    assert final.trajectory is None


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_a_stage_learns_from_the_samples_of_the_server(open_stub, make_prompts, scorer, mode):
    stage = {**SMALL, "mode": mode, "steps": 3, "optimizer": {"lr": 1e-2}}
    stub, engine, policy = open_stub(**stage)
    ctx = open_stub.ctx
    recorder = MetricsRecorder()
    before = {name: values.detach().clone() for name, values in policy.parameters.items()}
    trainer = TrainingWorker(ctx, PolicyUpdater(policy, ctx.online_config))
    workers = LocalWorkers(trainer, scorer, RolloutWorker(engine))
    run_online_stage(ctx, workers, make_prompts(4), recorder)
    assert any(not torch.equal(values, before[name]) for name, values in policy.parameters.items())
    metrics = recorder.metrics_rows
    assert len(metrics) == 3
    assert all(step["parity/mean_shift"] < 1e-3 for step in metrics)
    # Against the training policy before its updates (``decoupled``), as with every other engine.
    assert all(step["ratio/first_deviation"] < 1e-6 for step in metrics)
    assert sum(path == "/update_weights_from_disk" for path, _ in stub.requests) >= 3


@pytest.mark.any_cpu
def test_an_offline_stage_gets_its_samples_from_the_server(open_stub, make_prompts, tmp_path):
    stage = {"kind": "offline", "engine": "sglang", "algorithm": {"name": "diffusion_nft"}}
    keys = {"group_size": 2, "micro_batch": 4, "sampler": {"name": "ode", "steps": 3}}
    stub, engine, policy = open_stub(stage=stage, shards=1, shared_initial_noise=False, **keys)
    policy.ensure_copy("old")
    push(engine, policy)
    prompts = make_prompts(3)
    path = tmp_path / "shard.parquet"
    write_shard(open_stub.ctx, policy.model, policy, 0, prompts, 0, path, engine)
    # The first request is that of the gate.
    _, *bodies = [body for route, body in stub.requests if route == "/rollout/generate"]
    asked = [(body["prompt"], body["num_outputs_per_prompt"]) for body in bodies[-3:]]
    assert asked == [(prompt.prompt, 2) for prompt in prompts]
    assert read_table(path).num_rows == 6


@pytest.fixture
def certify(tiny_recipe, monkeypatch):
    """``certify(Stub, settings)``: the certificate of ``engine: sglang`` on a tiny SD3."""
    model = tiny_recipe("sd3", {"guidance": 4.0, "max_tokens": 32}).model

    def run(kind, settings=QUICK):
        base = Path(model.path)
        with stubs.serve(kind(base, model)) as url:
            monkeypatch.setenv(URL, url)
            return certify_engine(
                "sglang", open_certified_engine("sglang"), base, model, settings=settings
            )

    return run


def list_failed(certificate):
    return {line.name for line in certificate.lines if line.verdict == "failed"}


@pytest.mark.any_cpu
def test_the_certificate_of_a_right_server_passes(certify):
    certificate = certify(stubs.Stub, replace(QUICK, adapters=(LORA, RSLORA)))
    verdicts = {line.name: line.verdict for line in certificate.lines}
    assert certificate.verdict == "passed", write_page(certificate, "test")
    assert verdicts["noise"] == "not supported"
    assert verdicts["transition"] == "passed"
    assert verdicts["full weights"] == "passed"
    assert verdicts["weight versions"] == "passed"


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (stubs.IgnoresUpdates, "LoRA of rank 4 and alpha 8"),
        (stubs.OneUpdateLate, "weight versions"),
        (stubs.OtherSchedule, "schedule"),
        (stubs.SwappedGuidance, "guidance"),
        (stubs.OtherLogProbs, "log-probs"),
    ],
)
def test_the_certificate_of_a_wrong_server_names_its_line(certify, kind, line):
    # Without adapters, which cost as much as all the rest, where the fault is not theirs.
    adapters = QUICK.adapters if kind is stubs.IgnoresUpdates else ()
    certificate = certify(kind, replace(QUICK, adapters=adapters))
    assert line in list_failed(certificate), write_page(certificate, "test")
    assert certificate.verdict == "failed"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampler": {"name": "dance_sde", "steps": 6}}, "has the samplers flow_sde, cps, ode"),
        ({"shared_initial_noise": True}, "noise of its own, which samples cannot share"),
        ({"window": {"kind": "fixed", "size": 2, "tail": 0.5}}, "takes all steps"),
    ],
)
def test_a_recipe_that_the_protocol_cannot_express_is_rejected(tiny_recipe, keys, message):
    stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "engine": "sglang"}
    with pytest.raises((RecipeError, ValueError), match=message):
        tiny_recipe("sd3", stages=[{**stage, **keys}])


def test_a_sampler_of_validations_that_the_server_lacks_is_rejected(tiny_recipe):
    stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "engine": "sglang"}
    evaluation = {"sampler": "dpm_solver", "steps": 4}
    tiny_recipe("sd3", stages=[stage], evaluation=evaluation)
    validated = stage | {"validation": {"every": 2}}
    with pytest.raises((RecipeError, ValueError), match=r"not evaluation\.sampler = 'dpm_solver'"):
        tiny_recipe("sd3", stages=[validated], evaluation=evaluation)


def test_branches_that_push_to_one_server_are_rejected(tiny_recipe):
    names = ("words", "signs")
    teachers = {name: f"branch:{name}" for name in names}
    merge = {"kind": "online", "algorithm": {"name": "distillation", "teachers": teachers}}
    prompts = {"mixture": [{"name": name, "source": f"{name}.txt"} for name in names]}

    def build(*engines):
        stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}}
        stages = [
            {**stage, "branch": name, "engine": engine}
            for name, engine in zip(names, engines, strict=True)
        ]
        branches = {name: {"prompts": [name]} for name in names}
        return tiny_recipe("sd3", stages=[*stages, merge], branches=branches, prompts=prompts)

    build("sglang", "diffusers")
    with pytest.raises((RecipeError, ValueError), match="the branches signs, words, which run"):
        build("sglang", "sglang")


def test_a_family_whose_latents_nobody_has_mapped_is_rejected(tiny_recipe):
    stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "engine": "sglang"}
    with pytest.raises((RecipeError, ValueError), match="generates with sd3, qwen_image, flux"):
        tiny_recipe("wan", stages=[stage])
