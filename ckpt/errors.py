"""The error type for everything that a user gave us: a file, a name, an option.

Our own bugs are ``assert`` failures and never this type. So a caller can catch ``CheckpointError``;
its message names the file or tensor, both values if there are two, and the next step if there is
one.
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """A text for a terminal: names in a file may contain anything, even escape sequences.

    A newline is kept only before an indented line, as in our lists. So a newline in a name cannot
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


class InUse(CheckpointError):
    """Another run holds the lock of an output."""


# What the base installation lacks: module -> (what it is called, the extra that brings it).
_EXTRAS = {
    "accelerate": ("accelerate", "train"),
    "huggingface_hub": ("huggingface_hub", "hub"),
    "matplotlib": ("matplotlib", "plan"),
    "megatron": ("megatron-core", "train"),
    "safetensors": ("safetensors", "train"),
    "tensorboard": ("tensorboard", "train"),
    "torch": ("torch", "train"),
    "transformers": ("transformers", "train"),
    "yaml": ("PyYAML", "plan"),
}


def is_extra(module: str | None) -> bool:
    """Whether a missing module is one that an extra brings, and not a part of a broken package."""
    return module in _EXTRAS or module in ("megatron.core",)


def install(module: str, extra: str = "") -> str:
    """What to say of a module that is not installed, and what to type."""
    name, usual = _EXTRAS[module.partition(".")[0]]
    return f"{name} is not installed; pip install 'shardwright[{extra or usual}]'"


def raise_all(faults: Iterable[str], headline: str, limit: int = 20, *, hint: str = "") -> None:
    """Raise one error that counts every fault and lists the first; return quietly without any.

    A damaged file can have a fault for each of its names, so only what is listed is kept.
    ``hint`` is the next step; it comes last.
    """
    count, first = 0, []
    for count, fault in enumerate(faults, 1):
        if count <= limit:
            first.append(fault)
    if not first:
        return
    if count == 1:
        one = f"{headline}: {first[0]}" if headline else first[0]
        raise CheckpointError(f"{one}; {hint}" if hint else one)
    shown = "\n".join(f"  - {fault}" for fault in first)
    more = f"\n  ... and {count - limit} more" if count > limit else ""
    last = f"\n  {hint}" if hint else ""
    raise CheckpointError(f"{headline} ({count} faults)\n{shown}{more}{last}")
