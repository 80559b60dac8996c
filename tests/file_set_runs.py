"""Saves of small sets of files into one folder, for runs that are killed (``Forge``)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move import file_set

LAST = "checkpoint.json"
SETS = {
    "old": {"both": "old both", "sub/both": "old sub", "gone": "old gone", "sub/gone": "old"},
    "new": {
        "both": "new both",
        "sub/both": "new sub",
        "added": "new added",
        "deep/er/added": "new",
    },
}


def whole(name: str) -> dict[str, bytes]:
    """The files of a set as they lie in a folder, by path."""
    files = SETS[name]
    described = json.dumps(sorted([*files, LAST]))
    return {path: text.encode() for path, text in {**files, LAST: described}.items()}


def owned(folder: Path) -> list[str]:
    """What the set in a folder says of itself."""
    path = folder / LAST
    return json.loads(path.read_text()) if path.is_file() else []


def save(folder: Path, name: str) -> None:
    """Add a set to a folder, in the place of the one that is there."""
    with file_set.FileSetTransaction(folder, LAST, owned) as transaction:
        for path, data in whole(name).items():
            (transaction.path / path).parent.mkdir(parents=True, exist_ok=True)
            (transaction.path / path).write_bytes(data)
        transaction.publish()


def main(argv: list[str]) -> int:
    """``FOLDER --save NAME``, or ``FOLDER`` alone to open it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save")
    args = parser.parse_args(argv)
    try:
        if args.save:
            save(args.folder, args.save)
        else:
            file_set.finish(args.folder)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
