"""Saves native checkpoints of a running trainer, while training continues.

A rank's tensors are copied to host memory, which is all that the step waits for; a thread then
writes this rank's files. No collective runs in that thread: ranks agree over a gloo group of their
own when the trainer next calls ``poll``, and only then rank 0 publishes. Each rank also leaves a
note that it has written its files: at the end of a process, when other ranks may be gone, rank 0
publishes by these notes.

Each rank's part is a plan from its live tensors to its files (rank_files.py); rank 0 holds the
output (output.py), so that lock, staging, sync and rename are those of every command.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.manifest import SideFile
from shardwright.ckpt.move.storage import told

from ..core.notes import Notes
from ..errors import TrainError
from . import ending, output, training_state
from .host_memory import HostMemory
from .output import SaveOutput, Written
from .rank_files import RankSnapshot, snapshot, write_files
from .rank_state import Log, RankState
from .retention import Numbered

NUMBERED = "checkpoint-"  # what the command calls its checkpoints, a step following
_END_SECONDS = 20.0  # so long rank 0 waits at the end of a process for the files of other ranks


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

    number: int  # of this saver's saves
    step: int
    final: Path
    output: SaveOutput | None  # on rank 0
    state: Mapping[str, object]  # JSON
    frozen: set[str] | None  # weights that are not trained; None without an optimizer
    thread: threading.Thread | None = None
    written: list[tuple[str, int, str]] = field(default_factory=list)  # name, size, digest
    error: BaseException | None = None
    took_s: float = 0.0  # to write this rank's files

    def join(self) -> None:
        """Wait for this rank's files."""
        if self.thread is not None:
            self.thread.join()


class Saver:
    """Writes checkpoints while training continues."""

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
        numbered: str = NUMBERED,
        pointer: bool | None = True,
    ) -> None:
        """``reserve`` host memory at once where tensors lie on a GPU, if a save is to come.

        ``on_wait`` is told when a save had to wait for the one before it. ``replaced`` are older
        checkpoints that are removed after the first save. ``keep_last`` counts the folders whose
        names are ``numbered`` and a number. ``pointer``: whether ``latest`` beside a checkpoint is
        to name it; None: where that harms nothing.
        """
        self.held, self.keep_last, self.log, self.on_wait = held, keep_last, log, on_wait
        self.weights_only, self._replaced = weights_only, list(replaced)
        self.numbered, self.pointer = numbered, pointer
        self.memory: HostMemory | None = None
        device = next(iter(held.named.values())).device
        if reserve and device.type == "cuda":
            self.memory = HostMemory(held.bytes_to_save(weights_only), device)
        self.stalled_s = 0.0  # how long the last `save` made the step wait
        self._last_save = time.monotonic()
        self._pending: _Pending | None = None
        self._publishing = threading.Lock()  # a thread may end the save while the script goes on
        self._notes = Notes("save", held.control)

    def save(
        self,
        final: Path,
        step: int,
        state: Mapping[str, object],
        sides: Sequence[SideFile] = (),
        *,
        safe: bool = True,
        into: bool = False,
    ) -> None:
        """Copy everything to host memory and start writing; an unfinished save is waited for.

        ``state`` holds schedule, param_groups and data; what JSON cannot hold is refused here,
        before anything is written. ``sides`` are the side files (config, tokenizer);
        rank 0 writes them. ``safe`` False means ``.bin`` files. With ``into`` the folder is there
        on return, and may be listed and written to. Raises TrainError on every rank.
        """
        table = training_state.to_json(state)
        self._wait_and_tell(step)
        started = self._last_save = time.monotonic()
        self.held.settle()
        made, added = self._open(final, sides, into)
        if self.memory is not None:
            self.memory.clear()
        try:
            files = snapshot(
                self.held, output.stage_of(final, added=added), step, self.memory,
                weights_only=self.weights_only, safe=safe,
            )  # fmt: skip
        except BaseException:
            if made is not None:
                made.close(failed=True)
            raise
        pending = _Pending(self._notes.next(), step, final, made, table, self._frozen())
        pending.thread = threading.Thread(target=self._write, args=(pending, files), daemon=True)
        self._pending = pending
        ending.begin(self.end)
        pending.thread.start()
        self.stalled_s = time.monotonic() - started

    def _frozen(self) -> set[str] | None:
        """The weights of all ranks that are not trained; None if no optimizer state is saved."""
        if self.held.optimizer is None or self.weights_only:
            return None
        return set().union(*gather(self.held.frozen(), self.held.control))

    def _open(
        self, final: Path, sides: Sequence[SideFile], into: bool
    ) -> tuple[SaveOutput | None, bool]:
        """Rank 0 takes the place; TrainError on every rank if it cannot.

        Returns rank 0's output, and whether files are added to a folder.
        """
        made, why, added = None, "", False
        if self.held.rank == 0:
            try:
                with told(final):
                    added = into or final.is_dir()
                    made = SaveOutput(final, added, self.held.model, tuple(sides))
                    made.open()
            except CheckpointError as error:
                why = str(error)
        why, added = gather((why, added), self.held.control)[0]
        if why:
            raise TrainError(f"cannot save: {why}")
        return made, added

    def _write(self, pending: _Pending, files: RankSnapshot) -> None:
        """In the background thread: this rank's files, synced and digested."""
        started = time.monotonic()
        try:
            pending.written += write_files(files)
        except BaseException as error:
            pending.error = error
        pending.took_s = time.monotonic() - started
        said = {"error": str(pending.error)} if pending.error else {"written": pending.written}
        self._notes.leave(pending.number, self.held.rank, json.dumps(said))

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        pending = self._pending
        return pending is not None and pending.thread is not None and pending.thread.is_alive()

    def poll(self) -> bool:
        """Publish if every rank has written its files; True if nothing is left to do.

        All ranks call it at the same step. Raises TrainError if any rank failed to write.
        """
        pending = self._pending
        if pending is None:
            return True
        mine = 1 if self.is_writing else 2
        if pending.error is not None:
            mine = 0
        lowest = _lowest(mine, self.held.control)
        if lowest == 1:
            return False
        if lowest == 0:
            self._pending = None
            self._give_up(pending, pending.error)
        self._publish(pending)
        ending.over(self.end)
        return True

    def _give_up(self, pending: _Pending, error: BaseException | None) -> None:
        """Every rank raises the same TrainError; what was written is removed."""
        said = f"rank {self.held.rank}: {error}" if error is not None else None
        why = [one for one in gather(said, self.held.control) if one is not None]
        if pending.output is not None:
            pending.output.close(failed=True)
        ending.over(self.end)
        raise _not_written(pending.final, why)

    def wait(self) -> None:
        """Block until the running save is published."""
        if self._pending is not None:
            self._pending.join()
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
        with self._publishing:
            is_here = self._pending is pending  # else `end` has published it meanwhile
            self._pending = None
            if is_here and pending.output is not None:
                try:
                    self._finish(pending, pending.output, rows)
                except (CheckpointError, OSError) as failed:
                    error = failed
        if any(gather(error is not None, self.held.control)):
            self._give_up(pending, error)
        self._say_saved(pending)

    def _say_saved(self, pending: _Pending) -> None:
        for line in pending.output.notes if pending.output is not None else ():
            self.log(line)
        self.log(f"saved {pending.final}")

    def _finish(self, pending: _Pending, made: SaveOutput, written: Sequence[Written]) -> None:
        """On rank 0: text files, sync and renames, then the pointer, last what is too old."""
        made.publish(self.held, pending.step, pending.state, pending.frozen, written)
        numbered = Numbered(pending.final.parent, self.numbered)
        is_one = numbered.number(pending.final) is not None
        if self.pointer or (self.pointer is None and is_one and self.numbered == NUMBERED):
            output.point_to(pending.final, self.log, needed=bool(self.pointer))
        if is_one:
            self._prune(numbered, pending.final)

    def _prune(self, numbered: Numbered, newest: Path) -> None:
        """Remove all but the last ``keep_last`` checkpoints of the save folder."""
        old = [path for path in self._replaced if path != newest and path.is_dir()]
        self._replaced = []
        if self.keep_last is not None:
            old += numbered.older(newest, self.keep_last, old)
        numbered.remove(old)

    def end(self) -> None:
        """At the end of this process: finish the save under way without the help of other ranks.

        They may be gone, or wait for each other elsewhere. This rank's files are written, and rank
        0 publishes once all ranks have left their notes; for those that do not come it waits for a
        while. Any thread may call it. Raises TrainError if the save is lost.
        """
        with self._publishing:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            pending.join()
            if pending.output is None:
                return
            try:
                self._finish(pending, pending.output, self._told(pending.number))
            except (CheckpointError, OSError) as error:
                raise _not_written(pending.final, [str(error)]) from error
            finally:
                pending.output.close(failed=True)
            self._say_saved(pending)

    def _told(self, number: int) -> list[Written]:
        """What every rank says it has written; CheckpointError if one does not say so."""
        world = dist.get_world_size(self.held.control) if dist.is_initialized() else 1
        notes = self._notes.read(number, world, _END_SECONDS)
        said = [json.loads(note) if note else {} for note in notes]
        faults = [
            f"rank {rank}: {one.get('error', 'its files are not there')}"
            for rank, one in enumerate(said)
            if "written" not in one
        ]
        if faults:
            raise CheckpointError("; ".join(faults))
        return [one["written"] for one in said]


def _not_written(final: Path, why: Sequence[str]) -> TrainError:
    return TrainError(
        f"{final} could not be written ({'; '.join(why)}); free space there, or keep fewer "
        "checkpoints, and continue from the last one that was saved"
    )


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
