"""Designs Megatron-LM's classic checkpoints: rank folders that Megatron-LM's own loader takes.

The layout of files is reader.py's. Weights have the local spec's names (TransformerEngine's
where the source was trained with it), numbered within each virtual stage. The optimizer is the
plain one, or flat buffers if it is sharded over data-parallel ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ....checkpoint.state import TrainingState
from ....containers import torch_zip
from ....containers.pickles import Global, Stub
from ....errors import CheckpointError, raise_all
from ....model.chunk_builder import ChunkBuilder
from ....model.design import Design, OutFile
from ....model.dtypes import HALF, ITEMSIZE, TO_TORCH
from ....model.family import MTP, WHOLE_DOWN
from ....model.file_layout import FileLayout, Spec
from ....model.manifest import SLOTS, STATES, SideFile
from ....model.mesh import Coord
from ....model.placement import Placed, Placement
from ....model.target import main_dtype
from ...writing import StoredDtypes, WriteRequest, Written, checksums
from .. import args_codec, args_out, param_groups, run_state
from .. import names as megatron_names
from .. import optimizer as megatron_optim
from ..expert_args import MOE
from ..optimizer import Param, registration_key
from . import files as megatron_files
from .files import FILES, FLAT, TRACKER
from .grid import Grid

TO = "megatron"
TAKES = frozenset({
    "--pp-layers", "--pp-layout", "--vpp", "--ep", "--etp", "--use-distributed-optimizer", "--adam",
    args_out.ALLOW,
})  # fmt: skip
WEIGHTS_ONLY = False
LINEAR_OF_LAYERS = (
    "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "linear_fc1", "linear_fc2", "eh_proj",
)  # fmt: skip
_LINEAR = (*LINEAR_OF_LAYERS, "output_layer")
_MAX_SCALE = 3.4028234663852886e38  # of float32
_HYSTERESIS = 2  # Megatron-LM's own default
_STEP_IN = {"fused": "groups", "torch": "state"}  # an Adam -> where it keeps its step
# A loaded group replaces the optimizer's own one, so it needs all that a step reads: Apex's and
# TransformerEngine's Adam, and every SGD, fill in nothing.
_READ: Mapping[str, Mapping[str, object]] = {
    "betas": {"bias_correction": True},
    "momentum": {"dampening": 0.0, "nesterov": False},
}


def design(request: WriteRequest, root: PurePath) -> Design:
    """Every rank's files below ``root``."""
    return Designer(request, root).design()


def sides(request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
    """What travels along, digests, and the tracker file last."""
    kept = [s for s in request.sides if s.name != TRACKER]
    step = request.target.step
    tracker = SideFile(TRACKER, text="release" if step is None else str(step))
    return [*kept, *checksums(files), tracker]


@dataclass(frozen=True, slots=True)
class _Row:
    """A stored tensor of a rank."""

    placed: Placed
    param: Param
    name: str  # in the file: local layer number
    states: Mapping[str, str]  # optimizer state -> dtype


class Designer:
    """Collects the files of all ranks."""

    def __init__(self, request: WriteRequest, root: PurePath) -> None:
        target = request.target
        self.request, self.target = request, target
        self.files: list[OutFile] = []
        self.folder = root / megatron_files.iteration_name(target.step)
        self.state = TrainingState.of(
            request.state, request.source.state_file or str(request.source.path)
        )
        self.saved: Mapping[str, Any] = self.state.megatron
        source = self.saved.get("args")
        self.source_args: Mapping[str, object] = source if isinstance(source, dict) else {}
        self.fused = self.source_args.get("transformer_impl") == "transformer_engine"
        self.grouped = self.fused and self.source_args.get("moe_grouped_gemm") is True
        variant = frozenset({WHOLE_DOWN} if self.fused else ())  # local layers cut them
        self.here = Placement.written(target.model, target.mesh, target.vocab_multiple, variant)
        self.builder, self.dtypes = ChunkBuilder(self.here), StoredDtypes(request.metas)
        self.grid = Grid.of(target.mesh)
        self.tp, self.pp = self.grid.tp, self.grid.pp
        self.latent = bool(target.model.sizes.get("kl"))
        self.dp = self._dp()
        self.stages = target.mesh.stages["pp"]
        self.vpp = max(len(stages) for stages in self.stages)
        states = [] if request.weights_only else STATES
        self.states = [s for s in states if any(f.startswith(s + "/") for f in request.metas)]
        self.notes: list[str] = []
        self._check_adam()
        self.args = self._args()
        self.schedulers: dict[str, object] = {}
        if self.states:
            self.schedulers = run_state.schedulers(self.state, self.notes)
            groups, step, _ = self.groups()
            param_groups.say_changed(self.state, groups, step, self.notes)
        if not request.weights_only:
            run_state.say_what_is_lost(self.state, self.notes)

    def _dp(self) -> int:
        """Data-parallel ranks that args say: so many that experts divide over all ranks."""
        mesh, dp = self.target.mesh, self.target.dp
        if mesh.experts is None:
            return dp
        least = self.grid.etp * self.grid.ep
        least //= math.gcd(least, self.tp)
        if self.target.sharded and dp > 1:
            mesh.expert_dp(dp)  # refuses what does not divide
        return dp * least // math.gcd(dp, least)

    def _check_adam(self) -> None:
        """An Adam that can load this form of the optimizer; a note if the user named none."""
        adam, plain = self.request.adam, not self.target.sharded
        if adam is not None and adam not in _STEP_IN:
            raise CheckpointError(f"--adam {adam!r}: known are {', '.join(_STEP_IN)}")
        if adam == "torch" and not plain:
            raise CheckpointError(
                "--adam torch: with torch's Adam megatron-core's distributed optimizer cannot load "
                "state, its own neither; add --no-use-distributed-optimizer"
            )
        known = adam is not None or "optimizer" in self.saved
        if plain and not known and "exp_avg" in self.states:
            self.notes.append(
                "the optimizer is for Apex's or TransformerEngine's Adam; --adam torch writes it "
                "for a megatron-core without both"
            )

    def _args(self) -> dict[str, object]:
        target = self.target
        made = args_out.args_for(
            target.model,
            self.source_args,
            mesh=target.mesh,
            dp=self.dp,
            padded_vocab=self.here.padded,
            vocab_multiple=target.vocab_multiple,
            distributed=target.sharded,
            dtype=main_dtype(self.request.metas),
            transformer_engine=self.fused,
            origin=str(self.request.source.path),
            state_origin=self.state.origin,
            allow_incomplete=self.request.allow_incomplete_args,
            notes=self.notes,
        )
        if not self.source_args:
            self.notes += args_out.say_options(made)
        # Megatron-LM asks torch_dist only for what its args do not name here
        made |= {"no_save_rng": True, "no_save_optim": not self._has_moments()}
        if target.step is not None:
            made["iteration"] = target.step
        return made if self.request.weights_only else made | run_state.progress_args(self.state)

    def design(self) -> Design:
        self.grid.check("--to megatron")
        for coord in self.grid.coords():
            placed = list(self.here.held(self.grid.shards(coord)).values())
            self._rank(coord, list(self._rows(coord, placed)))
        raise_all(self.dtypes.faults, "these tensors cannot be packed")
        self.notes.append(self.how_to_load())
        tied = self.here.tied_copies * (1 + len(self.states))
        return Design(self.files, self.builder.manifest(), tied, self.notes)

    def _has_moments(self) -> bool:
        return any(state in SLOTS for state in self.states)

    def contents(self) -> str:
        """Which parts of a run are not in the files."""
        if self.target.step is None:
            return "a release: Megatron-LM loads its weights and begins a run at iteration 0"
        if not self.states:
            return "weights alone"
        if not self._has_moments():
            return "the optimizer has masters and no moments yet"
        return "random states are left out"

    def how_to_load(self) -> str:
        """Megatron-LM's options for what is written, in the classic format."""
        said = self.contents()
        if self.target.step is None:
            return said
        if not self._has_moments():
            more = "" if self.states else ", or --finetune"
            return f"{said}: load with --no-load-optim --no-load-rng{more}"
        if self.target.sharded and main_dtype(self.request.metas) == "F32":
            said = (
                "megatron-core 0.16 cannot load flat buffers of fp32 weights, its own neither "
                f"(--to torch_dist, which it can); {said}"
            )
        return f"{said}: load with --no-load-rng"

    def _rows(self, coord: Coord, placed: Sequence[Placed]) -> Iterator[_Row]:
        """A rank's tensors in registration order."""
        chunks = self.stages[dict(coord)["pp"]]
        tied = "tie_word_embeddings" in self.target.model.flags and self.pp > 1
        found = []
        first = 0
        if self.target.mesh.experts is not None:
            first = self.target.mesh.experts.owned["ep"][dict(coord)["ep"]][0]
        for row in placed:
            layer = megatron_names.layer_of(row.name)
            name = row.name
            if layer is not None:
                name = megatron_names.renumbered(row.name, layer - chunks[row.stage][0])
            name = megatron_names.expert_shifted(name, -first)
            shared = tied and row.name in (
                "embedding.word_embeddings.weight", "output_layer.weight",
            )  # fmt: skip
            dtype = self.dtypes.of(row, "") or "F32"
            states = {}
            for state in self.states if row.trained else ():
                have = self.dtypes.of(row, state)
                if have is not None:
                    states[state] = have
            param = Param(row.name, row.shape, dtype, row.stage, shared)
            shown = name
            if self.fused:
                moe = self.has_experts(row)
                shown = megatron_names.fused(name, moe=moe, latent=self.latent)
            if self.grouped:
                shown = megatron_names.grouped(shown)
            found.append(_Row(row, param, shown, states))
        found.sort(
            key=lambda r: (
                r.param.chunk,
                registration_key(r.param.name, self.fused, self.grouped),
            )
        )
        yield from found

    def has_experts(self, row: Placed) -> bool:
        """Whether a tensor is of a layer with experts."""
        kinds, numbers = self.target.model.kinds, dict(row.numbers)
        if not kinds or not numbers.keys() & {"layer", MTP}:
            return False
        return MOE in kinds[numbers.get("layer", -1)]

    def _rank(self, coord: Coord, rows: list[_Row]) -> None:
        folder = self.folder / self.grid.folder(coord)
        number = self.grid.number(coord, self.dp)
        tree: dict[str, object] = {
            "args": Stub("argparse", "Namespace", (), {**self.args, "rank": number}),
            "checkpoint_version": 3.0,
            "iteration": self.target.step or 0,
        }
        for v in range(self.vpp):
            chunk = [row for row in rows if row.param.chunk == v]
            tree["model" if self.vpp == 1 else f"model{v}"] = self._model(chunk)
        if self.states:
            tree["optimizer"] = self._optimizer(rows)
            tree |= self.schedulers
        tree |= run_state.operations(self.state)
        layout = self._file(folder / FILES[0], tree)
        path = str(folder / FILES[0])
        for row in rows:
            self._chunks(path, layout, "", row, f"model/{row.param.name}")
            if not self.target.sharded:
                for state in row.states:
                    key = f"{state}/{row.param.name}"
                    if key in layout.offsets:
                        self._chunks(path, layout, state, row, key)
        if self.states and self.target.sharded:
            self._flat(coord, folder / FLAT, rows)

    def _file(self, path: PurePath, tree: object) -> FileLayout:
        layout = torch_zip.layout_tree(tree)
        self.files.append(OutFile(str(path), layout))
        return layout

    def _model(self, rows: Sequence[_Row]) -> dict[str, object]:
        """Names as the module has them, with the empty ``_extra_state`` of linear layers."""
        model: dict[str, object] = {}
        for i, row in enumerate(rows):
            model[row.name] = Spec(f"model/{row.param.name}", row.param.dtype, row.param.shape)
            module = row.name.rpartition(".")[0]
            last = i + 1 == len(rows) or rows[i + 1].name.rpartition(".")[0] != module
            if last and module.rpartition(".")[2] in _LINEAR:
                model[f"{module}.{megatron_names.EXTRA}"] = None
        if rows and rows[-1].param.name.startswith("decoder.final_layernorm."):
            model[f"output_layer.{megatron_names.EXTRA}"] = None  # its weight is the embedding
        return model

    # --- optimizer ---------------------------------------------------------------------------

    def _optimizer(self, rows: Sequence[_Row]) -> object:
        """The optimizer of a rank; with ep above 1 a list, the second one for the experts."""
        made = []
        for experts in self.chain:
            held = [row for row in rows if row.placed.trained]
            if experts is not None:
                held = [row for row in held if megatron_optim.is_expert(row.param.name) is experts]
            flat = self.target.sharded
            made.append(
                self.distributed_groups(experts) if flat else self._plain_optimizer(held, experts)
            )
        return made[0] if len(made) == 1 else made

    @property
    def chain(self) -> tuple[bool | None, ...]:
        """For each optimizer of a rank whether it is the experts'; None: a single one of all."""
        return (False, True) if self.grid.ep > 1 else (None,)

    def groups(
        self, experts: bool | None = None
    ) -> tuple[list[dict[str, object]], int | None, str]:
        """Hyperparameters of each group, the step, and its place."""
        groups, step, step_in = self._groups_of_source()
        groups = param_groups.of_chain(groups, experts)
        adam = self.request.adam
        return groups, step, step_in if adam is None else _STEP_IN[adam]

    def _groups_of_source(self) -> tuple[list[dict[str, object]], int | None, str]:
        saved = self.saved.get("optimizer")
        if isinstance(saved, dict) and isinstance(saved.get("param_groups"), list):
            where = f"{self.state.origin}: megatron.optimizer.param_groups"
            decoded = args_codec.decode_plain(saved["param_groups"], where)
            if not all(isinstance(group, dict) for group in decoded):
                raise CheckpointError(f"{where}: holds values that are no groups")
            step = saved.get("step")
            groups = [param_groups.identified(dict(group)) for group in decoded]
            step_in = str(saved.get("step_in", "groups"))
            if any("amsgrad" in group for group in groups):
                step_in = "state"  # of torch's Adam; the distributed optimizer has it in groups
            return groups, step if type(step) is int else None, step_in
        rows = self.state.groups
        steps = [r["step"] for r in rows if type(r.get("step")) is int]
        return param_groups.made(rows), steps[0] if steps else self.target.step, "groups"

    def _numbered(self, rows: Sequence[_Row], groups: list[dict[str, object]]) -> list[list[_Row]]:
        """The parameters of each group, by megatron-core's rule."""
        by_name = {row.param.name: row for row in rows}
        params = [row.param for row in rows if row.states]
        buckets = megatron_optim.assigned(groups, params)
        if buckets is None:
            raise CheckpointError(
                f"{self.request.source.path}: its {len(groups)} param groups do not say which "
                "parameters they hold; pass --weights-only to go on without the optimizer"
            )
        return [[by_name[p.name] for p in bucket] for bucket in buckets]

    def _plain_optimizer(self, rows: Sequence[_Row], experts: bool | None) -> dict[str, object]:
        groups, step, step_in = self.groups(experts)
        buckets = self._numbered(rows, groups)
        state: dict[int, dict[str, object]] = {}
        for group, bucket in zip(groups, buckets, strict=True):
            group["params"] = list(range(len(state), len(state) + len(bucket)))
            put_step(group, step, step_in)
            for row in bucket:
                entry: dict[str, object] = {}
                if step is not None and step_in == "state":
                    entry["step"] = torch_zip.Known("F32", (), struct.pack("<f", step))
                for moment in SLOTS:
                    if moment in row.states:
                        key = f"{moment}/{row.param.name}"
                        entry[moment] = Spec(key, row.states[moment], row.param.shape)
                state[len(state)] = entry
        inner: dict[str, object] = {"state": state, "param_groups": groups}
        if not any(row.param.dtype in HALF for row in rows):
            return inner
        masters = [
            [
                Spec(f"master/{r.param.name}", r.states.get("master", "F32"), r.param.shape)
                for r in bucket
                if r.param.dtype in HALF
            ]
            for bucket in buckets
        ]
        self._need_masters(rows)
        found: dict[str, object] = {"optimizer": inner, "fp32_from_fp16_params": masters}
        return found | self.scaler()

    def scaler(self) -> dict[str, object]:
        """The loss scale under ``grad_scaler``, as megatron-core's own state_dict has it.

        A dynamic one is a float32 tensor of shape [1] and two counters; Megatron-LM needs all
        three. A constant one has no state. Empty if the source has none: Megatron-LM then starts
        its own.
        """
        saved = self.saved.get("optimizer")
        table = saved.get("grad_scaler") if isinstance(saved, dict) else None
        if not isinstance(table, dict):
            return {}
        if not table:
            return {"grad_scaler": {}}
        scale = table.get("scale")
        if not isinstance(scale, (int, float)) or not 0 < scale <= _MAX_SCALE:
            why = f"grad_scaler left out: its scale is {scale!r}, no float32 above 0"
            if why not in self.notes:
                self.notes.append(why)
            return {}
        patience = self.source_args.get("hysteresis")
        fresh = {
            "growth_tracker": 0,
            "hysteresis_tracker": patience if type(patience) is int else _HYSTERESIS,
        }
        counters = {k: table[k] if type(table.get(k)) is int else n for k, n in fresh.items()}
        known = torch_zip.Known("F32", (1,), struct.pack("<f", scale))
        return {"grad_scaler": {"scale": known, **counters}}

    def _need_masters(self, rows: Sequence[_Row]) -> None:
        lacking = [r.param.name for r in rows if r.param.dtype in HALF and "master" not in r.states]
        if lacking:
            raise CheckpointError(
                f"{self.request.source.path}: {lacking[0]}: half-precision weights with moments "
                "and no fp32 masters, which Megatron-LM's optimizer needs; pass --weights-only, or "
                "--dtype fp32"
            )

    def distributed_groups(self, experts: bool | None = None) -> dict[str, object]:
        groups, step, _ = self.groups(experts)
        for group in groups:
            put_step(group, step, "groups")
        return {"optimizer": {"param_groups": groups}} | self.scaler()

    def _flat(self, coord: Coord, path: PurePath, rows: Sequence[_Row]) -> None:
        """distrib_optim.pt: one buffer for each virtual stage and dtype.

        With ep above 1 a list, the second of the experts' buffers; the first is None in files of
        ranks that are no first data-parallel ones.
        """
        rows = [row for row in rows if row.placed.trained]
        self._need_masters(rows)
        for row in rows:
            if not row.states:
                raise CheckpointError(
                    f"{self.request.source.path}: {row.param.name} has no optimizer state, which "
                    "flat buffers need for every parameter; pass --weights-only"
                )
        laid: list[tuple[str, str, _Row, int]] = []
        trees: list[object] = []
        for experts in self.chain:
            held = rows
            if experts is not None:
                held = [row for row in rows if megatron_optim.is_expert(row.param.name) is experts]
            if experts is False and not self.grid.is_first(coord):
                trees.append(None)
            else:
                trees.append(self._buffers(dict(coord)["pp"], len(trees), held, laid))
        layout = self._file(path, trees[0] if len(trees) == 1 else trees)
        for name, key, row, start in laid:
            state = "master" if key == "param" else key
            if state == "master" and row.param.dtype == "F32":
                state = ""  # the master of an fp32 weight is that weight again
            self._chunks(str(path), layout, state, row, name, start)

    def _buffers(
        self,
        stage: int,
        of_chain: int,
        rows: Sequence[_Row],
        laid: list[tuple[str, str, _Row, int]],
    ) -> dict[object, object]:
        """The buffers of one optimizer; adds (tensor, key, row, first element) to ``laid``."""
        pools: dict[tuple[int, str], list[_Row]] = {}
        for row in rows:
            pools.setdefault((row.param.chunk, row.param.dtype), []).append(row)
        tree: dict[object, object] = {"buckets_coalesced": True}
        for number, ((chunk, dtype), pool) in enumerate(pools.items()):
            sizes = megatron_optim.bucket_sizes(self.args, self.target.dp, stage, chunk)
            flat = megatron_optim.flat_buffer([r.param for r in pool], next(sizes))
            by_name = {r.param.name: r for r in pool}
            values: dict[str, object] = {}
            for key, state in (("param", "master"), *((m, m) for m in SLOTS)):
                if key != "param" and state not in pool[0].states:
                    continue
                name = f"{of_chain}.{number}.{key}"
                values[key] = Spec(name, pool[0].states.get(state, "F32"), (flat.length,))
                laid += [(name, key, by_name[s.param.name], s.start) for s in flat.spans]
            values["numel_unpadded"] = flat.length
            pair = (Global("torch", TO_TORCH[dtype]), Global("torch", "float32"))
            tree[number] = {pair: values}
        return tree

    def _chunks(
        self, path: str, layout: FileLayout, state: str, row: _Row, key: str, start: int = 0
    ) -> None:
        """A stored tensor's pieces; it begins ``start`` elements into the file's tensor."""
        dtype = row.states[state] if state else row.param.dtype
        offset = layout.offsets[key] + start * ITEMSIZE[dtype]
        self.builder.add(state, row.placed, path, offset, dtype)


def put_step(group: dict[str, Any], step: int | None, step_in: str) -> None:
    """Make a group one of an optimizer that has its step in ``groups`` or beside the ``state``."""
    if step_in == "state":
        group.pop("step", None)
        return
    for key, more in _READ.items():
        if key in group:
            group |= {**more, **group}
    if step is not None:
        group["step"] = step  # whole: TransformerEngine's Adam takes no other number
