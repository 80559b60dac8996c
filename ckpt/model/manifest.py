"""The type of every source and every target: named boxes of bytes.

A manifest knows no format, family or mesh axis. It says at which bytes of which file each box of
each logical tensor lies, and which other files are copied.
Memory: under 2 KiB per chunk; boxes, shapes and strides are shared between layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .box import Box
from .dtypes import ITEMSIZE

# Optimizer state is the same logical tensors under one of these prefixes.
# What optimizers keep for each element of a weight, by torch's names: Adam's and SGD's, then those
# of AMSGrad, Adamax, RMSprop, Adadelta, Adagrad, Rprop, ASGD, Adan, AdEMAMix and Sophia. A state of
# another shape than its weight (Adafactor, Shampoo, 8-bit Adam) cannot be cut as the weight is.
SLOTS = (
    "exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "exp_inf", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax", "exp_avg_diff", "neg_pre_grad",
    "exp_avg_slow", "hessian",
)  # fmt: skip
STATES = (*SLOTS, "master")
PADDING = "padding/"  # rows that only fill a vocabulary up to a multiple


@dataclass(frozen=True, slots=True)
class View:
    """Strided elements of a file; no bytes are held."""

    file: str
    offset_bytes: int  # of element (0, ..., 0), from the start of the file
    shape: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # elements
    dtype: str  # a key of dtypes.ITEMSIZE

    def narrow(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> View:
        """The box of this view that starts at ``offsets`` (in this view's coordinates)."""
        step = sum(o * s for o, s in zip(offsets, self.strides, strict=True))
        start = self.offset_bytes + step * ITEMSIZE[self.dtype]
        return View(self.file, start, sizes, self.strides, self.dtype)

    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that this view touches."""
        if 0 in self.shape:
            return self.offset_bytes, self.offset_bytes
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes, self.offset_bytes + (last + 1) * ITEMSIZE[self.dtype]


class DeferredView(ABC):
    """Elements of a file at a place that is not known yet: a header must be read first.

    Box, file and dtype are known without it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def file(self) -> str:
        """Path of the file that holds them."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """A key of dtypes.ITEMSIZE."""

    @abstractmethod
    def narrow(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DeferredView:
        """The box of these elements that starts at ``offsets``; nothing is read."""

    @abstractmethod
    def view(self) -> View:
        """Where the elements are; reads the header if `find` did not. CheckpointError if it is
        damaged."""

    @classmethod
    @abstractmethod
    def find(cls, places: Sequence[DeferredView]) -> None:
        """Read the headers of many views of this class. CheckpointError names every damaged one."""


Place = View | DeferredView


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A logical tensor: its whole shape and its dtype."""

    shape: tuple[int, ...]  # elements
    dtype: str
    # Padding rows: a target may have more (new ones are zero) or fewer (dropped, counted).
    elastic: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a logical tensor that a view holds."""

    fqn: str
    box: Box  # in the logical tensor's coordinates; box.sizes == view.shape
    place: Place

    @property
    def view(self) -> View:
        """Where the box lies; CheckpointError if its header is damaged."""
        return self.place if isinstance(self.place, View) else self.place.view()

    def narrow(self, box: Box) -> Place:
        """Where a part of this chunk's box lies; nothing is read."""
        if box == self.box:
            return self.place
        offsets = tuple(b - c for b, c in zip(box.offsets, self.box.offsets, strict=True))
        return self.place.narrow(offsets, box.sizes)


def locate(places: Iterable[Place]) -> None:
    """Find many deferred places at once, so that each file is opened once."""
    deferred: dict[type[DeferredView], list[DeferredView]] = {}
    for place in places:
        if not isinstance(place, View):
            deferred.setdefault(type(place), []).append(place)
    for kind, found in deferred.items():
        kind.find(found)


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that is copied with a checkpoint byte for byte, or new text."""

    name: str  # relative to the checkpoint, with forward slashes
    source: str = ""  # path of the file to copy; empty when `text` holds the content
    text: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint as named boxes of bytes."""

    tensors: dict[str, TensorMeta]  # logical name -> meta
    chunks: dict[str, list[Chunk]]  # logical name -> where its boxes lie
    state: Mapping[str, object] = field(default_factory=dict)  # JSON: step, schedule, data, ...
    side_files: tuple[SideFile, ...] = ()

    def __repr__(self) -> str:
        count = sum(map(len, self.chunks.values()))
        return f"<Manifest: {len(self.tensors)} tensors in {count} chunks>"

    def category(self, prefix: str) -> list[str]:
        """The logical names under ``prefix/`` (``""``: the weights)."""
        if prefix:
            return [fqn for fqn in self.tensors if fqn.startswith(prefix + "/")]
        return [fqn for fqn in self.tensors if category_of(fqn) == ""]


def category_of(fqn: str) -> str:
    """The optimizer state that a logical name belongs to; ``""`` for a weight."""
    head, slash, _ = fqn.partition("/")
    return head if slash and head in STATES else ""


def is_padding(fqn: str) -> bool:
    """Whether a logical name means padding rows, of a weight or of its state."""
    state = category_of(fqn)
    return fqn[len(state) + 1 if state else 0 :].startswith(PADDING)


class Chunks:
    """Collects chunks under their logical names while a format is being read."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Chunk]] = {}

    def add(self, chunk: Chunk) -> None:
        self.by_name.setdefault(chunk.fqn, []).append(chunk)
