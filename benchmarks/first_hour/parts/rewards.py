"""What an online step needs besides the velocity network: reward networks, the VAE's gradient,
profiles, and the optimiser of 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPConfig, CLIPModel

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.model_folder import describe_model, find_model_folder
from benchmarks.tiny_models.tokenizers import build_clip_tokenizer
from ebbflow.data.prompts import Prompt
from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

TEXTS = ("two cats", "a red bicycle")
PROMPTS = [Prompt(n, text, "", None, "", "train", "{}") for n, text in enumerate(TEXTS)]
MOST_DIFFERENT = 1e-2
"""Between scores of the device and of the CPU: TF32 convolutions round to 10 bits."""


class Brightness(Reward):
    """A reward for bright images, with a gradient."""

    name = "brightness"
    has_gradient = True
    gradient_bytes = 0

    def __call__(self, images: np.ndarray, prompts: Any) -> RewardResult:
        return RewardResult(images.reshape(len(images), -1).mean(1) / 255, {}, {})

    def score_with_gradient(self, samples: torch.Tensor, prompts: Any) -> torch.Tensor:
        return samples.mean((1, 2, 3))


class Files(MetricsRecorder):
    """A recorder that remembers which files it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def log_file(self, path: str, content: bytes | str) -> None:
        self.paths.append(path)


def measure(setting: Setting) -> Iterator[Line]:
    yield judge_network(setting.folder)
    tiny = find_model_folder(setting.folder, "tiny")
    metrics, _, moved = run_step(tiny, {"algorithm": {"name": "refl", "weight": 1.0}})
    norm = metrics["grad_norm"]
    yield judge(
        "ReFL goes back through the VAE and changes the policy",
        np.isfinite(norm) and norm > 0 and moved,
        f"gradient norm {norm:.2e}",
        "finite, above 0, adapters moved",
    )
    profiled = {"algorithm": {"name": "mix_grpo"}, "profile": {"steps": [0]}}
    _, paths, _ = run_step(tiny, profiled)
    profiles = sorted(path for path in paths if path.startswith("profile/"))
    endings = [".json.gz"]
    if torch.cuda.is_available():
        endings.append(".memory.pickle")
    yield judge(
        "a profile and a memory snapshot of a step are written",
        all(any(path.endswith(ending) for path in profiles) for ending in endings),
        f"{len(profiles)} files",
        " and ".join(endings),
    )
    claim = "adamw_8bit trains a step"
    if find_spec("bitsandbytes") is None:
        yield skip(claim, "bitsandbytes is not installed: pip install 'ebbflow[8bit]'")
        return
    keys = {"algorithm": {"name": "mix_grpo"}, "optimizer": {"name": "adamw_8bit", "lr": 1e-3}}
    metrics, _, moved = run_step(tiny, keys)
    yield judge(claim, moved and np.isfinite(metrics["grad_norm"]), "a step", "adapters moved")


def run_step(folder: Path, keys: dict[str, Any]) -> tuple[dict[str, float], list[str], bool]:
    """Run one online step on a tiny model: its metrics, its files, whether the adapters moved."""
    stage = {
        "kind": "online",
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 2,
        "micro_batch": 4,
        "updates_per_step": 1,
        "drift_alarm": 1e9,
        "sampler": {"steps": 6},
    }
    recipe = Recipe.model_validate(
        {
            "model": describe_model(folder, "tiny").model_dump(),
            "policy": {"train": "lora", "rank": 4, "alpha": 8},
            "stages": [stage | keys],
        }
    )
    ctx = StageContext(recipe, 0, 0)
    policy = Policy(load_model(folder, recipe.model), recipe.policy, seed=0)
    for name in ctx.following_copies:
        policy.ensure_copy(name)
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    recorder = Files()
    scorer = Scorer(((Brightness(), 1.0),))
    updater = PolicyUpdater(policy, ctx.online_config)
    run_online_stage(ctx, open_local_workers(ctx, updater, scorer), PROMPTS, recorder)
    (metrics,) = recorder.metrics_rows
    moved = any(not torch.equal(before[name], p) for name, p in policy.parameters.items())
    return metrics, recorder.paths, moved


def judge_network(folder: Path) -> Line:
    """Score pictures with a CLIP of random weights on the device and on the CPU."""
    claim = "a reward network scores on the device as on the CPU"
    if not torch.cuda.is_available():
        return skip(claim, "there is only the CPU")
    path = write_clip(folder / "clip")
    images = np.random.default_rng(0).integers(0, 256, (8, 512, 512, 3), dtype=np.uint8)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(images))]
    reward: Any = configure_reward("clipscore", path=str(path)).build()
    on_device = np.asarray(reward(images, prompts).scores, dtype=np.float64)
    # The same object as the reward's: it is loaded once.
    reward.load_clip_model().model.to("cpu")
    on_cpu = np.asarray(reward(images, prompts).scores, dtype=np.float64)
    difference = float(np.abs(on_device - on_cpu).max())
    return judge(claim, difference <= MOST_DIFFERENT, f"{difference:.1e}", f"<= {MOST_DIFFERENT}")


def write_clip(folder: Path) -> Path:
    """Write a CLIP of ViT-L's size with random weights, in the Hugging Face layout."""
    folder.mkdir(exist_ok=True)
    tokenizer = build_clip_tokenizer()
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision |= {"num_attention_heads": 16, "image_size": 224, "patch_size": 14}
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    text |= {
        "num_attention_heads": 12,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": 224, "width": 224}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "crop_size": size,
                "do_center_crop": True,
                "do_normalize": True,
                "do_resize": True,
                "image_processor_type": "CLIPImageProcessor",
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711],
                "resample": 3,
                "size": {"shortest_edge": 224},
            }
        )
    )
    return folder
