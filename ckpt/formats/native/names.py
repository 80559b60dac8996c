"""What native rank files are called, and which of them a mesh needs.

Shared by the reader and the writer, so that a name has one rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...checkpoint.claims import MAX_RANKS
from ...checkpoint.types import WITHOUT, Container
from ...containers import safetensors
from ...errors import CheckpointError, raise_all
from ...model.mesh import AXES, Coord, Mesh
from ...move.storage import StoragePath

NAME = "shards"
VERSION = "1.0"
CHECKPOINT = "checkpoint.json"
FILE = re.compile(
    r"(model|pytorch_model|optimizer|experts|experts_optimizer)((?:_[a-z]+_\d+)+)"
    r"\.(safetensors|bin)"
)
OPTIMIZER = ("optimizer", "experts_optimizer")


@dataclass(frozen=True, slots=True)
class RankNames:
    """The rank files of a folder by kind and coordinate; those of experts have the axis ep."""

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
        kind = "optimizer" if match[1] in OPTIMIZER else "model"
        axes = [axis for axis, _ in coord]
        of_experts = match[1].startswith("experts")
        all_known = (*(("tp", "pp", "ep") if of_experts else AXES), "dp")
        known = [axis for axis in all_known if axis in axes]
        if axes != known or axes[:2] != ["tp", "pp"] or of_experts != ("ep" in axes):
            raise CheckpointError(
                f"{child}: names the axes {axes}; known are {', '.join(all_known[:-1])} and dp, "
                "in this order"
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
    meshes: Sequence[Mapping[str, int]],
    suffix: str,
    kind: str,
    written: Collection[str] | None = None,
) -> None:
    """The set of files must be that of the meshes (axis -> size), no more and no less.

    ``written`` are the names that were recorded; a file of the mesh that is not among them was
    never there.
    """
    says = " and ".join(
        " ".join(f"{axis}={size}" for axis, size in shape.items()) for shape in meshes
    )
    if sum(math.prod(shape.values()) for shape in meshes) > MAX_RANKS:
        raise CheckpointError(f"{path}: a mesh of {says} has more than {MAX_RANKS} ranks")
    wanted = {
        coord: path / file_name(kind, coord, suffix)
        for shape in meshes
        for coord in Mesh(tuple(shape.items())).coords()
    }
    faults = [
        f"{file.name}: is missing"
        for coord, file in wanted.items()
        if coord not in found and (written is None or file.name in written)
    ]
    faults += [f"{file.name}: no rank of the mesh" for c, file in found.items() if c not in wanted]
    way_on = f"; {WITHOUT}" if kind == "optimizer" else ""
    raise_all(faults, f"{path}: the files of a mesh of {says} are needed{way_on}")


def file_name(kind: str, coord: Coord, suffix: str) -> str:
    """``model_tp_0_pp_1.safetensors``; ``.bin`` files take Hugging Face's older stem.

    Experts have files of their own: ``experts_tp_0_pp_1_ep_0``, ``experts_optimizer_tp_...``.
    """
    stem = "pytorch_model" if kind == "model" and suffix == "bin" else kind
    if "ep" in dict(coord):
        stem = "experts" if kind == "model" else "experts_optimizer"
    return stem + "".join(f"_{axis}_{rank}" for axis, rank in coord) + "." + suffix


def shards_of(file: Coord) -> tuple[Coord, ...]:
    """The shards of the model that a rank file holds tensors of; with ``dp``, ranges of them.

    A file's own ranks and the coordinates of what it holds are two things: one file may hold
    shards of several meshes.
    """
    return (tuple((axis, rank) for axis, rank in file if axis != "dp"),)


def container(suffix: str) -> Container:
    if suffix == "safetensors":
        return safetensors
    from ...containers import torch_zip  # with pickles and more, which few runs need

    return torch_zip


def mesh_table(mesh: Mesh, dp: int) -> tuple[tuple[str, int], ...]:
    """The axes of all meshes and their sizes."""
    experts = mesh.experts
    more = () if experts is None else (("ep", experts.size("ep")), ("etp", experts.size("tp")))
    return (*mesh.axes, ("dp", dp), *more)
