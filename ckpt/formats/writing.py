"""The seam through which a format writes an output: what it is told, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from ..checkpoint.json_io import CHECKSUMS
from ..checkpoint.types import Checkpoint
from ..model.design import Design
from ..model.manifest import PADDING, SideFile, TensorMeta
from ..model.placement import Placed
from ..model.target import Target

Written = Mapping[str, tuple[int, str]]  # path below the output -> size, xxh3-128 or ""


@dataclass(frozen=True, slots=True)
class WholeFiles:
    """How a format that is not cut by ranks spreads its tensors over files."""

    safe: bool = True  # safetensors rather than torch zips
    max_shard_bytes: int | None = None  # None: one file
    file_name: str = ""  # of the one file that the output is; "" where it is a folder


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Everything that a writer is told."""

    source: Checkpoint
    parallel: Target | None  # None for a format that is not cut by ranks
    metas: Mapping[str, TensorMeta]  # logical tensors of the source, with the dtypes to write
    state: Mapping[str, object]  # of the training run, JSON
    weights_only: bool  # leave optimizer and training state out
    sides: tuple[SideFile, ...]  # config, tokenizer and whatever else travels along
    whole: WholeFiles = WholeFiles()
    allow_incomplete_args: bool = False  # of Megatron-LM, which cannot say every model
    adam: str | None = (
        None  # that loads Megatron-LM's optimizer: fused or torch; None: the source's
    )

    @property
    def target(self) -> Target:
        """The parallel layout, for writers that cut by ranks."""
        assert self.parallel is not None
        return self.parallel


class Writer(Protocol):
    """Knows which files, below a folder, hold a model in a layout. Writes nothing itself."""

    TO: str  # what --to calls it; the NAME of the format that reads it
    TAKES: frozenset[str]  # of reshard's options that not every format has: those that it has
    WEIGHTS_ONLY: bool  # whole weights and nothing else: neither ranks nor training state

    def design(self, request: WriteRequest, root: PurePath) -> Design:
        """Every file below ``root``, sub-folders included, and where each logical tensor lies.

        Names that no row places are left to ``plan``, which reports them. What the format
        cannot hold is said in ``Design.notes``. Raises CheckpointError for an impossible layout.
        """
        ...

    def sides(self, request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
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


class StoredDtypes:
    """The dtypes in which stored tensors are written: each has one, its parts' own."""

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self.metas = metas  # logical tensors to write
        self.faults: list[str] = []

    def of(self, placed: Placed, state: str) -> str | None:
        """The dtype of a stored weight or of its ``state``; None where no part of it is there."""
        prefix = state + "/" if state else ""
        parts = {fqn for fqn in placed.parts if not fqn.startswith(PADDING)}
        if not parts:  # a rank that holds padding rows alone
            parts = {fqn.removeprefix(PADDING) for fqn in placed.parts}
        found = {fqn: self.metas[prefix + fqn].dtype for fqn in parts if prefix + fqn in self.metas}
        if found and len(found) < len(parts):
            lacking = sorted(parts - set(found))
            self.faults.append(f"{prefix}{placed.name}: the source lacks {', '.join(lacking)}")
        if len(set(found.values())) > 1:
            self.faults.append(
                f"{prefix}{placed.name}: its parts differ in dtype ({found}); pass --dtype"
            )
        return next(iter(found.values()), None)
