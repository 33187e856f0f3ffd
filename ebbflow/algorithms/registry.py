"""The algorithms by the name that a recipe uses."""

from __future__ import annotations

from ebbflow.algorithms import diffusion_nft, flow_grpo
from ebbflow.algorithms.base import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "diffusion_nft": diffusion_nft.ALGORITHM,
    "flow_grpo": flow_grpo.ALGORITHM,
}
