"""What native rank files are called, and which of them a mesh needs.

Shared by the reader and the writer, so that a name has one rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoint.claims import MAX_RANKS
from ...checkpoint.types import WITHOUT, Container
from ...containers import safetensors, torch_zip
from ...errors import CheckpointError, raise_all
from ...model.mesh import AXES, Coord, Mesh
from ...move.storage import StoragePath

NAME = "shards"
VERSION = "1.0"
CHECKPOINT = "checkpoint.json"
FILE = re.compile(r"(model|pytorch_model|optimizer)((?:_[a-z]+_\d+)+)\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class RankNames:
    """The rank files of a folder by kind and coordinate."""

    model: dict[Coord, StoragePath]
    optimizer: dict[Coord, StoragePath]
    suffix: str  # "safetensors" or "bin"


def scan(path: StoragePath) -> RankNames:
    """Rank files by their integers: ``tp_10`` sorts after ``tp_2``."""
    kinds: dict[str, dict[Coord, StoragePath]] = {"model": {}, "optimizer": {}}
    spellings: dict[str, str] = {}
    for child in path.iterdir():
        match = FILE.fullmatch(child.name)
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
    return RankNames(
        dict(sorted(kinds["model"].items())), dict(sorted(kinds["optimizer"].items())), suffix
    )


def check_files(
    path: StoragePath,
    found: Mapping[Coord, StoragePath],
    shape: Mapping[str, int],
    suffix: str,
    kind: str,
) -> None:
    """The set of files must be the mesh's, no more and no less."""
    mesh = Mesh(tuple(shape.items()))
    says = " ".join(f"{axis}={size}" for axis, size in shape.items())
    if math.prod(shape.values()) > MAX_RANKS:
        raise CheckpointError(f"{path}: a mesh of {says} has more than {MAX_RANKS} ranks")
    wanted = {coord: path / file_name(kind, coord, suffix) for coord in mesh.coords()}
    faults = [f"{file.name}: is missing" for coord, file in wanted.items() if coord not in found]
    faults += [f"{file.name}: no rank of the mesh" for c, file in found.items() if c not in wanted]
    way_on = f"; {WITHOUT}" if kind == "optimizer" else ""
    raise_all(faults, f"{path}: the files of a mesh of {says} are needed{way_on}")


def file_name(kind: str, coord: Coord, suffix: str) -> str:
    """``model_tp_0_pp_1.safetensors``; ``.bin`` files take Hugging Face's older stem."""
    stem = "pytorch_model" if kind == "model" and suffix == "bin" else kind
    return stem + "".join(f"_{axis}_{rank}" for axis, rank in coord) + "." + suffix


def shards_of(file: Coord) -> tuple[Coord, ...]:
    """The shards of the model that a rank file holds tensors of; with ``dp``, ranges of them.

    A file's own ranks and the coordinates of what it holds are two things: one file may hold
    shards of several meshes.
    """
    return (tuple((axis, rank) for axis, rank in file if axis != "dp"),)


def container(suffix: str) -> Container:
    return safetensors if suffix == "safetensors" else torch_zip


def mesh_table(mesh: Mesh, dp: int) -> tuple[tuple[str, int], ...]:
    return (*mesh.axes, ("dp", dp))
