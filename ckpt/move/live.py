"""Tensors in memory as a manifest: what a rank of the trainer holds, under the names in shards.

A live tensor is a stored tensor of this rank, or a row-major range of one (a distributed
optimizer's share). Its bytes are a buffer that the executor reads and writes like a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import raise_all
from ..model.chunk_builder import ChunkBuilder
from ..model.dtypes import ITEMSIZE
from ..model.manifest import Manifest
from ..model.placement import Placed, Placement
from ..model.planner import Copy, plan, resolve

if TYPE_CHECKING:
    from .executor import Mover


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A stored tensor or its elements ``[start, stop)``, contiguous in memory."""

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
    builder = ChunkBuilder(here)
    for live in tensors:
        span = None if live.whole else (live.start, live.stop)
        builder.add(live.state, live.placed, live.key, 0, live.dtype, span)
    return builder.manifest()


def load(
    source: Manifest,
    tensors: Sequence[LiveTensor],
    buffers: Mapping[str, memoryview],
    here: Placement,
    memory_budget: int = 32 << 20,
) -> None:
    """Fill this rank's buffers from any manifest; a rank reads only the bytes that it needs.

    Buffers must hold zeros if the source may lack padding rows. CheckpointError lists every logical
    tensor that the source lacks or has in another shape.
    """
    from .executor import Budget, run_units, units

    _check_buffers(tensors, buffers)
    copies = resolve(plan(source, manifest(tensors, here), share=True)).copies

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
