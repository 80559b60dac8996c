"""The on-disk formats: a reader each (``Format``), and a writer (``writing.Writer``) for most."""

from __future__ import annotations

import re
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
# what ``--to`` calls it -> its module
_WRITERS = {
    "shards": "native.writer",
    "torch_dist": "megatron.torch_dist.writer",
    "megatron": "megatron.classic.writer",
    "hf": "hf.writer",
}
# Names of which every folder of a format has one. Its reader takes long to import, and is not
# imported for a folder without.
_MEGATRON = re.compile(
    r"mp_rank_.*|iter_\d+|release|latest_checkpointed_iteration\.txt"
    r"|dist_ckpt|metadata\.json|\.metadata|common\.pt|.*\.distcp"
)
_TELLING = {"megatron.torch_dist.reader": _MEGATRON, "megatron.classic.reader": _MEGATRON}


@cache
def formats() -> tuple[Format, ...]:
    """Every format that is read, in the order in which they are tried."""
    return tuple(map(_reader, _READERS))


def fitting(path: StoragePath) -> tuple[Format, ...]:
    """Every format that ``path`` is a checkpoint of, in the order in which they are tried."""
    names = [child.name for child in path.iterdir()] if path.is_dir() else []
    possible = [
        module
        for module in _READERS
        if module not in _TELLING or any(map(_TELLING[module].fullmatch, names))
    ]
    return tuple(fmt for fmt in map(_reader, possible) if fmt.sniff(path))


def _reader(module: str) -> Format:
    return cast("Format", import_module(f".{module}", __name__))


def writers() -> tuple[str, ...]:
    """What ``--to`` calls each format that is written."""
    return tuple(_WRITERS)


def writer(to: str) -> Writer:
    """The writer of a format, under its name in ``--to``."""
    return cast("Writer", import_module(f".{_WRITERS[to]}", __name__))
