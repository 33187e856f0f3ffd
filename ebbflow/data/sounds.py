"""Sound as 16-bit PCM, in WAV files, and in the PNG file of its video.

Decoded sound is rounded to 16 bits at once, as pictures are to 8: a score never depends on whether
a sample was stored. A stored sample is one PNG file, whose chunk ``soNd`` holds the WAV file: the
PNG specification leaves such names to private chunks that every reader skips.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL.PngImagePlugin import putchunk

from ebbflow.data.images import iterate_png_chunks

PCM_SCALE = 32767
"""The 16-bit number of a full amplitude of 1."""
SAMPLE_BYTES = 2
SOUND_CHUNK = b"soNd"
CHUNK_HEADER = 8
"""Bytes of a chunk's length and name."""
CHUNK_CHECKSUM = 4
END_CHUNK = 12
"""Bytes of the last chunk of a PNG file, which is empty."""


class SoundError(ValueError):
    """Sound that cannot be read: the predicate of a sentence about the value, with the fix."""


@dataclass(frozen=True)
class Sounds:
    """The sounds of N videos.

    Example:
        Two stereo sounds of a second: ``Sounds(np.zeros((2, 24000, 2), np.int16), 24000)``.

    Attributes:
        pcm: int16 [N, samples, channels].
        rate: samples a second.
    """

    pcm: np.ndarray
    rate: int

    def __len__(self) -> int:
        return len(self.pcm)

    def select_rows(self, rows: slice | np.ndarray | list[int]) -> Sounds:
        """Return the sounds of some of the videos."""
        return Sounds(self.pcm[rows], self.rate)

    @property
    def waves(self) -> np.ndarray:
        """The amplitudes, float32 in [-1, 1], [N, samples, channels]."""
        return self.pcm.astype(np.float32) / PCM_SCALE

    @property
    def mono(self) -> np.ndarray:
        """The mean of the channels, float32 in [-1, 1], [N, samples]."""
        mean: np.ndarray = self.waves.mean(axis=2)
        return mean


def encode_pcm(waves: np.ndarray) -> np.ndarray:
    """Encode amplitudes in [-1, 1], float [N, channels, samples], as int16 [N, samples, channels].

    Louder ones are clipped, as by every player. What is not finite becomes silence: the sample is
    failed by its latent, which is not finite either.
    """
    # Symmetric, so that silence is 0 and a full amplitude the same number on both sides.
    finite = np.nan_to_num(waves, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1)
    pcm: np.ndarray = (finite * PCM_SCALE).round().astype(np.int16).swapaxes(1, 2)
    return pcm


def encode_wavs(sounds: Sounds) -> list[bytes]:
    """Encode each sound as a WAV file."""
    return [_encode_wav(pcm, sounds.rate) for pcm in sounds.pcm]


def _encode_wav(pcm: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(pcm.shape[1])
        file.setsampwidth(SAMPLE_BYTES)
        file.setframerate(rate)
        # WAV is little-endian on every machine.
        file.writeframes(pcm.astype("<i2").tobytes())
    return buffer.getvalue()


def decode_wavs(files: list[bytes]) -> Sounds:
    """Decode WAV files of one length and rate.

    Raises:
        SoundError: a file is no 16-bit WAV, or differs in rate, length or channels.
    """
    sounds = [_decode_wav(file) for file in files]
    kinds = {(sound.rate, *sound.pcm.shape[1:]) for sound in sounds}
    if len(kinds) != 1:
        raise SoundError(
            f"have several rates, lengths or channels ({sorted(kinds)}); generate them together"
        )
    return Sounds(np.concatenate([sound.pcm for sound in sounds]), sounds[0].rate)


def _decode_wav(file: bytes) -> Sounds:
    try:
        with wave.open(io.BytesIO(file)) as reader:
            if reader.getsampwidth() != SAMPLE_BYTES:
                raise SoundError(
                    f"has samples of {8 * reader.getsampwidth()} bits; write it with 16"
                )
            # A file that is cut off has half a point in time, or none, at its end.
            pcm = np.frombuffer(reader.readframes(reader.getnframes()), "<i2")
            rows = pcm.reshape(1, -1, reader.getnchannels()).astype(np.int16)
            if not rows.size:
                raise SoundError("has no samples; generate it again")
            return Sounds(rows, reader.getframerate())
    except SoundError:
        raise
    except (wave.Error, EOFError, ValueError) as error:
        raise SoundError(f"is no WAV file that can be read ({error}); generate it again") from None


def attach_sounds(pngs: Sequence[bytes], sounds: Sounds | None) -> list[bytes]:
    """Put each sound into the PNG file of its video; None changes nothing."""
    if sounds is None:
        return list(pngs)
    return [_attach_sound(png, wav) for png, wav in zip(pngs, encode_wavs(sounds), strict=True)]


def _attach_sound(png: bytes, wav: bytes) -> bytes:
    buffer = io.BytesIO()
    # Before the last chunk, where no reader of animations looks for a frame.
    buffer.write(png[:-END_CHUNK])
    putchunk(buffer, SOUND_CHUNK, wav)
    buffer.write(png[-END_CHUNK:])
    return buffer.getvalue()


def read_sounds(pngs: Sequence[bytes]) -> Sounds | None:
    """Read the sounds in PNG files of ``attach_sounds``; None where the first has none.

    Raises:
        SoundError: one of them has no sound, or another kind of it.
    """
    files = [read_sound(png) for png in pngs]
    if not files or files[0] is None:
        return None
    return decode_wavs([file or b"" for file in files])


def read_sound(png: bytes) -> bytes | None:
    """Return the WAV file in a PNG file of ``attach_sounds``; None where there is none.

    Raises:
        ImageError: the file does not begin as PNG files do.
    """
    for name, chunk in iterate_png_chunks(png):
        if name == SOUND_CHUNK:
            return chunk[CHUNK_HEADER:-CHUNK_CHECKSUM]
    return None
