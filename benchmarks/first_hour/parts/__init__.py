"""The parts in the order in which they run: those come last that may be cut off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the first hour.

    Attributes:
        module: below this package, with a function ``measure`` from ``Setting`` to lines.
        minutes: after which its process is ended.
        claims: all that it answers; those that it leaves open count as failed.
        on_failure: what to do then.
    """

    name: str
    module: str
    minutes: float
    claims: tuple[str, ...]
    on_failure: str


PARTS = (
    Part(
        "device",
        "device",
        2,
        (
            "torch sees a GPU, and its driver is new enough",
            "a large product in bfloat16 reaches the share that predictions assume",
            "copies on the device reach the share that predictions assume",
            "there is a C++ compiler, and triton compiles a kernel",
        ),
        "update the driver or the torch build; nothing below means anything before that",
    ),
    Part(
        "ratio",
        "ratio",
        3,
        (
            "eager, equal rows: the first log-ratio is 0",
            "eager, unequal rows: the first log-ratio is below a tenth of the clip range",
            "compiled, equal rows: the first log-ratio is 0",
            "compiled, unequal rows: the first log-ratio is below a tenth of the clip range",
        ),
        "docs/bitwise.md: find the first layer whose outputs differ, and leave model.compile out"
        " where only the compiled lines fail",
    ),
    Part(
        "attention",
        "attention",
        1,
        (
            "prompts of different lengths without a mask: attention is that under the mask",
            "prompts of different lengths without a mask: gradients are those under the mask",
            "prompts of different lengths without a mask: a row has the same bytes alone",
        ),
        "set model.attention: native in recipes of Qwen-Image, which keeps the mask",
    ),
    Part(
        "updates",
        "updates",
        3,
        ("two processes with deterministic kernels train the same bytes",),
        "torch.use_deterministic_algorithms names the operation; compare the metrics of both",
    ),
    Part(
        "tiny",
        "whole_runs",
        4,
        ("the recipe tiny runs to its end on the device",),
        "read the end of tiny.log in the folder; docs/troubleshooting.md",
    ),
    Part(
        "resume",
        "resume",
        5,
        ("a run that was killed in its online stage ends with the bytes of one that was not",),
        "compare the folders nodes/ of both runs; docs/resume.md",
    ),
    Part(
        "memory",
        "memory",
        4,
        (
            "loading takes the memory of the estimate",
            "encoding prompts takes the memory of the estimate",
            "a rollout with its pictures takes the memory of the estimate",
            "training takes the memory of the estimate",
        ),
        "a snapshot (the recipe's key 'profile') shows what is there; the formulas are in"
        " ebbflow/estimate/memory.py",
    ),
    Part(
        "speed",
        "speed",
        6,
        (
            "rollouts are as fast as diffusers' own loop",
            "rollouts with adapters are as fast as diffusers' own loop",
            "updates are as fast as a plain training loop",
            "the share of the peak in rollouts with adapters",
            "the share of the peak in updates",
            "a forward pass with adapters starts few more kernels than one of diffusers",
            "the device is busy during a forward pass with adapters",
        ),
        "the trace of a step (the recipe's key 'profile') shows the gaps; compare with"
        " benchmarks/results/cuda_budget.md",
    ),
    Part(
        "flux",
        "flux",
        3,
        (
            "the size of FLUX.1-dev: a forward pass with adapters starts few more kernels",
            "the size of FLUX.1-dev: the device is busy during a forward pass with adapters",
            "the size of FLUX.1-dev: the share of the peak in a forward pass with adapters",
        ),
        "as of the part speed",
    ),
    Part(
        "fsdp",
        "fsdp",
        3,
        (
            "FSDP2 on one rank trains the bytes of a process alone",
            "FSDP2 on one rank with offload trains the bytes of a process alone",
        ),
        "look for a copy that another one overtakes (Policy._wait_for_reads): run it again with"
        " CUDA_LAUNCH_BLOCKING=1",
    ),
    Part(
        "rewards",
        "rewards",
        3,
        (
            "a reward network scores on the device as on the CPU",
            "ReFL goes back through the VAE and changes the policy",
            "a profile and a memory snapshot of a step are written",
            "adamw_8bit trains a step",
        ),
        "run the part's tests: pytest tests/rewards tests/training/test_reward_gradients.py"
        " tests/training/test_adamw_8bit.py",
    ),
    Part(
        "engine",
        "engine",
        4,
        ("vLLM-Omni generates what the policy does, up to its rounding",),
        "docs/bitwise.md; compare the engine's attention backend and precision with the model's",
    ),
    Part(
        "glyph",
        "whole_runs",
        8,
        ("the recipe glyph runs to its end on the device",),
        "read the end of glyph.log in the folder; docs/troubleshooting.md",
    ),
)
"""In the order of their worth: where the time runs out, the last ones are not measured."""
