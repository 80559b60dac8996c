"""One module per on-disk format; every module of this folder with a ``sniff`` is one.

Import errors surface: a broken format must not look like an unknown checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, ReadOptions


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
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f".{name}", __name__) for name in names)
    return tuple(cast("Format", module) for module in modules if hasattr(module, "sniff"))
