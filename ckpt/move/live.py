"""Tensors in memory as a manifest: what a trainer's rank holds, under the names of shards.

A live tensor is a stored tensor of this rank, or a row-major range of one (a distributed
optimizer's share). Its bytes are a buffer that the executor reads and writes like a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CheckpointError, raise_all
from ..formats.native.names import piece_meta
from ..formats.native.writer import Placement
from ..model.dtypes import ITEMSIZE
from ..model.family import Placed
from ..model.manifest import Chunk, Chunks, Manifest, TensorMeta, View
from ..model.planner import Copy, plan

if TYPE_CHECKING:
    from .executor import Mover


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A stored tensor, or the elements ``[start, stop)`` of one, contiguous in memory."""

    state: str  # "" for a weight, else one of manifest.STATES
    placed: Placed
    dtype: str
    start: int = 0  # elements, row-major in the rank's stored tensor
    stop: int = -1  # one past the last element; -1 for the whole tensor

    @property
    def key(self) -> str:
        """Name of its buffer, and of the tensor in a rank file."""
        return f"{self.state}/{self.placed.name}" if self.state else self.placed.name

    @property
    def whole(self) -> bool:
        return self.stop < 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape, or 1-D for a range."""
        return self.placed.shape if self.whole else (self.stop - self.start,)


def manifest(tensors: Sequence[LiveTensor], here: Placement) -> Manifest:
    """Where the logical tensors' boxes lie in this rank's buffers."""
    metas: dict[str, TensorMeta] = {}
    chunks = Chunks()
    for live in tensors:
        size = ITEMSIZE[live.dtype]
        pieces = live.placed.pieces
        if not live.whole:
            pieces = tuple(live.placed.clip(live.start, live.stop))
        for piece in pieces:
            fqn = f"{live.state}/{piece.fqn}" if live.state else piece.fqn
            offset, strides = live.placed.bytes_at(piece, -live.start * size, size)
            view = View(live.key, offset, piece.box.sizes, strides, live.dtype)
            chunks.add(Chunk(fqn, piece.box, view))
            metas[fqn] = piece_meta(piece, here.shapes, here.sizes, live.dtype)
    return Manifest(metas, chunks.by_name)


def load(
    source: Manifest,
    tensors: Sequence[LiveTensor],
    buffers: Mapping[str, memoryview],
    here: Placement,
    memory_budget: int = 32 << 20,
) -> None:
    """Fill this rank's buffers from any manifest; each byte is read by who needs it.

    Buffers must hold zeros where the source may lack padding rows. Raises CheckpointError
    with every logical tensor that the source lacks or has in another shape.
    """
    from .executor import Budget, run_units, units

    _check_buffers(tensors, buffers)
    copies = plan(source, manifest(tensors, here), share=True).copies

    def each(mover: Mover, index: int, unit: list[Copy]) -> None:
        mover.move(unit)

    run_units(units(copies), Budget(1, memory_budget), each, buffers=buffers)


def _check_buffers(tensors: Sequence[LiveTensor], buffers: Mapping[str, memoryview]) -> None:
    faults = []
    for live in tensors:
        need = math.prod(live.shape) * ITEMSIZE[live.dtype]
        have = len(buffers[live.key]) if live.key in buffers else -1
        if have != need:
            faults.append(f"{live.key}: needs {need} bytes of memory, got {have}")
    raise_all(faults, "live tensors")


def find(rows: Sequence[Placed], name: str) -> Placed:
    """The stored tensor of that name on a rank."""
    for placed in rows:
        if placed.name == name:
            return placed
    raise CheckpointError(f"{name}: no stored tensor of this rank has that name")
