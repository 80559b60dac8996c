"""megatron-core's distributed checkpoints (``--ckpt-format torch_dist``), read without torch.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0001234/metadata.json       written last: without it the save was not finished
    DIR/iter_0001234/common.pt           args, iteration, hyperparameters; since megatron-core 0.20
                                         the object common_state in a blob
    DIR/iter_0001234/.metadata           which box of which tensor lies in which blob
    DIR/iter_0001234/__R_I.distcp        blobs

Stored tensors do not depend on the layout of the run: layers are stacked in a first dimension (or
numbered), a gated MLP is [gate; up] of the whole model. So a chunk of one is a box of what one
rank would hold alone. docs/format.md lists the forms of optimizer state.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ....checkpoint import claims
from ....checkpoint.state import TrainingState
from ....checkpoint.types import WITHOUT, Checkpoint, FileSummary, ReadOptions
from ....containers import dcp
from ....containers.dcp import COMMON, DESCRIBES, METADATA, Grid, Stored, read_headers
from ....errors import CheckpointError, raise_all
from ....model.box import Box
from ....model.chunk_builder import ChunkBuilder
from ....model.dtypes import ITEMSIZE
from ....model.family import build_mesh, fill, with_tensors
from ....model.file_layout import Index
from ....model.layout import check_layout, default_layout
from ....model.manifest import SLOTS, Chunk, Manifest, SideFile
from ....model.placement import Piece, Placed, Placement, restrict
from ....move.storage import StoragePath
from .. import args as megatron_args
from .. import args_codec, expert_args, run_state
from .. import names as megatron_names
from ..classic import files as megatron_files
from ..classic import reader as megatron
from ..classic.files import TRACKER, iteration_folder
from ..masters import differing_chunks
from ..optimizer_reader import OptimizerReader, not_carried
from . import flat as megatron_dist_flat
from .boxes import boxes, half_of_gated
from .files import COMMON_OBJECT, check_kind, common

NAME = "torch_dist"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.experts\.(\d{1,6}\.)?(linear_fc[12]\..+)")
_STATE = re.compile(
    rf"(?:chained_\d+\.)?optimizer\.state\.({'|'.join(SLOTS)}|fp32_param|param)\.(.+)"
)
_ANY_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\..+")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STATES = {"fp32_param": "master", "param": "master"}
_OBJECTS = {  # objects that stay behind: part of the key -> reason
    "_extra_state": "_extra_state holds no weights",
    "rng_state": "random states belong to the ranks of the saving run",
    "rerun_state_machine_state": "the rerun machine's state belongs to the saving run",
}


def sniff(path: StoragePath) -> bool:
    """Whether ``path`` is such a folder, or the folder of one of its iterations."""
    if not path.is_dir():
        return False
    iterations = megatron_files.iterations(path)
    if iterations or (path / TRACKER).is_file():
        return any(megatron_files.is_dist(c) for c in iterations)
    if (path / "dist_ckpt").is_dir():  # verl
        return megatron_files.is_dist(path / "dist_ckpt")
    return megatron_files.is_dist(path)


def read(path: StoragePath, options: ReadOptions) -> Checkpoint:
    """The checkpoint; raises CheckpointError with what does not fit."""
    folder = path / "dist_ckpt" if (path / "dist_ckpt").is_dir() else path
    folder = iteration_folder(folder, options.iteration)
    if not megatron_files.is_dist(folder) and megatron_files.has_ranks(folder):
        return megatron.read(path, options)  # saved before the run changed its format
    check_kind(folder)
    return _Reader(path, folder, options).checkpoint()


class _Reader:
    """Reads one iteration."""

    def __init__(self, path: StoragePath, folder: StoragePath, options: ReadOptions) -> None:
        self.path, self.folder, self.options = path, folder, options
        self.listing = dcp.listing(folder)
        self.common = common(folder, self.listing)
        self.args: dict[str, object] = {}
        self.lost: list[str] = []
        if self.common.extra.get("args") is not None:
            found = args_codec.namespace(self.common.extra["args"], self.common.path)
            self.args, self.lost = found
        megatron_args.check_precision(self.args, self.common.path, options)
        self.padded = self._padded_vocab()
        self.model, self.config, notes = megatron_args.model_from_args(
            self.args, self.common.path, options, self.padded, megatron_files.homes(path, folder)
        )
        held = (megatron_names.ours(_template(name)[1]) for name in self.listing.tensors)
        self.model = with_tensors(self.model, held, stored=True)
        expert_args.check_mtp(self.model, self.args, self.common.path)
        true = self.model.sizes["vocab"]
        if self.padded < true:
            raise CheckpointError(
                f"{folder}: {self.padded} vocabulary rows are fewer than the {true} of the config"
            )
        one = build_mesh(self.model, (("tp", 1), ("pp", 1)))
        layout = {**default_layout(self.model.family), "glu": "flat", **options.layout}
        self.layout = check_layout(layout, self.model.family, str(path))
        here = Placement.of(
            self.model, one, self.layout, self.padded, nbytes=sum(self.listing.files.values())
        )
        self.rows: dict[str, Placed] = {p.name: p for rows in here.placed.values() for p in rows}
        self.builder = ChunkBuilder(here)
        self.repeats = ChunkBuilder(here)  # masters of fp32 weights: not kept
        self.result = Checkpoint(path, NAME, Manifest({}, {}), self.model, one)
        self.result.notes += notes
        self.seen: set[str] = set()

    def _padded_vocab(self) -> int:
        table = self.listing.tensors.get("embedding.word_embeddings.weight")
        if table is None or not table.shape:
            raise CheckpointError(
                f"{self.folder / METADATA}: names no embedding.word_embeddings.weight"
            )
        return table.shape[0]

    def checkpoint(self) -> Checkpoint:
        """Everything in the iteration, checked."""
        result, tensors = self.result, self.listing.tensors
        result.has_optimizer = any(_OPTIMIZER.match(name) for name in tensors)
        self._check_lost()
        other = {
            match[1]
            for name in tensors
            if (match := _ANY_STATE.fullmatch(name)) and not _STATE.fullmatch(name)
        }
        if other and not result.unread_optimizer:
            why = not_carried(other)
            result.unread_optimizer = f"{self.folder / METADATA}: {why}; {WITHOUT}"
        with_optimizer = not self.options.weights_only and not result.unread_optimizer
        if not with_optimizer:
            tensors = {n: stored for n, stored in tensors.items() if not _OPTIMIZER.match(n)}
        for name, stored in tensors.items():
            match = _STATE.fullmatch(name)
            if match is not None:
                self._tensor(_STATES.get(match[1], match[1]), match[2], stored)
            elif not megatron_dist_flat.is_flat(name):
                self._tensor("", name, stored)
        raise_all(
            [*self.builder.faults, *(f"{n}: missing" for n in self.rows if n not in self.seen)],
            str(self.folder),
        )
        self._mesh()
        self._flat({n: t for n, t in tensors.items() if megatron_dist_flat.is_flat(n)})
        self._left_out()
        raise_all([*self.builder.faults, *self.repeats.faults], str(self.folder))
        result.manifest = self.builder.manifest(self._state(), self._sides())
        self._describe(tensors, with_optimizer=with_optimizer)
        return result

    def _describe(self, tensors: Mapping[str, Stored], *, with_optimizer: bool) -> None:
        """What the result says of its files, and its later checks; ``tensors`` are used."""
        result = self.result
        result.state_file = self.common.path
        # Not bound methods: a checkpoint outlives its reader, which is larger.
        if with_optimizer:
            result.frozen = frozenset()
            result.check_optimizer = partial(
                _shifted_masters, self.folder, list(self.builder.here.shapes),
                {**self.builder.chunks.by_name, **self.repeats.chunks.by_name},
            )  # fmt: skip
        blobs = [blob for t in tensors.values() for blob in t.blobs]
        result.blob_checksums = partial(dcp.checksums, blobs)
        result.headers = partial(read_headers, blobs)
        result.padded_vocab = self.padded
        multiple = self.args.get("make_vocab_size_divisible_by")
        if type(multiple) is int and multiple > 0:
            result.vocab_multiple = claims.vocab_multiple(multiple, self.padded, self.common.path)
        result.layout = {**self.layout, "glu": "flat"}
        count = Counter(b.file for s in self.listing.tensors.values() for b in s.blobs)
        for file, size in sorted(self.listing.files.items()):
            result.files.append(FileSummary(str(file), "", size, count[str(file)]))
        described = (self.folder / name for name in (DESCRIBES, METADATA, COMMON))
        result.described_by = tuple(str(file) for file in described if file.is_file())
        result.digests = megatron_files.recorded(self.path, self.folder)
        if not with_optimizer:
            unneeded = {b.place for t in self.listing.tensors.values() for b in t.blobs}
            megatron_files.forget(result, unneeded - {blob.place for blob in blobs})

    def _sides(self) -> tuple[SideFile, ...]:
        """The files that travel along, and the config."""
        sides, notes = megatron_files.beside(self.path, self.folder)
        self.result.notes += notes
        own = {str(self.folder / name) for name in (DESCRIBES, "transformer_config.json")}
        sides = [s for s in sides if s.source not in own]
        if self.config is not None:
            sides.append(SideFile("config.json", text=megatron_args.json_text(self.config)))
        return tuple(sides)

    def _check_lost(self) -> None:
        """Bytes that are not there are an error where they are needed, and only there."""
        lost = self.listing.lost
        optimizer = [why for name, why in lost.items() if _OPTIMIZER.match(name)]
        raise_all(
            (w for n, w in lost.items() if n in self.listing.tensors and not _OPTIMIZER.match(n)),
            f"{self.folder}: weights are missing; copy the whole iteration again",
        )
        if optimizer:
            self.result.unread_optimizer = f"{optimizer[0]}; {WITHOUT}"
        others = [why for name, why in lost.items() if not _OPTIMIZER.match(name)]
        self.result.notes += [f"{why}, which is not copied" for why in others[:1]]

    def _flat(self, tensors: dict[str, Stored]) -> None:
        """Optimizer state in the flat buffers of the saving run's ranks."""
        if not tensors:
            return
        saved = megatron_dist_flat.SavedRun(
            self.folder, self.args, self.model, self.padded, self.layout, self.builder,
            self.result.left_out,
        )  # fmt: skip
        why = megatron_dist_flat.read(saved, tensors)
        if why:
            self.result.unread_optimizer = f"{why}; {WITHOUT}"

    def _mesh(self) -> None:
        """The layout of the run that saved it, which a reshard keeps where nothing else is said."""
        with suppress(CheckpointError):  # one rank for a split that args express in no known way
            self.result.mesh = megatron_dist_flat.mesh_of(self.args, self.model)
        dp = self.args.get("data_parallel_size")
        if type(dp) is int and dp > 0:
            self.result.dp = claims.ranks(dp, "data_parallel_size", self.common.path)
        self.result.sharded = self.args.get("use_distributed_optimizer") is True

    # --- tensors -----------------------------------------------------------------------------

    def _tensor(self, state: str, name: str, stored: Stored) -> None:
        """A stored tensor's blobs as chunks of logical tensors."""
        file = str(self.folder / METADATA)
        builder = self.builder
        if state == "master" and self._is_fp32(name):
            builder = self.repeats
            nbytes = math.prod(stored.shape) * ITEMSIZE[stored.dtype]
            self.result.left_out.append(("masters of fp32 weights repeat them", nbytes))
        original = self.listing.original_shapes.get(stored.name)
        whole = stored.shape
        if original is not None and len(whole) == len(original) + 1:
            whole = original
        else:
            original = None
        stacked, rest = _template(name)
        shift, name_of = half_of_gated(rest)
        first = self._first(name_of, stacked)
        if first is None:
            self.builder.faults.append(
                f"{file}: {stored.name}: unknown tensor of shape {list(stored.shape)}"
            )
            return
        wanted = (*(self.model.sizes[index] for index in stacked), *first.shape)
        if shift is not None:
            dim = len(stacked)
            wanted = (*wanted[:dim], wanted[dim] // 2, *wanted[dim + 1 :])
        if whole != wanted:
            self.builder.faults.append(
                f"{file}: {stored.name}: shape {list(whole)}, the model needs {list(wanted)}"
            )
            return
        moved = (first.shape[0] // 2) * (shift or 0)
        lead = len(stacked)
        for box, grid in boxes(stored, original):
            inner = Box(box.offsets[lead:], box.sizes[lead:])
            if moved:
                inner = Box((inner.offsets[0] + moved, *inner.offsets[1:]), inner.sizes)
            for at in itertools.product(*(range(n) for n in box.sizes[:lead])):
                numbers = [o + i for o, i in zip(box.offsets, at, strict=False)]
                row = self.rows.get(_filled(name_of, stacked, numbers))
                if row is None:
                    self.builder.faults.append(f"{file}: {stored.name}: {numbers} has no tensor")
                    return
                if not state:
                    self.seen.add(row.name)
                self._box(builder, state, row, inner, grid, at)

    def _first(self, template: str, stacked: Sequence[str]) -> Placed | None:
        """The row of the first layer and expert that a stacked key holds."""
        return self.rows.get(_filled(template, stacked, [0] * len(stacked)))

    def _is_fp32(self, name: str) -> bool:
        weight = self.listing.tensors.get(name)
        return weight is not None and weight.dtype == "F32"

    def _box(
        self, builder: ChunkBuilder, state: str, row: Placed, inner: Box, grid: Grid,
        layer: tuple[int, ...],
    ) -> None:  # fmt: skip
        """A box of a stored row as boxes of its logical parts; ``layer`` is its place in grid."""
        for piece in row.pieces:
            common = piece.stored.intersect(inner)
            if common is None or not common.numel:
                continue
            part: Piece = restrict(piece, common)
            inside = (c - o for c, o in zip(common.offsets, inner.offsets, strict=True))
            dims = tuple(len(layer) + dim for dim in part.dims)
            place = grid.part((*layer, *inside), part.box.sizes, dims)
            builder.add_box(state, part, place, row.name)

    # --- the rest ----------------------------------------------------------------------------

    def _left_out(self) -> None:
        for name in self.listing.objects:
            if COMMON_OBJECT.fullmatch(name):
                continue
            reason = next((why for part, why in _OBJECTS.items() if part in name), None)
            if reason is not None:
                self.result.left_out.append((reason, 0))
            elif not megatron_dist_flat.is_flat(name):
                self.result.notes.append(f"not copied, of unknown use: {name}")
        if any("rng_state" in name for name in self.listing.objects):
            self.result.notes.append(
                "not copied: random states, which belong to the ranks of the saving run"
            )

    def _state(self) -> dict[str, object]:
        """Iteration, schedule, args and the optimizer's hyperparameters."""
        root, result = self.common.extra, self.result
        version = root.get("checkpoint_version")
        version = version if isinstance(version, (int, float)) else 3.0
        state = run_state.read(root, self.args, self.folder, version, result.notes)
        result.step = state.step
        if self.lost:
            result.notes.append(f"args that cannot travel: {', '.join(self.lost)}")
        if result.has_optimizer and not self.options.weights_only:
            state = self._groups(state)
        return state.table()

    def _object(self, key: str, chained: str = "") -> Index | None:
        """What the flat optimizer's first rank keeps as an object under ``key``."""
        end = f".{key}/shard_0_1"
        name = next(
            (n for n in self.listing.objects if n.endswith(end) and n.startswith(chained)), None
        )
        if name is None or name in self.listing.lost:
            return None
        return dcp.objects(self.listing.objects[name])

    def _groups(self, state: TrainingState) -> TrainingState:
        """Hyperparameters of all optimizers: with experts spread over ranks there are two."""
        opt = self.common.extra.get("optimizer")
        parts = [self._part(opt, "optimizer", "")]
        if isinstance(opt, dict) and set(opt) == {0, 1}:
            parts = [self._part(opt[i], f"optimizer.{i}", f"chained_{i}.") for i in (0, 1)]
            opt = opt[0]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return state
        reader = OptimizerReader(self.builder, self.result)
        reader.groups(found, opt if isinstance(opt, dict) else {})
        scaler = self._object("grad_scaler")  # beside the flat buffers; in common.pt else
        if scaler is not None:
            rank = megatron_files.RankFile(self.folder, scaler, self.args, [], 3.0)
            reader.scaler(rank, scaler.extra.get("0"), "0")
        table = {**state.megatron, "optimizer": reader.state}
        return replace(state, megatron=table, groups=tuple(reader.native))

    def _part(
        self, opt: object, base: str, chained: str
    ) -> tuple[megatron_files.RankFile, list[Mapping[str, object]], str] | None:
        """The groups of one optimizer, from common.pt or from its first rank's object."""
        index, where, inner = self.common, base, opt
        if isinstance(opt, dict) and isinstance(opt.get("optimizer"), dict):
            inner, where = opt["optimizer"], f"{base}.optimizer"
        if not isinstance(inner, dict) or "param_groups" not in inner:
            found = self._object("optimizer", chained)
            if found is None:
                return None
            index, where = found, "0"
            inner = index.extra.get("0")
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            return None
        rank = megatron_files.RankFile(self.folder, index, self.args, [], 3.0)
        return rank, groups, where


def _shifted_masters(
    folder: StoragePath, names: Sequence[str], chunks: Mapping[str, Sequence[Chunk]]
) -> str:
    """megatron-core 0.16.1 may write fully reshardable state shifted: masters then differ."""
    wrong = differing_chunks(
        (name, chunks["master/" + name], chunks[name])
        for name in names
        if name in chunks and "master/" + name in chunks
    )
    if not wrong:
        return ""
    return (
        f"{folder}: {wrong}: the optimizer state is shifted against the weights (megatron-core "
        f"0.16.1 writes it so with several padded buckets); {WITHOUT}"
    )


def _template(name: str) -> tuple[tuple[str, ...], str]:
    """The indices that are dims of a key's tensor, and its name with their placeholders.

    Layers are stacked in a first dim, or numbered in keys; so are the experts of a layer.
    """
    stacked: tuple[str, ...] = ()
    if match := _STACKED.fullmatch(name):
        stacked, name = ("layer",), "decoder.layers.{layer}." + match[1]
    if match := _EXPERTS.fullmatch(name):
        number = match[2] or "{expert}."
        stacked += () if match[2] else ("expert",)
        name = f"{match[1]}.local_experts.{number}{match[3]}"
    return stacked, name


def _filled(template: str, stacked: Sequence[str], numbers: Sequence[int]) -> str:
    return megatron_names.ours(fill(template, dict(zip(stacked, numbers, strict=True))))
