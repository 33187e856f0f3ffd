"""The device, its driver and compilers, and the two ceilings that predictions rest on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.parts import PARTS
from benchmarks.gpu import measure_matmul_peak, time_call
from benchmarks.gpu_sides import SIZES
from benchmarks.kernel_counts import CONSTANTS
from ebbflow.compute import SMALLEST_DRIVER, read_driver_version

PEAKS = {
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.04e12),
}
"""FLOP/s in bfloat16 without sparsity and bytes/s, of NVIDIA's data sheets (SXM, 80 GB)."""
COPIED = 2**30
"""Bytes of each copy, more than any cache holds."""
COMPILES = (
    "import torch; f = torch.compile(lambda x: (x * 2).sin().sum());"
    " x = torch.ones(4096, device='cuda'); assert abs(f(x).item() - 4096 * 0.9092974) < 1"
)


def measure(setting: Setting) -> Iterator[Line]:
    gpu, product, copies, compiler = PARTS[0].claims
    if not torch.cuda.is_available():
        for claim in PARTS[0].claims:
            yield skip(claim, "torch sees no GPU here")
        return
    yield judge_driver(gpu)
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    peaks = next((peak for known, peak in PEAKS.items() if known in name), None)
    flops = measure_matmul_peak(SIZES[setting.size].matrix, device, torch.bfloat16)
    moved = measure_bandwidth(device)
    numbers = (f"{flops / 1e12:.0f} TFLOP/s", f"{moved / 1e12:.2f} TB/s")
    shares = (CONSTANTS["bf16"] / 989e12, CONSTANTS["bytes"] / 3.35e12)
    for number, claim in enumerate((product, copies)):
        if peaks is None:
            yield skip(claim, f"no data sheet of {name} in PEAKS", numbers[number])
            continue
        share = (flops, moved)[number] / peaks[number]
        # 5 % less, as the assumed shares are round numbers.
        bar = 0.95 * shares[number]
        yield judge(claim, share >= bar, f"{numbers[number]}, {share:.0%}", f">= {bar:.0%}")
    yield judge_compilers(compiler)


def judge_driver(claim: str) -> Line:
    """Compare the driver with the smallest one for torch's CUDA."""
    driver = read_driver_version() or "0"
    smallest = SMALLEST_DRIVER.get(int(str(torch.version.cuda).partition(".")[0]), "0")
    memory = torch.cuda.mem_get_info()[1] / 2**30
    described = (
        f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, driver {driver}, CUDA"
        f" {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}"
    )
    # A container may hide the file of the driver; a GPU that torch sees works anyway.
    new_enough = driver == "0" or _split_version(driver) >= _split_version(smallest)
    return judge(claim, new_enough, described, f"driver >= {smallest}", "update the driver")


def _split_version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def measure_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second in the fastest of five copies on the device."""
    source = torch.randint(0, 255, (COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [time_call(lambda: target.copy_(source), device)[0] for _ in range(6)]
    return 2 * COPIED / min(seconds[1:])


def judge_compilers(claim: str) -> Line:
    """Compile a kernel in a process of its own, with an empty cache."""
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler)
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True)
    return judge(
        claim,
        found is not None and done.returncode == 0,
        f"{compiler}: {found or 'missing'}, triton: exit {done.returncode}",
        "both",
        done.stderr.strip()[-300:] or f"install {compiler} or set CXX",
    )
