"""Designs native ``tp_X_pp_Y`` shards: every rank's files, before a byte is written."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from ...checkpoint.state import VERSION as STATE_VERSION
from ...errors import CheckpointError, raise_all
from ...model.chunk_builder import ChunkBuilder, Span
from ...model.design import Design, OutFile
from ...model.dtypes import TO_TORCH
from ...model.family import MTP, has_tensors
from ...model.file_layout import Spec
from ...model.layout import default_layout
from ...model.manifest import STATES, SideFile, TensorMeta
from ...model.mesh import Coord
from ...model.pipeline import split_by_counts, text_of
from ...model.placement import Placed, Placement, padded_vocab
from ...model.target import Target, main_dtype
from ..writing import StoredDtypes, WriteRequest, Written
from .names import CHECKPOINT, NAME, VERSION, container, file_name, mesh_table, shards_of
from .owned import SIDES

TO = NAME
TAKES = frozenset({
    "--pp-layers", "--pp-layout", "--vpp", "--ep", "--etp", "--safe-serialization",
})  # fmt: skip
WEIGHTS_ONLY = False


def design(request: WriteRequest, root: PurePath) -> Design:
    """Every rank's files below ``root``.

    Optimizer states are placed for exactly the tensors that have them.
    """
    target, metas = request.target, request.metas
    here = Placement.written(target.model, target.mesh, target.vocab_multiple)
    writer = _Collector(target, metas, root, here)
    files = [(c, list(here.held(shards_of(c)).values())) for c in here.mesh.all_coords()]
    for coord, rows in files:
        writer.model_file(coord, rows)
    states = [s for s in STATES if any(fqn.startswith(s + "/") for fqn in metas)]
    if states:
        for coord, rows in files:
            writer.optimizer_files(coord, rows, states)
    raise_all(writer.dtypes.faults, "these tensors cannot be packed")
    tied = here.tied_copies * (1 + len(states))
    return Design(writer.files, writer.builder.manifest(), tied, _notes(request))


def sides(request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
    """Random states where the layout is the source's, what travels along, checkpoint.json."""
    target = request.target
    padded = padded_vocab(
        target.model.sizes["vocab"], target.vocab_multiple, target.mesh.size("tp")
    )
    state = {} if request.weights_only else request.state
    frozen = None if request.weights_only else request.source.frozen
    dtype = TO_TORCH[main_dtype(request.metas)]
    text = checkpoint_json(target, state, padded, dtype, files, frozen)
    random = (
        request.source.random_states if _same_layout(request) and not request.weights_only else ()
    )
    return [*random, *request.sides, SideFile(CHECKPOINT, text=text)]


def _notes(request: WriteRequest) -> list[str]:
    random = request.source.random_states
    if not random or request.weights_only or _same_layout(request):
        return []
    return [
        f"dropped {len(random)} random_states files: they belong to the ranks of the old layout"
    ]


def _same_layout(request: WriteRequest) -> bool:
    source, target = request.source, request.target
    return (
        source.format == NAME
        and source.mesh == target.mesh
        and (source.dp, source.sharded) == (target.dp, target.sharded)
    )


class _Collector:
    """Collects the files and chunks of a design."""

    def __init__(
        self, target: Target, metas: Mapping[str, TensorMeta], root: PurePath, here: Placement
    ) -> None:
        self.target, self.root = target, root
        self.dtypes, self.builder = StoredDtypes(metas), ChunkBuilder(here)
        self.files: list[OutFile] = []
        self.suffix = "safetensors" if target.safe else "bin"

    def model_file(self, coord: Coord, rows: list[Placed]) -> None:
        """A rank's weights."""
        # plan reports the missing parts by their own names
        dtypes = [self.dtypes.of(placed, "") or "F32" for placed in rows]
        specs = [Spec(p.name, dtype, p.shape) for p, dtype in zip(rows, dtypes, strict=True)]
        self._file("model", coord, specs, {}, [("", placed, None) for placed in rows])

    def optimizer_files(self, coord: Coord, rows: list[Placed], states: list[str]) -> None:
        """A rank's optimizer state: one file, or one for each dp rank's flat share."""
        have = [
            (state, placed, dtype)
            for state in states
            for placed in rows
            if (dtype := self.dtypes.of(placed, state)) is not None
        ]
        if not self.target.sharded:
            specs = [Spec(f"{s}/{p.name}", dtype, p.shape) for s, p, dtype in have]
            self._file("optimizer", coord, specs, {}, [(s, p, None) for s, p, _ in have])
            return
        starts = dict(
            zip(
                (p.name for p in rows),
                itertools.accumulate((math.prod(p.shape) for p in rows), initial=0),
                strict=False,
            )
        )
        total = sum(math.prod(p.shape) for p in rows)
        dp = self.target.dp
        if "ep" in dict(coord):
            dp = self.target.mesh.expert_dp(dp)
        for rank in range(dp):
            share = rank * total // dp, (rank + 1) * total // dp
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
            rows.append((state, placed, (start, stop)))
        self._file("optimizer", coord, specs, {"ranges": json.dumps(ranges)}, rows)

    def _file(
        self,
        kind: str,
        coord: Coord,
        specs: list[Spec],
        metadata: Mapping[str, str],
        rows: Sequence[tuple[str, Placed, Span | None]],
    ) -> None:
        path = str(self.root / file_name(kind, coord, self.suffix))
        table = {**rank_metadata(self.target, coord), **metadata}
        layout = container(self.suffix).layout(specs, table)
        self.files.append(OutFile(path, layout))
        for spec, (state, placed, span) in zip(specs, rows, strict=True):
            at = layout.offsets[spec.name]
            self.builder.add(state, placed, path, at, spec.dtype, span)


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
    frozen: Collection[str] | None,
    sides: Sequence[str] = (),
) -> str:
    """The text of checkpoint.json; ``files`` maps names to size and digest ("" if not asked).

    ``frozen`` are the logical weights without optimizer state; None if nobody knows. ``sides`` are
    the files beside them that the next save into the folder may replace.
    Raises CheckpointError where ``state`` holds a value that JSON does not have.
    """
    owned = target.mesh.owned["pp"]
    counts = tuple(len(layers) for layers in owned)
    in_turn = owned == split_by_counts(sum(counts), counts)  # not so where stages interleave
    mesh = target.mesh
    virtual = any(len(stages) > 1 for stages in mesh.stages["pp"]) or mesh.mtp is not None
    mtp_layers = target.model.sizes.get(MTP, 0)
    layout = text_of(mesh.stages["pp"], mesh.mtp, mtp_layers) if virtual else None
    table = {
        "format_version": VERSION,
        "step": target.step,
        "mesh": dict(mesh_table(target.mesh, target.dp)),
        "pp_layers": list(counts) if in_turn else [list(layers) for layers in owned],
        **({} if layout is None else {"pp_layout": layout}),
        **({"has": has} if (has := has_tensors(target.model)) is not None else {}),
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
        **({SIDES: sorted(sides)} if sides else {}),
        **({"frozen": sorted(frozen)} if frozen is not None else {}),
        **({"state_version": STATE_VERSION} if set(state) - {"step"} else {}),
        **{key: value for key, value in state.items() if key != "step"},
    }
    try:
        return json.dumps(table, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        faults = [key for key, value in state.items() if not _is_json(value)]
        raise CheckpointError(
            f"{CHECKPOINT}: {', '.join(faults)} cannot be written as JSON ({error}); "
            "pass --weights-only to leave it out"
        ) from error


def _is_json(value: object) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False
