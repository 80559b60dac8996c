"""Saving and loading of a running trainer: native checkpoints, written while training goes on.

A rank describes its tensors as live tensors (ckpt/move/live.py). Loading plans them against
any readable checkpoint, so that each rank reads its own share and nothing else. Saving copies
them to host memory, which is all that the step waits for; a thread then writes this rank's
files. No collective runs in that thread: ranks agree over a gloo group of their own when the
trainer next calls ``poll``, and only then rank 0 publishes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.checkpoint.types import WITHOUT, Checkpoint, ReadOptions
from shardwright.ckpt.containers import safetensors
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.formats.megatron.classic import reader as megatron
from shardwright.ckpt.formats.megatron.torch_dist import reader as megatron_dist
from shardwright.ckpt.formats.native import names as shard_names
from shardwright.ckpt.formats.native import writer as shards_out
from shardwright.ckpt.model.dtypes import FROM_TORCH
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.file_layout import Spec
from shardwright.ckpt.model.manifest import Manifest, SideFile, category_of
from shardwright.ckpt.model.mesh import Coord, Mesh
from shardwright.ckpt.model.placement import Placement
from shardwright.ckpt.model.target import Target
from shardwright.ckpt.move import files, live
from shardwright.ckpt.move.live import LiveTensor
from shardwright.ckpt.move.publish import _exchange as exchange
from shardwright.ckpt.reader import LATEST, follow, read_checkpoint

from ..core import rng
from ..core.layout import Place
from ..core.optim import OptimizerView
from ..doctor import findings as advice
from ..errors import TrainError
from ..patches import graphs

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Held:
    """A live tensor and the memory that it stands for."""

    live: LiveTensor
    tensor: torch.Tensor  # contiguous, on the training device


@dataclass(slots=True)
class RankState:
    """What one rank holds of a model and its optimizer."""

    model: Model
    mesh: Mesh  # tp and pp
    place: Place  # of this rank
    named: Mapping[str, torch.nn.Parameter]  # stored name -> parameter
    optimizer: OptimizerView | None
    sharded: bool  # the optimizer is cut over dp
    vocab_multiple: int
    control: dist.ProcessGroup | None  # gloo, for agreement on saves
    settle: Callable[[], None] = lambda: None  # every rank's weights are those of the last step
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        self.placement = Placement.written(self.model, self.mesh, self.vocab_multiple)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.place.dp

    @property
    def dp_rank(self) -> int:
        """This rank's place among them."""
        return self.place.dp_rank

    @property
    def coord(self) -> Coord:
        """This rank's place in the mesh."""
        return self.place.coord

    @property
    def rank(self) -> int:
        """Of the whole world."""
        return self.place.rank

    def saves(self, names: Iterable[str]) -> bool:
        """Whether this rank writes the file of these stored tensors, whose owner is one rank."""
        owners = {self.place.owner(name) for name in names} or {self.place.owner("")}
        assert len(owners) == 1, f"one file, several owners: {owners}"
        return owners == {self.rank}

    def weights(self) -> list[Held]:
        """The weights, in row order."""
        return [self._held("", placed.name, p.data) for placed, p in self._rows()]

    def moments(self) -> list[Held]:
        """Masters and moments that this rank holds, whole or in ranges."""
        if self.optimizer is None:
            return []
        found = [
            self._held(slot.state, placed.name, slot.tensor, slot.start, slot.stop)
            for placed, param in self._rows()
            for slot in self.optimizer.slots(param)
        ]
        return sorted(found, key=lambda held: held.live.state)

    def bytes_to_save(self, weights_only: bool) -> list[int]:
        """The sizes of the tensors that this rank saves, in no set order."""
        rows = [(placed.name, param) for placed, param in self._rows()]
        owned = [param for name, param in rows if self.place.owns(name)]
        found = [p.numel() * p.element_size() for p in owned]
        if self.optimizer is None or weights_only:
            return found
        stepped = [param for _, param in rows] if self.sharded else owned
        return found + [size for param in stepped for size in self.optimizer.sizes(param)]

    def _rows(self) -> list[tuple[Any, torch.nn.Parameter]]:
        rows = self.placement.placed[self.coord]
        lacking = [p.name for p in rows if p.name not in self.named]
        surplus = set(self.named) - {p.name for p in rows}
        assert not lacking, f"the model lacks {lacking}"
        assert not surplus, f"no row places {surplus}"
        return [(placed, self.named[placed.name]) for placed in rows]

    def _held(
        self, state: str, name: str, tensor: torch.Tensor, start: int = 0, stop: int = -1
    ) -> Held:
        placed = self.placement.find(self.coord, name)
        if not self.sharded and stop >= 0:  # cut over a single rank: all of it
            tensor, start, stop = tensor.view(placed.shape), 0, -1
        dtype = FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]
        made = LiveTensor(state, placed, dtype, start, stop)
        assert tuple(tensor.shape) == made.shape, f"{name}: {tuple(tensor.shape)} {made.shape}"
        return Held(made, tensor)

    def target(self, step: int) -> Target:
        """What a checkpoint of this trainer is."""
        return Target(self.model, self.mesh, self.dp, self.sharded, self.vocab_multiple, True, step)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


# --- loading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint gave."""

    checkpoint: Checkpoint
    step: int
    state: Mapping[str, object]  # schedule, param_groups, data
    optimizer: bool  # moments were loaded
    random: bool  # this rank's random state was restored


def load(
    path: str | Path,
    held: RankState,
    *,
    read: ReadOptions | None = None,
    weights_only: bool = False,
    seed: int = 0,
    log: Log = lambda line: None,
) -> Loaded:
    """Fill this rank's weights, and its optimizer and random states where the source has them.

    Any readable checkpoint in any layout. Raises CheckpointError or TrainError.
    """
    read = read or _reading(path, held)
    try:
        ckpt = read_checkpoint(path, read)
    except CheckpointError:
        if not weights_only:
            raise
        # what is wrong may be the optimizer's; where nothing is, its masters refine the weights
        ckpt = read_checkpoint(path, replace(read, weights_only=True))
    _check_model(ckpt, held)
    if held.optimizer is not None and (fault := ckpt.optimizer_fault()):
        if not weights_only:
            how = "MEGATRON_LM_NO_LOAD_OPTIM=true goes on without the optimizer"
            raise TrainError(fault.replace(WITHOUT, how))
        ckpt = read_checkpoint(path, replace(read, weights_only=True))  # its masters are no better
    held.settle()
    source = _as_masters(ckpt.manifest, held)
    states = {category_of(fqn) for fqn in ckpt.manifest.tensors} - {""}
    with_optimizer = bool(states) and not weights_only and held.optimizer is not None
    if with_optimizer and held.optimizer is not None:
        held.optimizer.init_state()
    known = {category_of(fqn) for fqn in source.tensors}
    moments = held.moments()
    kinds = {h.live.state for h in moments}
    fresh = with_optimizer and states <= {"master"} and _no_step_yet(ckpt.manifest.state)
    if with_optimizer and not fresh and (kinds - known) - {"master"}:
        raise TrainError(
            f"{path}: has no {', '.join(sorted(kinds - known))}, which this optimizer needs; "
            "load with weights only"
        )
    loads = known if with_optimizer else known & {"master"}
    _fill(source, held.weights() + [h for h in moments if h.live.state in loads], held)
    if held.optimizer is not None and "master" in kinds - loads:
        held.optimizer.refresh_masters()
        log("masters were refreshed from the loaded weights")
    random = _restore_random(ckpt, held, seed, log) if not weights_only else False
    had_moments = with_optimizer and not fresh
    return Loaded(ckpt, ckpt.step or 0, ckpt.manifest.state, had_moments, random)


def describes_itself(where: Path) -> bool:
    """Whether the model is told by Megatron-LM's args, for want of a config.json."""
    own = megatron.sniff(where) or megatron_dist.sniff(where)
    return own and not (where / "config.json").is_file()


def _reading(path: str | Path, held: RankState) -> ReadOptions:
    """Megatron-LM's args do not say how many rows of the vocabulary are true ones; we know."""
    if describes_itself(follow(path)):
        return ReadOptions(vocab_size=held.model.sizes["vocab"])
    return ReadOptions()


def _no_step_yet(state: Mapping[str, object]) -> bool:
    """Whether the optimizer was saved before its first step, when it has masters alone."""
    groups = state.get("param_groups")
    return isinstance(groups, list) and not any(
        "step" in group for group in groups if isinstance(group, Mapping)
    )


def _check_model(ckpt: Checkpoint, held: RankState) -> None:
    """A checkpoint of another model is refused before any tensor is looked at."""
    if ckpt.model is None:
        return  # a bare file: names and shapes decide
    ours, theirs = held.model, ckpt.model
    if ours.family.name != theirs.family.name:
        raise TrainError(
            f"{ckpt.path}: is a {theirs.family.name} model, this run trains {ours.family.name}"
        )
    for symbol, size in ours.sizes.items():
        if theirs.sizes.get(symbol) != size:
            raise TrainError(
                f"{ckpt.path}: {symbol} is {theirs.sizes.get(symbol)}, this run has {size}; "
                "it is a checkpoint of another model"
            )


def _as_masters(source: Manifest, held: RankState) -> Manifest:
    """Let fp32 weights stand for masters and masters for fp32 weights, where one is absent.

    A run in bf16 that resumes from fp32 weights so keeps all their bits.
    """
    ours = FROM_TORCH[str(next(iter(held.named.values())).dtype).removeprefix("torch.")]
    masters = {f for f in source.tensors if category_of(f) == "master"}
    tensors, chunks = dict(source.tensors), dict(source.chunks)
    if masters and ours == "F32":
        for fqn in masters:
            plain = fqn.removeprefix("master/")
            tensors[plain], chunks[plain] = source.tensors[fqn], source.chunks[fqn]
    if not masters and ours != "F32":
        for fqn, meta in source.tensors.items():
            if category_of(fqn) == "" and meta.dtype == "F32":
                tensors["master/" + fqn], chunks["master/" + fqn] = meta, source.chunks[fqn]
    return Manifest(tensors, chunks, source.state, source.side_files)


def _fill(source: Manifest, wanted: Sequence[Held], held: RankState) -> None:
    """Read into the tensors: directly on CPU, through host memory elsewhere."""
    host = {
        h.live.key: torch.zeros(h.tensor.shape, dtype=h.tensor.dtype)
        if h.tensor.device.type != "cpu"
        else h.tensor
        for h in wanted
    }
    for tensor in host.values():
        tensor.detach().zero_()  # padding rows that the source lacks
    buffers = {key: _bytes(tensor) for key, tensor in host.items()}
    live.load(source, [h.live for h in wanted], buffers, held.placement)
    for h in wanted:
        if host[h.live.key] is not h.tensor:
            h.tensor.copy_(host[h.live.key])


def _restore_random(ckpt: Checkpoint, held: RankState, seed: int, log: Log) -> bool:
    """This rank's random state, if the layout is the one that saved it."""
    same = ckpt.mesh == held.mesh and ckpt.dp == held.dp
    name = f"random_states_{held.rank}.safetensors"
    path = next((s.source for s in ckpt.random_states if s.name == name), None)
    if same and path is not None:
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            rng.restore(tensors, opened.metadata())
        return True
    rng.reseed(seed, ckpt.step or 0, held.rank)
    why = "another layout saved it" if ckpt.random_states else "the checkpoint holds none"
    log(f"random state: reseeded from (seed {seed}, step {ckpt.step or 0}, rank); {why}")
    return False


# --- saving ------------------------------------------------------------------------------------


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


_SLAB = 1 << 29  # bytes; a power of two, to which torch rounds what it pins
_LARGE = _SLAB // 8  # tensors above this have memory of their own


class HostMemory:
    """Host memory that a GPU copies to at full speed, allocated once and in the background.

    Pinning takes as long as filling the memory: seconds for a model of a billion parameters.
    One save uses it at a time.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """``sizes``: the bytes of the tensors of a save, in any order."""
        self._device = device
        self._large: list[torch.Tensor] = []
        self._slabs: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []  # of the large ones
        self._used: list[int] = []  # bytes of each slab
        self.seconds = 0.0  # that the allocation took
        self._thread = threading.Thread(target=self._allocate, args=(sizes,), daemon=True)
        graphs.wait_for(self._thread)
        self._thread.start()

    def _allocate(self, sizes: Sequence[int]) -> None:
        started = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread's is the first GPU
        small = sum(_aligned(size) for size in sizes if size <= _LARGE)
        slabs = -(-small // (_SLAB - _LARGE))  # whatever the order, less than _LARGE stays empty
        try:
            for size in sizes:
                if size > _LARGE:
                    self._large.append(self._pinned(size))
            for _ in range(slabs):
                self._slabs.append(self._pinned(_SLAB))
        except RuntimeError:
            pass  # too little memory: a save that needs it will say so
        self.seconds = time.monotonic() - started

    def _pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    @property
    def ready(self) -> bool:
        """Whether the allocation is over."""
        return not self._thread.is_alive()

    def clear(self) -> None:
        """Forget every tensor; waits for the allocation."""
        self._thread.join()
        self._free = list(self._large)
        self._used = [0] * len(self._slabs)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor of that shape and type, on which nothing else lies."""
        size = like.numel() * like.element_size()
        return self._bytes(size).view(like.dtype).view(like.shape)

    def _bytes(self, size: int) -> torch.Tensor:
        if size > _LARGE:
            found = next((i for i, x in enumerate(self._free) if x.numel() == size), None)
            return self._free.pop(found) if found is not None else self._pinned(size)
        for i, used in enumerate(self._used):
            if used + size <= _SLAB:
                self._used[i] = used + _aligned(size)
                return self._slabs[i][used : used + size]
        return self._pinned(size)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


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
        specs = [Spec(k, _dtype(t), tuple(t.shape)) for k, t in tensors.items()]
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
        copies = [_to_host(h.tensor, self.memory) for h in tensors]
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
            said = advice.slow_save(
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
            exchange(pending.stage, pending.final)
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


def _dtype(tensor: torch.Tensor) -> str:
    return FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]


def _to_host(tensor: torch.Tensor, memory: HostMemory | None) -> torch.Tensor:
    """A copy in host memory that later steps do not change."""
    if memory is None:
        return tensor.detach().to("cpu", copy=True)
    return memory.take(tensor).copy_(tensor.detach(), non_blocking=True)


def _write_file(snapshot: _Snapshot) -> tuple[int, str]:
    """Create, fill, sync and digest one file; its size and xxh3-128."""
    blueprint = safetensors.layout(snapshot.specs, snapshot.metadata)
    path = str(snapshot.path)
    files.create(path, blueprint)
    with files.Files() as opened:
        for spec, tensor in zip(snapshot.specs, snapshot.tensors, strict=True):
            opened.write(path, blueprint.offsets[spec.name], _bytes(tensor.contiguous()))
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
