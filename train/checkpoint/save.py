"""Saves native checkpoints of a running trainer, while training goes on.

A rank's tensors are copied to host memory, which is all that the step waits for; a thread then
writes this rank's files. No collective runs in that thread: ranks agree over a gloo group of their
own when the trainer next calls ``poll``, and only then rank 0 publishes.

Each rank's part is a plan from its live tensors to its files (rank_files.py); rank 0 holds the
output's transaction, so that lock, staging, sync and rename are those of every command.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.formats.native import names as shard_names
from shardwright.ckpt.formats.native import writer as shards_out
from shardwright.ckpt.model.design import Design, OutFile, check_design
from shardwright.ckpt.model.file_layout import FileLayout
from shardwright.ckpt.model.manifest import Manifest, SideFile
from shardwright.ckpt.move import tree
from shardwright.ckpt.move.kept import write_side
from shardwright.ckpt.move.publish import OutputTransaction, staging_folder, tidy_up
from shardwright.ckpt.move.storage import storage_path, told
from shardwright.ckpt.reader import LATEST

from ..errors import TrainError
from . import training_state
from .host_memory import HostMemory
from .rank_files import RankSnapshot, snapshot, write_files
from .rank_state import Log, RankState

_RANK_FILES = ("model_tp_", "optimizer_tp_", "random_states_")
REMOVED = ".removed"  # ends the private name of a checkpoint that is being deleted


@dataclass(frozen=True, slots=True)
class SaveWait:
    """How long training waited for the save before this one; seconds and bytes of this rank."""

    step: int
    waited: float
    since: float  # from the last save to this one
    size: int
    took: float  # to write the files


@dataclass(slots=True)
class _Pending:
    """A save whose files are being written."""

    step: int
    final: Path
    output: OutputTransaction | None  # on rank 0
    thread: threading.Thread
    sides: tuple[SideFile, ...]
    state: Mapping[str, object]  # JSON
    written: list[tuple[str, int, str]] = field(default_factory=list)  # name, size, digest
    error: BaseException | None = None
    took_s: float = 0.0  # to write this rank's files


class Saver:
    """Writes checkpoints ``SAVE_DIR/checkpoint-STEP`` while training goes on."""

    def __init__(
        self,
        held: RankState,
        *,
        keep_last: int | None = None,
        log: Log = lambda line: None,
        on_wait: Callable[[SaveWait], None] = lambda wait: None,
        weights_only: bool = False,
        reserve: bool = True,
        replaced: Sequence[Path] = (),
    ) -> None:
        """``reserve`` host memory at once where tensors lie on a GPU, if a save is to come.

        ``on_wait`` is told when a save had to wait for the one before it. ``replaced`` are older
        checkpoints that give way to the first save.
        """
        self.held, self.keep_last, self.log, self.on_wait = held, keep_last, log, on_wait
        self.weights_only, self._replaced = weights_only, list(replaced)
        self.memory: HostMemory | None = None
        device = next(iter(held.named.values())).device
        if reserve and device.type == "cuda":
            self.memory = HostMemory(held.bytes_to_save(weights_only), device)
        self.stalled_s = 0.0  # how long the last `save` made the step wait
        self._last_save = time.monotonic()
        self._pending: _Pending | None = None

    def save(
        self,
        final: Path,
        step: int,
        state: Mapping[str, object],
        sides: Sequence[SideFile] = (),
    ) -> None:
        """Copy everything to host memory and start writing; an unfinished save is waited for.

        ``state`` holds schedule, param_groups and data; what JSON cannot hold is refused here,
        before anything is written. ``sides`` are files that travel along (config, tokenizer);
        rank 0 writes them. Raises TrainError on every rank.
        """
        table = training_state.to_json(state)
        self._wait_and_tell(step)
        started = self._last_save = time.monotonic()
        self.held.settle()
        output = self._open(final)
        if self.memory is not None:
            self.memory.clear()
        try:
            files = snapshot(self.held, staging_folder(final), step, self.memory, self.weights_only)
        except BaseException:
            if output is not None:
                output.close(failed=True)
            raise
        thread = threading.Thread(target=self._write, args=(files,), daemon=True)
        self._pending = _Pending(step, final, output, thread, tuple(sides), table)
        thread.start()
        self.stalled_s = time.monotonic() - started

    def _open(self, final: Path) -> OutputTransaction | None:
        """Rank 0 locks and empties the staging folder; TrainError on every rank if it cannot."""
        output, why = None, ""
        if self.held.rank == 0:
            output = OutputTransaction(final, overwrite=True, is_ours=_is_ours)
            try:
                output.open()
            except CheckpointError as error:
                why = str(error)
        why = gather(why, self.held.control)[0]
        if why:
            raise TrainError(f"cannot save: {why}")
        return output

    def _write(self, files: RankSnapshot) -> None:
        """In the background thread: this rank's files, synced and digested."""
        pending = self._pending
        assert pending is not None
        started = time.monotonic()
        try:
            pending.written += write_files(files)
        except BaseException as error:
            pending.error = error
        pending.took_s = time.monotonic() - started

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._pending is not None and self._pending.thread.is_alive()

    def poll(self) -> bool:
        """Publish if every rank has written its files; True if nothing is left to do.

        All ranks call it at the same step. Raises TrainError if any rank failed to write.
        """
        if self._pending is None:
            return True
        mine = 1 if self._pending.thread.is_alive() else 2
        if self._pending.error is not None:
            mine = 0
        lowest = _lowest(mine, self.held.control)
        if lowest == 1:
            return False
        pending, self._pending = self._pending, None
        if lowest == 0:
            self._give_up(pending, pending.error)
        self._publish(pending)
        return True

    def _give_up(self, pending: _Pending, error: BaseException | None) -> None:
        """Every rank raises the same TrainError; what was written is removed."""
        rank = self.held.rank
        said = f"rank {rank}: {error}" if error is not None else None
        why = [one for one in gather(said, self.held.control) if one is not None]
        made = TrainError(
            f"{pending.final} could not be written ({'; '.join(why)}); free space there, or "
            "keep fewer checkpoints, and go on from the last one that was saved"
        )
        if pending.output is not None:
            pending.output.close(failed=True)
        raise made

    def wait(self) -> None:
        """Block until the running save is published."""
        if self._pending is not None:
            self._pending.thread.join()
            while not self.poll():
                time.sleep(0.01)

    def _wait_and_tell(self, step: int) -> None:
        """Wait for an unfinished save, and tell how long training was held up."""
        pending, started = self._pending, time.monotonic()
        self.wait()
        if pending is not None:
            ended = time.monotonic()
            size = sum(size for _, size, _ in pending.written)
            wait = SaveWait(step, ended - started, ended - self._last_save, size, pending.took_s)
            self.on_wait(wait)

    def _publish(self, pending: _Pending) -> None:
        rows = gather(pending.written, self.held.control)
        error = None
        if pending.output is not None:
            table = {name: (size, mark) for part in rows for name, size, mark in part}
            try:
                self._finish(pending, pending.output, table)
            except (CheckpointError, OSError) as failed:
                error = failed
        if any(gather(error is not None, self.held.control)):
            self._give_up(pending, error)
        self.log(f"saved {pending.final}")

    def _finish(
        self, pending: _Pending, output: OutputTransaction, table: Mapping[str, tuple[int, str]]
    ) -> None:
        """On rank 0: the text files, sync and rename, then the pointer, last what is too old."""
        target, named = self.held.target(pending.step), self.held.named
        dtype = str(next(iter(named.values())).dtype).removeprefix("torch.")
        text = shards_out.checkpoint_json(
            target, pending.state, self.held.placement.padded, dtype, table
        )
        sides = [*pending.sides, SideFile(shard_names.CHECKPOINT, text=text)]
        files = [
            OutFile(str(output.path / name), FileLayout(size, {}, ()))
            for name, (size, _) in table.items()
        ]
        check_design(Design(files, Manifest({}, {})), output.path, sides)
        for side in sides:
            write_side(output.path, side, storage_path(output.path))
        output.carry_over(_is_made)  # a script may save into a folder that holds more
        output.publish()
        output.close()
        _point_to(pending.final)
        self._prune(pending.final)

    def _prune(self, newest: Path) -> None:
        """Remove all but the last ``keep_last`` checkpoints of the save folder.

        Each gets a hidden name first: a checkpoint is whole as long as it can be seen.
        """
        old = [path for path in self._replaced if path != newest and path.is_dir()]
        self._replaced = []
        if self.keep_last is not None:
            old += _before(newest, old)[: -self.keep_last]
        for path in old:
            os.rename(path, _unused(newest.parent / f".{path.name}{REMOVED}"))
        tidy_up(newest.parent, "checkpoint-*")  # of killed runs that saved at other steps
        for gone in newest.parent.glob(f".checkpoint-*{REMOVED}"):  # also those of a killed run
            with contextlib.suppress(OSError):  # the next save tries again
                tree.remove(gone)


def _before(newest: Path, leaving: Sequence[Path]) -> list[Path]:
    """The checkpoints of this run up to ``newest``, in order: later ones are no steps of it."""
    steps = {}
    for child in newest.parent.glob("checkpoint-*"):
        number = child.name.removeprefix("checkpoint-")
        if number.isdigit() and child.is_dir() and child not in leaving:
            steps[int(number)] = child
    last = int(newest.name.removeprefix("checkpoint-"))
    return [steps[step] for step in sorted(steps) if step <= last]


def _unused(path: Path) -> Path:
    """``path``, or where a killed run has left one, the same with a number."""
    found, number = path, 1
    while os.path.lexists(found):
        found = path.with_name(f"{path.name.removesuffix(REMOVED)}.{number}{REMOVED}")
        number += 1
    return found


def _is_made(name: str) -> bool:
    """Whether a file of an older checkpoint gives way with it: all that only a checkpoint has."""
    return name == shard_names.CHECKPOINT or name.startswith(_RANK_FILES)


def _is_ours(folder: Path) -> bool:
    """Whether an older release, which kept no journal, left this folder."""
    return any(name.startswith(_RANK_FILES) for name in os.listdir(folder))


def _point_to(final: Path) -> None:
    """Make ``latest`` name a checkpoint, which is on the disk already."""
    with told(final.parent / LATEST):
        tree.replace_file(final.parent / LATEST, f"{final.name}\n".encode())


def _lowest(value: int, group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return value
    box = torch.tensor([value])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=group)
    return int(box.item())


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, by rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
