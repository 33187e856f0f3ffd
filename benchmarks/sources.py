"""Files of other repositories at a commit, read from clones in one folder.

Pages that say what other projects do (docs/features.md, the report of published values) name a
repository, a commit and a file for each statement. The commands that write these pages read the
files with ``Clones``, so that a statement can be checked again by whoever has the clones.
"""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path

from ebbflow.recipe.base import RecipeError


class Clones:
    """Git clones in one folder: FOLDER/NAME, FOLDER/OWNER+NAME or FOLDER/OWNER/NAME, bare or not.
    A commit that a clone lacks is read from FOLDER/NAME-COMMIT, an unpacked archive of it, which is
    all one needs of a large repository.

    Example:
        ::

            clones = Clones(Path("../clones"))
            clones.read("yifan123/flow_grpo", "ac4c86e", "config/base.py")  # its text, or None
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = lru_cache(maxsize=None)(self._read_uncached)

    def find(self, repository: str) -> Path | None:
        """Returns the git directory of ``repository`` (OWNER/NAME), None without a clone of it."""
        owner, name = repository.split("/")
        for clone in (name, f"{owner}+{name}", f"{owner}/{name}"):
            for git_directory in (".git", "repo", "."):
                candidate = self.folder / clone / git_directory
                if (candidate / "HEAD").is_file():
                    return candidate
        return None

    def find_archive(self, repository: str, commit: str) -> Path | None:
        """Returns the folder of the unpacked archive of a commit, None without one. Archives have
        the whole hash in their name.
        """
        name = repository.split("/")[1]
        return next(iter(sorted(self.folder.glob(f"{name}-{commit}*"))), None)

    def read(self, repository: str, commit: str, path: str) -> str | None:
        """Returns the text of a file at ``commit``, None where the commit has no such file.

        Raises:
            RecipeError: the folder has no archive of the commit, and no clone of the repository, or
                the clone lacks the commit.
        """
        return self._read(repository, commit, path)

    def _read_uncached(self, repository: str, commit: str, path: str) -> str | None:
        git_directory = self.find(repository)
        commit_exists = ("cat-file", "-e", f"{commit}^{{commit}}")
        if git_directory is None or not self._runs(git_directory, *commit_exists):
            archive = self.find_archive(repository, commit)
            if archive is not None:
                file = archive / path
                return file.read_text(errors="replace") if file.is_file() else None
        if git_directory is None:
            raise RecipeError(
                f"no clone of {repository} in {self.folder}: git clone "
                f"https://github.com/{repository} {self.folder / repository.split('/')[1]}"
            )
        if not self._runs(git_directory, *commit_exists):
            raise RecipeError(f"{git_directory} has no commit {commit}: git fetch --all")
        result = subprocess.run(
            ["git", "--git-dir", str(git_directory), "show", f"{commit}:{path}"],
            capture_output=True,
            check=False,
        )
        # A file that the commit lacks is an answer; everything else was asked above.
        return result.stdout.decode(errors="replace") if result.returncode == 0 else None

    @staticmethod
    def _runs(git_directory: Path, *arguments: str) -> bool:
        command = ["git", "--git-dir", str(git_directory), *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
