"""What ``inspect-ckpt`` prints about a checkpoint, as plain values. Reads headers unless asked."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from .checkpoint.types import Checkpoint
from .errors import CheckpointError
from .model.dtypes import ITEMSIZE
from .model.manifest import STATES, category_of, is_padding, locate
from .move.storage import StoragePath

if TYPE_CHECKING:
    from .lazy import LazyArray


def describe(ckpt: Checkpoint) -> dict[str, object]:
    """Format, model, mesh, step, sizes, dtypes and the table of ranks; JSON-able."""
    weights = {
        fqn: meta
        for fqn, meta in ckpt.manifest.tensors.items()
        if category_of(fqn) == "" and not is_padding(fqn)
    }
    dtypes: dict[str, int] = {}
    for meta in weights.values():
        dtypes[meta.dtype] = dtypes.get(meta.dtype, 0) + math.prod(meta.shape)
    model = ckpt.model
    return {
        "path": str(ckpt.path),
        "format": ckpt.format,
        "family": model.family.name if model else None,
        "mesh": {**dict(ckpt.mesh.axes), "dp": ckpt.dp, **_expert_axes(ckpt)},
        "optimizer_sharded": ckpt.sharded,
        "pp_layers": [len(owned) for owned in ckpt.mesh.owned.get("pp", ())],
        "layout": ckpt.layout,
        "step": ckpt.step,
        "vocab_size": model.sizes["vocab"] if model else None,
        "padded_vocab_size": ckpt.padded_vocab,
        "tensors": len(weights),
        "parameters": sum(math.prod(m.shape) for m in weights.values()),
        "bytes": sum(file.nbytes for file in ckpt.files),
        "dtypes": dtypes,
        "optimizer_states": [s for s in STATES if ckpt.manifest.category(s)],
        "state": sorted(ckpt.manifest.state),
        "tied": ckpt.tied,
        "files": [
            {
                "name": PurePath(f.path).name,
                "rank": f.rank,
                "bytes": f.nbytes,
                "tensors": f.num_tensors,
                "layers": _spans(f.layers),
            }
            for f in ckpt.files
        ],
        "side_files": [side.name for side in ckpt.manifest.side_files],
        "notes": ckpt.notes + ([ckpt.unread_optimizer] if ckpt.unread_optimizer else []),
    }


def _expert_axes(ckpt: Checkpoint) -> dict[str, int]:
    experts = ckpt.mesh.experts
    return {} if experts is None else {"ep": experts.size("ep"), "etp": experts.size("tp")}


def _spans(numbers: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` -> ``"0-2,5"``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans)


def describe_tensor(ckpt: Checkpoint, fqn: str) -> dict[str, object]:
    """Shape, dtype, every box with its file and bytes, and the values' statistics."""
    meta = ckpt.manifest.tensors[fqn]
    chunks = ckpt.manifest.chunks.get(fqn, [])
    locate(chunk.place for chunk in chunks)
    found, note = _values(_array(ckpt, fqn))
    return {
        "name": fqn,
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "boxes": [
            {
                "offsets": list(c.box.offsets),
                "sizes": list(c.box.sizes),
                "file": PurePath(c.view.file).name,
                "offset_bytes": c.view.offset_bytes,
                "strides": list(c.view.strides),
                "bytes": c.box.numel * ITEMSIZE[c.view.dtype],
            }
            for c in chunks
        ],
        "statistics": found,
        "note": note,
    }


def _array(ckpt: Checkpoint, fqn: str) -> LazyArray:
    from .lazy import LazyArray

    chunks = ckpt.manifest.chunks.get(fqn, [])
    return LazyArray(fqn, ckpt.manifest.tensors[fqn], chunks, ckpt.path.storage)


def _values(array: LazyArray) -> tuple[Mapping[str, float | int], str]:
    """The statistics of a tensor, or why there are none."""
    locate(chunk.place for chunk in array.chunks)
    holds = sum(stop - start for start, stop in (chunk.view.extent() for chunk in array.chunks))
    count = math.prod(array.shape)
    if count > max(MAX_REPEATED, holds):
        return {}, f"no statistics: {holds} bytes stand for {count} elements"
    return statistics(array), ""


def list_tensors(ckpt: Checkpoint, pattern: str, values: bool) -> list[dict[str, object]]:
    """Name, dtype and shape of the logical tensors that a pattern picks, and their statistics.

    A pattern without ``*``, ``?`` or ``[`` picks names that contain it.
    """
    picked = picks(pattern)
    return [_row(_array(ckpt, fqn), values) for fqn in ckpt.manifest.tensors if picked(fqn)]


def list_stored(path: StoragePath, pattern: str, values: bool) -> list[dict[str, object]]:
    """The same of single files: tensors under the names and with the shapes that are stored.

    A file that cannot be read is a row with its fault.
    """
    from .stored import stored_files

    picked = picks(pattern)
    rows: list[dict[str, object]] = []
    for file in stored_files(path):
        where: dict[str, object] = {
            "file": file.path.name if path.is_file() else str(file.path.relative_to(path))
        }
        if file.fault:
            rows.append({**where, "fault": file.fault})
        rows += [
            {**where, **_row(file.array(entry), values, file.notes.get(entry.name, ""))}
            for entry in file.entries
            if picked(entry.name)
        ]
    return rows


def picks(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern picks a name."""
    whole = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    match = re.compile(fnmatch.translate(whole)).match
    return lambda name: match(name) is not None


def _row(array: LazyArray, values: bool, why_not: str = "") -> dict[str, object]:
    row: dict[str, object] = {
        "name": array.fqn, "dtype": array.dtype, "shape": list(array.shape)
    }  # fmt: skip
    if values and why_not:
        row["statistics"], row["note"] = {}, f"no statistics: {why_not}"
    elif values:
        try:
            row["statistics"], row["note"] = _values(array)
        except (CheckpointError, OSError) as error:
            row["statistics"], row["note"] = {}, f"cannot be read: {error}"
    return row


STAT_ELEMENTS = 1 << 20  # elements in memory at once for statistics
MAX_REPEATED = 1 << 22  # elements of a tensor with strides that repeat its bytes


def row_major_blocks(
    shape: tuple[int, ...], most: int = STAT_ELEMENTS
) -> Iterator[tuple[slice, ...]]:
    """A whole tensor in blocks of at most ``most`` elements, each a run of its row-major order."""
    if not math.prod(shape):
        return
    room, ranges = most, []
    for size in reversed(shape):
        step = max(1, min(size, room))
        room //= step
        ranges.append([slice(at, min(at + step, size)) for at in range(0, size, step)])
    yield from itertools.product(*reversed(ranges))


def statistics(array: LazyArray) -> Mapping[str, float | int]:
    """min, max, mean, std and counts of zero, NaN and infinite values, streaming in blocks."""
    import numpy as np

    low, high, total, square, count = math.inf, -math.inf, 0.0, 0.0, 0
    zeros = nans = infs = 0
    for block in row_major_blocks(array.shape):
        part = np.asarray(array[block]).astype(np.float64)
        finite = part[np.isfinite(part)]
        nans += int(np.isnan(part).sum())
        infs += int(np.isinf(part).sum())
        zeros += int((part == 0).sum())
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total, square = total + float(finite.sum()), square + float((finite**2).sum())
            count += finite.size
    counts = {"zeros": zeros, "nan": nans, "inf": infs}
    if not count:
        return counts
    mean = total / count
    std = math.sqrt(max(0.0, square / count - mean * mean))
    return {"min": low, "max": high, "mean": mean, "std": std, **counts}
