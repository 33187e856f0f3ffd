"""What the tests of bad input share: how many cases there are, what may be said of them, and how
bytes go wrong.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_LINES = 60
MAX_LINE = 1500
"""Of a message that somebody is to read."""

Result = TypeVar("Result")


def only_speaks_plainly(
    call: Callable[[], Result], errors: type[Exception] | tuple[type[Exception], ...], *names: str
) -> Result | None:
    """What the call gives, or None where it raised one of the errors; everything else that it
    raises comes through.

    Args:
        names: what the message must contain, such as the file.
    """
    try:
        return call()
    except errors as error:
        assert_readable(str(error), *names)
        return None


def assert_readable(message: str, *names: str) -> None:
    lines = message.splitlines()
    assert message.strip(), "an error without a message"
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines, first {lines[:3]}"
    for line in lines:
        assert len(line) <= MAX_LINE, f"a line of {len(line)} characters: {line[:200]}"
        assert line.isprintable(), f"characters that no terminal should get: {line!r:.300}"
    for name in names:
        assert name in message, f"{name!r} is not named in {message[:500]!r}"


def cases(
    count: int, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A hypothesis test of ``count`` cases, the same on every machine. One that ran fewer, because
    there are no more, fails.

    A soak test (tests/soak.py) has as many as its environment says, drawn from its seed.
    """
    soaked = int(os.environ.get("EBBFLOW_SOAK_CASES", "0"))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        ran = 0

        @functools.wraps(test)
        def one(*args: Any, **keys: Any) -> None:
            nonlocal ran
            test(*args, **keys)
            ran += 1

        always = settings(
            max_examples=soaked or count,
            derandomize=not soaked,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        run = always(given(**strategies)(one))

        @functools.wraps(run)
        def all_of_them(*args: Any, **keys: Any) -> None:
            nonlocal ran
            ran = 0
            run(*args, **keys)
            assert soaked or ran >= count, f"only {ran} of {count} cases were run"

        return all_of_them

    return decorate


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A function that damages bytes: cut off, some bytes changed, some taken out or put in; never
    the bytes themselves.
    """
    kind = draw(st.sampled_from(["cut", "flip", "remove", "insert"]))
    places = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3))
    bits = draw(st.integers(1, 255))
    some = draw(st.binary(min_size=1, max_size=9))

    def damaged(content: bytes) -> bytes:
        changed = bytearray(content)
        places_in = {int(position * len(content)) for position in places}
        for position in sorted(places_in, reverse=True):
            if kind == "cut":
                del changed[position:]
            elif kind == "flip":
                changed[position] ^= bits
            elif kind == "remove":
                del changed[position : position + len(some)]
            else:
                changed[position:position] = some
        return bytes(changed) if bytes(changed) != content else content + b"\0"

    return damaged


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, -(2**70), 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "\x00", "\x1b[2J", "\u202e", "\ue000", "../..", "/etc/passwd", "a:b", "x" * 3000]
    ),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
"""What JSON can hold, and floats that it cannot."""
