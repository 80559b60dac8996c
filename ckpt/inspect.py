"""What ``inspect-ckpt`` prints about a checkpoint, as plain values. Reads headers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from .checkpoint.types import Checkpoint
from .model.dtypes import ITEMSIZE
from .model.manifest import STATES, category_of, is_padding, locate


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
    holds = sum(stop - start for start, stop in (chunk.view.extent() for chunk in chunks))
    note = ""
    if math.prod(meta.shape) > max(MAX_REPEATED, holds):
        note = f"no statistics: {holds} bytes stand for {math.prod(meta.shape)} elements"
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
        "statistics": {} if note else statistics(ckpt, fqn),
        "note": note,
    }


STAT_ELEMENTS = 1 << 20  # elements in memory at once for statistics
MAX_REPEATED = 1 << 22  # elements of a tensor with strides that repeat its bytes


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """A whole tensor in blocks of at most ``STAT_ELEMENTS``."""
    if not math.prod(shape):
        return
    room, ranges = STAT_ELEMENTS, []
    for size in reversed(shape):
        step = max(1, min(size, room))
        room //= step
        ranges.append([slice(at, min(at + step, size)) for at in range(0, size, step)])
    yield from itertools.product(*reversed(ranges))


def statistics(ckpt: Checkpoint, fqn: str) -> Mapping[str, float | int]:
    """min, max, mean, std and counts of zero, NaN and infinite values, streaming in blocks."""
    import numpy as np

    from .lazy import LazyArray

    meta = ckpt.manifest.tensors[fqn]
    array = LazyArray(fqn, meta, ckpt.manifest.chunks.get(fqn, []), ckpt.path.storage)
    low, high, total, square, count = math.inf, -math.inf, 0.0, 0.0, 0
    zeros = nans = infs = 0
    for block in _blocks(meta.shape):
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
