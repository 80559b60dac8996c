"""Turns stored tensors, at known bytes, into chunks of logical tensors.

Readers, writers and the trainer's live tensors all build their manifests here.
"""

from __future__ import annotations

from collections.abc import Mapping

from .box import row_major
from .dtypes import ITEMSIZE
from .file_layout import Entry
from .manifest import (
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
from .placement import Piece, Placed, Placement

Span = tuple[int, int]  # the row-major elements [start, stop) of a stored tensor


class ChunkBuilder:
    """Chunks and logical tensors of a placement found so far, and the faults."""

    def __init__(self, here: Placement) -> None:
        self.here = here
        self.metas: dict[str, TensorMeta] = {}
        self.chunks = Chunks()
        self.faults: list[str] = []

    def add(
        self,
        state: str,
        placed: Placed,
        file: str,
        offset_bytes: int,
        dtype: str,
        span: Span | None = None,
        name: str = "",
        steps: tuple[int, ...] | None = None,
    ) -> None:
        """Add a stored tensor, or ``span`` of it; its first element in the file is at
        ``offset_bytes``.

        ``state`` is "" for a weight; ``name`` is what the file calls it, for messages; ``steps``
        are its strides in elements if it is not row-major.
        """
        size = ITEMSIZE[dtype]
        pieces = placed.pieces if span is None else placed.clip(*span)
        base = offset_bytes - (0 if span is None else span[0]) * size
        for piece in pieces:
            offset, strides = placed.bytes_at(piece, base, size, steps)
            view = View(file, offset, piece.box.sizes, strides, dtype)
            self.add_box(state, piece, view, name or placed.name)

    def add_entry(
        self, state: str, placed: Placed, entry: Entry, file: str, span: Span | None = None
    ) -> bool:
        """Add a file's tensor as a stored tensor, or ``span`` of it; False if it does not fit."""
        wanted = placed.shape if span is None else (span[1] - span[0],)
        if entry.shape != wanted:
            self.faults.append(
                f"{file}: {entry.name}: shape {list(entry.shape)}, this rank of the mesh needs "
                f"{list(wanted)}"
            )
            return False
        if 0 not in entry.shape and entry.strides != row_major(entry.shape):
            self.faults.append(
                f"{file}: {entry.name}: not contiguous; save it again with .contiguous()"
            )
            return False
        self.add(state, placed, file, entry.offset_bytes, entry.dtype, span, entry.name)
        return True

    def add_strided(self, state: str, placed: Placed, entry: Entry, file: str) -> None:
        """Add a stored tensor that lies in a file's tensor in another order of dims."""
        if entry.shape != placed.shape:
            self.faults.append(
                f"{file}: {entry.name}: experts of shape {list(entry.shape)}, this rank of the "
                f"mesh needs {list(placed.shape)}"
            )
            return
        at, steps = entry.offset_bytes, entry.strides
        self.add(state, placed, file, at, entry.dtype, name=entry.name, steps=steps)

    def add_box(self, state: str, piece: Piece, place: View | DeferredView, name: str) -> None:
        """One box of a logical tensor; ``name`` is the stored tensor's, for messages."""
        fqn = f"{state}/{piece.fqn}" if state else piece.fqn
        have = self.metas.get(fqn)
        if have is None:
            self.metas[fqn] = self._meta(piece, place.dtype)
        elif have.dtype != place.dtype:
            self.faults.append(
                f"{place.file}: {name}: {place.dtype}, other ranks hold {have.dtype}"
            )
        self.chunks.add(Chunk(fqn, piece.box, place))

    def _meta(self, piece: Piece, dtype: str) -> TensorMeta:
        """The logical tensor that a piece belongs to; padding rows are a separate tensor."""
        shapes = self.here.shapes
        if not piece.fqn.startswith(PADDING):
            return TensorMeta(shapes[piece.fqn], dtype)
        rows = self.here.padded - self.here.model.sizes["vocab"]
        shape = (rows, *shapes[piece.fqn.removeprefix(PADDING)][1:])
        return TensorMeta(shape, dtype, elastic=True)

    def manifest(
        self, state: Mapping[str, object] | None = None, side_files: tuple[SideFile, ...] = ()
    ) -> Manifest:
        """All chunks and tensors so far, in the order of the model."""
        order = {fqn: i for i, fqn in enumerate(self.here.shapes)}
        metas = dict(sorted(self.metas.items(), key=lambda kv: order[bare(kv[0])]))
        return Manifest(metas, self.chunks.by_name, state or {}, side_files)


def bare(fqn: str) -> str:
    """A logical name without its state and padding prefixes."""
    state = category_of(fqn)
    return (fqn[len(state) + 1 :] if state else fqn).removeprefix(PADDING)
