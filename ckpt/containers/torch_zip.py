"""The container of ``torch.save``: a zip archive of stored records, one of them a pickle.

Says where each tensor of such a file lies, and lays out files that ``torch.load``
accepts. Reads the zip's directory, the header before each record, and the records ``data.pkl``,
``byteorder`` and ``shardwright.json``; never tensor bytes. All offsets and sizes are checked
against the file. Memory is bounded by the limits below.

pickles.py decodes the pickle; the caller knows which names are parameters.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import CheckpointError
from ..model.dtypes import ITEMSIZE
from ..model.file_layout import Checksum, FileLayout, Index, RecordedChecksum, Spec
from ..move.crc import crc32
from ..move.storage import MAX_PARSED_BYTES, OpenFile, Where, storage_path
from . import torch_legacy
from .budget import check_json
from .pickle_writer import dumps
from .pickles import StorageRef, TensorRef, contiguous, decode, short, storage_ref
from .tensor_names import entry, extra, tensors

MAX_RECORD_BYTES = MAX_PARSED_BYTES  # of what is read whole: the pickle, the directory, the JSON
MAX_RECORDS = 1 << 20  # one per storage
END_BYTES = 4096  # read at once of an archive's start and end: of one tensor, all but its bytes
ALIGN_BYTES = 64  # where a storage starts: torch's own choice, so that vector loads may follow
MAX_U16, MAX_U32 = 0xFFFF, 0xFFFFFFFF  # at these values a zip field says "see the ZIP64 field"

_LOCAL = struct.Struct("<4s5H3L2H")  # header before a record's bytes
_CENTRAL = struct.Struct("<4s6H3L5H2L")  # row of the directory
_END = struct.Struct("<4s4H2LH")  # end of the directory
_END64 = struct.Struct("<4sQ2H2L4Q")  # the same in 64 bits
_LOCATOR = struct.Struct("<4sLQL")  # where _END64 is
_ENCRYPTED, _SIZES_FOLLOW = 1, 8  # flag bits; the second: sizes may be 0 in the local header
_FOLDER = 0x10  # of a row's external attributes, as DOS has them


@dataclass(frozen=True, slots=True)
class _Record:
    """A stored record of the archive."""

    name: bytes
    header_offset: int  # bytes from the start of the file
    offset: int  # of its bytes, from the start of the file
    size: int  # bytes
    crc: int  # CRC-32 that the directory records


@dataclass(slots=True)
class _Archive:
    """An open file, or the part of one that is an archive."""

    name: str  # for messages
    file: OpenFile
    start: int  # bytes from the start of the file
    size: int  # bytes
    summed: bool = True  # whether its records have a CRC-32
    _ends: list[tuple[int, bytes]] = field(default_factory=list)  # what was read of both ends

    def read(self, offset: int, length: int) -> bytes:
        """Bytes at an offset from the start of the file, clipped to the archive."""
        length = max(0, min(length, self.start + self.size - offset))
        for at, data in self._ends or self._read_ends():
            if at <= offset and offset + length <= at + len(data):
                return data[offset - at : offset - at + length]
        return self.file.read(offset, length)

    def _read_ends(self) -> list[tuple[int, bytes]]:
        """torch.save puts everything but the tensors' bytes near the ends."""
        stop = self.start + self.size
        for first in sorted({self.start, max(self.start, stop - END_BYTES)}):
            self._ends.append((first, self.file.read(first, min(END_BYTES, stop - first))))
        return self._ends

    def fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {text}")


def index(where: Where, *, foreign: bool = False) -> Index:
    """The tensors of a file, named by their place: ``model.decoder.weight``, ``0.1.exp_avg``.

    ``extra`` is the rest: each top-level value that is not itself a tensor, under its key. A
    dict among them holds its tensors as ``TensorRef``. A file that is one tensor names it "".
    Files of the form before zip archives are read as well. ``foreign`` is `pickles.decode`'s.
    """
    with storage_path(where).opened() as file:
        if torch_legacy.is_legacy(file):
            return torch_legacy.index(file, foreign=foreign)
        return Archives(file).index(0, file.size, foreign=foreign)


def index_span(
    where: Where, start_bytes: int, length_bytes: int, *, foreign: bool = False
) -> Index:
    """``index`` of an archive that is a part of a file; offsets are from the file's start."""
    with archives(where) as file:
        return file.index(start_bytes, length_bytes, foreign=foreign)


def checksums(where: Where) -> Iterator[RecordedChecksum]:
    """The CRC-32s that a file records of its tensors' bytes; none in a file of the old form.

    What else an archive holds is checked whenever it is read.
    """
    with storage_path(where).opened() as file:
        if not torch_legacy.is_legacy(file):
            yield from Archives(file).checksums(0, file.size)


@contextmanager
def archives(where: Where) -> Iterator[Archives]:
    """A file with one archive after another, open while they are looked at."""
    with storage_path(where).opened() as file:
        yield Archives(file)


@dataclass(frozen=True, slots=True)
class Archives:
    """An open file with one archive after another."""

    _file: OpenFile

    def index(
        self, start_bytes: int, length_bytes: int, name: str = "", *, foreign: bool = False
    ) -> Index:
        """``index_span``; errors call the archive ``name``, which the path is if it has none."""
        path, size = str(self._file.path), self._file.size
        name, stop_bytes = name or path, start_bytes + length_bytes
        if not 0 <= start_bytes <= stop_bytes <= size:
            raise CheckpointError(
                f"{name}: bytes {start_bytes} to {stop_bytes} of a file of {size} "
                "bytes; the file is truncated"
            )
        archive = _Archive(name, self._file, start_bytes, length_bytes)
        _check_kind(archive)
        records = _records(archive)
        prefix = _prefix(archive, records)
        _check_byteorder(archive, records, prefix)
        metadata = _metadata(archive, records, prefix)
        raw = _small(archive, records[prefix + b"data.pkl"])
        known: dict[str, StorageRef] = {}
        root = decode(
            raw, name, lambda pid: _storage(name, records, prefix, known, pid), foreign=foreign
        )
        entries = {}
        for key, view in tensors(name, root, budget=4 * len(raw)).items():
            record = records[_record_name(prefix, view.storage)]
            entries[key] = entry(name, key, view, record.offset)
        return Index(path, size, entries, metadata, extra(name, root))

    def checksums(self, start_bytes: int, length_bytes: int) -> Iterator[RecordedChecksum]:
        """The CRC-32s of the tensors' bytes in an archive.

        torch can be told to write none: then each is 0, which is the CRC-32 of no bytes.
        """
        path = str(self._file.path)
        archive = _Archive(path, self._file, start_bytes, length_bytes)
        _check_kind(archive)
        records = _records(archive)
        prefix = _prefix(archive, records) + b"data/"
        if archive.summed:
            for record in records.values():
                if record.size and record.name.startswith(prefix):
                    yield RecordedChecksum(path, record.offset, record.size, record.crc)


# --- the archive ----------------------------------------------------------------------------


def _check_kind(archive: _Archive) -> None:
    """Refuse a file that is no zip, and say what it is, if known."""
    head = archive.read(archive.start, 64)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return
    if head.startswith(b"version https://git-lfs"):
        raise archive.fault("a Git LFS pointer, not the file itself; run `git lfs pull`")
    what = "a bare pickle" if head.startswith(b"\x80") else f"it starts with {head[:8]!r}"
    raise archive.fault(f"no zip archive of torch.save: {what}")


def _records(archive: _Archive) -> dict[bytes, _Record]:
    """The records by name, each inside the archive, stored as it is, and apart from the others."""
    at, size, count = _directory(archive)
    raw = archive.read(at, size)
    if len(raw) < size:
        raise archive.fault("ends inside its directory; the file is truncated")
    records: dict[bytes, _Record] = {}
    for record in _rows(archive, raw, at):
        if record.name in records:
            raise archive.fault(f"two records named {short(record.name)}")
        if len(records) == count:
            raise archive.fault(f"more than the {count} records that the directory announces")
        records[record.name] = record
    if len(records) != count:
        raise archive.fault(f"the directory announces {count} records and has {len(records)}")
    stop, last = archive.start, b"the start"
    for record in sorted(records.values(), key=lambda record: record.header_offset):
        if record.header_offset < stop:
            raise archive.fault(f"record {short(record.name)} overlaps {short(last)}")
        stop, last = record.offset + record.size, record.name
    if stop > at:
        raise archive.fault(f"record {short(last)} overlaps the directory")
    archive.summed = any(record.crc for record in records.values() if record.size)
    return records


def _directory(archive: _Archive) -> tuple[int, int, int]:
    """(offset from the start of the file, bytes, records) of the zip directory."""
    stop = archive.start + archive.size
    for reach in (_END.size, _END.size + MAX_U16):  # without a comment after it, then with one
        tail_at = max(archive.start, stop - reach)
        tail = archive.read(tail_at, reach)
        found = tail.rfind(b"PK\x05\x06")
        if found >= 0:
            break
    if found < 0 or len(tail) - found < _END.size:
        raise archive.fault("a zip archive without an end; the file is truncated")
    end = _END.unpack_from(tail, found)
    _, disk, first_disk, here, count, size, at, comment = end
    if found + _END.size + comment != len(tail):
        raise archive.fault("bytes after the end of the zip archive, or too few")
    stop = tail_at + found
    wide = _wide_end(archive, stop)
    if wide is not None:
        # a program that reads the narrow fields must see the same archive
        tops = (MAX_U16,) * 4 + (MAX_U32,) * 2
        for narrow, true, top in zip(end[1:7], wide[1:], tops, strict=True):
            if narrow not in (true, top):
                raise archive.fault(f"two ends of the directory that disagree: {narrow}, {true}")
        stop, disk, first_disk, here, count, size, at = wide
    if disk or first_disk or here != count:
        raise archive.fault("a zip archive in several parts")
    at += archive.start
    if at + size != stop or count > MAX_RECORDS or size > MAX_RECORD_BYTES:
        raise archive.fault(
            f"a directory of {count} records and {size} bytes at byte {at}, which must end at "
            f"{stop} (limits: {MAX_RECORDS} records, {MAX_RECORD_BYTES} bytes)"
        )
    return at, size, count


def _wide_end(archive: _Archive, stop: int) -> tuple[int, ...] | None:
    """(own offset, then the first six fields of the end) from the ZIP64 end, if there is one."""
    at = stop - _LOCATOR.size
    if at < archive.start:
        return None
    magic, disk, where, _disks = _LOCATOR.unpack(archive.read(at, _LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    where += archive.start
    if disk or where + _END64.size != at:
        raise archive.fault(f"the ZIP64 end at byte {where} does not precede byte {at}")
    magic, length, _made, _need, *fields = _END64.unpack(archive.read(where, _END64.size))
    if magic != b"PK\x06\x06" or length != _END64.size - 12:
        raise archive.fault(f"no ZIP64 end at byte {where}")
    return (where, *fields)


def _rows(archive: _Archive, raw: bytes, stop: int) -> Iterator[_Record]:
    """The directory's rows, each compared with the header that it points to."""
    at = 0
    while at < len(raw):
        if len(raw) - at < _CENTRAL.size:
            raise archive.fault("the directory ends inside a row")
        row = _CENTRAL.unpack_from(raw, at)
        magic, flags, method, crc, packed, size = row[0], row[3], row[4], *row[7:10]
        name_length, extra_length, comment_length, disk, header = *row[10:14], row[16]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if magic != b"PK\x01\x02" or at > len(raw) or disk:
            raise archive.fault(f"the directory's row at byte {name_at - _CENTRAL.size} is damaged")
        name = raw[name_at:extra_at]
        wide = _wide_fields(raw[extra_at : extra_at + extra_length], (size, packed, header))
        if wide is None:
            raise archive.fault(f"record {short(name)}: its ZIP64 field is damaged")
        size, packed, header = wide
        if method or packed != size or flags & _ENCRYPTED:
            raise archive.fault(
                f"record {short(name)} is compressed or encrypted, which torch.save never does; "
                "unpack the archive and save it again with torch.save"
            )
        if size and (row[15] & _FOLDER or name.endswith(b"/")):
            # torch.load reads nothing of a folder: its tensor would be what was in memory before
            raise archive.fault(
                f"record {short(name)} has {size} bytes and is marked as a folder; the directory "
                "is damaged, copy the file again"
            )
        yield _located(archive, name, flags, crc, size, archive.start + header, stop)


def _wide_fields(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """(size, packed size, offset) with those at their top replaced from the ZIP64 extra field."""
    if MAX_U32 not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind == 1:
            wanted = fields.count(MAX_U32)
            if len(body) < 8 * wanted:
                return None
            values = iter(struct.unpack_from(f"<{wanted}Q", body))
            size, packed, offset = (next(values) if n == MAX_U32 else n for n in fields)
            return size, packed, offset
    return None


def _located(
    archive: _Archive, name: bytes, flags: int, crc: int, size: int, header: int, stop: int
) -> _Record:
    """A record of the directory, once the header before its bytes says the same of it."""
    end = archive.start + archive.size
    raw = archive.read(header, _LOCAL.size + len(name) + 128) if header < end else b""
    if len(raw) < _LOCAL.size:
        raise archive.fault(f"record {short(name)} at byte {header} is outside the file")
    magic, _need, own_flags, method, _t, _d, _crc, packed, own_size, own_name, extra_length = (
        _LOCAL.unpack_from(raw)
    )
    offset = header + _LOCAL.size + own_name + extra_length
    if magic != b"PK\x03\x04" or method or own_flags != flags or own_name != len(name):
        raise archive.fault(f"record {short(name)}: the header at byte {header} is another one")
    if raw[_LOCAL.size :][:own_name] != name:
        raise archive.fault(f"record {short(name)}: the header at byte {header} is another one")
    if offset + size > stop:
        raise archive.fault(
            f"record {short(name)}: {size} bytes at byte {offset} reach past byte {stop}, where "
            "the directory starts"
        )
    extra_at = header + _LOCAL.size + own_name
    extra = archive.read(extra_at, extra_length) if MAX_U32 in (packed, own_size) else b""
    wide = _wide_fields(extra, (own_size, packed, 0))
    if wide is None or (wide[:2] != (size, size) and not (flags & _SIZES_FOLLOW and not any(wide))):
        raise archive.fault(
            f"record {short(name)}: {size} bytes in the directory, {own_size} in its header"
        )
    return _Record(name, header, offset, size, crc)


def _prefix(archive: _Archive, records: Mapping[bytes, _Record]) -> bytes:
    """The folder that all records of a torch file lie in, with its slash."""
    folders = [
        name[: -len(b"data.pkl")]
        for name in records
        if name.endswith(b"/data.pkl") and name.count(b"/") == 1
    ]
    if len(folders) != 1:
        raise archive.fault(
            f"a zip archive with {len(folders)} records <name>/data.pkl, not one; "
            "it was not written by torch.save"
        )
    prefix = folders[0]
    for name in records:
        if name == prefix + b"constants.pkl" or name.startswith(prefix + b"code/"):
            raise archive.fault(
                "a TorchScript archive, which holds code; load it with torch.jit.load and save "
                "its state_dict() with torch.save"
            )
    return prefix


def _small(archive: _Archive, record: _Record) -> bytes:
    """The bytes of a record that is read whole, once they have the CRC-32 that is recorded."""
    if record.size > MAX_RECORD_BYTES:
        raise archive.fault(
            f"record {short(record.name)} has {record.size} bytes; the limit is {MAX_RECORD_BYTES}"
        )
    data = archive.read(record.offset, record.size)
    if archive.summed and crc32(data, 0) != record.crc:
        raise archive.fault(
            f"record {short(record.name)} has the CRC-32 {crc32(data, 0):08x}, the archive "
            f"records {record.crc:08x}; the file is damaged, copy it again"
        )
    return data


def _check_byteorder(archive: _Archive, records: Mapping[bytes, _Record], prefix: bytes) -> None:
    record = records.get(prefix + b"byteorder")  # torch before 2.1 wrote none
    order = b"little" if record is None else _small(archive, record)
    if order != b"little":
        raise archive.fault(
            f"byte order {short(order)}; only little is read. Save it again on a little-endian "
            "machine"
        )


def _metadata(archive: _Archive, records: Mapping[bytes, _Record], prefix: bytes) -> dict[str, str]:
    """Our own record of texts, which torch.load ignores; {} where there is none."""
    record = records.get(prefix + b"shardwright.json")
    if record is None:
        return {}
    raw = _small(archive, record)
    check_json(raw, archive.name)
    try:
        pairs = json.loads(raw.decode("utf-8"), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise archive.fault(f"shardwright.json is not JSON ({error})") from error
    flat = isinstance(pairs, tuple) and all(isinstance(pair[1], str) for pair in pairs)
    if not flat or len(dict(pairs)) != len(pairs):
        raise archive.fault("shardwright.json must map strings to strings, each key once")
    return dict(pairs)


# --- what the pickle holds ------------------------------------------------------------------


def _storage(
    path: str,
    records: Mapping[bytes, _Record],
    prefix: bytes,
    known: dict[str, StorageRef],
    persistent_id: object,
) -> StorageRef:
    """The storage that the pickle refers to, once its record holds that many bytes.

    ``known`` holds those before it: one storage has one type, torch would take the first.
    """
    ref = storage_ref(path, persistent_id)
    first = known.setdefault(ref.key, ref)
    if first != ref:
        raise CheckpointError(
            f"{path}: storage {short(ref.key)} is {first.numel} {first.dtype} in one place and "
            f"{ref.numel} {ref.dtype} in another"
        )
    record = records.get(_record_name(prefix, ref))
    need = ref.numel * ITEMSIZE[ref.dtype]
    if record is None:
        raise CheckpointError(f"{path}: storage {short(ref.key)} is not in the archive")
    if need > record.size:
        raise CheckpointError(
            f"{path}: storage {short(ref.key)} of {ref.numel} {ref.dtype} needs {need} bytes, "
            f"its record holds {record.size}"
        )
    return ref


def _record_name(prefix: bytes, ref: StorageRef) -> bytes:
    return prefix + b"data/" + ref.key.encode("utf-8", "surrogatepass")


# --- writing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor whose bytes are known when the file is laid out: a step counter, a random state."""

    dtype: str  # a key of dtypes.ITEMSIZE
    shape: tuple[int, ...]  # elements
    data: bytes


def layout(specs: Sequence[Spec], metadata: Mapping[str, str]) -> FileLayout:
    """A file that ``torch.load`` reads as a dict of ``specs``, in the order given.

    One storage per tensor. The record ``shardwright.json`` holds ``metadata`` if there is any.
    """
    return layout_tree({spec.name: spec for spec in specs}, metadata)


def layout_tree(tree: object, metadata: Mapping[str, str] | None = None) -> FileLayout:
    """A file that ``torch.load`` reads as ``tree``: any values of pickle_out, and tensors.

    A ``Spec`` inside it is a tensor whose bytes come later, at the offset under its name;
    a ``Known`` is one whose bytes are there. One storage per tensor.
    """
    found: list[tuple[Spec | Known, TensorRef]] = []

    def leaf(value: object) -> TensorRef | None:
        if not isinstance(value, (Spec, Known)):
            return None
        found.append((value, contiguous(value.dtype, value.shape, str(len(found)))))
        return found[-1][1]

    raw = dumps(tree, leaf)
    if len(raw) > MAX_RECORD_BYTES or len(found) > MAX_RECORDS - 4:
        raise CheckpointError(
            f"{len(found)} tensors with {len(raw)} bytes of names and shapes are too many for "
            f"one file (limits: {MAX_RECORDS - 4} and {MAX_RECORD_BYTES}); split the output with "
            "--max-shard-size"
        )
    archive = _Writer()
    archive.record("data.pkl", raw)
    archive.record("byteorder", b"little")
    offsets: dict[str, int] = {}
    for value, tensor in found:
        size = math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        record = f"data/{tensor.storage.key}"
        if isinstance(value, Known):
            assert len(value.data) == size, f"{len(value.data)} bytes for {tensor.shape}"
            archive.record(record, value.data)
            continue
        assert value.name not in offsets, f"{value.name} twice in one file"
        offsets[value.name] = archive.reserve(record, size)
    archive.record("version", b"3\n")  # torch's number for this kind of file
    if metadata:
        text = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)
        archive.record("shardwright.json", text.encode())
    return archive.finish(offsets)


@dataclass(slots=True)
class _Writer:
    """An archive while it is laid out: every header, and the places of the bytes to come."""

    at: int = 0  # bytes so far
    fixed: list[tuple[int, bytes]] = field(default_factory=list)
    directory: bytearray = field(default_factory=bytearray)
    count: int = 0  # records
    # (offset of the bytes, length, CRC slot in the header, CRC slot from the directory's start)
    pending: list[tuple[int, int, int, int]] = field(default_factory=list)

    def record(self, name: str, data: bytes) -> None:
        """A record whose bytes are known."""
        self._start(name, len(data), crc32(data, 0))
        self._add(data)

    def reserve(self, name: str, size: int) -> int:
        """A record of ``size`` bytes to come; returns where they go."""
        header, row = self.at, len(self.directory)
        self._start(name, size, 0)  # the CRC-32 of no bytes
        offset = self.at
        if size:
            self.pending.append((offset, size, header + _LOCAL_CRC, row + _CENTRAL_CRC))
        self.at += size
        return offset

    def finish(self, offsets: dict[str, int]) -> FileLayout:
        """The directory and its end, always with the ZIP64 end, as torch writes it."""
        base, size, count = self.at, len(self.directory), self.count
        self._add(bytes(self.directory))
        wide = self.at
        narrow = min(count, MAX_U16)
        self._add(
            _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, base)
            + _LOCATOR.pack(b"PK\x06\x07", 0, wide, 1)
            + _END.pack(
                b"PK\x05\x06", 0, 0, narrow, narrow, min(size, MAX_U32), min(base, MAX_U32), 0
            )
        )
        checksums = tuple(
            Checksum(offset, length, (slot, base + row))
            for offset, length, slot, row in self.pending
        )
        return FileLayout(self.at, offsets, tuple(self.fixed), checksums)

    def _add(self, data: bytes) -> None:
        self.fixed.append((self.at, data))
        self.at += len(data)

    def _start(self, name: str, size: int, crc: int) -> None:
        """The header before a record, padded as torch does it, and its row in the directory."""
        full, header = f"archive/{name}".encode(), self.at
        wide = _wide_extra(size, size) if size >= MAX_U32 else b""
        padding = -(header + _LOCAL.size + len(full) + len(wide) + 4) % ALIGN_BYTES
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        shown = min(size, MAX_U32)
        need = 45 if wide else 20  # version 4.5 of the format brought ZIP64
        fields = (0, 0, 0, _DATE, crc, shown, shown, len(full))  # no flags, stored
        self._add(_LOCAL.pack(b"PK\x03\x04", need, *fields, len(extra)) + full + extra)
        wide = _wide_extra(*([size] * 2 if wide else []), *([header] if header >= MAX_U32 else []))
        self.directory += _CENTRAL.pack(
            b"PK\x01\x02", 45, 45 if wide else 20, *fields, len(wide), 0, 0, 0, 0,
            min(header, MAX_U32),
        ) + full + wide  # fmt: skip
        self.count += 1


_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # bytes from the start of the header, of the row
_DATE = 1 << 5 | 1  # 1980-01-01, so that the same tensors give the same bytes


def _wide_extra(*values: int) -> bytes:
    """The ZIP64 extra field; empty where every value fits its usual field."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
