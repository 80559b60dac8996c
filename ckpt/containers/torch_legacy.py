"""The container of ``torch.save`` before zip archives (torch 1.6, or asked for since then).

Five pickles one after another: a magic number, a protocol, facts about the machine, the saved
object, the keys of its storages. Then the storages in the order of the keys, each a count of
elements (8 bytes, little-endian) and its bytes. The end of the pickles is known only after
decoding, so a little more than they take may be read. The form of torch 0.1.9 and before, a tar
archive, is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import CheckpointError
from ..model.dtypes import ITEMSIZE
from ..model.file_layout import Index
from ..move.storage import MAX_PARSED_BYTES, OpenFile
from .pickles import InputEnds, StorageRef, decode_at, short, storage_ref
from .tensor_names import entry, extra, tensors

MAX_PICKLES_BYTES = MAX_PARSED_BYTES  # all five together
FIRST_READ_BYTES = 1 << 20  # a state dict takes about 200 bytes a tensor
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
# Protocols 2 and 3 start with the number itself, 4 and 5 may put it into a frame.
_HEAD = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(MAGIC.to_bytes(10, "little")), re.DOTALL
)
_HEAD_BYTES = 262  # a tar archive says so at byte 257


def is_legacy(file: OpenFile) -> bool:
    """Whether a file starts as this container does. Raises on a tar archive."""
    head = file.read(0, _HEAD_BYTES)
    if head[257:] == b"ustar":
        raise CheckpointError(
            f"{file.path}: a tar archive, as torch 0.1.9 and before wrote them; save it again with "
            "a current torch: torch.save(torch.load(path, weights_only=False), path)"
        )
    return _HEAD.match(head) is not None


@dataclass(slots=True)
class _Storages:
    """The storages that the object mentions, and parts of them that older files view."""

    path: str
    roots: dict[str, StorageRef] = field(default_factory=dict)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)  # key -> root, first byte

    def add(self, persistent_id: object) -> StorageRef:
        """('storage', class, key, device, size, None or (view key, offset, size))."""
        if type(persistent_id) is tuple and len(persistent_id) == 4:
            raise CheckpointError(
                f"{self.path}: holds a whole module of class {short(persistent_id[1])}, code and "
                "all; load it with torch and save its state_dict()"
            )
        if type(persistent_id) is not tuple or len(persistent_id) != 6:
            raise CheckpointError(
                f"{self.path}: persistent id {short(persistent_id)} is not a torch storage, which "
                "is ('storage', class, key, device, size, view)"
            )
        root = storage_ref(self.path, persistent_id[:5])
        known = self.roots.setdefault(root.key, root)
        if known != root and known.numel + root.numel:
            raise CheckpointError(
                f"{self.path}: storage {short(root.key)} is {known.numel} {known.dtype} in one "
                f"place and {root.numel} {root.dtype} in another"
            )
        view = persistent_id[5]
        return self._named(root, root.key, 0) if view is None else self._part(root, view)

    def _part(self, root: StorageRef, view: object) -> StorageRef:
        match view:
            case (str(), int(offset), int(numel)) if min(offset, numel) >= 0:
                pass
            case _:
                raise CheckpointError(f"{self.path}: storage {short(root.key)}: view {short(view)}")
        if offset + numel > root.numel:
            raise CheckpointError(
                f"{self.path}: storage {short(root.key)} of {root.numel} {root.dtype} is viewed at "
                f"{short(offset)} for {short(numel)} elements"
            )
        name = f"{root.key}[{offset}:{offset + numel}]"
        part = StorageRef(root.dtype, name, numel)
        return self._named(part, root.key, offset * ITEMSIZE[root.dtype])

    def _named(self, part: StorageRef, root: str, first_byte: int) -> StorageRef:
        if self.parts.setdefault(part.key, (root, first_byte)) != (root, first_byte):
            raise CheckpointError(f"{self.path}: two storages named {short(part.key)}")
        return part


def index(file: OpenFile, *, foreign: bool = False) -> Index:
    """The tensors of a file, named as ``torch_zip.index`` does it."""
    path, size = str(file.path), file.size
    root, storages, keys, stop = _pickles(path, file, foreign)
    starts = _starts(path, file, storages, keys, stop)
    entries = {}
    for name, view in tensors(path, root, budget=4 * stop).items():
        key, first_byte = storages.parts[view.storage.key]
        if key not in starts:
            raise CheckpointError(f"{path}: {name}: storage {short(key)} is not in the file")
        entries[name] = entry(path, name, view, starts[key] + first_byte)
    return Index(path, size, entries, {}, extra(path, root))


def _pickles(path: str, file: OpenFile, foreign: bool) -> tuple[object, _Storages, list[str], int]:
    """(object, its storages, the keys in the file's order, where the last pickle stops)."""
    length = FIRST_READ_BYTES
    while True:
        data = file.read(0, min(length, MAX_PICKLES_BYTES))
        try:
            return _decoded(path, data, foreign)
        except InputEnds as error:
            if len(data) >= min(file.size, MAX_PICKLES_BYTES):
                raise CheckpointError(str(error)) from error
        length *= 8


def _decoded(path: str, data: bytes, foreign: bool) -> tuple[object, _Storages, list[str], int]:
    storages = _Storages(path)
    at = 0

    def following(persistent: Callable[[object], StorageRef] | None = None) -> object:
        nonlocal at
        let_in = foreign and persistent is not None  # into the object, not what stands around it
        value, at = decode_at(data, at, path, persistent, foreign=let_in)
        return value

    magic, protocol, machine = following(), following(), following()
    if type(magic) is not int or magic != MAGIC:
        raise CheckpointError(f"{path}: starts with {short(magic)}, not torch's magic number")
    if type(protocol) is not int or protocol != PROTOCOL:
        raise CheckpointError(f"{path}: torch protocol {short(protocol)}; {PROTOCOL} is known")
    if not isinstance(machine, dict):
        raise CheckpointError(f"{path}: facts about the machine are {short(machine)}, not a dict")
    # "little_endian" does not matter: torch swapped the bytes when it wrote.
    root, keys = following(storages.add), following()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise CheckpointError(f"{path}: storage keys are {short(keys)}, not a list of texts")
    return root, storages, keys, at


def _starts(
    path: str, file: OpenFile, storages: _Storages, keys: list[str], at: int
) -> dict[str, int]:
    """Key -> first byte of each storage, once each has the size that the object says."""
    starts: dict[str, int] = {}
    size = file.size
    for key in keys:
        ref = storages.roots.get(key)
        if ref is None or key in starts:
            what = "is listed twice" if key in starts else "belongs to no value"
            raise CheckpointError(f"{path}: storage {short(key)} {what}")
        head = file.read(at, 8)
        at += 8
        numel = int.from_bytes(head, "little", signed=True)
        nbytes = ref.numel * ITEMSIZE[ref.dtype]
        if len(head) == 8 and numel != ref.numel:
            raise CheckpointError(
                f"{path}: storage {short(key)} has {numel} elements at byte {at - 8}, the pickle "
                f"says {ref.numel}"
            )
        if len(head) < 8 or at + nbytes > size:
            raise CheckpointError(
                f"{path}: storage {short(key)} needs {nbytes} bytes at byte {at}, the file has "
                f"{size}; it is truncated"
            )
        starts[key] = at
        at += nbytes
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last storage")
    return starts
