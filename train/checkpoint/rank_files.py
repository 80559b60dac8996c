"""One rank's files of a checkpoint: designed, planned from its live tensors, and written.

The design says which file holds which tensor; ``check_design`` and the plan prove that no two
tensors share a byte and that everything that the rank holds has its place. Tensors lie in host
memory by then, so that training can continue while they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.ckpt.containers import safetensors
from shardwright.ckpt.formats.native import names as shard_names
from shardwright.ckpt.formats.native import writer as shards_out
from shardwright.ckpt.model.chunk_builder import ChunkBuilder
from shardwright.ckpt.model.design import Design, OutFile, check_design
from shardwright.ckpt.model.file_layout import Spec
from shardwright.ckpt.model.mesh import Coord
from shardwright.ckpt.model.planner import Copy, plan
from shardwright.ckpt.model.target import Target
from shardwright.ckpt.move import files, live
from shardwright.ckpt.move.executor import Budget, Mover, run_units, units
from shardwright.ckpt.move.live import LiveTensor

from ..core import rng
from .host_memory import HostMemory, to_host
from .rank_state import Held, RankState, bytes_of, dtype_of


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """What a rank writes of one save; tensors are in host memory."""

    held: RankState
    folder: Path  # where the files go
    suffix: str  # of the files of logical tensors: "safetensors" or "bin"
    parts: tuple[_Part, ...]  # weights, optimizer state
    random: _Random


@dataclass(frozen=True, slots=True)
class _Part:
    """A file of logical tensors."""

    name: str
    metadata: dict[str, str]
    tensors: tuple[LiveTensor, ...]
    copies: tuple[torch.Tensor, ...]  # in host memory, by tensor


@dataclass(frozen=True, slots=True)
class _Random:
    """The file of a rank's random states, which are not resharded."""

    name: str
    metadata: dict[str, str]
    tensors: dict[str, torch.Tensor]


def snapshot(
    held: RankState,
    folder: Path,
    step: int,
    memory: HostMemory | None,
    *,
    weights_only: bool = False,
    safe: bool = True,
) -> RankSnapshot:
    """Copy to host memory what this rank saves: what it owns, and its optimizer share.

    Files of logical tensors are safetensors, or with ``safe`` False ``.bin`` files that
    ``torch.load`` reads. Every rank calls it.
    """
    target, parts = held.target(step), []
    suffix = "safetensors" if safe else "bin"
    if held.saves(held.named):
        parts.append(_part((held.coord, "model", suffix), held.weights(), target, memory))
    if held.optimizer is not None:
        held.optimizer.init_state()  # before the first step too: a state that can be loaded
    moments = [] if weights_only else held.moments()
    # a rank that trains nothing writes an empty file: every file of a mesh is there, or none
    if _on_any_rank(bool(moments), held) and (held.sharded or held.saves(held.named)):
        coord = (*held.coord, ("dp", held.dp_rank)) if held.sharded else held.coord
        parts.append(_part((coord, "optimizer", suffix), moments, target, memory))
    tensors, meta = rng.capture(held.stream)
    random = _Random(
        f"random_states_{held.rank}.safetensors", meta, {k: t.clone() for k, t in tensors.items()}
    )
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return RankSnapshot(held, folder, suffix, tuple(parts), random)


def _on_any_rank(value: bool, held: RankState) -> bool:
    if not dist.is_initialized():
        return value
    box = torch.tensor([int(value)])
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=held.control)
    return bool(box.item())


def _part(
    of: tuple[Coord, str, str], tensors: Sequence[Held], target: Target, memory: HostMemory | None
) -> _Part:
    """``of`` is the file's place in the mesh, its kind and its suffix."""
    coord, kind, suffix = of
    meta = shards_out.rank_metadata(target, coord)
    if "dp" in dict(coord):
        meta["ranges"] = json.dumps({h.live.key: _range(h.live) for h in tensors})
    name = shard_names.file_name(kind, coord, suffix)
    copies = tuple(to_host(h.tensor, memory) for h in tensors)
    return _Part(name, meta, tuple(h.live for h in tensors), copies)


def _range(tensor: LiveTensor) -> list[int]:
    """Elements [start, stop) of the rank's stored tensor."""
    return [tensor.start, math.prod(tensor.placed.shape) if tensor.whole else tensor.stop]


def write_files(made: RankSnapshot) -> list[tuple[str, int, str]]:
    """Create, fill, sync and digest the files: name, size in bytes and xxh3-128 of each."""
    design = _design(made)
    check_design(design, made.folder, ())
    copies = _copies(made, design)
    buffers = {
        tensor.key: bytes_of(copy.contiguous())
        for part in made.parts
        for tensor, copy in zip(part.tensors, part.copies, strict=True)
    }
    for file in design.files:
        files.create(file.path, file.layout)
    found: list[tuple[str, int, str]] = []

    def each(mover: Mover, index: int, unit: list[Copy]) -> None:
        mover.move(unit)

    def finish(mover: Mover) -> None:
        _write_random(made, mover.files)
        for file in design.files:
            _seal(file, mover)
        mover.files.sync()
        for file in design.files:
            mark = files.digest(file.path, mover.files)
            found.append((Path(file.path).name, file.layout.size_bytes, mark))

    run_units(units(copies), Budget(1), each, finish=finish, buffers=buffers)
    return found


def _seal(file: OutFile, mover: Mover) -> None:
    """Fill in the CRC-32s of a ``.bin`` file; one may cover the slots of those that end before."""
    scratch = memoryview(bytearray(files.SCRATCH_BYTES))
    for part in sorted(file.layout.checksums, key=lambda c: c.offset_bytes + c.length_bytes):
        files.seal(file.path, part, mover.files, scratch, mover.stop)


def _design(made: RankSnapshot) -> Design:
    """The files, and where each logical tensor's boxes lie in them."""
    builder, out = ChunkBuilder(made.held.placement), []
    for part in made.parts:
        specs = [Spec(t.key, t.dtype, t.shape) for t in part.tensors]
        layout = shard_names.container(made.suffix).layout(specs, part.metadata)
        path = str(made.folder / part.name)
        out.append(OutFile(path, layout))
        for tensor in part.tensors:
            span = None if tensor.whole else (tensor.start, tensor.stop)
            at = layout.offsets[tensor.key]
            builder.add(tensor.state, tensor.placed, path, at, tensor.dtype, span)
    specs = [Spec(k, dtype_of(t), tuple(t.shape)) for k, t in made.random.tensors.items()]
    layout = safetensors.layout(specs, made.random.metadata)
    out.append(OutFile(str(made.folder / made.random.name), layout))
    return Design(out, builder.manifest())


def _copies(made: RankSnapshot, design: Design) -> list[Copy]:
    """The copies from this rank's memory to its files; they leave nothing out."""
    tensors = [tensor for part in made.parts for tensor in part.tensors]
    source = live.manifest(tensors, made.held.placement)
    copies = plan(source, design.manifest, share=True, part=True).copies
    have = sum(copy.numel() * copy.element_size() for part in made.parts for copy in part.copies)
    planned = sum(copy.nbytes for copy in copies)
    assert planned == have, f"{made.folder}: {planned} bytes are planned of {have}"
    return copies


def _write_random(made: RankSnapshot, opened: files.Files) -> None:
    """The random states go straight to their file."""
    specs = [Spec(k, dtype_of(t), tuple(t.shape)) for k, t in made.random.tensors.items()]
    layout = safetensors.layout(specs, made.random.metadata)
    for name, tensor in made.random.tensors.items():
        path = str(made.folder / made.random.name)
        opened.write(path, layout.offsets[name], bytes_of(tensor.contiguous()))
