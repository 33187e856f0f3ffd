"""Folders of tiny models that a test changes."""

from __future__ import annotations

import json
import shutil


def copy_folder(folder, target, *ignore):
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*ignore))
    return target


def change_index(folder, **entries):
    """Change entries of a folder's ``model_index.json``."""
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | entries))
    return folder
