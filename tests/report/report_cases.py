"""An invented but lifelike run: its samples, evaluations and curves."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from ebbflow.data.records import Distribution, Evaluation
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.report.run_report import ReportInputs, write_report

METRICS = ["reward", "ocr", "exact_match", "tesseract", "similarity"]
HOSTILE = "<script>alert('prompt')</script>"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def picture(
    text: str, noise: float, generator: np.random.Generator, size: tuple[int, int] = (32, 16)
) -> bytes:
    canvas = Image.new("L", size, 235)
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono:bold"), size[1] * 3 // 4)
    ImageDraw.Draw(canvas).text((size[0] // 16, 0), text, fill=20, font=font)
    blurred = np.asarray(canvas, dtype=float) + generator.normal(0, 255 * noise, (size[1], size[0]))
    buffer = io.BytesIO()
    Image.fromarray(blurred.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def samples(
    path: Path, right: float, prompts: int = 128, size: tuple[int, int] = (32, 16)
) -> pa.Table:
    """An evaluation in which a share ``right`` of the letters is as it should be."""
    generator = np.random.default_rng(0)
    rows = []
    for prompt in range(prompts):
        target = HOSTILE if prompt == 3 else "".join(generator.choice(list(LETTERS), 4))
        draws = generator.random(4)
        seen = "".join(
            a if draw < right else "X" for a, draw in zip(target[:4], draws, strict=True)
        )
        ocr = float(np.mean(draws < right))
        row = {
            "prompt_id": prompt,
            "sample": 0,
            "split": "held_out",
            "prompt": f'The word "{target}"',
            "target": target,
        }
        row |= {
            "image": picture(seen, 0.25 * (1 - right), generator, size),
            "reward": ocr,
            "ocr": ocr,
        }
        rows.append(
            row
            | {
                "exact_match": float(ocr == 1),
                "tesseract": ocr * 0.8,
                "similarity": 0.5 + ocr / 2,
            }
        )
    table = pa.Table.from_pylist(rows, schema=build_evaluation_schema(METRICS))
    pq.write_table(table, path)
    return table


def evaluation(label: str, table: pa.Table, version: int) -> Evaluation:
    means = {metric: float(np.mean(table[metric].to_pylist())) for metric in METRICS}
    seconds = {"sampling": 2.1, "scoring": 1.4}
    return Evaluation(
        label=label,
        policy_version=version,
        held_out=means,
        validation=means,
        coverage=1.0,
        velocity_drift=version * 1.3e-4,
        seconds=seconds,
        statistics={"entropy": 0.25 + version / 1000, "edge_density": 0.125},
        distributions={
            "ocr": Distribution(
                spread=0.111, worst_tenth=0.222 + version / 1000, best_of=0.999 if version else None
            )
        },
    )


def curves(steps: int, trajectory: bool) -> list[dict[str, float]]:
    generator = np.random.default_rng(1)
    rows = []
    for step in range(1, steps + 1):
        mean = 0.9 - 0.35 * math.exp(-step / 12) + generator.normal(0, 0.02)
        row = {
            "step": step,
            "reward/mean": mean,
            "reward/min": mean - 0.4,
            "reward/max": min(1.0, mean + 0.25),
        }
        row |= {
            "velocity_drift": 2e-4 * step,
            "grad_norm": 0.4 + generator.random() / 3,
            "loss": 0.2 + generator.random() / 50,
        }
        if trajectory:
            row |= {
                "ratio/deviation": generator.random() * 1e-3,
                "kl/reference": 1e-3 * step,
                "group/zero_std_share": step / 200,
            }
            row |= {"clip/down": generator.random() / 9, "clip/up": generator.random() / 9}
        rows.append(row)
    return rows


def write_page(inputs: ReportInputs, path: Path) -> str:
    write_report(path, inputs)
    return path.read_text()
