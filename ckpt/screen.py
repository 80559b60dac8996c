"""Reports on one screen: what a notebook or ``print`` shows of a long list of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_LINES, _LAST, _WIDTH = 24, 6, 400


class Printer(Protocol):
    """What IPython passes to ``_repr_pretty_``."""

    def text(self, text: str, /) -> object:
        """Print a text."""


def one_screen(lines: Sequence[str]) -> str:
    """The first and the last lines, and how many are left out between them."""
    cut = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines]
    if len(cut) > _LINES:
        left_out = f"... {len(cut) - _LINES + 1} more lines; .lines() has them all"
        cut = [*cut[: _LINES - _LAST - 1], left_out, *cut[-_LAST:]]
    return "\n".join(cut)
