"""Reads the optimizer state of Megatron-LM's classic files into logical tensors.

The plain optimizer lies in each rank's model_optim_rng.pt, numbered by param group; the
distributed one in distrib_optim.pt, as flat buffers. Which parameter is which follows from
optimizer.py, and is checked: masters must round to the weights (masters.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from ...checkpoint.types import WITHOUT, Checkpoint
from ...checkpoint.types import FileSummary as Listed
from ...containers import tensor_names, torch_zip
from ...containers.pickles import TensorRef
from ...model.box import row_major
from ...model.chunk_builder import ChunkBuilder
from ...model.dtypes import HALF, ITEMSIZE
from ...model.file_layout import Entry, Index
from ...model.manifest import SLOTS
from ...model.placement import Placed
from . import args_codec, param_groups
from . import names as megatron_names
from . import optimizer as megatron_optim
from .classic.files import FLAT, RankFile
from .grouped import each_expert
from .masters import differing
from .optimizer import Flat, Param, is_expert
from .progress import scalar

Group = Mapping[str, object]
_CHAIN = (False, True)  # whether each optimizer of a chain is the experts'


class OptimizerReader:
    """Adds the optimizer state of rank after rank to what the weights gave."""

    def __init__(self, builder: ChunkBuilder, result: Checkpoint) -> None:
        self.builder, self.result = builder, result
        self.state: dict[str, object] = {}  # "optimizer", for Manifest.state["megatron"]
        self.native: list[dict[str, object]] = []  # param_groups as the trainer keeps them

    def _unreadable(self, why: str) -> None:
        self.result.unread_optimizer = f"{why}; {WITHOUT}"

    def rank(
        self,
        rank: RankFile,
        rows: Mapping[str, Placed],
        params: list[Param],
        weights: Mapping[str, Entry],
    ) -> None:
        """One rank's; ``params`` in registration order, ``weights`` by our names."""
        if self.result.unread_optimizer:
            return
        opt, file = rank.index.extra.get("optimizer"), rank.file
        if opt is None:
            self._unreadable(f"{rank.folder / FLAT}: lies there, but {file} has no optimizer")
            return
        parts: list[tuple[object, str, list[Param]]] = [(opt, "optimizer", params)]
        if isinstance(opt, (list, tuple)):  # one for all but the experts, one for these
            if len(opt) != len(_CHAIN):
                self._unreadable(f"{file}: the optimizer is a chain of {len(opt)}; 2 are known")
                return
            own = [[p for p in params if is_expert(p.name) is experts] for experts in _CHAIN]
            parts = [(one, f"optimizer.{i}", own[i]) for i, one in enumerate(opt)]
        groups = []
        for one, base, held in parts:
            found = self._part(rank, rows, held, weights, one, base)
            if found is None:
                return
            groups.append((rank, *found))
        first = parts[0][0]
        self.groups(groups, first if isinstance(first, dict) else {})

    def _part(
        self,
        rank: RankFile,
        rows: Mapping[str, Placed],
        params: list[Param],
        weights: Mapping[str, Entry],
        opt: object,
        base: str,
    ) -> tuple[list[Group], str] | None:
        """One optimizer of a rank, whose names begin with ``base``: its groups, and where they are.

        None if it cannot be read.
        """
        file = rank.file
        if not isinstance(opt, dict):
            self._unreadable(f"{file}: {base} is a {type(opt).__name__}, no dict")
            return None
        inner, where = opt, base
        for key in ("optimizer", "optimizer_state_dict"):
            if isinstance(opt.get(key), dict):
                inner, where = opt[key], f"{base}.{key}"
                break
        groups = inner.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            self._unreadable(f"{file}: {where} has no param_groups")
            return None
        if (rank.folder / FLAT).is_file():
            self._flat(rank, rows, params, weights, base.removeprefix("optimizer").lstrip("."))
        elif isinstance(inner.get("state"), dict):
            self._plain(rank, rows, params, weights, groups, base, where)
        elif rank.args.get("use_distributed_optimizer") is True:
            self._unreadable(f"{rank.folder / FLAT}: is missing")
        else:
            self._unreadable(f"{file}: {where} holds no state")
        return groups, where

    # --- the plain optimizer -----------------------------------------------------------------

    def _plain(
        self,
        rank: RankFile,
        rows: Mapping[str, Placed],
        params: list[Param],
        weights: Mapping[str, Entry],
        groups: list[Group],
        base: str,
        where: str,
    ) -> None:
        """State by number, masters by group."""
        file = rank.file
        buckets = megatron_optim.group_params(groups, params)
        if buckets is None:
            numbers = [g.get("params") for g in groups]
            counts = [len(n) if isinstance(n, list) else 0 for n in numbers]
            self._unreadable(
                f"{file}: {where}: groups of {counts} parameters fit no known rule for the "
                f"{len(params)} of this rank"
            )
            return
        half = [[p for p in bucket if p.dtype in HALF] for bucket in buckets]
        expected = _names(base, where, groups, buckets, half)
        if other := _other_slots(where, rank.index.entries, expected):
            self._unreadable(f"{file}: {where}.state: {not_carried(other)}")
            return
        have: dict[tuple[str, str], Entry] = {}
        for name, entry in rank.index.entries.items():
            if name in expected:
                state, param = expected[name]
                have[state, param.name] = entry
            elif name.startswith(base + ".") and not _is_scalar_place(name):
                self.builder.faults.append(
                    f"{file}: {name}: unknown optimizer tensor of shape {list(entry.shape)}"
                )
        masters = {name: entry for (state, name), entry in have.items() if state == "master"}
        wrong = differing(file, masters, file, weights)
        if wrong:
            self._unreadable(f"{file}: {wrong}, so the order of its optimizer state is unknown")
            return
        for (state, name), entry in have.items():
            self._add(state, rows, name, entry, file)
        if not self.state and not any(state in SLOTS for state, _ in have):
            self._say_fresh(file, groups)

    def _say_fresh(self, file: str, groups: Sequence[Group]) -> None:
        """Adam creates its moments in its first step; a checkpoint may be older than that."""
        if any("betas" in group for group in groups):
            self.result.notes.append(
                f"{file}: the optimizer has no moments: it was saved before its first step, and "
                "they start at zero"
            )

    # --- the distributed optimizer -----------------------------------------------------------

    def _flat(
        self,
        rank: RankFile,
        rows: Mapping[str, Placed],
        params: list[Param],
        weights: Mapping[str, Entry],
        of_chain: str,
    ) -> None:
        """distrib_optim.pt: masters and moments in flat buffers, in files of their own.

        ``of_chain`` is the number of the optimizer in a chain; empty for a single one.
        """
        file = str(rank.folder / FLAT)
        index = torch_zip.index(file)
        root: object = index.extra.get(of_chain) if of_chain else index.extra
        if root is None and of_chain:
            return  # another rank's file has it
        if not isinstance(root, dict):
            self._unreadable(f"{file}: holds no table of buffers {of_chain}")
            return
        if any(str(key) == "0" for key in root) and root.get("buckets_coalesced") is not True:
            self._unreadable(
                f"{file}: buckets_coalesced is absent: an optimizer of before 2024, whose order of "
                "parameters is another"
            )
            return
        self.result.sharded = True
        pools = _pools(params)
        buffers = [(str(key), table) for key, table in root.items() if str(key).isdecimal()]
        lead = f"{of_chain}." if of_chain else ""
        if len(buffers) != len(pools):
            self._unreadable(
                f"{file}: {len(buffers)} buffers, the parameters of this rank make {len(pools)}"
            )
            return
        used: set[str] = set()
        for (number, table), pool in zip(buffers, pools, strict=True):
            if not isinstance(table, dict) or len(table) != 1:
                self._unreadable(f"{file}: buffer {number} holds no single pair of dtypes")
                return
            ((pair, values),) = table.items()
            length = values.get("numel_unpadded") if isinstance(values, dict) else None
            found = _buffers(index, f"{lead}{number}.{tensor_names.key_text(pair)}")
            used |= {entry.name for entry in found.values()}
            flat = self._laid_out(rank, file, number, pool, length, found.get("master"), weights)
            if flat is None:
                return
            for state, entry in found.items():
                self._buffer(state, flat, entry, rows, file)
        self.builder.faults += [
            f"{file}: {name}: unknown tensor"
            for name in index.entries
            if name not in used and name.startswith(lead)
        ]
        if of_chain == "0" or any(row.path == file for row in self.result.files):
            return
        self.result.files.append(Listed(file, "", index.size_bytes, len(index.entries)))

    def _laid_out(
        self,
        rank: RankFile,
        file: str,
        number: str,
        pool: list[Param],
        length: object,
        master: Entry | None,
        weights: Mapping[str, Entry],
    ) -> Flat | None:
        """The place of each parameter in a buffer; the total length and the masters must fit."""
        dp = rank.args.get("data_parallel_size")
        sizes = megatron_optim.bucket_sizes(
            rank.args, dp if type(dp) is int else 1, dict(rank.coord)["pp"], pool[0].chunk
        )
        wrong = ""
        for size in sizes:
            flat = megatron_optim.flat_buffer(pool, size)
            if flat.length != length:
                continue
            if master is None or master.shape != (flat.length,):
                return flat  # a wrong shape is said where it is used
            masters = {s.param.name: _part(master, s, s.param.shape) for s in flat.spans}
            wrong = differing(file, masters, rank.file, weights)
            if not wrong:
                return flat
        if wrong:
            self._unreadable(
                f"{file}: buffer {number}: {wrong}; its order of parameters is another"
            )
        else:
            self._unreadable(
                f"{file}: buffer {number} has {length} elements; no known order of buckets gives "
                f"that for {len(pool)} parameters of {sum(p.numel for p in pool)} elements"
            )
        return None

    def _buffer(
        self, state: str, flat: Flat, entry: Entry, rows: Mapping[str, Placed], file: str
    ) -> None:
        """All parameters of one flat tensor. Masters of fp32 weights are those weights again."""
        if entry.shape != (flat.length,):
            self.builder.faults.append(
                f"{file}: {entry.name}: shape {list(entry.shape)}, {[flat.length]} is needed"
            )
            return
        for span in flat.spans:
            if state == "master" and span.param.dtype == "F32":
                nbytes = span.param.numel * ITEMSIZE[entry.dtype]
                self.result.left_out.append(("masters of fp32 weights repeat them", nbytes))
                continue
            part = _part(entry, span, span.param.shape)
            self._add(state, rows, span.param.name, part, file)

    def _add(
        self, state: str, rows: Mapping[str, Placed], name: str, entry: Entry, file: str
    ) -> None:
        """The state of one parameter, which may hold all experts of a rank."""
        if megatron_names.all_experts(name) is None:
            self.builder.add_entry(state, rows[name], entry, file)
            return
        for row, part in each_expert(name, entry, rows):
            self.builder.add_strided(state, row, part, file)

    # --- hyperparameters ---------------------------------------------------------------------

    def groups(self, parts: Sequence[tuple[RankFile, list[Group], str]], opt: Group) -> None:
        """Hyperparameters of the first rank, and the step; all ranks must have the same step.

        ``parts`` are the groups of each optimizer of a chain, and where they are.
        """
        rank = parts[0][0]
        step, step_in = _step(*parts[0])
        lost: list[str] = []
        plain = [row for part in parts for row in _plain_groups(*part, lost)]
        if self.state:
            if step is not None and step != self.state.get("step", step):
                self.builder.faults.append(
                    f"{rank.file}: the optimizer has done {step} steps, on other ranks "
                    f"{self.state['step']}; the ranks are of different saves"
                )
            self._check_alike(rank, plain)
            return
        done = sorted({n for row in plain if (n := _count(row.get("step"))) is not None})
        if len(done) > 1:
            self.result.notes.append(
                f"{rank.file}: its param_groups have done {done} steps; {step}, the first's, stays"
            )
        self.state = {"param_groups": plain, "step_in": step_in}
        if step is not None:
            self.state["step"] = step
        self._say_lost(rank, lost)
        scaler = "optimizer.0" if len(parts) > 1 else "optimizer"
        self.scaler(rank, opt.get("grad_scaler"), f"{scaler}.grad_scaler")
        self.native = [
            param_groups.native(row, step) for row in plain if not row.get("is_expert_parallel")
        ]

    def _check_alike(self, rank: RankFile, groups: Sequence[Group]) -> None:
        """Groups say what the first rank's do, in any order.

        A rank whose parameters fill fewer groups may lack some, so only as many are compared.
        """
        first = self.state.get("param_groups")
        said = (groups, first if isinstance(first, list) else groups)
        rows = [sorted(json.dumps(_hyperparameters(g), sort_keys=True) for g in r) for r in said]
        if len(rows[0]) == len(rows[1]) and rows[0] != rows[1]:
            here, there = next(pair for pair in zip(*rows, strict=True) if pair[0] != pair[1])
            self.builder.faults.append(
                f"{rank.file}: a param group has {here}, on other ranks {there}; the ranks are "
                "of different saves"
            )

    def scaler(self, rank: RankFile, table: object, where: str) -> None:
        """The loss scale and its counters; none of a constant one, whose table is empty."""
        if isinstance(table, dict):
            lost: list[str] = []
            self.state["grad_scaler"] = _plain_values(rank, where, table, lost)
            self._say_lost(rank, lost)

    def _say_lost(self, rank: RankFile, lost: list[str]) -> None:
        if lost:
            self.result.notes.append(
                f"{rank.file}: optimizer values that cannot travel: {', '.join(lost)}"
            )


def _names(
    base: str,
    where: str,
    groups: Sequence[Group],
    buckets: Sequence[Sequence[Param]],
    half: Sequence[Sequence[Param]],
) -> dict[str, tuple[str, Param]]:
    """What each optimizer tensor may be called -> its state and its parameter."""
    found: dict[str, tuple[str, Param]] = {}
    for group, bucket in zip(groups, buckets, strict=True):
        numbers = group["params"]
        assert isinstance(numbers, list)
        for number, param in zip(numbers, bucket, strict=True):
            for slot in SLOTS:
                found[f"{where}.state.{number}.{slot}"] = (slot, param)
    for k, bucket in enumerate(half):
        for j, param in enumerate(bucket):
            for name in ("fp32_from_fp16_params", "fp32_from_fp16"):
                found[f"{base}.{name}.{k}.{j}"] = ("master", param)
    return found


def not_carried(slots: Iterable[str]) -> str:
    """Why optimizer state of these names stays unread."""
    return (
        f"the optimizer keeps {', '.join(sorted(slots))}; carried are {', '.join(SLOTS)}, each of "
        "its weight's shape"
    )


def _other_slots(where: str, names: Iterable[str], expected: Container[str]) -> set[str]:
    """What an optimizer keeps for its parameters that has no place here."""
    pattern = re.compile(re.escape(where) + r"\.state\.\d+\.(\w+)")
    found = {
        match[1]
        for name in names
        if name not in expected and (match := pattern.fullmatch(name)) is not None
    }
    return found - {"step", *SLOTS}


def _is_scalar_place(name: str) -> bool:
    """Whether a tensor is a step, a hyperparameter or the loss scale: read as plain values."""
    return (
        re.fullmatch(r".*\.state\.\d+\.step|.*\.(param_groups\.\d+|grad_scaler)\.\w+", name)
        is not None
    )


def _step(rank: RankFile, groups: Sequence[Group], where: str) -> tuple[int | None, str]:
    """Optimizer steps done, and whether each parameter or each group says so."""
    for i, group in enumerate(groups):
        step = group.get("step")
        if isinstance(step, TensorRef):
            step = scalar(rank.index, f"{where}.param_groups.{i}.step")
        if (count := _count(step)) is not None:
            return count, "groups"
    pattern = re.compile(re.escape(where) + r"\.state\.(\d+\.step|common_step)")
    for name in rank.index.entries:
        if pattern.fullmatch(name) and (count := _count(scalar(rank.index, name))) is not None:
            return count, "state"
    return None, "groups"


def _count(step: object) -> int | None:
    """Whole optimizer steps; None for NaN, infinities and what no run reaches."""
    fits = isinstance(step, (int, float)) and not isinstance(step, bool) and 0 <= step < 2**53
    return int(step) if fits else None  # type: ignore[call-overload]


def _plain_values(rank: RankFile, where: str, table: Group, lost: list[str]) -> dict[str, object]:
    """Values as JSON; a tensor of one element is its number."""
    row: dict[str, object] = {}
    for key, value in table.items():
        try:
            if isinstance(value, TensorRef):
                number = scalar(rank.index, f"{where}.{tensor_names.key_text(key)}")
                if number is None:
                    raise args_codec.Unknown(f"a tensor of shape {list(value.shape)}")
                row[str(key)] = number
            else:
                row[str(key)] = args_codec.encode_plain(value)
        except args_codec.Unknown as error:
            lost.append(f"{key} ({error})")
    return row


def _plain_groups(
    rank: RankFile, groups: Sequence[Group], where: str, lost: list[str]
) -> list[dict[str, object]]:
    """The hyperparameters of each group as JSON."""
    rows = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return [
        _plain_values(rank, f"{where}.param_groups.{i}", row, lost) for i, row in enumerate(rows)
    ]


def _hyperparameters(group: Group) -> dict[str, object]:
    """What a group says of how its parameters are trained; the step is looked at by itself."""
    return {k: group[k] for k in ("lr", "betas", "eps", "weight_decay", "momentum") if k in group}


def _buffers(index: Index, prefix: str) -> dict[str, Entry]:
    """Master or slot -> the flat buffer of it that a file has below ``prefix``."""
    keys = {"master": "param", **{slot: slot for slot in SLOTS}}
    entries = {state: index.entries.get(f"{prefix}.{key}") for state, key in keys.items()}
    return {state: entry for state, entry in entries.items() if entry is not None}


def _pools(params: Sequence[Param]) -> list[list[Param]]:
    """The parameters of each flat buffer: one for each virtual stage and dtype."""
    pools: dict[tuple[int, str], list[Param]] = {}
    for param in params:
        pools.setdefault((param.chunk, param.dtype), []).append(param)
    return [pools[key] for key in sorted(pools, key=lambda key: key[0])]


def _part(entry: Entry, span: megatron_optim.Span, shape: tuple[int, ...]) -> Entry:
    """A parameter's elements of a flat tensor, in the parameter's shape."""
    offset = entry.offset_bytes + span.start * ITEMSIZE[entry.dtype]
    return replace(entry, shape=shape, strides=row_major(shape), offset_bytes=offset)
