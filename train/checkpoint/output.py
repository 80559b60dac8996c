"""Where a save goes, and what rank 0 adds to the ranks' files: text files, and the pointer.

A folder that is there already may hold anything: the save adds its files to it, in the place of
those that an earlier checkpoint there recorded. A new folder of `train-ckpt` appears by one rename.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.checkpoint.function import contradictions, settings
from shardwright.ckpt.checkpoint.json_io import load_json
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.formats.native import names as shard_names
from shardwright.ckpt.formats.native import writer as shards_out
from shardwright.ckpt.formats.native.owned import owned, strays
from shardwright.ckpt.model.design import Design, OutFile, check_design
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.file_layout import FileLayout
from shardwright.ckpt.model.manifest import Manifest, SideFile
from shardwright.ckpt.move import tree
from shardwright.ckpt.move.file_set import STAGE, FileSetTransaction
from shardwright.ckpt.move.kept import write_side
from shardwright.ckpt.move.publish import OutputTransaction, staging_folder
from shardwright.ckpt.move.storage import storage_path, told
from shardwright.ckpt.reader import LATEST

from .rank_state import RankState

CONFIG = "config.json"
Written = Sequence[tuple[str, int, str]]  # name, size in bytes and xxh3-128 of each file


def stage_of(final: Path, *, added: bool) -> Path:
    """Where the ranks write their files."""
    return Path(os.path.realpath(final)) / STAGE if added else staging_folder(final)


@dataclass(slots=True)
class SaveOutput:
    """Rank 0's side of one save. CheckpointError from every method."""

    final: Path
    added: bool
    model: Model
    sides: tuple[SideFile, ...]
    notes: list[str] = field(default_factory=list)  # lines for the user
    transaction: FileSetTransaction | OutputTransaction = field(init=False)

    def __post_init__(self) -> None:
        if self.added:
            self.transaction = FileSetTransaction(
                self.final, shard_names.CHECKPOINT, lambda folder: owned(storage_path(folder))
            )
        else:
            self.transaction = OutputTransaction(self.final, overwrite=True, is_ours=_is_ours)

    def open(self) -> None:
        """Lock the place and empty its staging folder; refuse what would be in the way."""
        self.transaction.open()
        try:
            if isinstance(self.transaction, FileSetTransaction):
                self._check_folder(self.transaction)
        except BaseException:
            self.close(failed=True)
            raise

    def _check_folder(self, made: FileSetTransaction) -> None:
        folder = storage_path(made.folder)
        if found := strays(folder, made.older):
            raise CheckpointError(
                f"{self.final}: holds {', '.join(found[:8])}, which the checkpoint there did not "
                "write and which would be read as part of the new one; move it away, or save into "
                "another folder"
            )
        self.sides = tuple(side for side in self.sides if not self._stays(made, side))
        made.check([shard_names.CHECKPOINT, *(side.name for side in self.sides)])
        # a script that saves its tokenizer as soon as save_state returns keeps its own
        made.yielding = frozenset(side.name for side in self.sides)

    def _stays(self, made: FileSetTransaction, side: SideFile) -> bool:
        """Whether the user's own file of a side file's name stays in its place."""
        own = made.folder / side.name
        if side.name in made.older or not own.is_file():
            return False
        if side.name == CONFIG:
            self._check_config(own)
        elif side.name == shard_names.CHECKPOINT:
            return False
        with told(own):
            if own.read_bytes() != _content(side):
                self.notes.append(_stayed(own))
        return True

    def _check_config(self, own: Path) -> None:
        """The user's config must describe the model that is saved beside it."""
        ours = self.model
        config = load_json(storage_path(own), finite=False)
        try:
            theirs = model_from(config, str(own))
        except CheckpointError:
            theirs = None  # of a model that is unknown here
        if (
            theirs is None
            or (theirs.family, theirs.sizes, theirs.flags) != (ours.family, ours.sizes, ours.flags)
            or contradictions(settings(config, theirs), settings(ours.config, ours))
        ):
            raise CheckpointError(
                f"{own}: describes another model than the one that is saved; move it away, or save "
                "into another folder"
            )

    def publish(
        self,
        held: RankState,
        step: int,
        state: Mapping[str, object],
        frozen: set[str] | None,
        written: Sequence[Written],
    ) -> None:
        """Write checkpoint.json and what travels along, and make all of it visible."""
        path, made = self.transaction.path, self.transaction
        if isinstance(made, FileSetTransaction):  # since `open` a script may have written files
            self.sides = tuple(side for side in self.sides if not self._stays(made, side))
        table = {name: (size, mark) for part in written for name, size, mark in part}
        dtype = str(next(iter(held.named.values())).dtype).removeprefix("torch.")
        text = shards_out.checkpoint_json(
            held.target(step), state, held.placement.padded, dtype, table, frozen,
            sides=[side.name for side in self.sides],
        )  # fmt: skip
        sides = [*self.sides, SideFile(shard_names.CHECKPOINT, text=text)]
        files = [
            OutFile(str(path / name), FileLayout(size, {}, ())) for name, (size, _) in table.items()
        ]
        check_design(Design(files, Manifest({}, {})), path, sides)
        for side in sides:
            write_side(path, side, storage_path(path))
        made.publish()
        if isinstance(made, FileSetTransaction):
            self.notes += [_stayed(made.folder / name) for name in made.yielded]
        made.close()

    def close(self, *, failed: bool = False) -> None:
        """Release the place; what was not published is removed."""
        self.transaction.close(failed=failed)


def _stayed(own: Path) -> str:
    return f"{own}: stays as it is, it was not written by a save"


def _content(side: SideFile) -> bytes:
    return Path(side.source).read_bytes() if side.source else side.text.encode()


def _is_ours(folder: Path) -> bool:
    """Whether an older release, which kept no journal, left this folder."""
    rank_files = ("model_tp_", "optimizer_tp_", "random_states_")
    return any(name.startswith(rank_files) for name in os.listdir(folder))


def point_to(final: Path, log: Callable[[str], None], *, needed: bool) -> None:
    """Make ``latest`` beside a checkpoint name it; it is on the disk already.

    Where it is not ``needed``, a file of this name that is no such pointer stays, and a folder that
    cannot be written gets none.
    """
    pointer = final.parent / LATEST
    try:
        with told(pointer):
            if not needed and os.path.lexists(pointer) and not _is_pointer(pointer):
                log(f"{pointer}: stays as it is, since it names no checkpoint beside it")
                return
            tree.replace_file(pointer, f"{final.name}\n".encode())
    except CheckpointError as error:
        if needed:
            raise
        log(f"{error}; {final} is saved")


def _is_pointer(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 255:
        return False
    name = path.read_text(errors="replace").strip()
    return bool(name) and "/" not in name and (path.parent / name).is_dir()
