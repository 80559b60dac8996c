"""What an output in a parallel layout is to be, and the seam through which a format writes one.

A writer is a module of ``formats`` with a ``TO``, found as a reader is found by its ``sniff``:
a new output format is one new file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .checkpoint import CHECKSUMS, Checkpoint, Design, Model
from .manifest import SideFile, TensorMeta, category_of
from .mesh import Mesh

Written = Mapping[str, tuple[int, str]]  # path below the output -> size, xxh3-128 or ""


@dataclass(frozen=True, slots=True)
class Target:
    """The layout that an output is to have."""

    model: Model
    mesh: Mesh  # ``owned["pp"]`` names the layers of each stage, in the order in which it has them
    dp: int  # data-parallel ranks
    sharded: bool  # the optimizer state is cut over them
    vocab_multiple: int  # rows are padded to a multiple of this times tp
    safe: bool  # safetensors rather than torch zips, where a format has both
    step: int | None


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that a writer is told."""

    source: Checkpoint
    target: Target
    metas: Mapping[str, TensorMeta]  # logical tensors to write, with the dtypes to write them in
    state: Mapping[str, object]  # of the training run, JSON
    weights_only: bool  # leave optimizer and training state out
    sides: tuple[SideFile, ...]  # config, tokenizer and whatever else travels along


class Writer(Protocol):
    """Knows which files, below a folder, hold a model in a layout. Writes nothing itself."""

    TO: str  # what --to calls it; the NAME of the format that reads it
    TAKES: frozenset[str]  # of reshard's options that not every format has: those that it has

    def design(self, order: Order, root: Path) -> Design:
        """Every file below ``root``, sub-folders included, and where each logical tensor lies.

        Names that no row places are left to ``plan``, which reports them. What the format
        cannot hold is said in ``Design.notes``. Raises CheckpointError for an impossible layout.
        """
        ...

    def sides(self, order: Order, made: Design, files: Written) -> list[SideFile]:
        """The text files, in the order in which they are written: after all others.

        Called twice: before anything is written without digests, and at the end.
        """
        ...


def checksums(files: Written) -> list[SideFile]:
    """The file that records digests; none where none were asked for, or before they are made."""
    if not any(mark for _, mark in files.values()):
        return []
    table = {name: {"size": size, "xxh3_128": mark} for name, (size, mark) in files.items()}
    return [SideFile(CHECKSUMS, text=json.dumps({"files": table}, indent=2) + "\n")]


def main_dtype(metas: Mapping[str, TensorMeta]) -> str:
    """The dtype that most bytes of the weights have."""
    totals: dict[str, int] = {}
    for fqn, meta in metas.items():
        if category_of(fqn) == "":
            totals[meta.dtype] = totals.get(meta.dtype, 0) + meta.nbytes
    return max(totals, key=lambda d: totals[d], default="F32")
