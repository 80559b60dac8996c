"""Megatron-LM's classic checkpoints (``--ckpt-format torch``), read without Megatron or torch.

    DIR/latest_checkpointed_iteration.txt        "1234" or "release"
    DIR/iter_0001234/mp_rank_TT[_PPP]/model_optim_rng.pt
    DIR/iter_0001234/mp_rank_TT[_PPP]/distrib_optim.pt     with the distributed optimizer

Layer numbers count from 0 in each virtual stage; walking virtual stages first and pipeline ranks
second numbers them for the whole model. The rest is what `args` say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint import Checkpoint, Model, RankFile, ReadOptions
from ..containers import pickled, torchzip
from ..containers.blueprint import Entry, Index
from ..containers.files import Files
from ..errors import CheckpointError, raise_all
from ..family import Placed, build_mesh, logical_shapes, mesh_flags, place
from ..layout import check_layout, rounds
from ..manifest import SideFile
from ..mesh import Coord, Mesh
from . import megatron_args, megatron_names, megatron_optim
from .gather import Gather
from .megatron_optim import Param
from .side_files import side_files

NAME = "megatron"
TRACKER = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")
FLAT = "distrib_optim.pt"
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum_buffer"}
PACKING = {0: "per_rank", 1: "per_row", 2: "per_group", 3: "per_group"}  # by checkpoint version
_DROPPED = {
    "rng_state": "random states belong to the ranks of the saving run",
    "random_rng_state": "random states belong to the ranks of the saving run",
    "np_rng_state": "random states belong to the ranks of the saving run",
    "torch_rng_state": "random states belong to the ranks of the saving run",
    "cuda_rng_state": "random states belong to the ranks of the saving run",
    "rng_tracker_states": "random states belong to the ranks of the saving run",
    "rerun_state_machine": "the rerun machine's state belongs to the saving run",
    "modelopt_state": "ModelOpt's state is not carried",
}


def sniff(path: Path) -> bool:
    """Whether ``path`` is such a folder, or the folder of one of its iterations."""
    if not path.is_dir():
        return False
    if (path / TRACKER).is_file():
        return not any(_is_dist(child) for child in _iterations(path))
    return _has_ranks(path) and not _is_dist(path)


def _iterations(path: Path) -> list[Path]:
    return [c for c in path.iterdir() if re.fullmatch(r"iter_\d{7,}|release", c.name)]


def _is_dist(path: Path) -> bool:
    return (
        (path / "metadata.json").exists()
        or (path / ".metadata").exists()
        or (path / "common.pt").exists()
    )


def _has_ranks(path: Path) -> bool:
    return any(RANK.fullmatch(c.name) and c.is_dir() for c in path.iterdir())


def iteration_folder(path: Path, wanted: int | None) -> Path:
    """The folder of an iteration: ``wanted``, else the one that the tracker names."""
    tracker = path / TRACKER
    if not tracker.is_file() and not _iterations(path):
        return path
    if wanted is not None:
        name = f"iter_{wanted:07d}"
        origin = f"--iteration {wanted}"
    else:
        if not tracker.is_file():
            raise CheckpointError(f"{tracker}: is missing; name an iteration with --iteration N")
        text = tracker.read_text(errors="replace").strip()
        if not (text == "release" or (text.isdecimal() and len(text) < 19)):
            raise CheckpointError(
                f"{tracker}: says {text[:80]!r}, neither an iteration nor 'release'"
            )
        name = text if text == "release" else f"iter_{int(text):07d}"
        origin = f"{tracker} says {text}"
    folder = path / name
    if not folder.is_dir():
        have = ", ".join(sorted(c.name for c in _iterations(path))) or "none"
        raise CheckpointError(
            f"{folder}: is not there, and {origin}; iterations here: {have} (--iteration N "
            "picks one)"
        )
    return folder


@dataclass(slots=True)
class _Rank:
    """One rank's file."""

    coord: Coord
    folder: Path
    index: Index
    args: dict[str, object]
    version: float
    chunks: list[list[tuple[str, Entry]]] = field(default_factory=list)  # our names, local layers


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint; raises CheckpointError with what does not fit."""
    folder = iteration_folder(path, options.iteration)
    ranks = _ranks(folder)
    return _Reader(path, folder, ranks, options).checkpoint()


def _ranks(folder: Path) -> dict[Coord, _Rank]:
    """Every rank's file, by tensor and pipeline rank."""
    found = []
    for child in sorted(folder.iterdir()):
        match = RANK.fullmatch(child.name)
        if match and child.is_dir():
            numbers = tuple(None if n is None else int(n) for n in match.groups())
            found.append((numbers, child))
    if not found:
        raise CheckpointError(f"{folder}: holds no mp_rank_TT folder")
    if any(numbers[2] is not None for numbers, _ in found):
        raise CheckpointError(f"{found[0][1]}: expert-parallel ranks; experts cannot be read yet")
    ranks: dict[Coord, _Rank] = {}
    for (t, second, _), child in found:
        rank = _rank_file(child)
        if second is not None and rank.args.get("pipeline_model_parallel_size", 2) == 1:
            raise CheckpointError(
                f"{child}: {second} is an expert-parallel rank, as args say pipeline size 1; "
                "experts cannot be read yet"
            )
        assert t is not None
        coord: Coord = (("tp", t), ("pp", second or 0))
        rank.coord = coord
        ranks[coord] = rank
    return dict(sorted(ranks.items()))


def _rank_file(folder: Path) -> _Rank:
    for name in FILES:
        file = folder / name
        if file.is_file():
            break
    else:
        odd = [c.name for c in folder.iterdir() if c.name.startswith("layer_wise_optimizer")]
        why = f" ({odd[0]} is of a layer-wise optimizer)" if odd else ""
        raise CheckpointError(f"{folder / FILES[0]}: is missing{why}")
    index = torchzip.index(str(file))
    root = index.extra
    version = root.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or int(version) not in PACKING:
        raise CheckpointError(f"{file}: checkpoint_version {version!r}; 0, 1, 2 and 3 are known")
    args: dict[str, object] = {}
    if root.get("args") is not None:
        args, _ = megatron_args.namespace(root["args"], str(file))
    return _Rank((), folder, index, args, float(version))


class _Reader:
    """Reads one iteration."""

    def __init__(
        self, path: Path, folder: Path, ranks: dict[Coord, _Rank], options: ReadOptions
    ) -> None:
        self.path, self.folder, self.ranks, self.options = path, folder, ranks, options
        self.first = next(iter(ranks.values()))
        self.args = self.first.args
        self.tp = 1 + max(dict(c)["tp"] for c in ranks)
        self.pp = 1 + max(dict(c)["pp"] for c in ranks)
        self._check_set()
        for rank in ranks.values():
            rank.chunks = _chunks(rank.index)
        self.vpp = max(len(rank.chunks) for rank in ranks.values())
        self.owned, self.numbers = self._stages()
        self.model, self.config, notes = self._model()
        self.gather, self.placed, self.mesh = self._place()
        self.result = Checkpoint(path, NAME, self.gather.manifest({}, ()), self.model, self.mesh)
        self.result.notes += notes
        self.state: dict[str, object] = {}

    def _check_set(self) -> None:
        """The ranks must be those of args, each once, of one iteration."""
        faults = []
        for key, have in (
            ("tensor_model_parallel_size", self.tp),
            ("pipeline_model_parallel_size", self.pp),
        ):
            said = self.args.get(
                key, self.args.get("model_parallel_size") if "tensor" in key else None
            )
            if type(said) is int and said > have:
                faults.append(f"args say {key} {said}, the folders are those of {have}")
            elif type(said) is int and said != have:
                faults.append(f"args say {key} {said}, but there are folders of {have}")
        for coord in Mesh((("tp", self.tp), ("pp", self.pp))).coords():
            if coord not in self.ranks:
                t, p = dict(coord)["tp"], dict(coord)["pp"]
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if self.pp > 1 else "")
                faults.append(f"{name}: is missing")
        for key in ("iteration", "checkpoint_version"):
            said_all = {str(r.folder.name): r.index.extra.get(key) for r in self.ranks.values()}
            values = {repr(v) for v in said_all.values()}
            if len(values) > 1:
                rows = ", ".join(f"{name} {value}" for name, value in said_all.items())
                faults.append(f"the ranks are of different saves: {key} {rows}")
        raise_all(faults, f"{self.folder}")
        experts = self.args.get("num_experts")
        if experts not in (None, 0, 1):
            raise CheckpointError(
                f"{self.first.index.path}: args say num_experts={experts}; experts cannot be read "
                "yet"
            )

    def _stages(self) -> tuple[tuple[tuple[int, ...], ...], dict[tuple[int, int], int]]:
        """The layers of each stage, and the number of the first layer of each virtual stage."""
        counts: dict[tuple[int, int], int] = {}
        for coord, rank in self.ranks.items():
            if dict(coord)["tp"]:
                continue
            for v, chunk in enumerate(rank.chunks):
                seen = {n for name, _ in chunk if (n := megatron_names.layer_of(name)) is not None}
                if seen and seen != set(range(len(seen))):
                    raise CheckpointError(
                        f"{rank.index.path}: its layers are numbered {sorted(seen)}, not from 0 on"
                    )
                counts[v, dict(coord)["pp"]] = len(seen)
        starts, at = {}, 0
        owned: list[list[int]] = [[] for _ in range(self.pp)]
        for v, p in sorted(counts):
            starts[v, p] = at
            owned[p] += range(at, at + counts[v, p])
            at += counts[v, p]
        said = self.args.get("num_layers")
        if type(said) is int and said != at:
            raise CheckpointError(f"{self.folder}: args say {said} layers, the files hold {at}")
        return tuple(tuple(o) for o in owned), starts

    def _model(self) -> tuple[Model, dict[str, object] | None, list[str]]:
        if not self.args and self.options.config is None:
            raise CheckpointError(
                f"{self.first.index.path}: holds no args, so the model is unknown; name the folder "
                "of a Hugging Face config with --config"
            )
        return megatron_args.model_from_args(
            self.args, self.first.index.path, self.options, self._padded_vocab(), self.path
        )

    def _padded_vocab(self) -> int:
        for name, entry in self.first.chunks[0]:
            if name == "embedding.word_embeddings.weight" and entry.shape:
                return entry.shape[0] * self.tp
        raise CheckpointError(f"{self.first.index.path}: holds no embedding.word_embeddings.weight")

    def _place(self) -> tuple[Gather, dict[Coord, list[Placed]], Mesh]:
        model = self.model
        padded, true = self._padded_vocab(), model.sizes["vocab"]
        if padded < true:
            raise CheckpointError(
                f"{self.first.index.path}: {padded} vocabulary rows on {self.tp} ranks are fewer "
                f"than the {true} of the config"
            )
        packing = PACKING[int(self.first.version)]
        self.layout = check_layout(
            {"qkv": packing, **self.options.layout}, model.family, str(self.path)
        )
        rules = model.family.select(model.flags)
        mesh = build_mesh(rules, model.sizes, (("tp", self.tp), ("pp", self.pp)), self.owned)
        rules = model.family.select(model.flags | mesh_flags(mesh))
        sizes = {**model.sizes, "padded_vocab": padded}
        try:
            placed = place(rules, sizes, mesh, rounds(self.layout))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        return Gather(logical_shapes(rules, sizes), sizes), placed, mesh

    def checkpoint(self) -> Checkpoint:
        """Everything in the iteration, checked."""
        result = self.result
        for coord, rank in self.ranks.items():
            self._rank(coord, rank)
        raise_all(self.gather.faults, f"{self.folder}")
        self._state()
        result.layout = self.layout
        result.padded_vocab = self.gather.sizes["padded_vocab"]
        multiple = self.args.get("make_vocab_size_divisible_by")
        if type(multiple) is int and multiple > 0:
            result.vocab_multiple = multiple
        dp = self.args.get("data_parallel_size")
        result.dp = dp if type(dp) is int and dp > 0 else 1
        sides: Sequence[SideFile] = side_files(self.path)
        if self.config is not None:
            text = megatron_args.json_text(self.config)
            sides = [*sides, SideFile("config.json", text=text)]
        result.manifest = self.gather.manifest(self.state, tuple(sides))
        self._beside()
        return result

    def _beside(self) -> None:
        """What Accelerate writes beside Megatron's folders stays behind, by name."""
        names = sorted(
            c.name
            for c in self.path.iterdir()
            if re.fullmatch(
                r"random_states_\d+\.pkl|(sampler|scheduler|dl_state_dict|optimizer)(_\d+)?\.bin"
                r"|scaler\.pt|custom_checkpoint_\d+\.pkl",
                c.name,
            )
        )
        if names:
            self.result.notes.append(
                f"left behind: {', '.join(names)} (Accelerate's states of one run's processes)"
            )

    # --- weights -----------------------------------------------------------------------------

    def _rank(self, coord: Coord, rank: _Rank) -> None:
        rows = {p.name: p for p in self.placed[coord]}
        params: list[Param] = []
        found = set()
        file = rank.index.path
        for v, chunk in enumerate(rank.chunks):
            shift = self.numbers[v, dict(coord)["pp"]]
            for name, entry in chunk:
                if name.endswith(megatron_names.EXTRA):
                    self.result.left_out.append(("_extra_state holds no weights", 0))
                    continue
                if megatron_names.is_table(name):
                    self.result.left_out.append(("a rotary table, computed from the config", 0))
                    continue
                name = megatron_names.shifted(name, shift)
                placed = rows.get(name)
                if placed is None:
                    self.gather.faults.append(
                        f"{file}: {entry.name}: unknown tensor of shape {list(entry.shape)}"
                    )
                    continue
                if name in found:
                    self.gather.faults.append(f"{file}: {entry.name}: the second {name}")
                    continue
                found.add(name)
                self.gather.add("", placed, entry, file)
                params.append(Param(name, entry.shape, entry.dtype, v, self._is_shared(name)))
        self.gather.faults += [f"{file}: {name}: missing" for name in rows if name not in found]
        self._count_extra(rank)
        layers = self.mesh.owned["pp"][dict(coord)["pp"]]
        says = " ".join(f"{axis} {number}" for axis, number in coord)
        self.result.files.append(
            RankFile(file, says, rank.index.size_bytes, len(rank.index.entries), layers)
        )
        if rank.index.extra.get("optimizer") is not None or (rank.folder / FLAT).exists():
            self.result.has_optimizer = True
            if not self.options.weights_only and not self.result.unread_optimizer:
                self._optimizer(rank, rows, params)

    def _is_shared(self, name: str) -> bool:
        """Whether Megatron keeps a bucket of its own for it: a tied table on two stages."""
        tied = "tie_word_embeddings" in self.model.flags and self.pp > 1
        return tied and name in ("embedding.word_embeddings.weight", "output_layer.weight")

    def _count_extra(self, rank: _Rank) -> None:
        """Everything in the file that is no tensor of the model or of its optimizer."""
        for key, value in rank.index.extra.items():
            if re.fullmatch(r"model\d*", key) and isinstance(value, dict):
                empty = sum(str(k).endswith(megatron_names.EXTRA) for k, v in value.items())
                self.result.left_out += [("_extra_state holds no weights", 0)] * empty
        for entry in rank.index.entries.values():
            head = entry.name.partition(".")[0]
            if re.fullmatch(r"model\d*", head) or head == "optimizer":
                continue
            if head not in _DROPPED:
                self.gather.faults.append(f"{rank.index.path}: {entry.name}: unknown tensor")
        for key, reason in _DROPPED.items():
            if key in rank.index.extra:
                self.result.left_out.append((reason, 0))

    # --- optimizer ---------------------------------------------------------------------------

    def _unreadable(self, why: str) -> None:
        self.result.unread_optimizer = f"{why}; pass --weights-only to go on without the optimizer"

    def _optimizer(self, rank: _Rank, rows: Mapping[str, Placed], params: list[Param]) -> None:
        opt = rank.index.extra.get("optimizer")
        file = rank.index.path
        if opt is None:
            self._unreadable(f"{rank.folder / FLAT}: lies there, but {file} has no optimizer")
            return
        if not isinstance(opt, dict):
            self._unreadable(f"{file}: optimizer is a {type(opt).__name__}, of a chained optimizer")
            return
        inner, where = opt, "optimizer"
        for key in ("optimizer", "optimizer_state_dict"):
            if isinstance(opt.get(key), dict):
                inner, where = opt[key], f"optimizer.{key}"
                break
        groups = inner.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            self._unreadable(f"{file}: {where} has no param_groups")
            return
        if (rank.folder / FLAT).is_file():
            self._flat(rank, rows, params)
        elif isinstance(inner.get("state"), dict):
            self._plain(rank, rows, params, groups, where)
        elif self.args.get("use_distributed_optimizer") is True:
            self._unreadable(f"{rank.folder / FLAT}: is missing")
        else:
            self._unreadable(f"{file}: {where} holds no state")
        self._group_state(rank, groups, opt, where)

    def _plain(
        self,
        rank: _Rank,
        rows: Mapping[str, Placed],
        params: list[Param],
        groups: list[Mapping[str, object]],
        where: str,
    ) -> None:
        """State by number, masters by group."""
        file, entries = rank.index.path, rank.index.entries
        buckets = megatron_optim.group_params(groups, params)
        if buckets is None:
            counts = [len(g["params"]) for g in groups if isinstance(g.get("params"), list)]  # type: ignore[arg-type]
            self._unreadable(
                f"{file}: {where}: groups of {counts} parameters fit no known rule for the "
                f"{len(params)} of this rank"
            )
            return
        expected: dict[str, tuple[str, Param]] = {}
        for group, bucket in zip(groups, buckets, strict=True):
            for number, param in zip(group["params"], bucket, strict=True):  # type: ignore[call-overload]
                for key, state in STATES.items():
                    expected[f"{where}.state.{number}.{key}"] = (state, param)
        half = [[p for p in bucket if p.dtype in ("BF16", "F16")] for bucket in buckets]
        for k, bucket in enumerate(half):
            for j, param in enumerate(bucket):
                for name in ("fp32_from_fp16_params", "fp32_from_fp16"):
                    expected[f"optimizer.{name}.{k}.{j}"] = ("master", param)
        have = set()
        for name, entry in entries.items():
            if not name.startswith("optimizer."):
                continue
            if name in expected:
                state, param = expected[name]
                have.add((state, param.name))
                self.gather.add(state, rows[param.name], entry, file)
            elif not re.fullmatch(r".*\.(step|grad_scaler\..*)", name):
                self.gather.faults.append(
                    f"{file}: {name}: unknown optimizer tensor of shape {list(entry.shape)}"
                )
        for state in ("exp_avg", "exp_avg_sq", "momentum_buffer", "master"):
            some = {name for s, name in have if s == state}
            lacking = [p.name for bucket in (half if state == "master" else buckets) for p in bucket
                       if p.name not in some]  # fmt: skip
            if some and lacking:
                self.gather.faults.append(f"{file}: {state} of {lacking[0]}: missing")

    def _flat(self, rank: _Rank, rows: Mapping[str, Placed], params: list[Param]) -> None:
        """distrib_optim.pt: masters and moments in flat buffers."""
        file = str(rank.folder / FLAT)
        index = torchzip.index(file)
        root = index.extra
        if root.get("buckets_coalesced") is not True:
            self._unreadable(
                f"{file}: buckets_coalesced is absent: an optimizer of before 2024, whose order of "
                "parameters is another"
            )
            return
        self.result.sharded = True
        used: set[str] = set()
        pools = _pools(params)
        buffers = [(k, v) for k, v in root.items() if k.isdecimal()]
        if len(buffers) != len(pools):
            self._unreadable(
                f"{file}: {len(buffers)} buffers, the parameters of this rank make {len(pools)}"
            )
            return
        stage = dict(rank.coord)["pp"]
        for (number, table), pool in zip(buffers, pools, strict=True):
            if not isinstance(table, dict) or len(table) != 1:
                self._unreadable(f"{file}: buffer {number} holds no single pair of dtypes")
                return
            (values,) = table.values()
            (pair,) = table
            prefix = f"{number}.{pickled.key_text(pair)}"
            length = values.get("numel_unpadded") if isinstance(values, dict) else None
            flat = self._laid_out(pool, length, stage)
            if flat is None:
                total = sum(p.numel for p in pool)
                self._unreadable(
                    f"{file}: buffer {number} has {length} elements; no known order of buckets "
                    f"gives that for {len(pool)} parameters of {total} elements"
                )
                return
            for key, state in {"param": "master", **STATES}.items():
                entry = index.entries.get(f"{prefix}.{key}")
                if entry is None:
                    continue
                used.add(entry.name)
                if entry.shape != (flat.length,):
                    self.gather.faults.append(
                        f"{file}: {entry.name}: shape {list(entry.shape)}, {[flat.length]} needed"
                    )
                    continue
                for span in flat.spans:
                    self._span(state, span, entry, rows, file)
        self.gather.faults += [
            f"{file}: {name}: unknown tensor" for name in index.entries if name not in used
        ]
        self.result.files.append(RankFile(file, "", index.size_bytes, len(index.entries)))

    def _span(
        self,
        state: str,
        span: megatron_optim.Span,
        entry: Entry,
        rows: Mapping[str, Placed],
        file: str,
    ) -> None:
        """One parameter's part of a buffer. Masters of fp32 weights are those weights again."""
        if state == "master" and span.param.dtype == "F32":
            self.result.left_out.append(("masters of fp32 weights repeat them", 0))
            return
        placed = rows[span.param.name]
        part = _part(entry, span, placed.shape)
        self.gather.add(state, placed, part, file)

    def _laid_out(
        self, pool: list[Param], length: object, stage: int
    ) -> megatron_optim.Flat | None:
        dp = self.args.get("data_parallel_size", 1)
        ranks = dp if type(dp) is int else 1
        for size in megatron_optim.bucket_sizes(self.args, ranks, stage, pool[0].chunk):
            flat = megatron_optim.flat_buffer(pool, size)
            if flat.length == length:
                return flat
        return None

    def _group_state(
        self,
        rank: _Rank,
        groups: list[Mapping[str, object]],
        opt: Mapping[str, object],
        where: str,
    ) -> None:
        """Hyperparameters and the step, of the first rank."""
        if "megatron" in self.state:
            return
        plain, lost = [], []
        for group in groups:
            row = {}
            for key, value in group.items():
                if key == "params":
                    continue
                try:
                    row[str(key)] = megatron_args.encode(value)
                except megatron_args.Unknown as error:
                    lost.append(f"{key} ({error})")
            plain.append(row)
        step, step_in = self._step(rank, groups, where)
        table: dict[str, object] = {"param_groups": plain, "step_in": step_in}
        if step is not None:
            table["step"] = step
        scaler = opt.get("grad_scaler")
        if scaler is not None:
            try:
                table["grad_scaler"] = megatron_args.encode(scaler)
            except megatron_args.Unknown:
                lost.append("grad_scaler")
        if lost:
            self.result.notes.append(f"optimizer values that cannot travel: {', '.join(lost)}")
        self.state["megatron"] = {"optimizer": table}
        self.state["param_groups"] = [_native_group(row, step) for row in plain]

    def _step(
        self, rank: _Rank, groups: list[Mapping[str, object]], where: str
    ) -> tuple[int | None, str]:
        """Optimizer steps done, and whether each parameter or each group says so."""
        for group in groups:
            step = group.get("step")
            if isinstance(step, (int, float)):
                return int(step), "groups"
        for name, entry in rank.index.entries.items():
            if (
                re.fullmatch(re.escape(where) + r"\.state\.\d+\.step", name)
                and entry.dtype == "F32"
            ):
                return int(_float(rank.index.path, entry)), "state"
        return None, "groups"

    # --- the rest ----------------------------------------------------------------------------

    def _state(self) -> None:
        """Iteration, schedule and args."""
        root, result = self.first.index.extra, self.result
        step = root.get("iteration")
        if type(step) is int and step >= 0:
            result.step = step
            self.state["step"] = step
        table = {"args": self.args, "checkpoint_version": self.first.version}
        for key in ("iteration", "opt_param_scheduler", "lr_scheduler",
                    "num_floating_point_operations_so_far"):  # fmt: skip
            if root.get(key) is not None:
                try:
                    table[key] = megatron_args.encode(root[key])
                except megatron_args.Unknown as error:
                    result.notes.append(f"{key} left behind: it holds a {error}")
        known = {*table, *_DROPPED, "args", "optimizer", "model"}
        rest = [k for k in root if k not in known and not re.fullmatch(r"model\d+", k)]
        if rest:
            result.notes.append(f"left behind, of unknown use: {', '.join(map(str, rest))}")
        _, lost = (
            megatron_args.namespace(root["args"], self.first.index.path)
            if root.get("args") is not None
            else ({}, [])
        )
        if lost:
            result.notes.append(f"args that cannot travel: {', '.join(lost)}")
        have = self.state.get("megatron")
        self.state["megatron"] = {**table, **(have if isinstance(have, dict) else {})}
        if any(key in root for key in _DROPPED if "rng" in key):
            result.notes.append(
                "random states left behind: they belong to the ranks of the saving run"
            )


def _native_group(group: Mapping[str, object], step: int | None) -> dict[str, object]:
    """A group as the trainer's own checkpoints have it."""
    found: dict[str, object] = {} if step is None else {"step": step}
    for key in ("lr", "weight_decay", "eps", "momentum", "wd_mult", "lr_mult"):
        if isinstance(group.get(key), (int, float)):
            found[key] = group[key]
    betas = group.get("betas")
    if isinstance(betas, dict) and isinstance(betas.get("$tuple"), list):
        found["betas"] = betas["$tuple"]
    return found


def _pools(params: Sequence[Param]) -> list[list[Param]]:
    """The parameters of each flat buffer: one for each virtual stage and dtype."""
    pools: dict[tuple[int, str], list[Param]] = {}
    for param in params:
        pools.setdefault((param.chunk, param.dtype), []).append(param)
    return [pools[key] for key in sorted(pools, key=lambda k: k[0])]


def _part(entry: Entry, span: megatron_optim.Span, shape: tuple[int, ...]) -> Entry:
    """A parameter's elements of a flat tensor, in the parameter's shape."""
    from ..box import row_major
    from ..dtypes import ITEMSIZE

    offset = entry.offset_bytes + span.start * ITEMSIZE[entry.dtype]
    return replace(entry, shape=shape, strides=row_major(shape), offset_bytes=offset)


def _float(path: str, entry: Entry) -> float:
    import struct

    raw = bytearray(4)
    with Files() as files:
        files.read_into(path, entry.offset_bytes, memoryview(raw))
    value: float = struct.unpack("<f", raw)[0]
    return value


def _chunks(index: Index) -> list[list[tuple[str, Entry]]]:
    """The tensors of each virtual stage under our names, in the file's order."""
    heads = sorted(
        (k for k in index.extra if re.fullmatch(r"model\d{0,3}", k)),
        key=lambda k: int(k[5:] or 0),
    )
    if not heads:
        raise CheckpointError(f"{index.path}: has no model, and no model0")
    if len(heads) > 1 and heads != [f"model{i}" for i in range(len(heads))]:
        raise CheckpointError(f"{index.path}: has {', '.join(heads)}, not model0, model1, ...")
    return [list(_named(index, head)) for head in heads]


def _named(index: Index, head: str) -> Iterator[tuple[str, Entry]]:
    for name, entry in index.entries.items():
        if name.startswith(head + "."):
            bare = name[len(head) + 1 :].removeprefix("module.")
            yield megatron_names.ours(bare), entry
