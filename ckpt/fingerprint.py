"""Fingerprints: a digest of each logical tensor, the same in every layout and format of its values.

A digest is the xxh3-128 of the tensor's bits in row-major order, in its stored type, little-endian.
Padding rows belong to a layout and have none. ``docs/format.md`` has the scheme. Memory is bounded
by one block for each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from .checkpoint.json_io import load_json
from .checkpoint.types import Checkpoint, ReadOptions
from .errors import CheckpointError
from .inspect import row_major_blocks
from .jobs import RunOptions
from .lazy import LazyArray
from .model.box import Box
from .model.dtypes import ITEMSIZE
from .model.manifest import category_of, is_padding
from .move.progress import Progress
from .move.storage import Where, storage_path
from .reader import read_checkpoint
from .verdict import Verdict

SCHEME = "xxh3-128 of row-major little-endian bits, version 1"
_BLOCK = 1 << 21  # elements of a block


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One tensor's."""

    dtype: str
    shape: tuple[int, ...]
    digest: str  # hex

    def table(self) -> dict[str, object]:
        """As JSON."""
        return {"dtype": self.dtype, "shape": list(self.shape), "xxh3_128": self.digest}


def fingerprint(
    path: Where, *, read: ReadOptions | None = None, run: RunOptions | None = None
) -> dict[str, Fingerprint]:
    """The fingerprint of each logical tensor of a checkpoint; CheckpointError as for reading it."""
    return fingerprints(read_checkpoint(path, read), run or RunOptions())


def fingerprints(ckpt: Checkpoint, run: RunOptions) -> dict[str, Fingerprint]:
    """The same of a checkpoint that has been read."""
    fault = ckpt.optimizer_fault()
    if fault:
        raise CheckpointError(fault)
    manifest = ckpt.manifest
    names = [fqn for fqn in manifest.tensors if not is_padding(fqn)]
    arrays = [
        LazyArray(fqn, manifest.tensors[fqn], manifest.chunks.get(fqn, []), ckpt.path.storage)
        for fqn in names
    ]
    total = sum(array.nbytes for array in arrays)
    with Progress(total, "fingerprint", quiet=run.quiet) as progress:

        def one(array: LazyArray) -> Fingerprint:
            state = xxhash.xxh3_128()
            for block in row_major_blocks(array.shape, _BLOCK):
                box = Box(
                    tuple(part.start for part in block),
                    tuple(part.stop - part.start for part in block),
                )
                state.update(array.raw(box).tobytes())
                progress.add(box.numel * ITEMSIZE[array.dtype])
            return Fingerprint(array.dtype, array.shape, state.hexdigest())

        with ThreadPoolExecutor(run.threads) as pool:
            return dict(zip(names, pool.map(one, arrays), strict=True))


def as_json(found: Mapping[str, Fingerprint]) -> dict[str, object]:
    """What ``shardwright fingerprint --json`` prints, and ``verify-ckpt --against`` reads."""
    rows = sorted(found.items())
    lines = "".join(f"{name} {f.dtype} {list(f.shape)} {f.digest}\n" for name, f in rows)
    return {
        "scheme": SCHEME,
        "all": xxhash.xxh3_128_hexdigest(lines.encode()),
        "tensors": {name: f.table() for name, f in found.items()},
    }


def read_fingerprints(path: Where) -> dict[str, Fingerprint]:
    """What a file of ``shardwright fingerprint --json`` says."""
    file = storage_path(path)
    table = load_json(file)
    rows = table.get("tensors")
    if table.get("scheme") != SCHEME or not isinstance(rows, dict):
        raise CheckpointError(f"{file}: holds no fingerprints of the scheme {SCHEME!r}")
    found = {}
    for name, row in rows.items():
        shape = row.get("shape") if isinstance(row, dict) else None
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise CheckpointError(f"{file}: {name}: has no shape")
        found[name] = Fingerprint(str(row.get("dtype")), tuple(shape), str(row.get("xxh3_128")))
    return found


def verify_against(
    path: Where,
    file: Where,
    *,
    weights_only: bool = False,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
) -> Verdict:
    """Compare a checkpoint with fingerprints of one that may be gone."""
    known = read_fingerprints(file)
    found = fingerprint(path, read=read, run=run)
    verdict = Verdict()
    for name in [*known, *(name for name in found if name not in known)]:
        if weights_only and category_of(name):
            continue
        a, b = known.get(name), found.get(name)
        if a is None or b is None:
            verdict.add("missing", name, f"{name}: missing in {file if a is None else path}")
            continue
        verdict.tensors += 1
        verdict.nbytes += ITEMSIZE[b.dtype] * Box((0,) * len(b.shape), b.shape).numel
        if a.shape != b.shape:
            verdict.add("shape", name, f"{name}: shape {list(a.shape)} and {list(b.shape)}")
        elif a.dtype != b.dtype:
            verdict.add("dtype", name, f"{name}: dtype {a.dtype} and {b.dtype}")
        elif a.digest != b.digest:
            verdict.add("fingerprint", name, f"{name}: values differ: {a.digest} and {b.digest}")
    return verdict
