"""The safetensors container: an 8-byte length, a JSON header, then the bytes.

Reads the header only, and checks every length and offset in it against the file. Memory is bounded
by the header; the format limits its size.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..errors import CheckpointError
from ..model.box import row_major
from ..model.dtypes import ITEMSIZE
from ..model.file_layout import Entry, FileLayout, Index, Spec
from ..move.storage import MAX_PARSED_BYTES, Where, storage_path
from .budget import check_json

MAX_HEADER_BYTES = MAX_PARSED_BYTES  # the format's own limit
MAX_DIMS = 64  # torch's and NumPy's own limit
ALIGN_BYTES = 8  # the header is padded so that the data starts on this boundary


def index(where: Where) -> Index:
    """The tensors of a file; raises CheckpointError on anything the format does not allow."""
    path = str(storage_path(where))
    with storage_path(where).opened() as file:
        size, prefix = file.size, file.read(0, 8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or length + 8 > size:
            raise CheckpointError(
                f"{path}: header of {length} bytes does not fit a file of {size} bytes; "
                "the file is truncated or no safetensors file"
            )
        raw = file.read(8, length)
    if len(raw) < length:
        raise CheckpointError(f"{path}: header ends after {len(raw)} of {length} bytes")
    header = _parse(path, raw)
    del raw
    metadata = _metadata(path, header.pop("__metadata__", {}))
    base = 8 + length
    # a row goes when its entry comes: a header can have a row for every 50 bytes
    names = list(header)
    entries = {name: _entry(path, name, header.pop(name), base, size) for name in names}
    _check_tiling(path, entries, base, size)
    return Index(path, size, entries, metadata)


def _parse(path: str, raw: bytes) -> dict[str, object]:
    def refuse(text: str) -> NoReturn:
        raise CheckpointError(f"{path}: the header holds the number {text}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object] | _Row:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise CheckpointError(f"{path}: the header names {_short(name)} twice")
                seen.add(name)
        return _compact(table)

    check_json(raw, path)
    try:
        header = json.loads(raw.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not an object")
    return header


_Row = tuple[str, tuple[object, ...], tuple[object, ...]]  # dtype, shape, data_offsets
_KEYS = {"dtype", "shape", "data_offsets"}


def _compact(table: dict[str, object]) -> dict[str, object] | _Row:
    """A tensor's row in a third of the memory; any other object as it is."""
    if len(table) != 3 or set(table) != _KEYS:
        return table
    dtype, shape, span = table["dtype"], table["shape"], table["data_offsets"]
    if isinstance(dtype, str) and isinstance(shape, list) and isinstance(span, list):
        return sys.intern(dtype), tuple(shape), tuple(span)
    return table


def _metadata(path: str, table: object) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    return table


def _entry(path: str, name: str, row: object, base: int, size: int) -> Entry:
    """One header row as a view; ``base`` is where the data starts in the file."""
    if not _is_unicode(name):
        raise CheckpointError(
            f"{path}: {_short(name)} is not a name of a tensor: it is not Unicode"
        )
    if isinstance(row, dict) and set(row) == _KEYS:
        row = (row["dtype"], row["shape"], row["data_offsets"])
    if not isinstance(row, tuple):
        raise CheckpointError(
            f"{path}: {name}: needs exactly dtype, shape and data_offsets, got {_short(row)}"
        )
    dtype, shape, span = row
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(f"{path}: {name}: dtype {_short(dtype)} is not one this tool reads")
    if not _is_counts(shape) or not _is_counts(span) or len(span) != 2:
        raise CheckpointError(
            f"{path}: {name}: shape {_listed(shape)} and data_offsets {_listed(span)} "
            "must be whole numbers of at least 0"
        )
    # with the zeros left out, since strides are made of the other sizes
    if len(shape) > MAX_DIMS or math.prod(n for n in shape if n) * ITEMSIZE[dtype] >= 2**63:
        raise CheckpointError(
            f"{path}: {name}: shape {_listed(shape)} has over {MAX_DIMS} dims or needs over "
            "2**63 bytes"
        )
    start, stop = span
    need = math.prod(shape) * ITEMSIZE[dtype]
    if stop - start != need:
        raise CheckpointError(
            f"{path}: {name}: shape {_listed(shape)} of {dtype} needs {need} bytes, "
            f"data_offsets {_listed(span)} hold {stop - start}"
        )
    if base + stop > size:
        raise CheckpointError(
            f"{path}: {name}: ends at byte {base + stop} of a file of {size} bytes; "
            "the file is truncated"
        )
    return Entry(name, dtype, shape, row_major(shape), base + start)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file can be given as a name
        return False
    return True


def _is_counts(value: object) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _listed(value: object) -> str:
    """A value of JSON as it was written."""
    return _short(list(value) if isinstance(value, tuple) else value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_tiling(path: str, entries: Mapping[str, Entry], base: int, size: int) -> None:
    """The format allows neither overlaps nor holes: each byte belongs to one tensor."""
    spans = sorted(
        (entry.offset_bytes, math.prod(entry.shape) * ITEMSIZE[entry.dtype], name)
        for name, entry in entries.items()
    )
    at, last = base, "the header"
    for offset, length, name in spans:
        if offset != at:
            what = "overlaps" if offset < at else "leaves a hole after"
            raise CheckpointError(
                f"{path}: {name}: starts at byte {offset} and {what} {last}, which ends at {at}"
            )
        at, last = offset + length, name
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor ({last})")


def layout(specs: Sequence[Spec], metadata: Mapping[str, str]) -> FileLayout:
    """A file that holds ``specs`` in the order given; ``{"format": "pt"}`` is always written.

    Other tools refuse a file without that entry, or guess its framework.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at, spans = 0, {}
    for spec in specs:
        assert spec.name not in spans, f"{spec.name} twice in one file"
        length = math.prod(spec.shape) * ITEMSIZE[spec.dtype]
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + length],
        }
        spans[spec.name] = at
        at += length
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % ALIGN_BYTES)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(raw)} bytes is over safetensors' limit of {MAX_HEADER_BYTES}; "
            "split the output with --max-shard-size"
        )
    base = 8 + len(raw)
    offsets = {name: base + start for name, start in spans.items()}
    return FileLayout(base + at, offsets, ((0, struct.pack("<Q", len(raw)) + raw),))
