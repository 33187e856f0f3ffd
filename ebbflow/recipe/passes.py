"""How samples are split into forward passes: about as many in each, so that all of them run the
same kernels, and compiled ones are compiled once.
"""

from __future__ import annotations


def split_into_equal_passes(count: int, max_samples: int) -> list[slice]:
    """Split ``count`` samples into as few passes of at most ``max_samples`` as there can be, whose
    sizes differ by one at most.

    Example:
        >>> split_into_equal_passes(24, 9)
        [slice(0, 8), slice(8, 16), slice(16, 24)]
    """
    num_passes = -(-count // max_samples)
    ends = [0]
    for number in range(num_passes):
        # The first passes are the larger ones: 7 samples in 3 passes are 3, 2 and 2.
        ends.append(
            ends[-1] + (count - ends[-1] + num_passes - number - 1) // (num_passes - number)
        )
    return [slice(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]


def choose_pass_size(group_size: int, micro_batch: int) -> int:
    """Choose how many samples a pass of rollouts and updates has, at most: ``micro_batch``, or the
    largest number below it that is an equal part of a group, or whole groups.

    Example:
        >>> choose_pass_size(group_size=24, micro_batch=9)
        8
        >>> choose_pass_size(group_size=4, micro_batch=10)
        8
    """
    if micro_batch < group_size:
        # Rollouts generate a group by itself.
        largest: int = split_into_equal_passes(group_size, micro_batch)[0].stop
        return largest
    return micro_batch // group_size * group_size
