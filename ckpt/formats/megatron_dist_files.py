"""The files of a torch_dist checkpoint: what ``.metadata`` says, and blobs of ``.distcp`` files.

``.metadata`` is a pickle of torch.distributed.checkpoint's Metadata; its objects stay inert. Each
blob is a file of ``torch.save`` of its own, with one tensor or one list of objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..box import Box
from ..checkpoint import is_file_name
from ..containers import pickles, torchzip
from ..containers.blueprint import Entry, Index
from ..containers.files import regular_size
from ..containers.pickles import Global, Stub
from ..errors import CheckpointError

METADATA = ".metadata"
COMMON = "common.pt"
DESCRIBES = "metadata.json"
MAX_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Blob:
    """A box of a stored tensor, and where its file lies."""

    box: Box
    file: str
    start_bytes: int
    length_bytes: int

    def entry(self, name: str, dtype: str) -> Entry:
        """The tensor in it; CheckpointError if it is another."""
        index = torchzip.index_span(self.file, self.start_bytes, self.length_bytes)
        entry = index.entries.get("")
        if entry is None or entry.shape != self.box.sizes or entry.dtype != dtype:
            have = f"{entry.dtype} {list(entry.shape)}" if entry else "no tensor"
            raise CheckpointError(
                f"{self.file}: {name} at byte {self.start_bytes}: holds {have}, {METADATA} says "
                f"{dtype} {list(self.box.sizes)}"
            )
        return entry


@dataclass(slots=True)
class Stored:
    """A stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    blobs: list[Blob] = field(default_factory=list)


@dataclass(slots=True)
class Listing:
    """Everything that ``.metadata`` names."""

    tensors: dict[str, Stored]
    objects: dict[str, Blob]  # blobs of pickled objects
    original_shapes: dict[str, tuple[int, ...]]  # of tensors stored flattened (core <= 0.15)
    files: dict[str, int]  # path -> bytes


def listing(folder: Path) -> Listing:
    """What lies in which blob; every chunk has its blob, and chunks tile their tensor."""
    file = folder / METADATA
    size = regular_size(str(file))
    if size > MAX_METADATA_BYTES:
        raise CheckpointError(f"{file}: {size} bytes; the limit is {MAX_METADATA_BYTES}")
    root = pickles.decode(file.read_bytes(), str(file))
    if not isinstance(root, Stub) or root.name not in ("Metadata", "MCoreMetadata"):
        raise CheckpointError(f"{file}: is no Metadata of torch.distributed.checkpoint")
    table = _dict(file, root.state, "Metadata")
    found = Listing({}, {}, _original_shapes(table.get("mcore_data")), {})
    places = _places(file, folder, _dict(file, table.get("storage_data"), "storage_data"), found)
    for name, meta in _dict(file, table.get("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(meta, Stub) or not isinstance(name, str):
            raise CheckpointError(f"{file}: {pickles.short(name)}: no metadata of a tensor")
        if meta.name == "BytesStorageMetadata":
            if (name, None) not in places:
                raise CheckpointError(f"{file}: {name}: no file holds it")
            path, start, length = places[name, None]
            found.objects[name] = Blob(Box((), ()), path, start, length)
            continue
        found.tensors[name] = _stored(file, name, meta, places)
    return found


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _places(file: Path, folder: Path, table: Mapping[object, object], found: Listing) -> _Places:
    """(name, offsets) -> (path, first byte, bytes)."""
    places: _Places = {}
    for key, value in table.items():
        if not isinstance(key, Stub) or not isinstance(value, Stub):
            raise CheckpointError(f"{file}: storage_data holds no MetadataIndex")
        at, info = _dict(file, key.state, "MetadataIndex"), _dict(file, value.state, "_StorageInfo")
        name, offset = at.get("fqn"), at.get("offset")
        path, start, length = (info.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or type(start) is not int or type(length) is not int:
            raise CheckpointError(f"{file}: {pickles.short(name)}: no place in a file")
        if not is_file_name(path):
            raise CheckpointError(
                f"{file}: {name} lies in {pickles.short(path)}, no file beside it"
            )
        where = str(folder / str(path))
        if where not in found.files:
            found.files[where] = regular_size(where)
        if start < 0 or length < 0 or start + length > found.files[where]:
            raise CheckpointError(
                f"{where}: {name}: bytes {start} to {start + length} of a file of "
                f"{found.files[where]} bytes; the file is truncated"
            )
        places[name, _ints(file, name, offset) if offset is not None else None] = (
            where, start, length,
        )  # fmt: skip
    return places


def _stored(file: Path, name: str, meta: Stub, places: _Places) -> Stored:
    table = _dict(file, meta.state, name)
    shape = _ints(file, name, table.get("size"))
    properties = table.get("properties")
    state = properties.state if isinstance(properties, Stub) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, dict):
        first = state.get("dtype")
    dtype = first.dtype if isinstance(first, Global) else None
    if dtype is None:
        raise CheckpointError(f"{file}: {name}: an element type that is not known")
    found = Stored(name, shape, dtype)
    chunks = table.get("chunks")
    count = 0
    corners = set()
    for chunk in chunks if isinstance(chunks, list) else []:
        row = _dict(file, chunk.state if isinstance(chunk, Stub) else None, name)
        box = Box(_ints(file, name, row.get("offsets")), _ints(file, name, row.get("sizes")))
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            o >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        place = places.get((name, box.offsets)) or places.get((name, None))
        if not inside or place is None:
            what = "no file holds it" if inside else f"outside of {list(shape)}"
            raise CheckpointError(
                f"{file}: {name}: chunk {list(box.sizes)} at {list(box.offsets)}: {what}"
            )
        if box.numel and box.offsets in corners:
            raise CheckpointError(f"{file}: {name}: two chunks lie at {list(box.offsets)}")
        corners.add(box.offsets)
        found.blobs.append(Blob(box, *place))
        count += box.numel
    total = 1
    for n in shape:
        total *= n
    if count != total:
        raise CheckpointError(
            f"{file}: {name}: its chunks have {count} elements, its shape {list(shape)} has {total}"
        )
    return found


def _original_shapes(table: object) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, row in table.items() if isinstance(table, dict) else ():
        shape = row.get("nd_reformulated_orig_global_shape") if isinstance(row, dict) else None
        if isinstance(shape, (tuple, list)) and all(type(n) is int and n >= 0 for n in shape):
            found[str(name)] = tuple(shape)
    return found


def _dict(file: Path, value: object, what: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what} is a {type(value).__name__}, not a table")
    return value


def _ints(file: Path, name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, Stub) and len(value.args) == 1:  # torch.Size
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointError(f"{file}: {name}: {pickles.short(value)} is no shape")
    return tuple(value)


def objects(blob: Blob) -> Index:
    """A blob of pickled objects: ``extra`` holds them."""
    return torchzip.index_span(blob.file, blob.start_bytes, blob.length_bytes)
