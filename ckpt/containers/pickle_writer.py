"""Values as a pickle (protocol 2) that ``torch.load`` reads, ``weights_only=True`` included.

Writes what pickles.py reads, as ``torch.save`` does: plain values, ``Global``, ``Stub`` and
``TensorRef``, nested. Nothing is called, and no class has to be installed.

A program that loads the file imports and calls the names in it. So the names that may be written
are a closed list, and each of them only makes a value.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping

from ..model.dtypes import TO_TORCH
from .pickles import LEGACY_CLASSES, Global, Stub, TensorRef

Leaf = Callable[[object], TensorRef | None]  # the tensor that a value stands for, if it is one

_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}
_DCP = "torch.distributed.checkpoint"
# classes and functions that may be called, and what may be mentioned besides
_CALLED = frozenset(
    {
        ("__builtin__", "set"),
        ("_codecs", "encode"),
        ("argparse", "Namespace"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)  # fmt: skip
_MENTIONED = frozenset(
    {
        ("torch.storage", "UntypedStorage"),
        *(("torch", name) for name in TO_TORCH.values()),
        *(("torch", name) for name in LEGACY_CLASSES.values()),
    }
)


def dump_tensors(tensors: Mapping[str, TensorRef]) -> bytes:
    """A dict of tensors as ``torch.save`` pickles it; decode() gives it back."""
    return dumps(dict(tensors))


def dumps(value: object, leaf: Leaf | None = None) -> bytes:
    """Any value as a pickle; ``leaf`` may replace values of the caller by tensors.

    Types without a storage class of torch use untyped storages; their size is in bytes, and the
    call names the type.
    """
    writer = _Writer(leaf)
    return b"".join([b"\x80\x02", *writer.value(value), b"."])


class _Writer:
    """The pickle while it is written: a global is written once, then referred to."""

    def __init__(self, leaf: Leaf | None) -> None:
        self.leaf = leaf
        self.memo: dict[bytes, bytes] = {}

    def value(self, value: object) -> list[bytes]:
        """The opcodes that leave ``value`` on the stack."""
        if value is None or isinstance(value, bool):
            return [_CONSTANTS[value]]
        if isinstance(value, int):
            return [_int(value)]
        if isinstance(value, float):
            return [b"G" + struct.pack(">d", value)]
        if isinstance(value, str):
            return [_text(value)]
        if isinstance(value, bytes):
            return self._bytes(value)
        if isinstance(value, Global):
            return [self._mention(value.module, value.name)]
        if isinstance(value, Stub):
            return self._object(value)
        found = value if isinstance(value, TensorRef) else self.leaf and self.leaf(value)
        if isinstance(found, TensorRef):
            return self._tensor(found)
        return self._container(value)

    def _container(self, value: object) -> list[bytes]:
        if isinstance(value, OrderedDict):
            return [self._called("collections", "OrderedDict"), b")R", *self._items(value)]
        if isinstance(value, dict):
            return [b"}", *self._items(value)]
        if isinstance(value, list):
            parts = [b"]"]
            if value:
                parts += [b"(", *self._each(value), b"e"]
            return parts
        if isinstance(value, tuple):
            return [b"(", *self._each(value), b"t"] if value else [b")"]
        if isinstance(value, (set, frozenset)):
            members = self._container(sorted(value, key=repr))
            return [self._called("__builtin__", "set"), b"(", *members, b"tR"]
        raise AssertionError(f"{type(value).__name__} has no place in a checkpoint's pickle")

    def _items(self, table: Mapping[object, object]) -> list[bytes]:
        if not table:
            return []
        parts = [b"("]
        for key, item in table.items():
            parts += self.value(key)
            parts += self.value(item)
        return [*parts, b"u"]

    def _each(self, values: list[object] | tuple[object, ...]) -> list[bytes]:
        return [part for value in values for part in self.value(value)]

    def _bytes(self, value: bytes) -> list[bytes]:
        """Bytes, which protocol 2 lacks: a text and the call that encodes it."""
        text = _text(value.decode("latin-1"))
        return [self._called("_codecs", "encode"), b"(", text, _text("latin1"), b"tR"]

    def _object(self, value: Stub) -> list[bytes]:
        """An object of a class: what ``copyreg`` would write."""
        assert not value.items, f"{value.module}.{value.name} with items"
        parts = [self._called(value.module, value.name), *self._container(value.args)]
        if value.state is None:
            return [*parts, b"R"]
        return [*parts, b"\x81", *self.value(value.state), b"b"]

    def _called(self, module: str, name: str) -> bytes:
        if (module, name) not in _CALLED:  # not an assert: -O must not turn this off
            raise AssertionError(f"{module}.{name} may not be called by what is written")
        return self._global(module, name)

    def _mention(self, module: str, name: str) -> bytes:
        if (module, name) not in _MENTIONED:
            raise AssertionError(f"{module}.{name} may not be named by what is written")
        return self._global(module, name)

    def _global(self, module: str, name: str) -> bytes:
        assert all(part.isidentifier() for part in (*module.split("."), name)), (module, name)
        return self.once(f"c{module}\n{name}\n".encode())

    def once(self, value: bytes) -> bytes:
        """``value`` at its first use, a reference to it after that."""
        if value in self.memo:
            return b"h" + self.memo[value]
        if len(self.memo) > 255:  # one byte says which
            return value
        self.memo[value] = bytes([len(self.memo)])
        return value + b"q" + self.memo[value]

    def _tensor(self, tensor: TensorRef) -> list[bytes]:
        legacy = LEGACY_CLASSES.get(tensor.dtype)
        assert tensor.storage.dtype == (tensor.dtype if legacy else "U8"), tensor
        storage = ("torch", legacy) if legacy else ("torch.storage", "UntypedStorage")
        once = self.once
        return [
            self._called("torch._utils", f"_rebuild_tensor_v{2 if legacy else 3}"),
            b"((", once(_text("storage")),
            self._mention(*storage), _text(tensor.storage.key), once(_text("cpu")),
            _int(tensor.storage.numel), b"tQ", _int(tensor.offset_elems),
            _ints(tensor.shape), _ints(tensor.strides),
            b"\x89", self._called("collections", "OrderedDict"), b")R",  # requires_grad, no hooks
            b"" if legacy else self._mention("torch", TO_TORCH[tensor.dtype]), b"tR",
        ]  # fmt: skip


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    assert len(raw) < 256, "an integer of over 2,000 bits"
    return b"\x8a" + bytes([len(raw)]) + raw


def _ints(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t" if values else b")"
