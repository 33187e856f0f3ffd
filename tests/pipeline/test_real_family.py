"""The same pipeline on a published layout: a tiny SD3 with guidance, in bfloat16, from a LoRA of
diffusers to a version.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from mlflow import MlflowClient
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

from benchmarks.tiny_models import build_tiny
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.tables import read_table
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import run_pipeline

PROMPTS = [f'a shop window with a sign that says "NO {number}"' for number in range(12)]


def _publish_lora(base: Path, folder: Path) -> None:
    transformer = load_model(
        base, ModelConfig(family="sd3", path=str(base), height=64, width=64)
    ).transformer
    transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=4, target_modules=["attn.to_q", "attn.to_v"])
    )
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(0)
            )
    metadata = transformer.peft_config["default"].to_dict()
    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=metadata,
    )


@pytest.mark.exhaustive
def write_inputs(workplace: Path) -> dict[str, Any]:
    """Write a base model, a LoRA of it, prompts to train on and others to be judged on; returns
    what a recipe says about a run on them.
    """
    base, lora, prompts, judged = (
        workplace / name for name in ("sd3", "lora", "prompts.txt", "benchmark.jsonl")
    )
    build_tiny("sd3", base)
    _publish_lora(base, lora)
    prompts.write_text("\n".join(PROMPTS))
    judged.write_text(
        "\n".join(
            json.dumps({"prompt": f"a photo of {tag}", "tag": tag})
            for tag in ("a cat", "a dog", "a cow")
        )
    )
    online = {
        "kind": "online",
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch": 8,
    }
    offline = {
        "kind": "offline",
        "prompts": 4,
        "group_size": 4,
        "micro_batch": 8,
        "batch_size": 8,
        "epochs": 1,
    }
    return {
        "model": {
            "family": "sd3",
            "path": str(base),
            "height": 64,
            "width": 64,
            "guidance": 3.0,
            "precision": "bfloat16",
        },
        "prompts": {
            "source": str(prompts),
            "validation": 2,
            "held_out_source": str(judged),
            "held_out": 3,
        },
        "rewards": ["jpeg_compressibility"],
        "guardrails": ["jpeg_incompressibility"],
        "policy": {"train": "lora", "rank": 4, "alpha": 4, "start": {"path": str(lora)}},
        "stages": [
            small_stage(online | {"sampler": {"steps": 4}, "window": {"size": 2}}),
            small_stage(offline | {"sampler": {"steps": 3}}),
        ],
        "promotion": {"model_name": "tiny-sd3"},
    }


def test_a_published_layout_goes_from_a_lora_to_a_registered_version(workplace: Path) -> None:
    done = run_pipeline(workplace, write_inputs(workplace))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = (workplace / "runs").glob("*/summary.json")
    summary = json.loads(path.read_text())
    (samples,) = (workplace / "runs").glob("*/nodes/before*/samples.parquet")
    held_out = [
        row["prompt"] for row in read_table(samples).to_pylist() if row["split"] == "held_out"
    ]
    assert held_out[:3] == ["a photo of a cat", "a photo of a dog", "a photo of a cow"]
    assert summary["categories"]["tag"]["after"]["values"].keys() == {"a cat", "a dog", "a cow"}
    assert (
        summary["before"].keys()
        == summary["after"].keys()
        == {"reward", "jpeg_compressibility", "jpeg_incompressibility"}
    )

    uri = f"sqlite:///{workplace}/runs/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    source = client.get_model_version_download_uri("tiny-sd3", summary["model_version"])
    drawn = mlflow.pyfunc.load_model(source).predict(pd.DataFrame({"prompt": PROMPTS[:2]}))
    assert [Image.open(io.BytesIO(image)).size for image in drawn["image"]] == [(64, 64), (64, 64)]
