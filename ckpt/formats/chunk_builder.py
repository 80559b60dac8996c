"""Collects what the files of a checkpoint hold as chunks of logical tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..model.box import row_major
from ..model.dtypes import ITEMSIZE
from ..model.family import Piece, Placed
from ..model.file_layout import Entry
from ..model.manifest import (
    PADDING,
    Chunk,
    Chunks,
    DeferredView,
    Manifest,
    SideFile,
    TensorMeta,
    View,
    category_of,
)
from .native.names import piece_meta


class Gather:
    """Chunks and logical tensors found so far, and the faults."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
        self.shapes, self.sizes = shapes, sizes
        self.metas: dict[str, TensorMeta] = {}
        self.chunks = Chunks()
        self.faults: list[str] = []

    def add(
        self, state: str, placed: Placed, entry: Entry, file: str, pieces: Iterable[Piece] = ()
    ) -> bool:
        """The pieces of one stored tensor, whole in ``entry``; False if its shape is wrong.

        ``pieces`` are those to take where not all are.
        """
        if entry.shape != placed.shape:
            self.faults.append(
                f"{file}: {entry.name}: shape {list(entry.shape)}, this rank of the mesh needs "
                f"{list(placed.shape)}"
            )
            return False
        if 0 not in entry.shape and entry.strides != row_major(entry.shape):
            self.faults.append(
                f"{file}: {entry.name}: not contiguous; save it again with .contiguous()"
            )
            return False
        size = ITEMSIZE[entry.dtype]
        for piece in pieces or placed.pieces:
            offset, strides = placed.bytes_at(piece, entry.offset_bytes, size)
            self.view(
                state, piece, View(file, offset, piece.box.sizes, strides, entry.dtype), entry.name
            )
        return True

    def view(self, state: str, piece: Piece, place: View | DeferredView, name: str) -> None:
        """One box of a logical tensor; ``name`` is the stored tensor's, for messages."""
        fqn = f"{state}/{piece.fqn}" if state else piece.fqn
        meta = piece_meta(piece, self.shapes, self.sizes, place.dtype)
        have = self.metas.setdefault(fqn, meta)
        if have.dtype != meta.dtype:
            self.faults.append(f"{place.file}: {name}: {meta.dtype}, other ranks hold {have.dtype}")
        self.chunks.add(Chunk(fqn, piece.box, place))

    def manifest(self, state: Mapping[str, object], side_files: tuple[SideFile, ...]) -> Manifest:
        """Everything, in the order of the model."""
        order = {fqn: i for i, fqn in enumerate(self.shapes)}
        metas = dict(sorted(self.metas.items(), key=lambda kv: order.get(bare(kv[0]), len(order))))
        return Manifest(metas, self.chunks.by_name, state, side_files)


def bare(fqn: str) -> str:
    """A logical name without its state and padding prefixes."""
    state = category_of(fqn)
    return (fqn[len(state) + 1 :] if state else fqn).removeprefix(PADDING)
