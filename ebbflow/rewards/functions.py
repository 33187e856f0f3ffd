"""A plain function as a reward, as Flow-Factory and trl take them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ebbflow.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt


def is_score_function(target: Any) -> bool:
    """Return whether an object is a function of ``images`` and ``prompts``, and not one that builds
    a reward.
    """
    if not inspect.isfunction(target):
        return False
    return list(inspect.signature(target).parameters)[:2] == ["images", "prompts"]


class FunctionReward(Reward):
    """A function that scores images.

    Args:
        function: is called with images, uint8 RGB [N, height, width, 3], the N texts of their
            prompts, and, if it has a parameter ``metadata``, N dictionaries of the further columns
            of the prompt file, with ``target`` and ``negative_prompt``. It returns N numbers, NaN
            where it fails: a list, an array or a tensor.
        options: further arguments by their names.

    Raises:
        TypeError: the function does not take the options, or lacks some.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        signature = inspect.signature(function)
        self.function = function
        self.options = options
        self.takes_metadata = "metadata" in signature.parameters
        if self.takes_metadata and "metadata" in options:
            raise TypeError("'metadata' is an argument of the call, not an option")
        # Now, and not after the first images have been paid for.
        metadata = {"metadata": ()} if self.takes_metadata else {}
        signature.bind((), (), **metadata, **options)

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        import numpy as np

        arguments = dict(self.options)
        if self.takes_metadata:
            arguments["metadata"] = [
                {
                    **json.loads(prompt.metadata),
                    "target": prompt.target,
                    "negative_prompt": prompt.negative_prompt,
                }
                for prompt in prompts
            ]
        scores = self.function(images, [prompt.prompt for prompt in prompts], **arguments)
        # A tensor may be on a GPU and have a gradient.
        if hasattr(scores, "detach"):
            scores = scores.detach().float().cpu().numpy()
        values = np.array(scores, np.float64)
        failures = {
            int(index): "the function returned NaN" for index in np.flatnonzero(np.isnan(values))
        }
        return RewardResult(values, failures=failures)
