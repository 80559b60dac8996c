"""What single files hold, under their own names: for a rank's file, and where parts are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .containers import safetensors, torch_zip
from .containers.dcp import METADATA, listing
from .errors import CheckpointError
from .lazy import LazyArray
from .model.box import full, row_major
from .model.file_layout import Entry
from .model.manifest import Chunk, TensorMeta, View
from .move.storage import StoragePath

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_MAX_FILES = 20_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file: the tensors that it names, or why it cannot be read."""

    path: StoragePath
    entries: tuple[Entry, ...] = ()
    fault: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)  # tensor -> why its values are not read

    def array(self, entry: Entry) -> LazyArray:
        """A tensor of this file, as it is stored."""
        view = View(str(self.path), entry.offset_bytes, entry.shape, entry.strides, entry.dtype)
        chunk = Chunk(entry.name, full(entry.shape), view)
        meta = TensorMeta(entry.shape, entry.dtype)
        return LazyArray(entry.name, meta, (chunk,), self.path.storage)


def stored_files(path: StoragePath) -> Iterator[StoredFile]:
    """The file, or each file of tensors in the folder and below it, in the order of their names."""
    for file in _files(path):
        try:
            if file.name == METADATA:
                yield _distributed(file)
                continue
            is_safe = file.suffix == ".safetensors"
            of = safetensors.index(file) if is_safe else torch_zip.index(file, foreign=True)
            yield StoredFile(file, tuple(of.entries.values()))
        except (CheckpointError, OSError) as error:
            yield StoredFile(file, fault=str(error))


def _distributed(file: StoragePath) -> StoredFile:
    """What the ``.metadata`` of a torch_dist folder says; blobs may be missing."""
    found = listing(file.parent)
    entries = [
        Entry(t.name, t.dtype, t.shape, row_major(t.shape), 0) for t in found.tensors.values()
    ]
    notes = {t.name: found.lost.get(t.name, "lies in .distcp files") for t in entries}
    return StoredFile(file, tuple(entries), notes=notes)


def _files(path: StoragePath) -> Iterator[StoragePath]:
    if path.is_file():
        yield path
        return
    count = 0
    for _, _, files in path.walk():
        for file in sorted(files, key=lambda file: file.name):
            if file.suffix in _SUFFIXES or file.name == METADATA:
                count += 1
                if count > _MAX_FILES:
                    raise CheckpointError(f"{path}: more than {_MAX_FILES} files; name one folder")
                yield file
