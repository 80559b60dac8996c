"""Designs native ``tp_X_pp_Y`` shards: every rank's files, before a byte is written."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, raise_all
from ...model.design import Design, OutFile
from ...model.dtypes import ITEMSIZE, TO_TORCH
from ...model.family import Model, Piece, Placed, Rule, logical_shapes, mesh_flags, place
from ...model.file_layout import Spec
from ...model.layout import default_layout, rounds
from ...model.manifest import PADDING, STATES, Chunk, Chunks, Manifest, SideFile, TensorMeta, View
from ...model.mesh import Coord, Mesh, split_by_counts
from ...model.target import Target, main_dtype
from ..writing import WriteRequest, Written
from .names import CHECKPOINT, NAME, VERSION, container, file_name, mesh_table, piece_meta

TO = NAME
TAKES = frozenset({"--pp-layers", "--vpp", "--safe-serialization"})
WEIGHTS_ONLY = False


def padded_vocab(vocab: int, multiple: int, tp: int) -> int:
    """The smallest multiple of ``multiple * tp`` that is at least ``vocab`` (Megatron's rule)."""
    unit = multiple * tp
    return -(-vocab // unit) * unit


@dataclass(frozen=True, slots=True)
class Placement:
    """A model on a mesh, in the packing that this tool writes."""

    rules: list[Rule]
    sizes: dict[str, int]  # of the model, `padded_vocab` included
    shapes: dict[str, tuple[int, ...]]  # logical tensors
    placed: dict[Coord, list[Placed]]  # every rank's stored tensors


def placement(model: Model, mesh: Mesh, vocab_multiple: int) -> Placement:
    """Where each element of a model lies on each rank; raises where the mesh cannot be."""
    rules = model.family.select(model.flags | mesh_flags(mesh))
    vocab = padded_vocab(model.sizes["vocab"], vocab_multiple, mesh.size("tp"))
    sizes = {**model.sizes, "padded_vocab": vocab}
    placed = place(rules, sizes, mesh, rounds(default_layout(model.family)))
    return Placement(rules, sizes, logical_shapes(rules, sizes), placed)


def design(order: WriteRequest, root: Path) -> Design:
    """Every rank's files below ``root``.

    Optimizer states are placed for exactly the tensors that have them.
    """
    target, metas = order.target, order.metas
    here = placement(target.model, target.mesh, target.vocab_multiple)
    writer = Collector(target, metas, root, here)
    for coord, rows in here.placed.items():
        writer.model_file(coord, rows)
    states = [s for s in STATES if any(fqn.startswith(s + "/") for fqn in metas)]
    if states:
        for coord, rows in here.placed.items():
            writer.optimizer_files(coord, rows, states)
    raise_all(writer.faults, "these tensors cannot be packed")
    repeats = sum({"tie_word_embeddings", "pp>1"} <= set(rule.when) for rule in here.rules)
    manifest = Manifest(writer.metas, writer.chunks.by_name)
    return Design(writer.files, manifest, repeats * (1 + len(states)), _notes(order))


def sides(order: WriteRequest, made: Design, files: Written) -> list[SideFile]:
    """Random states where the layout is the source's, what travels along, checkpoint.json."""
    target = order.target
    padded = padded_vocab(
        target.model.sizes["vocab"], target.vocab_multiple, target.mesh.size("tp")
    )
    state = {} if order.weights_only else order.state
    text = checkpoint_json(target, state, padded, TO_TORCH[main_dtype(order.metas)], files)
    random = order.source.random_states if _same_layout(order) and not order.weights_only else ()
    return [*random, *order.sides, SideFile(CHECKPOINT, text=text)]


def _notes(order: WriteRequest) -> list[str]:
    random = order.source.random_states
    if not random or order.weights_only or _same_layout(order):
        return []
    return [
        f"dropped {len(random)} random_states files: they belong to the ranks of the old layout"
    ]


def _same_layout(order: WriteRequest) -> bool:
    source, target = order.source, order.target
    return (
        source.format == NAME
        and source.mesh == target.mesh
        and (source.dp, source.sharded) == (target.dp, target.sharded)
    )


class Collector:
    """Collects the files and chunks of a design."""

    def __init__(
        self,
        target: Target,
        source: Mapping[str, TensorMeta],
        root: Path,
        here: Placement,
    ) -> None:
        self.target, self.source, self.root = target, source, root
        self.shapes, self.sizes = here.shapes, here.sizes
        self.files: list[OutFile] = []
        self.faults: list[str] = []
        self.metas: dict[str, TensorMeta] = {}
        self.chunks = Chunks()
        self.suffix = "safetensors" if target.safe else "bin"

    def dtype_of(self, placed: Placed, prefix: str) -> str | None:
        """The one dtype of a stored tensor's parts; None where the source has none of them."""
        parts = {p.fqn for p in placed.pieces if not p.fqn.startswith(PADDING)}
        if not parts:  # a rank that holds padding rows alone
            parts = {p.fqn.removeprefix(PADDING) for p in placed.pieces}
        found = {
            fqn: self.source[prefix + fqn].dtype for fqn in parts if prefix + fqn in self.source
        }
        if found and len(found) < len(parts):
            lacking = sorted(parts - set(found))
            self.faults.append(f"{prefix}{placed.name}: the source lacks {', '.join(lacking)}")
        if len(set(found.values())) > 1:
            self.faults.append(
                f"{prefix}{placed.name}: its parts differ in dtype ({found}); pass --dtype"
            )
        return next(iter(found.values()), None)

    def model_file(self, coord: Coord, rows: list[Placed]) -> None:
        """A rank's weights."""
        specs, kept = [], []
        for placed in rows:
            dtype = self.dtype_of(placed, "")
            if dtype is None:  # plan reports the missing parts by their own names
                dtype = "F32"
            specs.append(Spec(placed.name, dtype, placed.shape))
            kept.append((placed, placed.pieces, 0))
        self._file("model", coord, specs, {}, [("", *row) for row in kept])

    def optimizer_files(self, coord: Coord, rows: list[Placed], states: list[str]) -> None:
        """A rank's optimizer state: one file, or one for each dp rank's flat share."""
        have = [
            (state, placed, dtype)
            for state in states
            for placed in rows
            if (dtype := self.dtype_of(placed, state + "/")) is not None
        ]
        if not self.target.sharded:
            specs = [Spec(f"{s}/{p.name}", dtype, p.shape) for s, p, dtype in have]
            rows_ = [(s, p, p.pieces, 0) for s, p, _ in have]
            self._file("optimizer", coord, specs, {}, rows_)
            return
        starts = dict(
            zip(
                (p.name for p in rows),
                itertools.accumulate((math.prod(p.shape) for p in rows), initial=0),
                strict=False,
            )
        )
        total = sum(math.prod(p.shape) for p in rows)
        for rank in range(self.target.dp):
            share = rank * total // self.target.dp, (rank + 1) * total // self.target.dp
            self._dp_file((*coord, ("dp", rank)), have, starts, share)

    def _dp_file(
        self,
        coord: Coord,
        have: list[tuple[str, Placed, str]],
        starts: Mapping[str, int],
        share: tuple[int, int],
    ) -> None:
        """The elements ``[share)`` of the rank's parameters laid end to end, for each state."""
        specs, rows, ranges = [], [], {}
        for state, placed, dtype in have:
            base, count = starts[placed.name], math.prod(placed.shape)
            start, stop = max(share[0] - base, 0), min(share[1] - base, count)
            if start >= stop:
                continue
            key = f"{state}/{placed.name}"
            ranges[key] = [start, stop]
            specs.append(Spec(key, dtype, (stop - start,)))
            rows.append((state, placed, tuple(placed.clip(start, stop)), start))
        self._file("optimizer", coord, specs, {"ranges": json.dumps(ranges)}, rows)

    def _file(
        self,
        kind: str,
        coord: Coord,
        specs: list[Spec],
        metadata: Mapping[str, str],
        rows: list[tuple[str, Placed, tuple[Piece, ...], int]],
    ) -> None:
        path = str(self.root / file_name(kind, coord, self.suffix))
        table = {**rank_metadata(self.target, coord), **metadata}
        blueprint = container(self.suffix).layout(specs, table)
        self.files.append(OutFile(path, blueprint))
        for spec, (state, placed, pieces, start) in zip(specs, rows, strict=True):
            size = ITEMSIZE[spec.dtype]
            base = blueprint.offsets[spec.name] - start * size
            for piece in pieces:
                fqn = f"{state}/{piece.fqn}" if state else piece.fqn
                offset, strides = placed.bytes_at(piece, base, size)
                view = View(path, offset, piece.box.sizes, strides, spec.dtype)
                self.chunks.add(Chunk(fqn, piece.box, view))
                if fqn not in self.metas:
                    self.metas[fqn] = piece_meta(piece, self.shapes, self.sizes, spec.dtype)


def rank_metadata(target: Target, coord: Coord) -> dict[str, str]:
    """What a file says of itself, so that a swapped or stray one is noticed."""
    return {
        "ranks": json.dumps(dict(coord)),
        "mesh": json.dumps(dict(mesh_table(target.mesh, target.dp))),
        "step": json.dumps(target.step),
    }


def checkpoint_json(
    target: Target,
    state: Mapping[str, object],
    padded: int,
    dtype: str,
    files: Mapping[str, tuple[int, str]],
) -> str:
    """The text of checkpoint.json; ``files`` maps names to size and digest ("" if not asked).

    Raises CheckpointError where ``state`` holds a value that JSON does not have.
    """
    stages = target.mesh.owned["pp"]
    counts = tuple(len(owned) for owned in stages)
    in_turn = stages == split_by_counts(sum(counts), counts)  # not so where stages interleave
    table = {
        "format_version": VERSION,
        "step": target.step,
        "mesh": dict(mesh_table(target.mesh, target.dp)),
        "pp_layers": list(counts) if in_turn else [list(owned) for owned in stages],
        "family": target.model.family.name,
        "layout": default_layout(target.model.family),
        "vocab_size": target.model.sizes["vocab"],
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": target.vocab_multiple,
        "dtype": dtype,
        "files": {
            name: {"size": size, **({"xxh3_128": digest} if digest else {})}
            for name, (size, digest) in sorted(files.items())
        },
        **{key: value for key, value in state.items() if key != "step"},
    }
    try:
        return json.dumps(table, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        faults = [f"state {key}" for key, value in state.items() if not _is_json(value)]
        raise CheckpointError(
            f"{CHECKPOINT}: {', '.join(faults)} cannot be written as JSON ({error}); "
            "pass --weights-only to leave it out"
        ) from error


def _is_json(value: object) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False
