"""The one error type for what a user gave us: a file, a name, an option.

Our own bugs are ``assert`` failures and never this type, so a caller can catch
``CheckpointError`` and know that the message names the file or tensor, both
values where there are two, and the next step where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """A text for a terminal: names in a file may hold anything, escape sequences too.

    A newline stays where an indented line follows, as in our own lists; so none of a name can
    begin a line that looks like one of ours.
    """
    if text.isprintable():
        return text
    return "\n  ".join("".join(map(_shown, part)) for part in text.split("\n  "))


def _shown(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


class CheckpointError(ValueError):
    """A checkpoint, option or file that cannot be used as it is; its text can be printed."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def raise_all(faults: Iterable[str], headline: str, limit: int = 20, *, hint: str = "") -> None:
    """Raise one error that lists every fault; return quietly if there is none.

    ``hint`` is the next step, said last.
    """
    found = list(faults)
    if not found:
        return
    if len(found) == 1:
        one = f"{headline}: {found[0]}" if headline else found[0]
        raise CheckpointError(f"{one}; {hint}" if hint else one)
    shown = "\n".join(f"  - {fault}" for fault in found[:limit])
    more = f"\n  ... and {len(found) - limit} more" if len(found) > limit else ""
    last = f"\n  {hint}" if hint else ""
    raise CheckpointError(f"{headline} ({len(found)} faults)\n{shown}{more}{last}")
