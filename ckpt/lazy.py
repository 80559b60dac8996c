"""Lazy arrays: slicing one reads that part of a logical tensor from the files."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from .errors import install
from .model.box import Box, full, row_major
from .model.dtypes import ITEMSIZE, TO_TORCH
from .model.manifest import Chunk, Manifest, TensorMeta, View
from .model.planner import plan, resolve
from .move.cast import Array, raw, values
from .move.executor import Budget, Mover
from .move.files import Files
from .move.storage import LOCAL, Storage

if TYPE_CHECKING:
    import torch

_MEMORY = "<memory>"
One = SupportsIndex | slice | EllipsisType
Key = One | tuple[One, ...]


@dataclass(frozen=True, slots=True)
class LazyArray:
    """A logical tensor of an open checkpoint."""

    fqn: str
    meta: TensorMeta
    chunks: Sequence[Chunk]
    storage: Storage = LOCAL  # of the chunks' files

    def __repr__(self) -> str:
        return f"<LazyArray {self.fqn}: {self.dtype} {list(self.shape)}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dim."""
        return self.meta.shape

    @property
    def dtype(self) -> str:
        """The stored type under safetensors' name, e.g. ``BF16``."""
        return self.meta.dtype

    def __getitem__(self, key: Key) -> Array:
        """Values of a box as a NumPy array; bfloat16 and float8 widen to float32.

        Indices are whole numbers of any type, slices with a step of 1, and one ``...``.
        """
        starts, sizes, kept = [], [], []
        for dim, (k, size) in enumerate(zip(self._keys(key), self.shape, strict=True)):
            if isinstance(k, slice):
                start, stop, step = k.indices(size)
                if step != 1:
                    raise IndexError(f"{self.fqn}: steps other than 1 are not supported")
                starts.append(start)
                sizes.append(max(0, stop - start))
                kept.append(dim)
                continue
            if not -size <= k < size:
                raise IndexError(f"{self.fqn}: index {k} of dim {dim} of size {size}")
            starts.append(k % size)
            sizes.append(1)
        array = values(self.raw(Box(tuple(starts), tuple(sizes))), self.dtype)
        return array.reshape([sizes[dim] for dim in kept])

    def _keys(self, key: Key) -> list[int | slice]:
        """One index for each dim."""
        keys = list(key) if isinstance(key, tuple) else [key]
        wide = [i for i, k in enumerate(keys) if k is Ellipsis]
        missing = len(self.shape) - (len(keys) - len(wide))
        if len(wide) > 1 or missing < 0:
            raise IndexError(f"{self.fqn}: {len(keys)} indices for shape {list(self.shape)}")
        at = wide[0] if wide else len(keys)
        keys[at : at + len(wide)] = [slice(None)] * missing
        return [self._index(k) for k in keys]

    def _index(self, key: object) -> int | slice:
        if isinstance(key, slice):
            return key
        try:
            if not isinstance(key, (bool, np.bool_)):
                return operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            pass
        raise IndexError(
            f"{self.fqn}: {key!r:.80} is not an index; use whole numbers, slices and ... "
            "([:] gives the whole array for anything else)"
        )

    def __len__(self) -> int:
        """Elements along the first dim."""
        if not self.shape:
            raise TypeError(f"{self.fqn}: a scalar has no length")
        return self.shape[0]

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> Array:
        """The whole tensor for ``np.asarray``; bytes of a file are always copied."""
        if copy is False:
            raise ValueError(f"{self.fqn}: is in a file, so it cannot be read without a copy")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype)

    def raw(self, box: Box | None = None) -> Array:
        """The bits of a box (in this tensor's coordinates) as unsigned integers."""
        box = box or full(self.shape)
        array = np.zeros(box.sizes, raw(self.dtype))
        buffer = memoryview(array.reshape(-1).view(np.uint8).data)
        moved = [
            Chunk(self.fqn, _shift(common, box), chunk.narrow(common))
            for chunk in self.chunks
            if (common := chunk.box.intersect(box)) is not None
        ]
        meta = TensorMeta(box.sizes, self.dtype)
        view = View(_MEMORY, 0, box.sizes, row_major(box.sizes), self.dtype)
        target = Manifest({self.fqn: meta}, {self.fqn: [Chunk(self.fqn, full(box.sizes), view)]})
        made = resolve(plan(Manifest({self.fqn: meta}, {self.fqn: moved}), target))
        with Files({_MEMORY: buffer}, self.storage) as files:
            Mover(files, Budget()).move(made.copies)
        return array

    def torch(self) -> torch.Tensor:
        """The whole tensor for torch, in its stored dtype."""
        try:
            import torch
        except ModuleNotFoundError as error:
            text = f"{self.fqn}: {install('torch', 'torch')}"
            raise ModuleNotFoundError(text, name=error.name) from error

        data = torch.from_numpy(self.raw().reshape(-1).view(np.uint8).copy())
        kind: torch.dtype = getattr(torch, TO_TORCH[self.dtype])
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=kind)
        return data.view(kind).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def _shift(box: Box, origin: Box) -> Box:
    """``box`` in coordinates that begin at ``origin``."""
    return Box(tuple(b - o for b, o in zip(box.offsets, origin.offsets, strict=True)), box.sizes)
