"""An output before it exists: its files, and where each of its tensors lies in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .file_layout import FileLayout
from .manifest import Manifest


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be made."""

    path: str
    blueprint: FileLayout


@dataclass(slots=True)
class Design:
    """An output before it exists."""

    files: list[OutFile]
    manifest: Manifest
    tied: int = 0  # copies of tied tensors that are written in addition
    notes: list[str] = field(default_factory=list)  # what the format cannot hold
