"""Where `make setup` takes torch from: prints options of `uv pip install`, and on standard error a
line that says what they mean. Needs nothing but Python and pip.

PyPI's torch for Linux is built for CUDA and brings 3 GB that a machine without a GPU cannot use.
PyTorch's own index has a build for each kind of machine, and uv picks one by the driver.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

INDEX = "https://download.pytorch.org/whl/cpu/torch/"
SECONDS = 5
"""For the index, or a page of wheels, to answer."""
SETTINGS = (":env:.find-links", "install.find-links", "global.find-links")
WHEEL = re.compile(r"torch-\d[^/\"'<> ]*\.whl")
PYPI = "pypi"
"""The backend that takes PyPI's build."""


def choose_options(
    backend: str, find_links: Sequence[str], is_reachable: Callable[[], bool]
) -> tuple[list[str], str]:
    """Choose the options, and a sentence about them.

    Args:
        backend: ``auto``, ``pypi``, or what ``uv pip install --torch-backend`` takes.
        find_links: folders and pages of wheels that pip is configured with.
        is_reachable: whether PyTorch's index answers.
    """
    links = [word for link in find_links for word in ("--find-links", link)]
    if backend == PYPI:
        return links, "torch from PyPI, as TORCH_BACKEND says"
    if backend != "auto":
        return [*links, "--torch-backend", backend], f"torch for {backend}, as TORCH_BACKEND says"
    for link in find_links:
        if has_torch_wheel(link):
            return links, f"torch from {link}, which pip is configured with"
    if is_reachable():
        return [*links, "--torch-backend", "auto"], "torch for this machine, from PyTorch's index"
    return links, (
        f"torch from PyPI, for CUDA, as {INDEX} does not answer; on Linux these are 3 GB more than"
        " a machine without a GPU needs"
    )


def has_torch_wheel(link: str) -> bool:
    """Return whether a folder or a page offers a wheel of torch; it may exist and be empty."""
    if "://" in link and not link.startswith("file://"):
        page = read_page(link)
        return page is not None and bool(WHEEL.search(page))
    folder = Path(link.removeprefix("file://"))
    return folder.is_dir() and any(folder.glob("torch-[0-9]*.whl"))


def read_page(url: str, method: str = "GET") -> str | None:
    """Return the text of a page; None if it does not answer in time."""
    try:
        with urlopen(Request(url, method=method), timeout=SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))
    except OSError:
        return None


def read_find_links() -> list[str]:
    """Return the find-links of pip's configuration, of its environment variable and its files."""
    links: list[str] = []
    for setting in SETTINGS:
        command = [sys.executable, "-m", "pip", "config", "get", setting]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            links += answer.stdout.split()
    return list(dict.fromkeys(links))


if __name__ == "__main__":
    options, sentence = choose_options(
        sys.argv[1], read_find_links(), lambda: read_page(INDEX, "HEAD") is not None
    )
    print(" ".join(options))
    print(sentence, file=sys.stderr)
