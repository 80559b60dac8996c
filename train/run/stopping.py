"""How a run is asked to end: a signal, or the file that the launcher makes."""

from __future__ import annotations

import os

STOP_FILE = "SHARDWRIGHT_STOP_FILE"  # the launcher makes this file to ask for a save and an end


def stop_file_exists() -> bool:
    path = os.environ.get(STOP_FILE)
    return bool(path and os.path.exists(path))
