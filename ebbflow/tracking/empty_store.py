"""An MLflow store without a run, kept in the user's cache: MLflow makes one in hundreds of
statements, its migrations, which take as long as hundreds of copies.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ebbflow.storage.artifacts import ArtifactError, verify_folder, write_new_folder
from ebbflow.storage.disk import DiskFullError, remove_path
from ebbflow.storage.user_cache import find_user_cache

DATABASE = "mlflow.db"
logger = logging.getLogger(__name__)


def copy_empty_store(path: Path) -> bool:
    """Copy the empty store of this MLflow to ``path``; return whether the cache has one.

    A damaged one is removed, and counts as none.

    Raises:
        OSError: ``path`` cannot be written.
    """
    folder = _find_folder()
    if not folder.exists():
        return False
    try:
        verify_folder(folder)
    except (ArtifactError, OSError) as error:
        logger.info("MLflow makes its tables anew, as %s cannot be used: %s", folder, error)
        with suppress(OSError):
            remove_path(folder)
        return False
    shutil.copyfile(folder / DATABASE, path)
    return True


def keep_empty_store(path: Path) -> None:
    """Keep the store at ``path``, which MLflow has just made and nobody has opened, for all later
    ones. A cache that cannot be written costs the migrations of the next one, and nothing else.
    """
    folder = _find_folder()
    try:
        with write_new_folder(folder) as unfinished:
            shutil.copyfile(path, unfinished / DATABASE)
            with closing(sqlite3.connect(unfinished / DATABASE)) as database:
                # The only row that depends on the place of a store: MLflow adds the default
                # experiment, with the folder of its artifacts, to each store that it opens and that
                # has none.
                database.execute("DELETE FROM experiments")
                database.commit()
                database.execute("VACUUM")
    except (ArtifactError, DiskFullError, OSError, sqlite3.Error) as error:
        logger.info("MLflow makes the tables of the next store, too: %s: %s", folder, error)


def cache_folder() -> Path:
    """Return the folder of the empty stores, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return find_user_cache("stores")


def _find_folder() -> Path:
    from mlflow.store.db.utils import _get_latest_schema_revision
    from mlflow.version import VERSION

    # Of the revision, too: an MLflow that was installed from its sources has the version of the
    # release before.
    return cache_folder() / f"mlflow-{VERSION}-{_get_latest_schema_revision()}"
