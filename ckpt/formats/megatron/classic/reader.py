"""Megatron-LM's classic checkpoints (``--ckpt-format torch``), read without Megatron or torch.

    DIR/latest_checkpointed_iteration.txt        "1234" or "release"
    DIR/iter_0001234/mp_rank_TT[_PPP]/model_optim_rng.pt
    DIR/iter_0001234/mp_rank_TT[_PPP]/distrib_optim.pt     with the distributed optimizer

Layer numbers count from 0 in each virtual stage; walking virtual stages first and pipeline ranks
second numbers them for the whole model. The rest is what `args` say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from ....checkpoint import claims
from ....checkpoint.types import WITHOUT, Checkpoint, FileSummary, ReadOptions, filled
from ....errors import CheckpointError, raise_all
from ....model.chunk_builder import ChunkBuilder
from ....model.dtypes import ITEMSIZE
from ....model.family import WHOLE_DOWN, build_mesh, with_tensors
from ....model.file_layout import Entry
from ....model.layout import check_layout
from ....model.manifest import Manifest, SideFile
from ....model.mesh import Coord, Mesh, Stages
from ....model.pipeline import numbered
from ....model.placement import Placed, Placement
from ....move.storage import StoragePath
from .. import args as megatron_args
from .. import expert_args, run_state
from .. import names as megatron_names
from ..grouped import each_expert
from ..optimizer import Param
from ..optimizer_reader import OptimizerReader
from . import files as megatron_files
from .files import FLAT, TRACKER, iteration_folder

NAME = "megatron"
PACKING = {0: "per_rank", 1: "per_row", 2: "per_group", 3: "per_group"}  # by checkpoint version


def sniff(path: StoragePath) -> bool:
    """Whether ``path`` is such a folder, or the folder of one of its iterations."""
    if not path.is_dir():
        return False
    iterations = megatron_files.iterations(path)
    if (path / TRACKER).is_file() or any(megatron_files.has_ranks(c) for c in iterations):
        return not any(megatron_files.is_dist(c) for c in iterations)
    return megatron_files.has_ranks(path) and not megatron_files.is_dist(path)


def read(path: StoragePath, options: ReadOptions) -> Checkpoint:
    """The checkpoint; raises CheckpointError with what does not fit."""
    folder = iteration_folder(path, options.iteration)
    ranks = megatron_files.rank_files(folder)
    return _Reader(path, folder, ranks, options).checkpoint()


class _Reader:
    """Reads one iteration."""

    def __init__(
        self,
        path: StoragePath,
        folder: StoragePath,
        ranks: dict[Coord, megatron_files.RankFile],
        options: ReadOptions,
    ) -> None:
        self.path, self.folder, self.ranks, self.options = path, folder, ranks, options
        self.first = next(iter(ranks.values()))
        self.args = self.first.args
        self.grid = megatron_files.grid_of(ranks)
        self.tp, self.pp = self.grid.tp, self.grid.pp
        megatron_args.check_precision(self.args, self.first.file, options)
        self.stages, self.numbers = self._stages()
        self.padded = self._padded_vocab()
        self.model, self.config, notes = megatron_args.model_from_args(
            self.args, self.first.file, options, self.padded, megatron_files.homes(path, folder)
        )
        held = (name for r in ranks.values() for chunk in r.chunks for name, _ in chunk)
        self.model = with_tensors(self.model, held, stored=True)
        expert_args.check_mtp(self.model, self.args, self.first.file)
        self.here = self._place()
        self.builder = ChunkBuilder(self.here)
        self.result = Checkpoint(path, NAME, Manifest({}, {}), self.model, self.here.mesh)
        self.result.notes += notes
        self.optimizer = OptimizerReader(self.builder, self.result)
        self.bare: list[str] = []  # files of ranks without an optimizer

    def _stages(self) -> tuple[Stages, dict[tuple[int, int], int]]:
        """The layers of each virtual stage, and the number of the first layer of each."""
        counts: dict[tuple[int, int], int] = {}
        for coord, rank in self.ranks.items():
            if dict(coord)["tp"] or (0, dict(coord)["pp"]) in counts:
                continue
            for v, chunk in enumerate(rank.chunks):
                seen = {n for name, _ in chunk if (n := megatron_names.layer_of(name)) is not None}
                if seen != set(range(len(seen))):
                    raise CheckpointError(
                        f"{rank.file}: its layers are numbered {sorted(seen)[:8]}, not from 0 on"
                    )
                counts[v, dict(coord)["pp"]] = len(seen)
        widths = {rank.folder.name: len(rank.chunks) for rank in self.ranks.values()}
        if len(set(widths.values())) > 1:
            raise CheckpointError(f"{self.folder}: the ranks differ in virtual stages: {widths}")
        starts, at = {}, 0
        for v, p in sorted(counts):
            starts[v, p] = at
            at += counts[v, p]
        said = self.args.get("num_layers")
        if type(said) is int and said != at:
            raise CheckpointError(f"{self.folder}: args say {said} layers, the files hold {at}")
        return numbered([counts[place] for place in sorted(counts)], self.pp), starts

    def _padded_vocab(self) -> int:
        entry = megatron_files.embedding(self.first)
        if entry is None:
            raise CheckpointError(f"{self.first.file}: holds no embedding.word_embeddings.weight")
        padded, said = entry.shape[0] * self.tp, self.args.get("padded_vocab_size")
        if type(said) is int and said != padded and self.options.config is None:
            raise CheckpointError(
                f"{self.first.file}: args say padded_vocab_size {said}, its files hold {padded} "
                f"rows on {self.tp} ranks; if args are wrong, name a config with --config HF_DIR"
            )
        return padded

    def _place(self) -> Placement:
        model, padded, true = self.model, self.padded, self.model.sizes["vocab"]
        if padded < true:
            raise CheckpointError(
                f"{self.first.file}: {padded} vocabulary rows on {self.tp} ranks are fewer "
                f"than the {true} of the config"
            )
        self.layout = check_layout(self._packing(), model.family, str(self.path))
        axes = (("tp", self.tp), ("pp", self.pp))
        experts = {"ep": self.grid.ep, "etp": self.grid.etp} if self.grid.experts else {}
        mesh = build_mesh(model, axes, self.stages, self._mtp(), **experts)
        self._check_experts(mesh)
        whole = any(
            megatron_names.is_whole_down(name, entry.shape, model.sizes)
            for rank in self.ranks.values()
            for chunk in rank.chunks
            for name, entry in chunk
        )
        variant = frozenset({WHOLE_DOWN} if whole else ())
        try:
            nbytes = sum(rank.index.size_bytes for rank in self.ranks.values())
            return Placement.of(model, mesh, self.layout, padded, variant, nbytes=nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _check_experts(self, mesh: Mesh) -> None:
        """The files, whose folders are numbered by args and tensors, and the model must agree."""
        if self.grid.experts == (mesh.experts is not None):
            return
        ours, theirs = ("with", "without") if self.grid.experts else ("without", "with")
        raise CheckpointError(
            f"{self.first.file}: its args (num_experts {self.args.get('num_experts')!r}) and "
            f"tensors are of a model {ours} experts, the config ({self.model.family.name}) is of "
            f"one {theirs}; if args are wrong, name the right config with --config HF_DIR"
        )

    def _mtp(self) -> tuple[int, int] | None:
        """The rank and virtual stage of the layers that predict further tokens."""
        last = (self.pp - 1, len(self.stages[-1]) - 1)
        for coord, rank in self.ranks.items():
            for v, chunk in enumerate(rank.chunks):
                place = dict(coord)["pp"], v
                if place != last and any(name.startswith("mtp.") for name, _ in chunk):
                    return place
        return None

    def _packing(self) -> dict[str, str]:
        """How query, key and value rows are packed, from the version or from the user."""
        version, sizes = int(self.first.version), self.model.sizes
        if version < 2 and sizes["g"] != sizes["n"] and "qkv" not in self.options.layout:
            raise CheckpointError(
                f"{self.first.file}: checkpoint_version {version} knows no query groups, the model "
                f"has {sizes['g']} for {sizes['n']} heads; say how rows are packed: "
                "--layout qkv=per_group"
            )
        settled = version >= 2 or sizes["g"] == sizes["n"]
        recorded = "checkpoint_version" in self.first.index.extra and settled
        origin = f"{self.first.file}: checkpoint_version {version}"
        given = self.options.layout.get("qkv")
        filled(PACKING[version] if recorded else None, given, "--layout qkv", origin)
        return {"qkv": PACKING[version], **self.options.layout}

    def checkpoint(self) -> Checkpoint:
        """Everything in the iteration, checked."""
        result = self.result
        for coord, rank in self.ranks.items():
            self._rank(coord, rank)
        raise_all(self.builder.faults, f"{self.folder}")
        if self.bare and result.has_optimizer:
            more = f" (and {len(self.bare) - 1} more)" if len(self.bare) > 1 else ""
            result.unread_optimizer = result.unread_optimizer or (
                f"{self.bare[0]}: holds no optimizer{more}, other ranks' files do: it was taken "
                f"from another save, or its optimizer was removed; {WITHOUT}"
            )
        state = self._state()
        result.state_file = self.first.file
        result.layout = self.layout
        result.padded_vocab = self.padded
        multiple = self.args.get("make_vocab_size_divisible_by")
        if type(multiple) is int and multiple > 0:
            result.vocab_multiple = claims.vocab_multiple(multiple, self.padded, self.first.file)
        dp = self.args.get("data_parallel_size")
        if type(dp) is int and dp > 0:
            result.dp = claims.ranks(dp, "data_parallel_size", self.first.file)
        result.digests = megatron_files.recorded(self.path, self.folder)
        if self.options.weights_only:
            megatron_files.forget(result, [rank.folder / FLAT for rank in self.ranks.values()])
        elif result.has_optimizer:
            result.frozen = frozenset()  # groups number every parameter of the model
        sides, notes = megatron_files.beside(self.path, self.folder)
        result.notes += notes
        if self.config is not None:
            sides.append(SideFile("config.json", text=megatron_args.json_text(self.config)))
        result.manifest = self.builder.manifest(state, tuple(sides))
        return result

    # --- weights -----------------------------------------------------------------------------

    def _rank(self, coord: Coord, rank: megatron_files.RankFile) -> None:
        rows = self.here.held(self.grid.shards(coord))
        experts = self.here.mesh.experts
        first = 0
        if experts is not None:
            (own,) = experts.stages["ep"][dict(coord)["ep"]]
            first = own[0]
        weights: dict[str, Entry] = {}
        held: set[str] = set()
        params: list[Param] = []
        for v, chunk in enumerate(rank.chunks):
            shift = self.numbers[v, dict(coord)["pp"]]
            for name, entry in chunk:
                if self._holds_no_weight(name, entry):
                    continue
                name = megatron_names.shifted(name, shift)
                name = megatron_names.expert_shifted(name, first)
                if megatron_names.all_experts(name) and name not in weights:
                    weights[name] = entry
                    for row, part in each_expert(name, entry, rows):
                        self.builder.add_strided("", row, part, rank.file)
                        held.add(row.name)
                    params.append(Param(name, entry.shape, entry.dtype, v))
                    continue
                placed = rows.get(name)
                if placed is None or name in weights:
                    what = "the second" if name in weights else "unknown tensor,"
                    self.builder.faults.append(
                        f"{rank.file}: {entry.name}: {what} {name} of shape {list(entry.shape)}"
                    )
                    continue
                weights[name] = entry
                held.add(name)
                self.builder.add_entry("", placed, entry, rank.file)
                if placed.trained:
                    params.append(Param(name, entry.shape, entry.dtype, v, self._is_shared(name)))
        self.builder.faults += [f"{rank.file}: {n}: missing" for n in rows if n not in held]
        self._count(rank)
        layers = self.here.mesh.owned["pp"][dict(coord)["pp"]]
        says = " ".join(f"{axis} {number}" for axis, number in coord)
        self.result.files.append(
            FileSummary(rank.file, says, rank.index.size_bytes, len(rank.index.entries), layers)
        )
        if self.builder.faults:
            return  # what the optimizer lacks follows from them
        self._optimizer_of(rank, rows, params, weights)

    def _optimizer_of(
        self,
        rank: megatron_files.RankFile,
        rows: Mapping[str, Placed],
        params: list[Param],
        weights: Mapping[str, Entry],
    ) -> None:
        layered = sorted(rank.folder.glob("layer_wise_optimizer*"))
        there = rank.index.extra.get("optimizer") is not None or (rank.folder / FLAT).exists()
        if not there and not layered:
            self.bare.append(rank.file)
            return
        self.result.has_optimizer = True
        if layered:
            self.result.unread_optimizer = (
                f"{layered[0]}: a layer-wise optimizer (Muon) is not read; {WITHOUT}"
            )
        elif not self.options.weights_only:
            self.optimizer.rank(rank, rows, params, weights)

    def _holds_no_weight(self, name: str, entry: Entry) -> bool:
        reason = ""
        if name.endswith(megatron_names.EXTRA):
            reason = "_extra_state holds no weights"
        elif megatron_names.is_table(name):
            reason = "a rotary table, computed from the config"
        if reason:
            nbytes = math.prod(entry.shape) * ITEMSIZE[entry.dtype]
            self.result.left_out.append((reason, nbytes))
        return bool(reason)

    def _is_shared(self, name: str) -> bool:
        """Whether Megatron has a separate bucket for it: a tied embedding on two stages."""
        tied = "tie_word_embeddings" in self.model.flags and self.pp > 1
        return tied and name in ("embedding.word_embeddings.weight", "output_layer.weight")

    def _count(self, rank: megatron_files.RankFile) -> None:
        """Everything in the file that is no tensor of the model or of its optimizer."""
        left_out = self.result.left_out
        left_out += [("_extra_state holds no weights", 0)] * rank.extra_states
        for entry in rank.index.entries.values():
            head = entry.name.partition(".")[0]
            if re.fullmatch(r"model\d*", head) or head == "optimizer":
                continue
            if head not in megatron_files.DROPPED:
                self.builder.faults.append(f"{rank.file}: {entry.name}: unknown tensor")
        for key, reason in megatron_files.DROPPED.items():
            if key in rank.index.extra:
                left_out.append((reason, 0))

    # --- the rest ----------------------------------------------------------------------------

    def _state(self) -> dict[str, object]:
        """Iteration, schedule, args and the optimizer's hyperparameters."""
        root, result = self.first.index.extra, self.result
        state = run_state.read(root, self.args, self.folder, self.first.version, result.notes)
        result.step = state.step
        known = {*megatron_files.DROPPED, *run_state.KNOWN, "args", "optimizer"}
        rest = [k for k in root if k not in known and not re.fullmatch(r"model\d*", k)]
        if rest:
            result.notes.append(f"not copied, of unknown use: {', '.join(map(str, rest))}")
        if self.first.lost:
            result.notes.append(f"args that cannot travel: {', '.join(self.first.lost)}")
        if any(key in root for key in megatron_files.DROPPED if "rng" in key):
            result.notes.append(
                "not copied: random states, which belong to the ranks of the saving run"
            )
        if self.optimizer.state:
            table = {**state.megatron, "optimizer": self.optimizer.state}
            state = replace(state, megatron=table, groups=tuple(self.optimizer.native))
        return state.table()
