"""The interface through which a format writes an output: what it gets, and what it returns."""

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
    """How a format without ranks spreads its tensors over files."""

    safe: bool = True  # safetensors, not torch zips
    max_shard_bytes: int | None = None  # None: one file
    file_name: str = ""  # if the output is one file; "" for a folder


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Everything that a writer gets."""

    source: Checkpoint
    parallel: Target | None  # None for a format without ranks
    metas: Mapping[str, TensorMeta]  # logical tensors of the source, with the dtypes to write
    state: Mapping[str, object]  # of the training run, JSON
    weights_only: bool  # leave optimizer and training state out
    sides: tuple[SideFile, ...]  # config, tokenizer and other files to copy
    whole: WholeFiles = WholeFiles()
    allow_incomplete_args: bool = False  # Megatron-LM's args cannot describe every model
    adam: str | None = (
        None  # that loads Megatron-LM's optimizer: fused or torch; None: the source's
    )

    @property
    def target(self) -> Target:
        """The parallel layout, for writers that cut by ranks."""
        assert self.parallel is not None
        return self.parallel


class Writer(Protocol):
    """Knows which files below a folder hold a model in a layout. Does not write them."""

    TO: str  # what --to calls it; the NAME of the format that reads it
    TAKES: frozenset[str]  # those of reshard's special options that this format has
    WEIGHTS_ONLY: bool  # whole weights only: no ranks, no training state

    def design(self, request: WriteRequest, root: PurePath) -> Design:
        """Every file below ``root``, sub-folders included, and where each logical tensor lies.

        Names without a place are left to ``plan``, which reports them. ``Design.notes`` says what
        the format cannot hold. Raises CheckpointError for an impossible layout.
        """
        ...

    def sides(self, request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
        """The text files, in the order in which they are written: after all others.

        Called twice: without digests before anything is written, and at the end.
        """
        ...


def checksums(files: Written) -> list[SideFile]:
    """The file that records digests; none without --checksum, or before they are computed."""
    if not any(mark for _, mark in files.values()):
        return []
    table = {name: {"size": size, "xxh3_128": mark} for name, (size, mark) in files.items()}
    return [SideFile(CHECKSUMS, text=json.dumps({"files": table}, indent=2) + "\n")]


class StoredDtypes:
    """The dtypes in which stored tensors are written: all parts of one must have the same."""

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self.metas = metas  # logical tensors to write
        self.faults: list[str] = []

    def of(self, placed: Placed, state: str) -> str | None:
        """The dtype of a stored weight or of its ``state``; None if no part of it exists."""
        prefix = state + "/" if state else ""
        parts = {fqn for fqn in placed.parts if not fqn.startswith(PADDING)}
        if not parts:  # a rank that holds only padding rows
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
