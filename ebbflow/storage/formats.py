"""The formats of what outlives the Ebbflow that wrote it. A number grows when what was written
before can no longer be read as it is; the code that reads it then says so, or converts it.
"""

from __future__ import annotations

RUN_FORMAT = 1
"""Of the folder of a local run; in its file ``RUN_FORMAT_FILE``."""
RUN_FORMAT_FILE = "format"
VERSION_FORMAT = 1
"""Of a registered version; in its tag ``VERSION_FORMAT_TAG``."""
VERSION_FORMAT_TAG = "ebbflow.format"
CHECKPOINT_FORMAT = 1
"""Of the checkpoint of a stage; in its ``state.json``."""


def explain_unknown_format(text: str | None, known: int) -> str | None:
    """Explain why something cannot be read; None if it can.

    Args:
        text: the format that it says it has; None, as before there were formats, counts as 1.
    """
    if text is None or text.strip() == "1" or text.strip() == str(known):
        return None
    if text.strip().isdecimal() and int(text) < known:
        return None
    return f"format {text.strip()[:20]!r} is of a newer Ebbflow, and this one reads up to {known}"
