"""The whole pipeline on a tiny LTX-2: videos with sound are generated, trained on, evaluated, shown
and served.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
from diffusers import LTX2Pipeline
from mlflow import MlflowClient

from benchmarks.tiny_models import build_tiny
from ebbflow.data.sounds import decode_wavs, read_sound
from ebbflow.storage.tables import read_table
from ebbflow.training.export import export_pipeline
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import run_pipeline

PROMPTS = [f"a bell is struck {number} times" for number in range(10)]
RATE = 24000


def hear(pngs: list[bytes]) -> np.ndarray:
    sounds = decode_wavs([read_sound(png) or b"" for png in pngs])
    assert sounds.rate == RATE
    assert sounds.pcm.std() > 0
    return sounds.pcm


@pytest.mark.exhaustive
def test_a_video_with_sound_goes_from_training_to_a_served_version(workplace: Path) -> None:
    base, prompts = workplace / "ltx2", workplace / "prompts.txt"
    build_tiny("ltx2", base)
    prompts.write_text("\n".join(PROMPTS))
    online = {"kind": "online", "steps": 1, "prompts_per_step": 2, "group_size": 2}
    offline = {"kind": "offline", "prompts": 2, "group_size": 2, "batch_size": 4, "epochs": 1}
    changes = {
        "model": {
            "family": "ltx2",
            "path": str(base),
            "height": 64,
            "width": 64,
            "frames": 9,
            "guidance": 1.0,
            "max_tokens": 16,
        },
        "prompts": {"source": str(prompts), "validation": 2, "held_out": 3},
        "rewards": ["jpeg_compressibility", "audio_video_sync"],
        "guardrails": ["jpeg_incompressibility"],
        "policy": {"train": "lora", "rank": 2, "alpha": 2},
        "stages": [
            small_stage(
                online | {"micro_batch": 4, "sampler": {"steps": 3}, "window": {"size": 1}}
            ),
            small_stage(offline | {"micro_batch": 4, "sampler": {"steps": 2}}),
        ],
        "promotion": {"model_name": "tiny-ltx2"},
    }
    done = run_pipeline(workplace, changes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    nodes = next((workplace / "runs").glob("*/nodes"))

    (samples,) = nodes.glob("before*/samples.parquet")
    before = read_table(samples)["image"].to_pylist()
    # Nine frames at 24 a second, as points in time of a tiny vocoder.
    assert hear(before).shape == (len(before), 132, 2)
    shards = list(nodes.rglob("rollouts-*.parquet"))
    assert shards
    assert all(len(hear(read_table(shard)["image"].to_pylist())) for shard in shards)

    page = max((path.read_text() for path in (workplace / "runs").rglob("report.html")), key=len)
    assert 'class="waveform"' in page
    assert '<audio controls preload="none" src="data:audio/wav;base64,' in page

    uri = f"sqlite:///{workplace}/runs/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    (summary,) = (workplace / "runs").glob("*/summary.json")
    version = json.loads(summary.read_text())["model_version"]
    source = client.get_model_version_download_uri("tiny-ltx2", version)
    drawn = mlflow.pyfunc.load_model(source).predict(
        pd.DataFrame({"prompt": PROMPTS[:2], "seed": [0, 1]})
    )
    first, second = hear(drawn["image"].tolist())
    assert np.array_equal(decode_wavs(drawn["sound"].tolist()).pcm, [first, second])
    assert not np.array_equal(first, second)

    policies = sorted(path.parent for path in nodes.rglob("policy.json"))
    export_pipeline(base, policies[-1], workplace / "exported")
    pipeline = LTX2Pipeline.from_pretrained(workplace / "exported", local_files_only=True)
    assert pipeline.vocoder.config.output_sampling_rate == RATE
