"""One module per on-disk format; every module of this folder with a ``sniff`` is one.

What writes a format is a module with a ``TO`` (``target.Writer``).

Import errors surface: a broken format must not look like an unknown checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, ReadOptions
    from ..target import Writer


class Format(Protocol):
    """Knows which file holds which view under which names. Formats do not overlap."""

    NAME: str

    def sniff(self, path: Path) -> bool:
        """Whether ``path`` is a checkpoint of this format; looks at names only."""
        ...

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """The checkpoint, headers only; raises CheckpointError with every fault found."""
        ...


@cache
def formats() -> tuple[Format, ...]:
    """Every format, in the order of module names."""
    return tuple(cast("Format", module) for module in _modules() if hasattr(module, "sniff"))


@cache
def writers() -> dict[str, Writer]:
    """What ``--to`` calls it -> the module that writes it."""
    found = [cast("Writer", module) for module in _modules() if hasattr(module, "TO")]
    return {writer.TO: writer for writer in found}


@cache
def _modules() -> tuple[ModuleType, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f".{name}", __name__) for name in names)
