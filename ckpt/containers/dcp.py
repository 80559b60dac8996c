"""The files of a torch_dist checkpoint: what ``.metadata`` says, and blobs of ``.distcp`` files.

``.metadata`` is a pickle of torch.distributed.checkpoint's Metadata; its objects stay inert. Each
blob is a complete file of ``torch.save`` with one tensor or one list of objects. ``.metadata`` says
box and dtype of a blob's tensor. The blob's header says where its bytes begin; it is read when a
copy needs it, because a checkpoint has as many blobs as tensors times ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from ..errors import CheckpointError, raise_all
from ..model.box import Box, row_major, tile
from ..model.dtypes import ITEMSIZE
from ..model.file_layout import Index, RecordedChecksum
from ..model.manifest import DeferredView, View
from ..move.storage import StoragePath, is_file_name
from . import pickles, torch_zip
from .pickles import Global, Stub

METADATA = ".metadata"
COMMON = "common.pt"
DESCRIBES = "metadata.json"


@dataclass(slots=True, eq=False)
class Blob:
    """A box of a stored tensor, and where its file lies."""

    name: str  # of the stored tensor
    dtype: str
    box: Box
    place: StoragePath  # its file
    start_bytes: int
    length_bytes: int
    # of the tensor, once the header has been read:
    offset_bytes: int = -1  # from the start of the file
    strides: tuple[int, ...] = ()  # elements

    @property
    def file(self) -> str:
        return str(self.place)

    def find(self) -> None:
        """Find the tensor in it; CheckpointError if it is another, or if the blob is damaged."""
        if self.offset_bytes < 0:
            read_headers([self])

    def read(self, file: torch_zip.Archives) -> None:
        """The same in the open file."""
        where = f"{self.file}: {self.name} at byte {self.start_bytes}"
        entry = file.index(self.start_bytes, self.length_bytes, where).entries.get("")
        if entry is None or entry.shape != self.box.sizes or entry.dtype != self.dtype:
            have = f"{entry.dtype} {list(entry.shape)}" if entry else "no tensor"
            raise CheckpointError(
                f"{where}: holds {have}, {METADATA} says {self.dtype} {list(self.box.sizes)}"
            )
        steps = _row_major(self.box.sizes)  # nearly always, and shared between the blobs then
        self.strides = steps if entry.strides == steps else entry.strides
        self.offset_bytes = entry.offset_bytes


_row_major = lru_cache(maxsize=512)(row_major)


@lru_cache(maxsize=4096)
def _shared(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The same numbers, mostly as a shared object, because layers have the same geometry."""
    return numbers


def read_headers(blobs: Iterable[Blob]) -> None:
    """Find the tensors of many blobs: each file is opened once and read from start to end.

    CheckpointError names every blob that is damaged.
    """
    by_file: dict[StoragePath, list[Blob]] = {}
    for blob in dict.fromkeys(blobs):
        if blob.offset_bytes < 0:
            by_file.setdefault(blob.place, []).append(blob)
    faults = []
    for path in sorted(by_file):
        with torch_zip.archives(path) as file:
            for blob in sorted(by_file[path], key=lambda blob: blob.start_bytes):
                try:
                    blob.read(file)
                except CheckpointError as error:
                    faults.append(str(error))
    raise_all(faults, "damaged tensors" if len(faults) > 1 else "")


@dataclass(frozen=True, slots=True)
class BlobSlice(DeferredView):
    """A box of a blob's tensor, its dims in any order; or one of a tensor flattened in the blob."""

    blob: Blob
    first: tuple[int, ...]  # its first element, in the blob's tensor
    sizes: tuple[int, ...]  # elements
    dims: tuple[int, ...] = ()  # the dims of the blob's tensor that its own are
    steps: tuple[int, ...] | None = None  # of a flattened tensor: its strides, in elements

    @property
    def file(self) -> str:
        return self.blob.file

    @property
    def dtype(self) -> str:
        return self.blob.dtype

    def narrow(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> BlobSlice:
        first = list(self.first)
        if self.steps is None:
            for dim, offset in zip(self.dims, offsets, strict=True):
                first[dim] += offset
        else:
            first[-1] += sum(o * step for o, step in zip(offsets, self.steps, strict=True))
        return BlobSlice(self.blob, tuple(first), sizes, self.dims, self.steps)

    def view(self) -> View:
        """Where the elements lie; CheckpointError as ``Blob.find``."""
        blob, steps = self.blob, self.steps
        blob.find()
        if steps is None:
            steps = _shared(tuple(blob.strides[dim] for dim in self.dims))
        elif blob.box.sizes[-1] > 1 and blob.strides[-1] != 1:
            raise CheckpointError(
                f"{blob.file}: {blob.name} at byte {blob.start_bytes}: its elements lie "
                f"{blob.strides[-1]} apart; a flattened tensor has them one after another"
            )
        start = sum(i * step for i, step in zip(self.first, blob.strides, strict=True))
        offset = blob.offset_bytes + start * ITEMSIZE[blob.dtype]
        return View(blob.file, offset, self.sizes, steps, blob.dtype)

    @classmethod
    def find(cls, places: Sequence[DeferredView]) -> None:
        """Read the headers of all their blobs."""
        read_headers(place.blob for place in places if isinstance(place, BlobSlice))


@dataclass(frozen=True, slots=True)
class Grid:
    """A box of a tensor in one blob: all that the blob holds, or, flattened, a run of it."""

    blob: Blob
    start: int = 0  # flattened: its first element, in the blob's last dim
    steps: tuple[int, ...] | None = None  # flattened: its strides, in elements

    def part(self, at: tuple[int, ...], sizes: tuple[int, ...], dims: tuple[int, ...]) -> BlobSlice:
        """The box at ``at`` of this one, as a tensor whose dims are ``dims`` of this one."""
        if self.steps is None:
            return BlobSlice(self.blob, _shared(at), sizes, _shared(dims))
        element = self.start + sum(i * step for i, step in zip(at, self.steps, strict=True))
        first = (0,) * (len(self.blob.box.sizes) - 1) + (element,)
        steps = _shared(tuple(self.steps[dim] for dim in dims))
        return BlobSlice(self.blob, first, sizes, (), steps)


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
    files: dict[StoragePath, int]  # bytes
    # name of a tensor or object -> why its bytes are not there: its file is missing or too short
    lost: dict[str, str] = field(default_factory=dict)


def listing(folder: StoragePath) -> Listing:
    """The content of each blob, checked: every chunk has a blob, and chunks tile their tensor.

    A file that is missing or too short is no error here: ``lost`` says what it takes away, which
    may be nothing that is needed.
    """
    file = folder / METADATA
    root = pickles.decode(_whole(file), str(file))
    if not isinstance(root, Stub) or root.name not in ("Metadata", "MCoreMetadata"):
        raise CheckpointError(f"{file}: is not a Metadata of torch.distributed.checkpoint")
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
            found.objects[name] = Blob(name, "", Box((), ()), path, start, length)
            continue
        found.tensors[name] = _stored(file, name, meta, places)
    return found


def _whole(file: StoragePath) -> bytes:
    """``.metadata``, of any size: it names each tensor of each rank, and holds every rank's plan.

    The ends are looked at first, since a file of zeros can be any size and take no room.
    """
    with file.opened() as opened:
        size = opened.size
        if opened.read(0, 1) != b"\x80" or opened.read(size - 1, 1) != b".":
            raise CheckpointError(f"{file}: {size} bytes that are no pickle")
        return opened.read(0, size)


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[StoragePath, int, int]]


def _places(
    file: StoragePath, folder: StoragePath, table: Mapping[object, object], found: Listing
) -> _Places:
    """(name, offsets) -> (path, first byte, bytes)."""
    places: _Places = {}
    paths: dict[str, StoragePath] = {}  # each once in memory
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
        if start < 0 or length < 0:
            raise CheckpointError(f"{file}: {name}: bytes {start} to {start + length} of a file")
        where = paths.get(str(path))
        if where is None:
            where = paths[str(path)] = folder / str(path)
            if where.exists():
                found.files[where] = where.size()
        size = found.files.get(where)
        if size is None:
            found.lost.setdefault(name, f"{where}: is missing; {name} lies in it")
        elif start + length > size:
            found.lost.setdefault(
                name,
                f"{where}: {name}: bytes {start} to {start + length} of a file of {size} bytes; "
                "the file is truncated",
            )
        places[name, _ints(file, name, offset) if offset is not None else None] = (
            where, start, length,
        )  # fmt: skip
    _check_apart(places)
    return places


def _check_apart(places: _Places) -> None:
    """Check that blobs of one file share no byte, so that none replaces another."""
    held = sorted((where, start, length, key[0]) for key, (where, start, length) in places.items())
    for (file, start, length, name), (other, after, more, second) in pairwise(held):
        if file == other and more and after < start + length:
            raise CheckpointError(
                f"{file}: {name} is said to lie at bytes {start} to {start + length} and {second} "
                f"at {after} to {after + more}; the metadata is damaged: save it again"
            )


def _stored(file: StoragePath, name: str, meta: Stub, places: _Places) -> Stored:
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
        sizes = _ints(file, name, row.get("sizes"))
        box = Box(_ints(file, name, row.get("offsets")), _shared(sizes))
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
        found.blobs.append(Blob(name, dtype, box, *place))
        count += box.numel
    total = math.prod(shape)
    if count != total:
        raise CheckpointError(
            f"{file}: {name}: its chunks have {count} elements, its shape {list(shape)} has {total}"
        )
    try:
        apart = tile([blob.box for blob in found.blobs], shape)
    except ValueError as error:
        raise CheckpointError(f"{file}: {name}: {error}: more than is read") from error
    if not apart:
        raise CheckpointError(f"{file}: {name}: its chunks overlap, and leave out as much")
    return found


def _original_shapes(table: object) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, row in table.items() if isinstance(table, dict) else ():
        shape = row.get("nd_reformulated_orig_global_shape") if isinstance(row, dict) else None
        if isinstance(shape, (tuple, list)) and all(type(n) is int and n >= 0 for n in shape):
            found[str(name)] = tuple(shape)
    return found


def _dict(file: StoragePath, value: object, what: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what} is a {type(value).__name__}, not a table")
    return value


def _ints(file: StoragePath, name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, Stub) and len(value.args) == 1:  # torch.Size
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointError(f"{file}: {name}: {pickles.short(value)} is no shape")
    return tuple(value)


def objects(blob: Blob) -> Index:
    """A blob of pickled objects: ``extra`` holds them."""
    return torch_zip.index_span(blob.place, blob.start_bytes, blob.length_bytes, foreign=True)


def checksums(blobs: Iterable[Blob]) -> Iterator[RecordedChecksum]:
    """The CRC-32s that the headers of blobs record of their tensors' bytes."""
    by_file: dict[StoragePath, list[Blob]] = {}
    for blob in dict.fromkeys(blobs):
        by_file.setdefault(blob.place, []).append(blob)
    for path in sorted(by_file):
        with torch_zip.archives(path) as file:
            for blob in sorted(by_file[path], key=lambda blob: blob.start_bytes):
                yield from file.checksums(blob.start_bytes, blob.length_bytes)
