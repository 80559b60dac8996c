"""Which files of a folder a native checkpoint recorded as its own, and which only look like it.

A save replaces what an earlier checkpoint recorded, and nothing else.
"""

from __future__ import annotations

import re

from ...checkpoint.json_io import load_json
from ...move.storage import StoragePath, is_path_below
from .names import CHECKPOINT, FILE

_RANDOM = re.compile(r"random_states_\d+\.safetensors")
_OBJECT = re.compile(r"custom_checkpoint_\d+\.pt")  # a script's registered objects
SIDES = "side_files"  # key of checkpoint.json: files that a save wrote beside the rank files


def owned(folder: StoragePath) -> frozenset[str]:
    """The files that the checkpoint in a folder says it wrote, by their paths below the folder.

    Empty where there is none, or another tool's checkpoint.json. CheckpointError if it is damaged.
    """
    path = folder / CHECKPOINT
    if not path.is_named():
        return frozenset()
    table = load_json(path)
    files, sides = table.get("files"), table.get(SIDES)
    if "format_version" not in table or not isinstance(files, dict):
        return frozenset()
    said = [CHECKPOINT, *files, *(sides if isinstance(sides, list) else [])]
    if sides is None:  # an older release named the rank files alone
        said += [child.name for child in folder.iterdir() if _OBJECT.fullmatch(child.name)]
    return frozenset(name for name in said if is_path_below(name) and not name.startswith("."))


def strays(folder: StoragePath, known: frozenset[str]) -> list[str]:
    """Files that a reader would take for the checkpoint's, and that are not among its own."""
    kinds = (FILE, _RANDOM, _OBJECT)
    return [
        child.name
        for child in folder.iterdir()
        if child.name not in known and any(kind.fullmatch(child.name) for kind in kinds)
    ]
