"""Our native ``tp_X_pp_Y`` shards, and such folders that somebody else wrote.

Reads by the pieces that ``writer.py`` designs by. ``checkpoint.json`` says
everything that names and shapes do not; without it the folder is foreign and the rest is
detected from names, or asked for. docs/format.md is the format's description.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...checkpoint import claims
from ...checkpoint.config import check_config, find_config, load_model
from ...checkpoint.json_io import load_json, read_digests
from ...checkpoint.state import TrainingState
from ...checkpoint.types import WITHOUT, Checkpoint, FileSummary, ReadOptions, filled
from ...errors import CheckpointError, raise_all
from ...model.chunk_builder import ChunkBuilder
from ...model.dtypes import TO_TORCH
from ...model.family import Model, build_mesh, with_tensors
from ...model.file_layout import Entry, Index
from ...model.layout import check_layout
from ...model.manifest import STATES, Manifest, SideFile, category_of
from ...model.mesh import AXES, Coord, Mesh, Stages, named_axes
from ...model.pipeline import Pipeline, parse, single, split_by_counts
from ...model.placement import Placement
from ...move.storage import StoragePath
from ..megatron.names import EXTRA, FUSED_NORMS
from ..side_files import left_behind, side_files
from .names import (
    CHECKPOINT,
    FILE,
    NAME,
    OPTIMIZER,
    VERSION,
    RankNames,
    check_files,
    container,
    mesh_table,
    scan,
    shards_of,
)

_RANDOM = re.compile(r"random_states_(\d+)\.safetensors")


def sniff(path: StoragePath) -> bool:
    """Whether ``path`` is a folder of rank files."""
    if not path.is_dir():
        return False
    if (path / CHECKPOINT).is_file():
        return True
    return any((m := FILE.fullmatch(c.name)) and m[1] not in OPTIMIZER for c in path.iterdir())


def is_described(path: StoragePath) -> bool:
    """Whether a folder has a valid checkpoint.json; damaged ones are refused when they are read."""
    return (path / CHECKPOINT).is_file() and "mesh" in load_json(path / CHECKPOINT)


@dataclass(frozen=True, slots=True)
class _Header:
    """What checkpoint.json, or detection in its place, says."""

    mesh: Mesh
    dp: int
    layout: dict[str, str]
    table: Mapping[str, object]  # checkpoint.json; empty for a foreign folder


def read(path: StoragePath, options: ReadOptions) -> Checkpoint:
    """The checkpoint in a folder of rank files; raises with every fault found."""
    table = load_json(path / CHECKPOINT) if (path / CHECKPOINT).is_named() else {}
    _check_version(path, table)
    _check_kinds(path, table)
    names = scan(path)
    config = find_config(path, options)
    if config is None:
        raise CheckpointError(
            f"{path}: has no config.json, so the packing of its rows is unknown; name the folder "
            "of the Hugging Face config with --config"
        )
    trusted = check_config(path, options)
    model = load_model(config, _vocab(path, table, options))
    _check_vocab(path, table, config, model)
    if table.get("family", model.family.name) != model.family.name:
        raise CheckpointError(
            f"{path / CHECKPOINT}: family {table['family']!r}, {config} says {model.family.name!r}"
        )
    shapes = _mesh_shape(path, names, table)
    check_files(path, names.model, _meshes(model, shapes), names.suffix, "model")
    indices = {coord: _rank_index(file) for coord, file in names.model.items()}
    model = _with_tensors(path, table, model, indices)
    header = _header(path, table, model, indices, shapes, options)
    found = _Reader(path, header, model, names, indices, options).checkpoint()
    filled(found.step, options.iteration, "--iteration", f"{path / CHECKPOINT}: step")
    found.notes += trusted
    return found


def _check_version(path: StoragePath, table: Mapping[str, object]) -> None:
    version = str(table.get("format_version", VERSION))
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise CheckpointError(
            f"{path / CHECKPOINT}: format_version {version}, this tool reads {VERSION}; "
            "use a newer shardwright"
        )


def _check_kinds(path: StoragePath, table: Mapping[str, object]) -> None:
    """Values that nothing here is decided by are refused too where they cannot be what they say."""
    for key, kind in (("format_version", str), ("dtype", str), ("family", str)):
        if key in table and not isinstance(table[key], kind):
            raise CheckpointError(f"{path / CHECKPOINT}: {key} {table[key]!r} is no text")
    padded = table.get("padded_vocab_size", 1)
    if type(padded) is not int or padded < 1:
        raise CheckpointError(f"{path / CHECKPOINT}: padded_vocab_size is {padded!r}")
    if "dtype" in table and table["dtype"] not in TO_TORCH.values():
        raise CheckpointError(
            f"{path / CHECKPOINT}: dtype {table['dtype']!r} is not one of torch's"
        )


def _vocab(path: StoragePath, table: Mapping[str, object], options: ReadOptions) -> int | None:
    said = table.get("vocab_size")
    if said is not None and (type(said) is not int or said <= 0):
        raise CheckpointError(f"{path / CHECKPOINT}: vocab_size is {said!r}")
    return filled(said, options.vocab_size, "--vocab-size", f"{path / CHECKPOINT}: vocab_size")


def _with_tensors(
    path: StoragePath, table: Mapping[str, object], model: Model, indices: Mapping[Coord, Index]
) -> Model:
    """The tensors that not all models of the family have: as recorded, else by stored names."""
    said = table.get("has")
    if said is None:
        names = {name for index in indices.values() for name in index.entries}
        return with_tensors(model, names, stored=True)
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise CheckpointError(f"{path / CHECKPOINT}: has is {said!r:.200}, no list of names")
    return with_tensors(model, said)


def _check_vocab(
    path: StoragePath, table: Mapping[str, object], config: StoragePath, model: Model
) -> None:
    """The two files beside the weights describe one model."""
    said, other = table.get("vocab_size"), model.config.get("vocab_size")
    if said is not None and type(other) is int and said != other:
        raise CheckpointError(
            f"{path / CHECKPOINT}: vocab_size is {said}, {config} says {other}; was one of them "
            "taken from another model?"
        )


def _mesh_shape(path: StoragePath, names: RankNames, table: Mapping[str, object]) -> dict[str, int]:
    """Axis -> size, from checkpoint.json, else from the largest rank numbers."""
    said = table.get("mesh")
    if said is None:
        if not names.model:
            raise CheckpointError(f"{path}: holds no model_tp_X_pp_Y file")
        dense = [dict(coord) for coord in names.model if "ep" not in dict(coord)]
        of_experts = [dict(coord) for coord in names.model if "ep" in dict(coord)]
        sizes = {a: 1 + max((c.get(a, 0) for c in dense), default=0) for a in AXES}
        for name, axis in (("ep", "ep"), ("etp", "tp")) if of_experts else ():
            sizes[name] = 1 + max(coord[axis] for coord in of_experts)
        return sizes
    if not isinstance(said, dict) or not all(type(n) is int and n > 0 for n in said.values()):
        raise CheckpointError(f"{path / CHECKPOINT}: mesh is {said!r}, not axis -> size")
    unknown = set(said) - {*AXES, *_MORE}
    if unknown:
        raise CheckpointError(
            f"{path / CHECKPOINT}: mesh has the unknown axes {sorted(unknown)}; "
            "use a newer shardwright"
        )
    axes = (*AXES, *(axis for axis in _MORE if axis == "dp" or axis in said))
    return {a: claims.ranks(said.get(a, 1), f"{a} is", path / CHECKPOINT) for a in axes}


_MORE = ("dp", "ep", "etp")  # axes of checkpoint.json beside those of dense files


def _meshes(model: Model, shape: Mapping[str, int]) -> list[dict[str, int]]:
    """Axis -> size of the mesh of dense tensors and, for a model with experts, of theirs."""
    dense = dict(named_axes(shape))
    if not any(rule.mesh for rule in model.rules()):
        return [dense]
    etp = shape.get("etp", shape["tp"])
    return [dense, {"tp": etp, "pp": dense["pp"], "ep": shape.get("ep", 1)}]


def _rank_index(file: StoragePath) -> Index:
    return container(file.suffix[1:]).index(file)


def _header(
    path: StoragePath,
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
    for tag, value in options.layout.items():
        filled(said.get(tag), value, f"--layout {tag}", f"{path / CHECKPOINT}: layout {tag}")
    layout = check_layout({**options.layout, **said}, model.family, str(path))
    count = model.sizes["layer"]
    stages: Stages | None = None
    mtp: tuple[int, int] | None = None
    if table.get("pp_layers") is not None:
        split = _recorded_stages(path / CHECKPOINT, table, shape["pp"], count)
        stages, mtp = split.stages, split.mtp
    elif not table:
        stages = single(_detect_stages(path, indices, count))
    ep, etp = shape.get("ep", 1), shape.get("etp")
    mesh = build_mesh(model, named_axes(shape), stages, mtp, ep=ep, etp=etp)
    return _Header(mesh, shape.get("dp", 1), layout, table)


def _recorded_stages(
    file: StoragePath, table: Mapping[str, object], pp: int, count: int
) -> Pipeline:
    """Layers of each stage: those of pp_layers, cut into virtual ones as pp_layout says."""
    owned = _recorded_layers(file, table["pp_layers"], pp, count)
    text = table.get("pp_layout")
    if text is None:
        return Pipeline(tuple(_runs(layers) for layers in owned), None)
    if not isinstance(text, str):
        raise CheckpointError(f"{file}: pp_layout is {text!r:.200}")
    split = parse(text, pp, count, f"{file}: pp_layout")
    if tuple(tuple(itertools.chain(*rank)) for rank in split.stages) != owned:
        raise CheckpointError(
            f"{file}: pp_layout {text!r:.200} and pp_layers {table['pp_layers']!r:.200} give the "
            "stages other layers"
        )
    return split


def _runs(layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Virtual stages of files from before pp_layout: their layers had consecutive numbers."""
    starts = [i for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1] + 1]
    return tuple(layers[a:b] for a, b in itertools.pairwise([*starts, len(layers)])) or ((),)


def _recorded_layers(
    file: StoragePath, stages: object, pp: int, count: int
) -> tuple[tuple[int, ...], ...]:
    """Layers of each rank: so many in turn, or those listed where stages interleave."""
    if not isinstance(stages, list):
        raise CheckpointError(f"{file}: pp_layers is {stages!r}")
    listed = [n for n in stages if isinstance(n, list)]
    numbers = list(itertools.chain(*listed)) if listed else stages
    if (listed and len(listed) < len(stages)) or not all(type(n) is int for n in numbers):
        raise CheckpointError(f"{file}: pp_layers is {stages!r}")
    if len(stages) != pp:
        raise CheckpointError(f"{file}: pp_layers {stages} for {pp} stages")
    if not listed and (sum(stages) != count or min(stages) < 0):
        raise CheckpointError(
            f"{file}: pp_layers {stages} name {sum(stages)} layers, the config has {count}"
        )
    if not listed:
        return split_by_counts(count, tuple(stages))
    if sorted(numbers) != list(range(count)):
        raise CheckpointError(
            f"{file}: pp_layers {stages} are not each once the {count} layers of the model"
        )
    return tuple(tuple(n) for n in stages)


_LAYER = re.compile(r"(.*\blayers\.)(\d{1,9})(\..*)")


def _detect_stages(
    path: StoragePath, indices: Mapping[Coord, Index], count: int
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


_WRAPPERS = ("model.", "module.", "state_dict.")  # keys that some writers put around the names


class _Reader:
    """Reads one folder; holds what its methods would otherwise pass to each other."""

    def __init__(
        self,
        path: StoragePath,
        header: _Header,
        model: Model,
        names: RankNames,
        indices: Mapping[Coord, Index],
        options: ReadOptions,
    ) -> None:
        self.path, self.header, self.model, self.names = path, header, model, names
        self.indices, self.options = indices, options
        self.native = bool(header.table)
        try:
            nbytes = sum(index.size_bytes for index in indices.values())
            self.here = Placement.of(
                model, header.mesh, header.layout, self._padded_vocab(), nbytes=nbytes
            )
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.builder = ChunkBuilder(self.here)
        self.faults = self.builder.faults
        self.result = Checkpoint(path, NAME, Manifest({}, {}), model, header.mesh, header.dp)

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
        result.has_optimizer = bool(self.names.optimizer)
        result.layout = self.header.layout
        result.padded_vocab = self.here.padded
        result.vocab_multiple = claims.vocab_multiple(
            self._whole("make_vocab_size_divisible_by", result.vocab_multiple, least=1),
            self.here.padded,
            self.path / CHECKPOINT,
        )
        if table.get("step") is not None:
            result.step = self._whole("step", 0, least=0)
        result.state_file = str(self.path / CHECKPOINT)
        result.frozen = self._frozen(table.get("frozen"))
        state = self._state(table)
        result.digests = {
            name: row
            for name, row in read_digests(table.get("files"), self.path / CHECKPOINT).items()
            if not self._unneeded(name)
        }
        self._check_sizes()
        result.random_states = tuple(
            SideFile(f.name, str(f))
            for f in sorted(self.path.iterdir())
            if _RANDOM.fullmatch(f.name)
        )
        result.manifest = self.builder.manifest(state, side_files(self.path, self.options))
        self._check_dtype(result.manifest)
        result.notes += left_behind(self.path, self.options, [f.path for f in result.files])
        if not self.native:
            self._say_foreign()
        return result

    def _state(self, table: Mapping[str, object]) -> dict[str, object]:
        """The training state; args of Megatron-LM in it hold numbers that a model can have."""
        state = TrainingState.of(table, self.result.state_file)
        args = state.megatron.get("args")
        if isinstance(args, dict):
            from ..megatron import known_args

            known_args.check_numbers(args, f"{self.result.state_file}: megatron")
        return state.table()

    def _frozen(self, said: object) -> frozenset[str] | None:
        """The weights that checkpoint.json says were not trained; None if it does not say."""
        if said is None:
            return None
        names = [n for n in said if isinstance(n, str)] if isinstance(said, list) else []
        if not isinstance(said, list) or len(names) < len(said):
            raise CheckpointError(f"{self.path / CHECKPOINT}: frozen is no list of weights")
        unknown = sorted(set(names) - set(self.here.shapes))
        if unknown:
            raise CheckpointError(
                f"{self.path / CHECKPOINT}: frozen names {unknown[0]!r:.200}, which is no weight "
                "of this model"
            )
        return frozenset(names)

    def _whole(self, key: str, default: int, least: int) -> int:
        """A whole number of checkpoint.json."""
        value = self.header.table.get(key, default)
        if type(value) is not int or value < least:
            raise CheckpointError(
                f"{self.path / CHECKPOINT}: {key} is {value!r}, no whole number of at least {least}"
            )
        return value

    def _check_dtype(self, manifest: Manifest) -> None:
        """The recorded dtype is one that the weights have."""
        said = self.header.table.get("dtype")
        have = {TO_TORCH[m.dtype] for f, m in manifest.tensors.items() if category_of(f) == ""}
        if said is not None and said not in have:
            raise CheckpointError(
                f"{self.path / CHECKPOINT}: dtype is {said}, the weights are "
                f"{', '.join(sorted(have))}; was it taken from another save?"
            )

    def _say_foreign(self) -> None:
        tags = ", ".join(f"{tag}={value}" for tag, value in self.header.layout.items())
        stages = ",".join(str(len(s)) for s in self.header.mesh.owned["pp"])
        local = any(self._first_layer(coord, index) for coord, index in self.indices.items())
        self.result.notes.append(
            f"{self.path}: no checkpoint.json; assumed layout {tags} (--layout KEY=VALUE "
            f"says another), layers per stage {stages}, "
            f"numbered {'locally, from 0 on each stage' if local else 'globally'}"
        )

    def _unneeded(self, name: str) -> bool:
        """Whether a recorded file is of the optimizer, and the optimizer is not asked for."""
        match = FILE.fullmatch(name)
        return self.options.weights_only and match is not None and match[1] in OPTIMIZER

    def _check_sizes(self) -> None:
        lost = [n for n in self.result.digests if (m := FILE.fullmatch(n)) and m[1] in OPTIMIZER]
        if lost and not self.names.optimizer:  # merges and --weights-only do without
            self.result.unread_optimizer = (
                f"{self.path / lost[0]}: is missing, {CHECKPOINT} records {len(lost)} optimizer "
                f"files; {WITHOUT}"
            )
        for name, (size, _) in self.result.digests.items():
            if name in lost and not self.names.optimizer:
                continue
            file = self.path / name
            now = file.size() if file.is_file() else None
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
            for pattern, ours in FUSED_NORMS:
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
        rows = self.here.held(shards_of(coord))
        found = set()
        for name, entry in self._renamed(index, self._first_layer(coord, index)):
            if not self.native and name.endswith(EXTRA):
                self.result.left_out.append(("_extra_state holds no weights", 0))
                continue
            placed = rows.get(name)
            if placed is None:
                self.faults.append(
                    f"{index.path}: {name}: unknown tensor of shape {list(entry.shape)}"
                )
                continue
            found.add(name)
            self.builder.add_entry("", placed, entry, index.path)
        for name in rows:
            if name not in found:
                self.faults.append(f"{index.path}: {name}: missing")
        self._note_file(index, coord)

    def _note_file(self, index: Index, coord: Coord) -> None:
        rank = " ".join(f"{axis} {number}" for axis, number in coord)
        layers = self.header.mesh.owned["pp"][dict(coord)["pp"]]
        row = FileSummary(index.path, rank, index.size_bytes, len(index.entries), layers)
        self.result.files.append(row)

    def _check_rank(self, coord: Coord, index: Index) -> None:
        """A file says which rank it is, so that swapped and stray files are noticed."""
        wanted = {
            "ranks": json.dumps(dict(coord)),
            "mesh": json.dumps(dict(mesh_table(self.header.mesh, self.header.dp))),
            "step": json.dumps(self.header.table.get("step")),
        }
        for key, value in wanted.items():
            said = index.metadata.get(key)
            known = self.native or key == "ranks"
            if known and said is not None and not _same_json(said, value):
                self.faults.append(
                    f"{index.path}: says {key} {said[:200]}, its name and {CHECKPOINT} say "
                    f"{value}; was it swapped or taken from another save?"
                )

    def _optimizer(self) -> None:
        """Optimizer files, whole or cut into row-major ranges over dp."""
        found = self.names.optimizer
        if not found:
            return
        if not self.native:
            self.result.unread_optimizer = (
                f"{next(iter(found.values()))}: optimizer files of a folder without {CHECKPOINT} "
                f"are not read; {WITHOUT}"
            )
            return
        mesh = self.header.mesh
        shapes = [dict(one.axes) for one, _ in mesh.parts()]
        if any("dp" in dict(coord) for coord in found):
            shapes[0]["dp"] = self.header.dp
            if mesh.experts is not None:
                shapes[1]["dp"] = mesh.expert_dp(self.header.dp)
            self.result.sharded = True
        files = self.header.table.get("files")
        # an older release wrote no file for a stage that is not trained at all
        written = files if isinstance(files, dict) and files else None
        check_files(self.path, found, shapes, self.names.suffix, "optimizer", written)
        for coord, file in found.items():
            index = _rank_index(file)
            self._check_rank(coord, index)
            self._optimizer_file(coord, index)

    def _optimizer_file(self, coord: Coord, index: Index) -> None:
        rows = self.here.held(shards_of(coord))
        ranges = _ranges(index) if "dp" in dict(coord) else None
        for key, entry in index.entries.items():
            state, _, name = key.partition("/")
            placed = rows.get(name)
            if state not in STATES or placed is None:
                known = f"; known states are {', '.join(STATES)}" if state not in STATES else ""
                self.faults.append(f"{index.path}: {key}: unknown optimizer tensor{known}")
                continue
            span = None
            if ranges is not None:
                span = ranges.get(key)
                total = math.prod(placed.shape)
                if span is None or not 0 <= span[0] <= span[1] <= total:
                    self.faults.append(
                        f"{index.path}: {key}: its metadata gives the range {span and list(span)}, "
                        f"this rank has the elements 0 to {total}"
                    )
                    continue
            self.builder.add_entry(state, placed, entry, index.path, span)
        self._note_file(index, coord)


def _ranges(index: Index) -> dict[str, tuple[int, int]]:
    """The row-major range of its stored tensor that each entry of a dp file holds."""
    try:
        table = json.loads(index.metadata.get("ranges", ""))
        found = {key: (start, stop) for key, (start, stop) in table.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index.path}: its metadata has no readable ranges") from error
    for key, pair in found.items():
        if not all(type(n) is int for n in pair):
            raise CheckpointError(f"{index.path}: {key}: its range {pair} is no pair of numbers")
    return found


def _same_json(a: str, b: str) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except (ValueError, RecursionError):
        return False
