"""The trained model as Hugging Face files, added to a folder: streamed, no rank holds all of it.

Shards and the files made of them lie in the folder's private place until they are complete. A
hidden file of the folder records what was written, so that the next save of a model replaces that
and nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from shardwright.ckpt import merge
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.jobs import RunOptions
from shardwright.ckpt.model.manifest import SideFile
from shardwright.ckpt.move import tree
from shardwright.ckpt.move.file_set import STAGE, FileSetTransaction
from shardwright.ckpt.move.kept import write_side
from shardwright.ckpt.move.staging import JOURNAL
from shardwright.ckpt.move.storage import is_path_below, storage_path, told

from ..errors import TrainError
from .rank_state import Log, RankState
from .save import Saver, gather

RECORD = ".shardwright.files"  # JSON: the files that the last save of a model wrote here
_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.\w+\.index\.json"
)
_MAX_RECORD_BYTES = 10_000_000
_SHARDS, _WHOLE = "shards", "whole"  # in the private place


def save_model(
    held: RankState,
    folder: Path,
    step: int,
    sides: Sequence[SideFile],
    *,
    max_shard_bytes: int,
    safe: bool,
    log: Log,
) -> None:
    """Write the weights and ``sides``, which rank 0 gives; TrainError on every rank.

    All ranks call it, and it returns when the files are there.
    """
    made, why = None, ""
    if held.rank == 0:
        made = _Folder(folder, log)
        try:
            made.open()
        except CheckpointError as error:
            why = str(error)
    _agree(why, held)
    try:
        saver = Saver(held, weights_only=True, reserve=False, pointer=False)
        place = Path(os.path.realpath(folder)) / STAGE
        saver.save(place / _SHARDS, step, {}, sides)
        saver.wait()
        if made is not None:
            try:
                made.publish(max_shard_bytes, safe=safe)
            except (CheckpointError, OSError) as error:
                why = str(error)
        _agree(why, held)
    finally:
        if made is not None:
            made.transaction.close()


def _agree(why: str, held: RankState) -> None:
    if said := gather(why, held.control)[0]:
        raise TrainError(f"cannot save the model: {said}")


class _Folder:
    """Rank 0's side: the folder and its transaction. CheckpointError from every method."""

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        self.transaction = FileSetTransaction(folder, RECORD, _recorded)

    def open(self) -> None:
        """Lock the folder; refuse weights in it that are not ours to replace."""
        self.transaction.open()
        try:
            with told(self.folder):
                there = os.listdir(self.transaction.folder)
            others = [name for name in there if _WEIGHTS.fullmatch(name)]
            if found := sorted(set(others) - self.transaction.older):
                raise CheckpointError(
                    f"{self.folder}: holds {', '.join(found[:8])}, which save_model has not "
                    "written; move it away, or save into another folder"
                )
        except BaseException:
            self.transaction.close()
            raise

    def publish(self, max_shard_bytes: int, *, safe: bool) -> None:
        """Join the shards, and let the result take the place of the older one."""
        path = self.transaction.path
        merge(
            path / _SHARDS, path / _WHOLE, max_shard_size=max_shard_bytes,
            safe_serialization=safe, run=RunOptions(verify_source=False),
        )  # fmt: skip
        with told(self.folder):
            tree.remove(path / _SHARDS)
            names = self._taken(path)
            tree.remove(path / _WHOLE)
            for child in path.iterdir():
                if child.name.startswith(".") or (child.is_dir() and not any(child.iterdir())):
                    tree.remove(child)
        text = json.dumps({"files": sorted(names)}) + "\n"
        write_side(path, SideFile(RECORD, text=text), storage_path(path))
        self.transaction.publish()

    def _taken(self, path: Path) -> list[str]:
        """Move the files up to where they are published from; a user's own stay in their place."""
        names = []
        for folder, found in tree.walk(path / _WHOLE):
            for name in found:
                below = (folder / name).relative_to(path / _WHOLE)
                own = self.transaction.folder / below
                if below.as_posix() not in self.transaction.older and own.is_file():
                    if own.read_bytes() != (folder / name).read_bytes():
                        self.log(f"{own}: stays as it is, it was not written by save_model")
                    continue
                assert below.name != JOURNAL
                tree.make((path / below).parent)
                os.rename(folder / name, path / below)
                names.append(below.as_posix())
        return names


def _recorded(folder: Path) -> list[str]:
    """What the last save of a model wrote into a folder; CheckpointError if nobody can tell."""
    path = folder / RECORD
    if not os.path.lexists(path):
        return []
    try:
        with tree.open_file(path, "rb") as file:
            said = json.loads(file.read(_MAX_RECORD_BYTES))
        found = said["files"]
        if not all(is_path_below(name) and not name.startswith(".") for name in found):
            raise ValueError("names that lead elsewhere")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}); remove it") from error
    return [*found, RECORD]
