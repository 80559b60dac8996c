"""Our native ``tp_X_pp_Y`` shards, and such folders that somebody else wrote.

Reading and designing use the same pieces of ``family.place``. ``checkpoint.json`` says
everything that names and shapes do not; without it the folder is foreign and the rest is
detected from names, or asked for. docs/format.md is the format's description.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..box import row_major
from ..checkpoint import (
    Checkpoint,
    Container,
    Design,
    Model,
    OutFile,
    RankFile,
    ReadOptions,
    find_config,
    load_json,
    load_model,
    read_digests,
)
from ..containers import safetensors, torchzip
from ..containers.blueprint import Entry, Index, Spec
from ..dtypes import ITEMSIZE
from ..errors import CheckpointError, raise_all
from ..family import Piece, Placed, build_mesh, logical_shapes, mesh_flags, place
from ..layout import check_layout, default_layout, rounds
from ..manifest import PADDING, STATES, Chunk, Chunks, Manifest, SideFile, TensorMeta, View
from ..mesh import AXES, Coord, Mesh, named_axes, split_by_counts
from .side_files import side_files

NAME = "shards"
VERSION = "1.0"
CHECKPOINT = "checkpoint.json"
STATE_KEYS = ("step", "schedule", "param_groups", "data")
_FILE = re.compile(r"(model|pytorch_model|optimizer)((?:_[a-z]+_\d+)+)\.(safetensors|bin)")
_RANDOM = re.compile(r"random_states_(\d+)\.safetensors")


def sniff(path: Path) -> bool:
    """Whether ``path`` is a folder of rank files."""
    if not path.is_dir():
        return False
    if (path / CHECKPOINT).is_file():
        return True
    return any((m := _FILE.fullmatch(c.name)) and m[1] != "optimizer" for c in path.iterdir())


@dataclass(frozen=True, slots=True)
class _Header:
    """What checkpoint.json, or detection in its place, says."""

    mesh: Mesh
    dp: int
    layout: dict[str, str]
    table: Mapping[str, object]  # checkpoint.json; empty for a foreign folder


@dataclass(frozen=True, slots=True)
class _Names:
    """The rank files of a folder by kind and coordinate."""

    model: dict[Coord, Path]
    optimizer: dict[Coord, Path]
    suffix: str  # "safetensors" or "bin"


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint in a folder of rank files; raises with every fault found."""
    table = load_json(path / CHECKPOINT) if (path / CHECKPOINT).is_file() else {}
    _check_version(path, table)
    names = _scan(path)
    config = find_config(path, options)
    if config is None:
        raise CheckpointError(
            f"{path}: has no config.json, so the packing of its rows is unknown; name the folder "
            "of the Hugging Face config with --config"
        )
    model = load_model(config, _vocab(path, table, options))
    if table.get("family", model.family.name) != model.family.name:
        raise CheckpointError(
            f"{path / CHECKPOINT}: family {table['family']!r}, {config} says {model.family.name!r}"
        )
    shapes = _mesh_shape(path, names, table)
    _check_files(path, names.model, dict(named_axes(shapes)), names.suffix, "model")
    indices = {coord: _rank_index(file) for coord, file in names.model.items()}
    header = _header(path, table, model, indices, shapes, options)
    return _Reader(path, header, model, names, indices, options).checkpoint()


def _check_version(path: Path, table: Mapping[str, object]) -> None:
    version = str(table.get("format_version", VERSION))
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise CheckpointError(
            f"{path / CHECKPOINT}: format_version {version}, this tool reads {VERSION}; "
            "use a newer shardwright"
        )


def _vocab(path: Path, table: Mapping[str, object], options: ReadOptions) -> int | None:
    said = table.get("vocab_size")
    if said is not None and (type(said) is not int or said <= 0):
        raise CheckpointError(f"{path / CHECKPOINT}: vocab_size is {said!r}")
    return options.vocab_size if options.vocab_size is not None else said


def _scan(path: Path) -> _Names:
    """Rank files by their integers: ``tp_10`` sorts after ``tp_2``."""
    kinds: dict[str, dict[Coord, Path]] = {"model": {}, "optimizer": {}}
    spellings: dict[str, str] = {}
    for child in path.iterdir():
        match = _FILE.fullmatch(child.name)
        if match is None:
            continue
        pairs = re.findall(r"_([a-z]+)_(\d+)", match[2])
        coord = tuple((axis, int(rank)) for axis, rank in pairs)
        kind = "optimizer" if match[1] == "optimizer" else "model"
        axes = [axis for axis, _ in coord]
        known = [axis for axis in (*AXES, "dp") if axis in axes]
        if axes != known or axes[:2] != ["tp", "pp"]:
            raise CheckpointError(
                f"{child}: names the axes {axes}; known are {', '.join(AXES)} and dp, in this order"
            )
        if coord in kinds[kind]:
            raise CheckpointError(f"{child} and {kinds[kind][coord]} are the same rank")
        kinds[kind][coord] = child
        spellings[match[3]] = child.name
    if len(spellings) > 1:
        raise CheckpointError(f"{path}: mixes two spellings: {', '.join(spellings.values())}")
    suffix = next(iter(spellings), "safetensors")
    return _Names(
        dict(sorted(kinds["model"].items())), dict(sorted(kinds["optimizer"].items())), suffix
    )


def _mesh_shape(path: Path, names: _Names, table: Mapping[str, object]) -> dict[str, int]:
    """Axis -> size, from checkpoint.json, else from the largest rank numbers."""
    said = table.get("mesh")
    if said is None:
        if not names.model:
            raise CheckpointError(f"{path}: holds no model_tp_X_pp_Y file")
        return {a: 1 + max(dict(c).get(a, 0) for c in names.model) for a in AXES}
    if not isinstance(said, dict) or not all(type(n) is int and n > 0 for n in said.values()):
        raise CheckpointError(f"{path / CHECKPOINT}: mesh is {said!r}, not axis -> size")
    unknown = set(said) - {*AXES, "dp"}
    if unknown:
        raise CheckpointError(
            f"{path / CHECKPOINT}: mesh has the unknown axes {sorted(unknown)}; "
            "use a newer shardwright"
        )
    return {a: said.get(a, 1) for a in (*AXES, "dp")}


def _check_files(
    path: Path, found: Mapping[Coord, Path], shape: Mapping[str, int], suffix: str, kind: str
) -> None:
    """The set of files must be the mesh's, no more and no less."""
    mesh = Mesh(tuple(shape.items()))
    wanted = {coord: path / file_name(kind, coord, suffix) for coord in mesh.coords()}
    faults = [f"{file.name}: is missing" for coord, file in wanted.items() if coord not in found]
    faults += [f"{file.name}: no rank of the mesh" for c, file in found.items() if c not in wanted]
    says = " ".join(f"{axis}={size}" for axis, size in shape.items())
    raise_all(faults, f"{path}: the files of a mesh of {says} are needed")


def file_name(kind: str, coord: Coord, suffix: str) -> str:
    """``model_tp_0_pp_1.safetensors``; ``.bin`` files take Hugging Face's older stem."""
    stem = "pytorch_model" if kind == "model" and suffix == "bin" else kind
    return stem + "".join(f"_{axis}_{rank}" for axis, rank in coord) + "." + suffix


def _container(suffix: str) -> Container:
    return safetensors if suffix == "safetensors" else torchzip


def _rank_index(file: Path) -> Index:
    return _container(file.suffix[1:]).index(str(file))


def _header(
    path: Path,
    table: Mapping[str, object],
    model: Model,
    indices: Mapping[Coord, Index],
    shape: Mapping[str, int],
    options: ReadOptions,
) -> _Header:
    """Mesh with its stages, and layout tags, as recorded or as detected."""
    said = table.get("layout", {})
    if not isinstance(said, dict):
        raise CheckpointError(f"{path / CHECKPOINT}: layout is {said!r}, not tag -> value")
    layout = check_layout({**said, **options.layout}, model.family, str(path))
    count = model.sizes["layer"]
    owned: tuple[tuple[int, ...], ...] | None
    stages = table.get("pp_layers")
    if stages is not None:
        if not isinstance(stages, list) or not all(type(n) is int for n in stages):
            raise CheckpointError(f"{path / CHECKPOINT}: pp_layers is {stages!r}")
        if len(stages) != shape["pp"]:
            raise CheckpointError(
                f"{path / CHECKPOINT}: pp_layers {stages} for {shape['pp']} stages"
            )
        owned = split_by_counts(count, tuple(stages))
    elif table:
        owned = None
    else:
        owned = _detect_stages(path, indices, count)
    rules = model.family.select(model.flags)
    mesh = build_mesh(rules, model.sizes, named_axes(shape), owned)
    return _Header(mesh, shape.get("dp", 1), layout, table)


_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


def _detect_stages(
    path: Path, indices: Mapping[Coord, Index], count: int
) -> tuple[tuple[int, ...], ...]:
    """Global layer numbers of each stage of a foreign folder, whatever numbers it uses."""
    found: dict[int, set[int]] = {}
    for coord, index in indices.items():
        numbers = {int(m[2]) for name in index.entries if (m := _LAYER.fullmatch(name))}
        found.setdefault(dict(coord)["pp"], set()).update(numbers)
    stages = [sorted(found[p]) for p in sorted(found)]
    local = len(stages) > 1 and all(not s or s[0] == 0 for s in stages)
    if local:
        return split_by_counts(count, tuple(len(s) for s in stages))
    if sorted(itertools.chain(*stages)) != list(range(count)):
        raise CheckpointError(
            f"{path}: the stages hold the layers {stages}, the config has {count} layers"
        )
    return tuple(tuple(s) for s in stages)


# TransformerEngine's names for norms that it fuses into the next linear layer
_ALIASES = (
    (
        re.compile(r"(.*)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)"),
        r"\1.input_layernorm.\2",
    ),
    (re.compile(r"(.*)\.mlp\.linear_fc1\.layer_norm_(weight|bias)"), r"\1.pre_mlp_layernorm.\2"),
)
_WRAPPERS = ("model.", "module.", "state_dict.")  # keys that some writers put around the names
_EXTRA = "_extra_state"


class _Reader:
    """Reads one folder; holds what its methods would otherwise pass to each other."""

    def __init__(
        self,
        path: Path,
        header: _Header,
        model: Model,
        names: _Names,
        indices: Mapping[Coord, Index],
        options: ReadOptions,
    ) -> None:
        self.path, self.header, self.model, self.names = path, header, model, names
        self.indices, self.options = indices, options
        self.native = bool(header.table)
        self.faults: list[str] = []
        self.metas: dict[str, TensorMeta] = {}
        self.chunks = Chunks()
        mesh = header.mesh
        self.rules = model.family.select(model.flags | mesh_flags(mesh))
        self.sizes = {**model.sizes, "padded_vocab": self._padded_vocab()}
        self.placed = place(self.rules, self.sizes, mesh, rounds(header.layout))
        self.shapes = logical_shapes(self.rules, self.sizes)
        self.result = Checkpoint(path, NAME, Manifest({}, {}), model, mesh, header.dp)

    def _padded_vocab(self) -> int:
        """Vocabulary rows of all ranks together, as the files have them."""
        tp, true = self.header.mesh.size("tp"), self.model.sizes["vocab"]
        for index in self.indices.values():
            for name, entry in self._renamed(index, 0):
                if name == "embedding.word_embeddings.weight" and entry.shape:
                    if entry.shape[0] * tp < true:
                        raise CheckpointError(
                            f"{index.path}: {name}: {entry.shape[0]} rows on each of {tp} ranks "
                            f"are fewer than the {true} rows of the vocabulary"
                        )
                    return entry.shape[0] * tp
        raise CheckpointError(f"{self.path}: no file holds embedding.word_embeddings.weight")

    def checkpoint(self) -> Checkpoint:
        """Everything in the folder, checked."""
        result, table = self.result, self.header.table
        for coord, index in self.indices.items():
            self._weights(coord, index)
        if not self.options.weights_only:
            self._optimizer()
        raise_all(self.faults, f"{self.path}")
        result.layout = self.header.layout
        result.padded_vocab = self.sizes["padded_vocab"]
        multiple = table.get("make_vocab_size_divisible_by", result.vocab_multiple)
        result.vocab_multiple = multiple if type(multiple) is int and multiple > 0 else 128
        step = table.get("step")
        result.step = step if type(step) is int else None
        state = {key: table[key] for key in STATE_KEYS if table.get(key) is not None}
        result.digests = read_digests(table.get("files"))
        self._check_sizes()
        result.random_states = tuple(
            SideFile(f.name, str(f))
            for f in sorted(self.path.iterdir())
            if _RANDOM.fullmatch(f.name)
        )
        order = {fqn: i for i, fqn in enumerate(self.shapes)}
        metas = dict(sorted(self.metas.items(), key=lambda kv: order.get(_bare(kv[0]), len(order))))
        result.manifest = Manifest(metas, self.chunks.by_name, state, side_files(self.path))
        if not self.native:
            self._say_foreign()
        return result

    def _say_foreign(self) -> None:
        tags = ", ".join(f"{tag}={value}" for tag, value in self.header.layout.items())
        stages = ",".join(str(len(s)) for s in self.header.mesh.owned["pp"])
        local = any(self._first_layer(coord, index) for coord, index in self.indices.items())
        self.result.notes.append(
            f"{self.path}: no checkpoint.json; assumed layout {tags} (--layout KEY=VALUE "
            f"overrides), layers per stage {stages}, "
            f"numbered {'locally, from 0 on each stage' if local else 'globally'}"
        )

    def _check_sizes(self) -> None:
        for name, (size, _) in self.result.digests.items():
            file = self.path / name
            now = file.stat().st_size if file.is_file() else None
            if now != size:
                raise CheckpointError(
                    f"{file}: {'is missing' if now is None else f'has {now} bytes'}, "
                    f"{CHECKPOINT} says {size} bytes"
                )

    def _renamed(self, index: Index, first_layer: int) -> Iterator[tuple[str, Entry]]:
        """Entries under our stored names; ``first_layer`` is added to layer numbers.

        Only foreign folders need it: a native file's names are taken as they are.
        """
        for name, entry in index.entries.items():
            if self.native:
                yield name, entry
                continue
            bare = name
            for wrapper in _WRAPPERS:
                bare = bare.removeprefix(wrapper)
            for pattern, ours in _ALIASES:
                bare = pattern.sub(ours, bare)
            match = _LAYER.fullmatch(bare)
            if match and first_layer:
                bare = f"{match[1]}{int(match[2]) + first_layer}{match[3]}"
            yield bare, entry

    def _first_layer(self, coord: Coord, index: Index) -> int:
        """What to add to the layer numbers of a file that counts from 0 on each stage."""
        owned = self.header.mesh.owned["pp"][dict(coord)["pp"]]
        numbers = [int(m[2]) for name in index.entries if (m := _LAYER.fullmatch(name))]
        return owned[0] - min(numbers) if owned and numbers else 0

    def _weights(self, coord: Coord, index: Index) -> None:
        """A rank's model file: names and shapes must be those of its place in the mesh."""
        self._check_rank(coord, index)
        rows = {p.name: p for p in self.placed[coord]}
        found = set()
        for name, entry in self._renamed(index, self._first_layer(coord, index)):
            if not self.native and name.endswith(_EXTRA):
                self.result.left_out.append(("_extra_state holds no weights", 0))
                continue
            placed = rows.get(name)
            if placed is None:
                self.faults.append(
                    f"{index.path}: {name}: unknown tensor of shape {list(entry.shape)}"
                )
                continue
            found.add(name)
            if entry.shape != placed.shape:
                self.faults.append(
                    f"{index.path}: {name}: shape {list(entry.shape)}, this rank of the mesh needs "
                    f"{list(placed.shape)}"
                )
                continue
            self._add("", placed, placed.pieces, entry, index.path, 0)
        for name in rows:
            if name not in found:
                self.faults.append(f"{index.path}: {name}: missing")
        self._note_file(index, coord)

    def _note_file(self, index: Index, coord: Coord) -> None:
        rank = " ".join(f"{axis} {number}" for axis, number in coord)
        layers = self.header.mesh.owned["pp"][dict(coord)["pp"]]
        row = RankFile(index.path, rank, index.size_bytes, len(index.entries), layers)
        self.result.files.append(row)

    def _check_rank(self, coord: Coord, index: Index) -> None:
        """A file says which rank it is, so that swapped and stray files are noticed."""
        wanted = {
            "ranks": json.dumps(dict(coord)),
            "mesh": json.dumps(dict(_mesh_table(self.header.mesh, self.header.dp))),
            "step": json.dumps(self.header.table.get("step")),
        }
        for key, value in wanted.items():
            said = index.metadata.get(key)
            if self.native and said is not None and not _same_json(said, value):
                self.faults.append(
                    f"{index.path}: says {key} {said}, its name and {CHECKPOINT} say {value}; "
                    "was it swapped or taken from another save?"
                )

    def _add(
        self,
        state: str,
        placed: Placed,
        pieces: Iterable[Piece],
        entry: Entry,
        file: str,
        start: int,
    ) -> None:
        """The pieces of one stored tensor as chunks.

        ``entry`` holds the row-major elements of ``placed`` from ``start`` on.
        """
        prefix = state + "/" if state else ""
        size = ITEMSIZE[entry.dtype]
        if start == 0 and entry.shape == placed.shape and entry.strides != row_major(entry.shape):
            self.faults.append(
                f"{file}: {entry.name}: not contiguous; save it again with .contiguous()"
            )
            return
        for piece in pieces:
            base = entry.offset_bytes - start * size
            offset, strides = placed.bytes_at(piece, base, size)
            fqn = prefix + piece.fqn
            meta = self._meta(piece, entry.dtype)
            have = self.metas.setdefault(fqn, meta)
            if have.dtype != meta.dtype:
                self.faults.append(
                    f"{file}: {entry.name}: {meta.dtype}, other ranks hold {have.dtype}"
                )
            view = View(file, offset, piece.box.sizes, strides, entry.dtype)
            self.chunks.add(Chunk(fqn, piece.box, view))

    def _meta(self, piece: Piece, dtype: str) -> TensorMeta:
        """The logical tensor that a piece belongs to."""
        if not piece.fqn.startswith(PADDING):
            return TensorMeta(self.shapes[piece.fqn], dtype)
        rows = self.sizes["padded_vocab"] - self.sizes["vocab"]
        shape = (rows, *self.shapes[piece.fqn.removeprefix(PADDING)][1:])
        return TensorMeta(shape, dtype, elastic=True)

    def _optimizer(self) -> None:
        """Optimizer files, whole or cut into row-major ranges over dp."""
        found = self.names.optimizer
        if not found:
            return
        if not self.native:
            self.result.unread_optimizer = (
                f"{next(iter(found.values()))}: optimizer files of a folder without {CHECKPOINT} "
                "are not read; pass --weights-only to go on without them"
            )
            return
        shape = dict(self.header.mesh.axes)
        if any("dp" in dict(coord) for coord in found):
            shape["dp"] = self.header.dp
            self.result.sharded = True
        _check_files(self.path, found, shape, self.names.suffix, "optimizer")
        for coord, file in found.items():
            index = _rank_index(file)
            self._check_rank(coord, index)
            self._optimizer_file(coord, index)

    def _optimizer_file(self, coord: Coord, index: Index) -> None:
        rank = tuple((axis, number) for axis, number in coord if axis != "dp")
        rows = {p.name: p for p in self.placed[rank]}
        ranges = _ranges(index) if rank != coord else None
        for key, entry in index.entries.items():
            state, _, name = key.partition("/")
            placed = rows.get(name)
            if state not in STATES or placed is None:
                self.faults.append(f"{index.path}: {key}: unknown optimizer tensor")
                continue
            start, stop = 0, math.prod(placed.shape)
            wanted = placed.shape
            if ranges is not None:
                start, stop = ranges.get(key, (0, -1))
                wanted = (stop - start,)
            if entry.shape != wanted or stop > math.prod(placed.shape):
                self.faults.append(
                    f"{index.path}: {key}: shape {list(entry.shape)}, its place in the mesh needs "
                    f"{list(wanted) if stop >= start else 'an entry in ranges'}"
                )
                continue
            pieces = placed.clip(start, stop) if ranges is not None else placed.pieces
            self._add(state, placed, pieces, entry, index.path, start)
        self._note_file(index, coord)


def _ranges(index: Index) -> dict[str, tuple[int, int]]:
    """The row-major range of its stored tensor that each entry of a dp file holds."""
    try:
        table = json.loads(index.metadata.get("ranges", ""))
        return {key: (int(start), int(stop)) for key, (start, stop) in table.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index.path}: its metadata has no readable ranges") from error


def _same_json(a: str, b: str) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def _bare(fqn: str) -> str:
    """A logical name without its state and padding prefixes."""
    head, slash, rest = fqn.partition("/")
    fqn = rest if slash and head in STATES else fqn
    return fqn.removeprefix(PADDING)


def _mesh_table(mesh: Mesh, dp: int) -> tuple[tuple[str, int], ...]:
    return (*mesh.axes, ("dp", dp))


def padded_vocab(vocab: int, multiple: int, tp: int) -> int:
    """The smallest multiple of ``multiple * tp`` that is at least ``vocab`` (Megatron's rule)."""
    unit = multiple * tp
    return -(-vocab // unit) * unit


@dataclass(frozen=True, slots=True)
class Target:
    """What a set of shards is to be."""

    model: Model
    mesh: Mesh
    dp: int  # data-parallel ranks
    sharded: bool  # the optimizer state is cut over them
    vocab_multiple: int
    safe: bool  # safetensors rather than torch zips
    step: int | None


def design(target: Target, metas: Mapping[str, TensorMeta], root: Path) -> Design:
    """Every rank's files below ``root``; ``metas`` are the source's logical tensors.

    Optimizer states are placed for exactly the tensors that have them. Names that no row
    places are left to ``plan``, which reports them.
    """
    model, mesh = target.model, target.mesh
    rules = model.family.select(model.flags | mesh_flags(mesh))
    vocab = padded_vocab(model.sizes["vocab"], target.vocab_multiple, mesh.size("tp"))
    sizes = {**model.sizes, "padded_vocab": vocab}
    placed = place(rules, sizes, mesh, rounds(default_layout(model.family)))
    writer = _Writer(target, metas, root, logical_shapes(rules, sizes), sizes)
    for coord, rows in placed.items():
        writer.model_file(coord, rows)
    states = [s for s in STATES if any(fqn.startswith(s + "/") for fqn in metas)]
    if states:
        for coord, rows in placed.items():
            writer.optimizer_files(coord, rows, states)
    raise_all(writer.faults, "these tensors cannot be packed")
    repeats = sum("tie_word_embeddings" in rule.when and "pp>1" in rule.when for rule in rules)
    manifest = Manifest(writer.metas, writer.chunks.by_name)
    return Design(writer.files, manifest, repeats * (1 + len(states)))


class _Writer:
    """Collects the files and chunks of a design."""

    def __init__(
        self,
        target: Target,
        source: Mapping[str, TensorMeta],
        root: Path,
        shapes: Mapping[str, tuple[int, ...]],
        sizes: Mapping[str, int],
    ) -> None:
        self.target, self.source, self.root = target, source, root
        self.shapes, self.sizes = shapes, sizes
        self.files: list[OutFile] = []
        self.faults: list[str] = []
        self.metas: dict[str, TensorMeta] = {}
        self.chunks = Chunks()
        self.suffix = "safetensors" if target.safe else "bin"

    def _dtype(self, placed: Placed, prefix: str) -> str | None:
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
            dtype = self._dtype(placed, "")
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
            if (dtype := self._dtype(placed, state + "/")) is not None
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
        table = {
            "ranks": json.dumps(dict(coord)),
            "mesh": json.dumps(dict(_mesh_table(self.target.mesh, self.target.dp))),
            "step": json.dumps(self.target.step),
            **metadata,
        }
        blueprint = _container(self.suffix).layout(specs, table)
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
                    self.metas[fqn] = self._meta(piece, spec.dtype)

    def _meta(self, piece: Piece, dtype: str) -> TensorMeta:
        if not piece.fqn.startswith(PADDING):
            return TensorMeta(self.shapes[piece.fqn], dtype)
        rows = self.sizes["padded_vocab"] - self.sizes["vocab"]
        shape = (rows, *self.shapes[piece.fqn.removeprefix(PADDING)][1:])
        return TensorMeta(shape, dtype, elastic=True)


def checkpoint_json(
    target: Target,
    state: Mapping[str, object],
    padded: int,
    dtype: str,
    files: Mapping[str, tuple[int, str]],
) -> str:
    """The text of checkpoint.json; ``files`` maps names to size and digest ("" if not asked)."""
    layers = target.mesh.owned["pp"]
    table = {
        "format_version": VERSION,
        "step": target.step,
        "mesh": dict(_mesh_table(target.mesh, target.dp)),
        "pp_layers": [len(owned) for owned in layers],
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
    return json.dumps(table, indent=2) + "\n"
