"""The on-disk formats: a reader each (``Format``), and a writer (``writing.Writer``) for most."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ..move.storage import StoragePath

if TYPE_CHECKING:
    from ..checkpoint.types import Checkpoint, ReadOptions
    from .writing import Writer


class Format(Protocol):
    """Knows which file holds which view under which names. Formats do not overlap."""

    NAME: str

    def sniff(self, path: StoragePath) -> bool:
        """Whether ``path`` is a checkpoint of this format; looks at names only."""
        ...

    def read(self, path: StoragePath, options: ReadOptions) -> Checkpoint:
        """The checkpoint, headers only; raises CheckpointError with every fault found."""
        ...


# The first whose ``sniff`` says yes reads a path. Import errors surface: a broken format must
# not look like an unknown checkpoint.
_READERS = ("native.reader", "megatron.torch_dist.reader", "megatron.classic.reader", "hf.reader")
_WRITERS = ("native.writer", "megatron.torch_dist.writer", "megatron.classic.writer", "hf.writer")


@cache
def formats() -> tuple[Format, ...]:
    """Every format that is read, in the order in which they are tried."""
    return tuple(cast("Format", import_module(f".{name}", __name__)) for name in _READERS)


@cache
def writers() -> dict[str, Writer]:
    """What ``--to`` calls it -> the module that writes it."""
    found = [cast("Writer", import_module(f".{name}", __name__)) for name in _WRITERS]
    return {writer.TO: writer for writer in found}
