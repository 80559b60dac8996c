"""What a container says about a file: where each tensor's bytes lie.

``Index`` describes a file that exists, ``FileLayout`` one that will be written. Both are plain
values, so a whole conversion is planned before a byte is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor that a file will hold, contiguous and row-major."""

    name: str
    dtype: str  # a key of dtypes.ITEMSIZE
    shape: tuple[int, ...]  # elements


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a file holds: a strided view of its bytes."""

    name: str
    dtype: str  # a key of dtypes.ITEMSIZE
    shape: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # elements
    offset_bytes: int  # of element (0, ..., 0), from the start of the file


@dataclass(frozen=True, slots=True)
class Index:
    """A file's tensors and text metadata, checked against the file's size."""

    path: str
    size_bytes: int
    entries: dict[str, Entry]
    metadata: dict[str, str]
    extra: Mapping[str, object] = field(default_factory=dict)  # non-tensor values of a pickle


@dataclass(frozen=True, slots=True)
class RecordedChecksum:
    """The CRC-32 that a file records of some of its bytes."""

    file: str
    offset_bytes: int
    length_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class RecordedDigest:
    """The xxh3-128, in hex, that is recorded of a whole file."""

    file: str
    length_bytes: int  # recorded with it
    xxh3_128: str
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Checksum:
    """A byte range whose CRC-32 (little-endian u32) must be written into ``slots``."""

    offset_bytes: int
    length_bytes: int
    slots: tuple[int, ...]  # byte offsets in the same file


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file before it exists: its size, the bytes known now, and where tensors go."""

    size_bytes: int
    offsets: dict[str, int]  # tensor name -> byte offset from the start of the file
    fixed: tuple[tuple[int, bytes], ...]  # (byte offset, bytes): headers, pickles, directories
    checksums: tuple[Checksum, ...] = ()  # filled in once the tensor bytes are there
