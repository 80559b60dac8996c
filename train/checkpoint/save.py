"""Saves native checkpoints of a running trainer, while training goes on.

A rank's tensors are copied to host memory, which is all that the step waits for; a thread then
writes this rank's files. No collective runs in that thread: ranks agree over a gloo group of their
own when the trainer next calls ``poll``, and only then rank 0 publishes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.containers import safetensors
from shardwright.ckpt.formats.native import names as shard_names
from shardwright.ckpt.formats.native import writer as shards_out
from shardwright.ckpt.model.file_layout import Spec
from shardwright.ckpt.model.manifest import SideFile
from shardwright.ckpt.model.mesh import Coord
from shardwright.ckpt.model.target import Target
from shardwright.ckpt.move import files
from shardwright.ckpt.move.live import LiveTensor
from shardwright.ckpt.move.publish import _exchange as exchange
from shardwright.ckpt.reader import LATEST

from ..core import rng
from ..doctor import measured
from ..errors import TrainError
from .host_memory import HostMemory, to_host
from .rank_state import Held, Log, RankState, bytes_of, dtype_of


@dataclass(slots=True)
class _Pending:
    """A save whose files are being written."""

    step: int
    final: Path
    stage: Path
    thread: threading.Thread
    sides: tuple[SideFile, ...]
    state: Mapping[str, object]
    written: list[tuple[str, int, str]] = field(default_factory=list)  # name, size, digest
    error: BaseException | None = None
    took_s: float = 0.0  # to write this rank's files


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A file of this rank in host memory."""

    path: Path
    specs: list[Spec]
    tensors: list[torch.Tensor]
    metadata: dict[str, str]


class Saver:
    """Writes checkpoints ``SAVE_DIR/checkpoint-STEP`` while training goes on."""

    def __init__(
        self,
        held: RankState,
        *,
        keep_last: int | None = None,
        log: Log = lambda line: None,
        weights_only: bool = False,
        reserve: bool = True,
    ) -> None:
        """``reserve`` host memory at once where tensors lie on a GPU, if a save is to come."""
        self.held, self.keep_last, self.log = held, keep_last, log
        self.weights_only = weights_only
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

        ``state`` holds schedule, param_groups and data as JSON values. ``sides`` are files that
        travel along (config, tokenizer); rank 0 writes them.
        """
        self._wait_and_say(step)
        started = self._last_save = time.monotonic()
        self.held.settle()
        stage = final.parent / f".{final.name}.partial"
        if self.held.rank == 0:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
        _barrier(self.held.control)
        if self.memory is not None:
            self.memory.clear()
        snapshots = self._snapshots(stage, step)
        thread = threading.Thread(target=self._write, args=(snapshots,), daemon=True)
        self._pending = _Pending(step, final, stage, thread, tuple(sides), dict(state))
        thread.start()
        self.stalled_s = time.monotonic() - started

    def _snapshots(self, stage: Path, step: int) -> list[_Snapshot]:
        """This rank's files: the first dp rank has the weights, each has its optimizer share."""
        held, target = self.held, self.held.target(step)
        found = []
        if held.saves(held.named):
            found.append(self._snapshot(stage, "model", held.coord, held.weights(), target))
        if held.optimizer is not None:
            held.optimizer.init_state()  # before the first step too: a state that can be loaded
        moments = [] if self.weights_only else held.moments()
        if moments and (held.sharded or held.saves(held.named)):
            coord = (*held.coord, ("dp", held.dp_rank)) if held.sharded else held.coord
            found.append(self._snapshot(stage, "optimizer", coord, moments, target))
        tensors, meta = rng.capture()
        specs = [Spec(k, dtype_of(t), tuple(t.shape)) for k, t in tensors.items()]
        path = stage / f"random_states_{held.rank}.safetensors"
        found.append(_Snapshot(path, specs, [t.clone() for t in tensors.values()], meta))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return found

    def _snapshot(
        self,
        stage: Path,
        kind: str,
        coord: Coord,
        tensors: Sequence[Held],
        target: Target,
    ) -> _Snapshot:
        specs = [Spec(h.live.key, h.live.dtype, h.live.shape) for h in tensors]
        meta = shards_out.rank_metadata(target, coord)
        if "dp" in dict(coord):
            ranges = {h.live.key: _range(h.live) for h in tensors}
            meta["ranges"] = json.dumps(ranges)
        name = shard_names.file_name(kind, coord, "safetensors")
        copies = [to_host(h.tensor, self.memory) for h in tensors]
        return _Snapshot(stage / name, specs, copies, meta)

    def _write(self, snapshots: Sequence[_Snapshot]) -> None:
        """In the background thread: this rank's files, synced and digested."""
        pending = self._pending
        assert pending is not None
        started = time.monotonic()
        try:
            for snapshot in snapshots:
                size, mark = _write_file(snapshot)
                pending.written.append((snapshot.path.name, size, mark))
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
            rank, error = self.held.rank, pending.error
            said = f"rank {rank}: {error}" if error is not None else None
            why = [one for one in _gather(said, self.held.control) if one is not None]
            raise TrainError(
                f"{pending.final} could not be written ({'; '.join(why)}); free space there, or "
                "keep fewer checkpoints, and go on from the last one that was saved"
            )
        self._publish(pending)
        return True

    def wait(self) -> None:
        """Block until the running save is published."""
        if self._pending is not None:
            self._pending.thread.join()
            while not self.poll():
                time.sleep(0.01)

    def _wait_and_say(self, step: int) -> None:
        """Wait for an unfinished save, and say so where that holds training up."""
        pending, started = self._pending, time.monotonic()
        self.wait()
        if pending is not None:
            ended = time.monotonic()
            size = sum(size for _, size, _ in pending.written)
            said = measured.slow_save(
                step, ended - started, ended - self._last_save, size, pending.took_s
            )
            if said:
                self.log(said)

    def _publish(self, pending: _Pending) -> None:
        rows = _gather(pending.written, self.held.control)
        if self.held.rank == 0:
            table = {name: (size, mark) for part in rows for name, size, mark in part}
            self._finish(pending, table)
        _barrier(self.held.control)
        self.log(f"saved {pending.final}")

    def _finish(self, pending: _Pending, table: Mapping[str, tuple[int, str]]) -> None:
        """On rank 0: the text files, one rename, then the pointer."""
        target = self.held.target(pending.step)
        for side in pending.sides:
            _write_side(pending.stage, side)
        padded = self.held.placement.padded
        dtype = str(next(iter(self.held.named.values())).dtype).removeprefix("torch.")
        text = shards_out.checkpoint_json(target, pending.state, padded, dtype, table)
        _write_text(pending.stage / shard_names.CHECKPOINT, text)
        _sync_folder(pending.stage)
        if pending.final.exists():
            exchange(pending.stage, pending.final, pending.stage.with_suffix(".replaced"))
            shutil.rmtree(pending.stage)
        else:
            os.rename(pending.stage, pending.final)
        pointer = pending.final.parent / f".{LATEST}.partial"
        _write_text(pointer, pending.final.name + "\n")
        os.replace(pointer, pending.final.parent / LATEST)
        _sync_folder(pending.final.parent)
        self._prune(pending.final)

    def _prune(self, newest: Path) -> None:
        """Remove all but the last ``keep_last`` checkpoints of the save folder."""
        if self.keep_last is None:
            return
        steps = {}
        for child in newest.parent.glob("checkpoint-*"):
            number = child.name.removeprefix("checkpoint-")
            if number.isdigit() and child.is_dir():
                steps[int(number)] = child
        for step in sorted(steps)[: -self.keep_last]:
            if steps[step] != newest:
                shutil.rmtree(steps[step])


def _range(tensor: LiveTensor) -> list[int]:
    stop = tensor.stop
    if tensor.whole:
        stop = 1
        for size in tensor.placed.shape:
            stop *= size
    return [tensor.start, stop]


def _write_file(snapshot: _Snapshot) -> tuple[int, str]:
    """Create, fill, sync and digest one file; its size and xxh3-128."""
    blueprint = safetensors.layout(snapshot.specs, snapshot.metadata)
    path = str(snapshot.path)
    files.create(path, blueprint)
    with files.Files() as opened:
        for spec, tensor in zip(snapshot.specs, snapshot.tensors, strict=True):
            opened.write(path, blueprint.offsets[spec.name], bytes_of(tensor.contiguous()))
        opened.sync()
        return blueprint.size_bytes, files.digest(path, opened)


def _write_side(stage: Path, side: SideFile) -> None:
    target = stage / side.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if side.source:
        shutil.copyfile(side.source, target)
    else:
        target.write_text(side.text, encoding="utf-8")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lowest(value: int, group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return value
    box = torch.tensor([value])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=group)
    return int(box.item())


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group=group)
