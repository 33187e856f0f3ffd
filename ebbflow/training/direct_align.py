"""Rows of Direct-Align (2509.06942): final latents, noised with the noise that they came from, and
rewards with gradient.

Clean latents and noise are both known, so any sample serves, however stale. No denoising step is
repeated: a row costs one pass of the network, and decoding and scoring what it recovers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, DirectAlignRows, expand_like
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.models.base import Conditioning, Model
from ebbflow.recipe.algorithms import DirectAlignConfig
from ebbflow.seeding import Stream, iterate_generators
from ebbflow.training.batches import ForwardInputs
from ebbflow.training.reward_gradients import Score


@dataclass(frozen=True)
class DirectAlignBatch:
    """``rows_per_sample`` adjacent rows per sample: the denoising branch, and the inversion branch
    if there is one.

    Example: a sample with both branches, whose band of sigmas is 0.2 to 0.6::

        batch.inputs.sigma  # tensor([0.47, 0.33]): a step down and a step up ...
        batch.end_sigma  # tensor([0.40, 0.40]): ... to the same noise level

    Attributes:
        clean: final latents of the rollout, [M, ...].
        noise: what the rollout started from, [M, ...].
        end_sigma: [M], where the step with gradient ends.
        positive, negative: the prompts as the rewards see them, with a control word in front.
    """

    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    clean: Tensor
    noise: Tensor
    end_sigma: Tensor
    advantage: Tensor
    keys: SampleKeys
    positive: Sequence[Prompt]
    negative: Sequence[Prompt]
    model: Model
    score: Score

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> DirectAlignRows:
        return DirectAlignRows(
            clean=self.clean[part],
            noise=self.noise[part],
            sigma=self.inputs.sigma[part],
            end_sigma=self.end_sigma[part],
            velocity=velocity,
            rewards=partial(self._compute_rewards, part),
            copies=copies,
            advantage=self.advantage[part],
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        start = float(self.inputs.sigma[row])
        end = float(self.end_sigma[row])
        return (
            f"{sample}, step from sigma {start:.4f} to {end:.4f} and the reward of the recovered"
            " image"
        )

    def _compute_rewards(self, part: slice, latents: Tensor) -> tuple[Tensor, Tensor]:
        positive = self.positive[part]
        negative = self.negative[part]
        decode = cache(self.model.decode_with_gradient)  # both rewards look at the same images
        reward = self.score(latents, positive, decode)
        if positive == negative:
            return reward, reward  # no control words: nothing is scored twice
        return reward, self.score(latents, negative, decode)


def build_direct_align_batch(
    model: Model,
    clean: Tensor,
    conditioning: Conditioning,
    advantage: Tensor,
    keys: SampleKeys,
    prompts: Sequence[Prompt],
    config: DirectAlignConfig,
    update: int,
    score: Score,
) -> DirectAlignBatch:
    """Build ``config.rows_per_sample`` rows for each of N samples.

    Args:
        clean: final latents of the rollouts, [N, ...].
        conditioning, advantage, keys, prompts: of the N samples.
        update: updates before this one, which choose the words
            (``DirectAlignConfig.choose_words``).
    """
    branches = config.rows_per_sample
    width = config.max_sigma - config.min_sigma
    numbers = [
        float(generator.random())
        for generator in iterate_generators(
            keys.seed, keys.prompt_ids, keys.samples, 0, Stream.TRAINING
        )
    ]
    # Where the end of the step is in the band, from 0 at min_sigma to 1 at max_sigma, (N, 1).
    place = torch.tensor(numbers).to(clean)[:, None]
    # The step starts as far above the end (denoising) as below it (inversion), inside the band.
    direction = torch.tensor([1.0, -1.0][:branches]).to(clean)
    jump = torch.minimum(place, 1 - place).clamp_max(config.jump) * direction  # (N, branches)
    end = (config.min_sigma + width * place).expand(-1, branches).flatten()
    sigma = (config.min_sigma + width * (place + jump)).flatten()
    index = torch.arange(len(keys), device=clean.device).repeat_interleave(branches)  # (M,)
    noise = generate_initial_noise(model.latent_shape, keys).to(clean)[index]
    clean = clean[index]
    share = expand_like(sigma, clean)
    positive, negative = (
        [_prepend_word(word, prompts[sample]) for sample in index.tolist()]
        for word in config.choose_words(update)
    )
    return DirectAlignBatch(
        inputs=ForwardInputs((1 - share) * clean + share * noise, sigma, conditioning, index),
        weight=torch.ones_like(sigma),
        group_index=torch.arange(len(index), device=clean.device),
        clean=clean,
        noise=noise,
        end_sigma=end,
        advantage=advantage[index],
        keys=keys.select_samples(index.cpu().numpy()),
        positive=positive,
        negative=negative,
        model=model,
        score=score,
    )


def _prepend_word(word: str, prompt: Prompt) -> Prompt:
    """Return the prompt as a reward sees it after a control word; as it is without one."""
    return replace(prompt, prompt=f"{word}. {prompt.prompt}") if word else prompt
