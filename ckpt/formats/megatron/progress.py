"""How far a run of Megatron-LM was: its iteration and samples, from any of its files."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from ...containers import torch_zip
from ...model.dtypes import ITEMSIZE
from ...model.file_layout import Index
from ...move.files import Files
from ...move.storage import StoragePath

TRAIN_STATE = "train_state.pt"  # of Megatron-Bridge, in the iteration's folder
_FOLDER = re.compile(r"iter_(\d{7,18})")
_SCALARS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q", "U8": "<B", "BOOL": "<?"}
_SAMPLES = "consumed_train_samples"


def scalar(index: Index, name: str) -> int | float | None:
    """The number in a tensor of one element; None if there is no such tensor."""
    entry = index.entries.get(name)
    if entry is None or any(n != 1 for n in entry.shape) or entry.dtype not in _SCALARS:
        return None
    raw = bytearray(ITEMSIZE[entry.dtype])
    with Files() as files:
        files.read_into(index.path, entry.offset_bytes, memoryview(raw))
    value: int | float = struct.unpack(_SCALARS[entry.dtype], raw)[0]
    return value


def train_state(folder: StoragePath) -> dict[str, int | float]:
    """The numbers of Megatron-Bridge's train_state.pt; empty where there is none."""
    file = folder / TRAIN_STATE
    if not file.is_file():
        return {}
    index = torch_zip.index(file)
    found = {str(key): value for key, value in index.extra.items() if _is_count(value)}
    tensors = {name: scalar(index, name) for name in index.entries}
    return {**found, **{k: v for k, v in tensors.items() if v is not None}}  # type: ignore[dict-item]


def iteration(root: Mapping[str, object], folder: StoragePath, notes: list[str]) -> int | None:
    """The iteration of a checkpoint; None for a ``release``, which belongs to no run.

    It is ``iteration`` in the files, ``total_iters`` in old ones, and in a separate file of
    Megatron-Bridge. Otherwise the folder's name counts.
    """
    if folder.name == "release":
        return None
    for said in (root.get("iteration"), root.get("total_iters"), train_state(folder).get("step")):
        if _is_count(said):
            assert isinstance(said, int)
            return said
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        return None
    notes.append(f"its files name no iteration: it is {int(match[1])}, as the folder's name says")
    return int(match[1])


def samples(args: Mapping[str, object], folder: StoragePath) -> int | None:
    """Training samples consumed."""
    for said in (args.get(_SAMPLES), train_state(folder).get(_SAMPLES)):
        if _is_count(said):
            assert isinstance(said, int)
            return said
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
