"""``clap``: how near the prompt and the sound of a video lie to each other under a CLAP
(2211.06687).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ebbflow.recipe.rewards import Scored
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.network import CLIP_FILES, Files, PretrainedReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.samples import SoundedVideos


class ClapConfig(PretrainedRewardConfig):
    """Cosine between prompt and sound under CLAP (2211.06687), about -.1 to .6."""

    num_parameters: ClassVar[int] = 153_492_890  # as transformers builds it
    name: Literal["clap"] = "clap"
    path: str | None = "laion/clap-htsat-unfused"

    @property
    def scores(self) -> Scored:
        return "sounds"

    def build(self) -> Reward:
        return Clap(self)


class Clap(PretrainedReward):
    """cos(sound, prompt) of the mean of the channels, brought to the rate of the network.

    Of a longer sound than the network hears (10 s of the published one) it is the beginning; the
    published preprocessing takes a random part, and a score would not be reproducible. A shorter
    one is repeated, as published.
    """

    scores = "sounds"

    def list_files(self) -> list[Files]:
        return [Files(self.config, CLIP_FILES)]

    def load_score_function(self) -> Any:
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        from ebbflow.rewards.weights import check_vocabulary, load_network

        folder = self.list_files()[0].fetch_folder()
        extractor = ClapFeatureExtractor.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Buffers of positions, which older checkpoints store and newer code computes.
        network = load_network(ClapModel, folder, r"position_ids|token_type_ids|relative_position")
        check_vocabulary(tokenizer, network.config.text_config.vocab_size, folder)
        # Two positions of RoBERTa are of padding, and none of a token.
        max_tokens = network.config.text_config.max_position_embeddings - 2

        def compute_cosines(samples: SoundedVideos, texts: list[str]) -> Tensor:
            waves = resample(samples.sounds.mono, samples.sounds.rate, extractor.sampling_rate)
            inputs = extractor(
                list(waves[:, : int(extractor.nb_max_samples)]),
                sampling_rate=extractor.sampling_rate,
                return_tensors="pt",
            ).to(network.device)
            heard = network.get_audio_features(**inputs).pooler_output
            # Padding is masked, so that no row depends on the length of its neighbours.
            tokens = tokenizer(
                texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
            ).to(network.device)
            read = network.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output
            cosines: Tensor = (heard * read).sum(-1)
            return cosines

        return compute_cosines

    def __call__(self, samples: SoundedVideos, prompts: Sequence[Prompt]) -> RewardResult:  # type: ignore[override]
        import numpy as np

        values = self._score_in_batches(samples, prompts)
        failures = {
            int(index): f"the network gave {values[index]}"
            for index in np.flatnonzero(~np.isfinite(values))
        }
        values[list(failures)] = np.nan
        return RewardResult(values, failures=failures)


def resample(waves: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Resample waveforms, float32 [N, samples], to another rate by their spectrum: float32
    [N, samples * target / rate].
    """
    import numpy as np

    if rate == target:
        return waves
    length = round(waves.shape[1] * target / rate)
    # Zeros at new high frequencies, or none of those that the target cannot hold. It takes the
    # sound as periodic, which its two ends alone notice.
    spectrum = np.fft.rfft(waves.astype(np.float64), axis=1)
    resampled = np.fft.irfft(spectrum[:, : length // 2 + 1], length, axis=1)
    scaled: np.ndarray = (resampled * (length / waves.shape[1])).astype(np.float32)
    return scaled
