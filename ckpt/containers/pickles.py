"""Pickles without ``pickle``: bytes in, plain values out; nothing in the input is ever executed.

Decides which globals a checkpoint may name and what each one becomes. A global is a pair of strings
(``Global``), an object of a foreign class is the description in the pickle (``Stub``), a tensor is
a view of a storage (``TensorRef``). The input can make it import, call or look up nothing, and a
global outside the lists below is an error.

Memory is bounded by the input: an opcode takes at least one byte of it and makes at most one
object, opcodes that make large ones are counted first (budget.check_opcodes), each length is
checked against the bytes left, and a handler that copies values, which the pickle can repeat, pays
from a budget of one element per input byte. Values may be nested to any depth, so nothing here
walks, hashes, compares or prints one without a limit. The result is measured before it is returned
(budget.py): written out, with shared parts counted each time, it has at most a few parts per input
byte.

Leaves to torch_zip.py: whether a storage exists, and whether a view lies inside it.
"""

from __future__ import annotations

import math
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NoReturn

from ..errors import CheckpointError
from ..model.box import row_major
from ..model.dtypes import FROM_TORCH, ITEMSIZE
from .budget import check_opcodes, check_parts

MAX_MARKS = 2_000  # open containers; CPython's pickler itself stops near 1,000
MAX_LONG_BYTES = 1_024  # the longest integers in real files are 128-bit random states
MAX_KEY_PARTS = 64  # leaves and tuples of one dict key: hashing a shared nest is exponential
MAX_TUPLE_KEYS = 4_096  # tuples hash without a secret, so a file can make them collide
MAX_DIMS = 64  # torch's and NumPy's own limit
PROTOCOL = 5  # the newest


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions: a class, a function or a dtype. Never resolved."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"

    @property
    def dtype(self) -> str | None:
        """Our name of a ``torch.<dtype>``; None for everything else."""
        return FROM_TORCH.get(self.name) if self.module == "torch" else None


@dataclass(slots=True, eq=False)
class Stub:
    """An object of a class that is not imported: what it was made from, and its state.

    Compares and hashes by identity, so one may be a dict key as the original may.
    """

    module: str
    name: str
    args: tuple[object, ...] = ()  # of the call, or of __new__
    state: object = None  # what BUILD gave; a dict for most classes
    items: tuple[object, ...] | list[object] = ()  # appended, or set as (key, value)

    def extend(self, items: Iterable[object]) -> None:
        """Append to ``items``; most objects have none, and there may be millions of them."""
        if not isinstance(self.items, list):
            self.items = list(self.items)
        self.items.extend(items)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Bytes that several tensors may view, lying outside the pickle under ``key``."""

    dtype: str  # a key of dtypes.ITEMSIZE; U8 for an untyped storage
    key: str
    numel: int  # elements of dtype


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage. Elements are of ``dtype``, which only v3 views change."""

    storage: StorageRef
    dtype: str  # a key of dtypes.ITEMSIZE
    offset_elems: int  # of element (0, ..., 0), from the start of the storage
    shape: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # elements


def decode(
    data: bytes | bytearray | memoryview,
    path: str,
    persistent: Callable[[object], StorageRef] | None = None,
    *,
    foreign: bool = False,
) -> object:
    """The value of a pickle; raises CheckpointError, which names ``path``, on anything else.

    ``persistent`` turns a persistent id into a storage; without it such ids are an error.
    With ``foreign``, classes of unknown libraries become stubs too, so that a run's other options
    can be read.
    """
    vm = _Machine(path, bytes(data), persistent, foreign=foreign)
    try:
        value = _run(vm)
    except InputEnds as error:
        raise CheckpointError(str(error)) from error
    if vm.pos != len(vm.data):
        vm.fail(f"the pickle stops with {len(vm.data) - vm.pos} bytes to go")
    check_parts(value, vm.pos, path, _inside)
    return value


def decode_at(
    data: bytes,
    start: int,
    path: str,
    persistent: Callable[[object], StorageRef] | None = None,
    *,
    foreign: bool = False,
) -> tuple[object, int]:
    """The value of the pickle at ``start``, and where it stops; ``foreign`` is ``decode``'s.

    Raises ``InputEnds`` where ``data`` holds too little of it, so that a caller can read more.
    """
    vm = _Machine(path, data, persistent, start, foreign=foreign)
    value = _run(vm)
    check_parts(value, vm.pos - start, path, _inside)
    return value, vm.pos


def _inside(value: object) -> Iterator[object] | None:
    """What an object holds."""
    return chain(value.args, (value.state,), value.items) if type(value) is Stub else None


class InputEnds(CheckpointError):
    """The bytes given hold only the beginning of a pickle."""


def _run(vm: _Machine) -> object:
    check_opcodes(vm.data, vm.pos, vm.path)
    try:
        return vm.run()
    except CheckpointError:
        raise
    except IndexError as error:  # the stack, the marks or the input ran out
        text = "the pickle is truncated, or takes values that it never made"
        if vm.pos >= len(vm.data):
            raise InputEnds(f"{vm.path}: pickle byte {vm.pos}: {text}") from error
        vm.fail(text)
    except (
        ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
        ValueError, struct.error,
    ) as error:  # fmt: skip
        vm.fail(f"the pickle is damaged ({type(error).__name__}: {short(str(error))})")


def short(value: object) -> str:
    """A value for an error message, in bounded time, since a nested one may be endless."""
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= 80 else f"{value[:77]!r}..."
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"a {value.bit_length()}-bit number"
    if isinstance(value, Global):
        return value.path[:160]
    if value is None or isinstance(value, float):
        return repr(value)
    return f"a {type(value).__name__}"


def storage_ref(path: str, persistent_id: object) -> StorageRef:
    """The persistent id of ``torch.save`` as a storage."""
    if type(persistent_id) is not tuple or len(persistent_id) != 5:
        raise CheckpointError(
            f"{path}: persistent id {short(persistent_id)} is not a torch storage, which is "
            "('storage', class, key, device, size)"
        )
    kind, cls, key, _device, numel = persistent_id
    dtype = _STORAGES.get(cls.path) if type(cls) is Global else None
    if kind != "storage" or dtype is None or type(key) is not str or _count(numel) is None:
        raise CheckpointError(
            f"{path}: storage {short(key)} of class {short(cls)} and size {short(numel)} "
            "is not one this tool reads"
        )
    return StorageRef(dtype, key, numel)


# --- which globals are let in ---------------------------------------------------------------

_LEGACY_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "BFloat16Storage": "BF16", "ComplexDoubleStorage": "C128",
    "ComplexFloatStorage": "C64",
}  # fmt: skip
_STORAGES = {
    "torch.storage.UntypedStorage": "U8",
    "torch.UntypedStorage": "U8",
    # torch before 1.6 on a GPU named torch.cuda's classes
    **{f"{m}.{name}": d for m in ("torch", "torch.cuda") for name, d in _LEGACY_STORAGES.items()},
}
_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.nn.Parameter")
# Names that are mentioned and never called.
_VALUES = frozenset(
    [
        *_STORAGES,
        *_PARAMETERS,
        "torch.storage.TypedStorage",
        "torch.Tensor",
        *(f"torch.{name}" for name in FROM_TORCH),
        # dtypes that this tool does not move; they occur as options of a training run
        *(
            f"torch.{name}"
            for name in ("complex32", "float4_e2m1fn_x2", "qint8", "quint8", "qint32")
        ),
        *(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "str", "tuple")),
        *(f"builtins.{name}" for name in ("long", "unicode")),  # int and str in protocol 2
    ]
)
# Classes and functions whose call becomes a Stub.
_STUBS = frozenset(
    [
        "_io.BytesIO",
        "io.BytesIO",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "builtins.object",
        "builtins.slice",
        "collections.deque",
        "signal.Signals",
        "torch.device",
        "torch._C.Generator",
        "torch.serialization._get_layout",
        *(
            f"{module}.{flavour}Path"
            for module in ("pathlib", "pathlib._local")
            for flavour in ("", "Posix", "Windows", "Pure", "PurePosix", "PureWindows")
        ),
        *(f"numpy.{name}" for name in ("ndarray", "dtype", "bool", "bool_", "str_", "bytes_")),
        *(f"numpy.{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *(f"numpy.{name}" for name in ("float16", "float32", "float64", "complex64", "complex128")),
        *(
            f"numpy.{core}.{name}"
            for core in ("core", "_core")  # NumPy 1 and 2
            for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
        ),
    ]
)
# Libraries whose options and states training checkpoints hold: any class becomes a Stub.
_STUB_PREFIXES = (
    "megatron.",
    "transformer_engine.",
    "nemo.",
    "modelopt.",
    "torch.distributed.checkpoint.",
    "numpy.dtypes.",
    "numpy.random.",
)
# Python 2's names, which protocol 2 writes on every version
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


# Members of signal.Signals, one of which Megatron-LM's args hold. Their numbers are this system's.
_SIGNALS = signal.Signals.__members__


def _signal(name: str) -> Stub:
    """A member as the call ``signal.Signals(number)``, in which later versions spell it."""
    return Stub("signal", "Signals", (int(_SIGNALS[name]),))


def _is_stub(path: str) -> bool:
    if path in _STUBS:
        return True
    return path.startswith(_STUB_PREFIXES) and all(part.isidentifier() for part in path.split("."))


# Of Python itself only these may be mentioned: a file that names others was made to do harm, and
# is refused as a whole. Libraries whose names are listed above have closed lists.
_FOREIGN_STDLIB = frozenset(
    {"datetime", "decimal", "enum", "fractions", "functools", "ipaddress", "uuid", "zoneinfo"}
)
_NOT_FOREIGN = frozenset({"__main__", "numpy", "torch", "_codecs", "nt"})


def _is_foreign(path: str) -> bool:
    """Whether a name is one of a library that is not known."""
    first = path.partition(".")[0]
    known = first in _NOT_FOREIGN or (
        first in sys.stdlib_module_names and first not in _FOREIGN_STDLIB
    )
    return not known and "." in path and all(part.isidentifier() for part in path.split("."))


# --- the machine ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Machine:
    """The pickle's stack, marks and memo, and the next byte of the input."""

    path: str
    data: bytes
    persistent: Callable[[object], StorageRef] | None
    pos: int = 0
    stack: list[object] = field(default_factory=list)  # since the innermost mark
    marks: list[list[object]] = field(default_factory=list)  # the stacks below each mark
    memo: list[object] = field(default_factory=list)  # by index: pickles number from 0 on
    apart: dict[int, object] = field(default_factory=dict)  # those with a number out of turn
    spent: int = 0  # elements copied by handlers
    tuple_keys: int = 0
    foreign: bool = False  # let in classes of unknown libraries, as stubs

    def fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: pickle byte {self.pos}: {text}")

    def run(self) -> object:
        data, ops = self.data, _OPS
        while True:
            code = data[self.pos]
            self.pos += 1
            op = ops[code]
            if op is not None:
                op(self)
            elif code == _STOP:
                break
            else:
                self.fail(f"opcode {bytes([code])!r} is not one that checkpoints use")
        return self.result()

    def result(self) -> object:
        value = self.stack.pop()
        if self.stack or self.marks:
            left = len(self.stack) + len(self.marks)
            self.fail(f"the pickle stops with {left} values left over")
        return value

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        start, stop = self.pos, self.pos + length
        if stop > len(self.data):
            left = len(self.data) - start
            raise InputEnds(
                f"{self.path}: pickle byte {start}: {length} bytes wanted, {left} left; the file "
                "is truncated"
            )
        self.pos = stop
        return self.data[start:stop]

    def uint(self, width: int) -> int:
        """The next ``width`` bytes as a little-endian number."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """The text up to the next newline; only names are written so."""
        stop = self.data.find(b"\n", self.pos, self.pos + 256)
        if stop < 0:
            if len(self.data) - self.pos < 256:
                raise InputEnds(f"{self.path}: pickle byte {self.pos}: a name that does not end")
            self.fail("a name that does not end")
        text = self.data[self.pos : stop].decode("utf-8")
        self.pos = stop + 1
        return text

    def push(self, value: object) -> None:
        self.stack.append(value)

    def keep(self, index: int) -> None:
        """Put the value on top of the stack into the memo."""
        value, memo = self.stack[-1], self.memo
        if index == len(memo):
            memo.append(value)
            if self.apart:
                self.apart.pop(index, None)
        elif index < len(memo):
            memo[index] = value
        else:
            self.apart[index] = value

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            self.fail(f"more than {MAX_MARKS} values inside each other")
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[object]:
        """The values since the innermost mark, which is closed."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def spend(self, count: int) -> None:
        """Pay for a copy of ``count`` elements of a value that the pickle can name again."""
        self.spent += count
        if self.spent > len(self.data):
            self.fail("the pickle copies the same values over and over")

    def name(self, module: str, name: str) -> Global | Stub:
        """The global as a value, if it is allowed."""
        module = _RENAMED.get(module, module)
        path = f"{module}.{name}"
        if module == "signal" and name in _SIGNALS:  # Python 3.10 and older spell a member so
            return _signal(name)
        if path in _CALLS or path in _VALUES or self.is_stub(path):
            return Global(module, name)
        shown = path if path.isprintable() and len(path) <= 160 else short(path)
        raise CheckpointError(
            f"{self.path}: the pickle calls {shown}; refused, nothing was executed"
        )

    def is_stub(self, path: str) -> bool:
        return _is_stub(path) or (self.foreign and _is_foreign(path))

    def call(self, func: object, args: object) -> object:
        """What a call of a global stands for."""
        if type(func) is not Global or type(args) is not tuple:
            self.fail(f"calls {short(func)} with {short(args)}, not a global with a tuple")
        handler = _CALLS.get(func.path)
        if handler is not None:
            return handler(self, args)
        if not self.is_stub(func.path):
            self.fail(f"calls {func.path}, which is a value")
        return Stub(func.module, func.name, args)

    def check_key(self, key: object) -> None:
        """Refuse a dict key that is not hashable, or whose hash costs more than it should."""
        todo, parts = [key], 0
        while todo:
            part = todo.pop()
            parts += 1
            if type(part) is tuple:
                if parts + len(todo) + len(part) > MAX_KEY_PARTS:
                    self.fail(f"a dict key of more than {MAX_KEY_PARTS} parts")
                todo.extend(part)
            elif type(part) is int and part.bit_length() > 60:  # beyond, hashes coincide
                self.fail(f"{short(part)} is no key for a dict")
            elif not isinstance(part, _KEY_TYPES):
                self.fail(f"{short(part)} is no key for a dict or member of a set")
        if type(key) is tuple:
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                self.fail(f"more than {MAX_TUPLE_KEYS} tuples as dict keys")

    def set_item(self, table: object, key: object, value: object) -> None:
        if type(table) is dict:
            if type(key) is not str:
                self.check_key(key)
            table[key] = value
        elif type(table) is Stub:
            table.extend([(key, value)])
        else:
            self.fail(f"sets an item of {short(table)}")

    def extend(self, items: list[object]) -> None:
        """Append to the value on top of the stack."""
        target = self.stack[-1]
        if type(target) is list or type(target) is Stub:
            target.extend(items)
        else:
            self.fail(f"appends to {short(target)}")

    def members(self, items: list[object] | tuple[object, ...]) -> set[object]:
        for item in items:
            self.check_key(item)
        return set(items)


_KEY_TYPES = (str, int, float, bytes, type(None), Global, Stub)  # bool is an int

# --- what calls of known globals give -------------------------------------------------------


def _mapping(vm: _Machine, args: tuple[object, ...]) -> object:
    """OrderedDict or Counter: empty, or from a dict or a list of pairs."""
    table: dict[object, object] = {}
    (source,) = args or ((),)
    if not isinstance(source, (dict, list, tuple)):
        vm.fail(f"makes a dict of {short(source)}")
    vm.spend(len(source))
    pairs = source.items() if isinstance(source, dict) else source
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            vm.fail(f"makes a dict of {short(pair)}, not of pairs")
        vm.set_item(table, pair[0], pair[1])
    return table


def _members(vm: _Machine, args: tuple[object, ...]) -> set[object]:
    (source,) = args or ((),)
    if not isinstance(source, (list, tuple)):
        vm.fail(f"makes a set of {short(source)}")
    vm.spend(len(source))
    return vm.members(source)


def _complex(vm: _Machine, args: tuple[object, ...]) -> object:
    real, imag = args
    if type(real) is not float or type(imag) is not float:
        vm.fail(f"makes a complex number of {short(real)} and {short(imag)}")
    return complex(real, imag)


def _bytes(vm: _Machine, args: tuple[object, ...]) -> object:
    """bytes, bytearray, or ``_codecs.encode``, which is how protocol 2 spells bytes."""
    if not args:
        return b""
    if len(args) == 1 and type(args[0]) is bytes:
        return args[0]
    text, codec = args
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        vm.fail(f"encodes {short(text)} as {short(codec)}")
    vm.spend(len(text) // 64)
    return text.encode("latin-1")


def _attribute(vm: _Machine, args: tuple[object, ...]) -> object:
    """getattr(Class, "NAME"): how Python 3.11.0 to 3.11.3 spell a member of an enum."""
    cls, attr = args
    plain = type(attr) is str and attr.isidentifier() and not attr.startswith("_")
    if type(cls) is Global and cls.path == "signal.Signals" and attr in _SIGNALS:
        return _signal(str(attr))
    if type(cls) is not Global or not plain or not cls.path.startswith(_STUB_PREFIXES):
        raise CheckpointError(
            f"{vm.path}: the pickle calls getattr({short(cls)}, {short(attr)}); refused, "
            "nothing was executed"
        )
    return Stub(cls.module, f"{cls.name}.{attr}")


def _new_object(vm: _Machine, args: tuple[object, ...]) -> object:
    """copyreg.__newobj__(cls, *args)."""
    vm.spend(len(args) // 8)
    return vm.call(args[0], args[1:])


def _new_object_ex(vm: _Machine, args: tuple[object, ...]) -> object:
    """copyreg.__newobj_ex__(cls, args, kwargs); keywords become a last argument."""
    cls, positional, keywords = args
    if type(positional) is not tuple or type(keywords) is not dict:
        vm.fail(f"calls {short(cls)} with {short(positional)} and {short(keywords)}")
    vm.spend(len(positional) // 8)
    return vm.call(cls, (*positional, keywords) if keywords else positional)


def _reconstruct(vm: _Machine, args: tuple[object, ...]) -> object:
    """copyreg._reconstructor(cls, base, base_state)."""
    cls, _base, state = args
    return vm.call(cls, () if state is None else (state,))


def _size(vm: _Machine, args: tuple[object, ...]) -> object:
    (sizes,) = args or ((),)
    if type(sizes) is list:
        vm.spend(len(sizes))
        return tuple(sizes)
    if type(sizes) is not tuple:
        vm.fail(f"makes a torch.Size of {short(sizes)}")
    return sizes


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DIMS:
        return None
    counts = tuple(n for n in value if _count(n) is not None)
    return counts if len(counts) == len(value) else None


def _tensor(vm: _Machine, view: tuple[object, ...], dtype: str | None = None) -> TensorRef:
    """A tensor of (storage, offset, size, strides); its dtype is the storage's by default."""
    storage, offset, size, stride = view
    if type(storage) is not StorageRef:
        vm.fail(f"makes a tensor of {short(storage)}, not of a storage")
    start, shape, strides = _count(offset), _counts(size), _counts(stride)
    if start is None or shape is None or strides is None or len(shape) != len(strides):
        vm.fail(
            f"a tensor of storage {storage.key} with offset {short(offset)}, shape {_dims(size)} "
            f"and strides {_dims(stride)}: needs whole numbers of at least 0, one stride per dim, "
            f"and at most {MAX_DIMS} dims"
        )
    return TensorRef(storage, dtype or storage.dtype, start, shape, strides)


def _dims(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return short(value)
    return f"({', '.join(short(n) for n in value[:8])}{', ...' if len(value) > 8 else ''})"


def _rebuild_tensor_v2(vm: _Machine, args: tuple[object, ...]) -> TensorRef:
    """(storage, offset, size, strides, requires_grad, hooks[, metadata])."""
    _check_metadata(vm, args[6:])
    return _tensor(vm, args[:4])


def _rebuild_tensor_v3(vm: _Machine, args: tuple[object, ...]) -> TensorRef:
    """(storage, offset, size, strides, requires_grad, hooks, dtype[, metadata])."""
    named = args[6]
    dtype = named.dtype if type(named) is Global else None
    if dtype is None:
        vm.fail(f"a tensor of dtype {short(named)}, which this tool does not read")
    _check_metadata(vm, args[7:])
    return _tensor(vm, args[:4], dtype)


def _check_metadata(vm: _Machine, rest: tuple[object, ...]) -> None:
    """Refuse lazy conj and neg: the bytes are not the values."""
    metadata = rest[0] if rest else None
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        vm.fail(
            "a tensor that is conjugated or negated only when it is read; save it again after "
            ".resolve_conj().resolve_neg()"
        )


def _rebuild_parameter(vm: _Machine, args: tuple[object, ...]) -> TensorRef:
    """(tensor, requires_grad, hooks[, state])."""
    if type(args[0]) is not TensorRef:
        vm.fail(f"makes a Parameter of {short(args[0])}, not of a tensor")
    return args[0]


def _rebuild_from_type(vm: _Machine, args: tuple[object, ...]) -> TensorRef:
    """(rebuild function, class, its args, state): a tensor with attributes."""
    func, cls, inner, _state = args
    handler = _REBUILDS.get(func.path) if type(func) is Global else None
    if handler is None or type(inner) is not tuple:
        vm.fail(f"makes a tensor by {short(func)}, which this tool does not read")
    if type(cls) is not Global or cls.path not in ("torch.Tensor", *_PARAMETERS):
        vm.fail(
            f"a tensor of class {short(cls)}, whose bytes may be coded; save it again as a "
            "plain torch.Tensor"
        )
    return handler(vm, inner)


_REBUILDS: dict[str, Callable[[_Machine, tuple[object, ...]], TensorRef]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
_CALLS: dict[str, Callable[[_Machine, tuple[object, ...]], object]] = {
    **_REBUILDS,
    "torch._tensor._rebuild_from_type": _rebuild_from_type,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _size,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda vm, args: {},  # the factory is for keys that are missing
    "builtins.set": _members,
    "builtins.frozenset": lambda vm, args: frozenset(_members(vm, args)),
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.getattr": _attribute,
    "_codecs.encode": _bytes,
    "copyreg.__newobj__": _new_object,
    "copyreg.__newobj_ex__": _new_object_ex,
    "copyreg._reconstructor": _reconstruct,
}

# --- opcodes --------------------------------------------------------------------------------

_Op = Callable[[_Machine], object]


def _push(value: object) -> _Op:
    return lambda vm: vm.push(value)


def _string(width: int) -> _Op:
    """A length of ``width`` bytes, then that many bytes of UTF-8."""
    return lambda vm: vm.push(str(vm.take(vm.uint(width)), "utf-8", "surrogatepass"))


def _blob(width: int) -> _Op:
    """A length of ``width`` bytes, then that many bytes."""
    return lambda vm: vm.push(vm.take(vm.uint(width)))


def _long(width: int) -> _Op:
    """A length of ``width`` bytes, then a signed integer of that many bytes."""

    def op(vm: _Machine) -> None:
        length = vm.uint(width)
        if length > MAX_LONG_BYTES:
            vm.fail(f"an integer of {length} bytes; the limit is {MAX_LONG_BYTES}")
        vm.push(int.from_bytes(vm.take(length), "little", signed=True))

    return op


def _put(width: int) -> _Op:
    def op(vm: _Machine) -> None:
        vm.keep(vm.uint(width))

    return op


def _get(width: int) -> _Op:
    def op(vm: _Machine) -> None:
        index = vm.uint(width)
        if index < len(vm.memo):
            vm.push(vm.memo[index])
        elif index in vm.apart:
            vm.push(vm.apart[index])
        else:
            vm.fail(f"memo {index} is used before it is set")

    return op


def _memoize(vm: _Machine) -> None:
    vm.keep(len(vm.memo) + len(vm.apart))


def _tuple_of(length: int) -> _Op:
    def op(vm: _Machine) -> None:
        if len(vm.stack) < length:
            vm.fail(f"a tuple of {length} of {len(vm.stack)} values")
        vm.stack[-length:] = [tuple(vm.stack[-length:])]

    return op


def _proto(vm: _Machine) -> None:
    version = vm.uint(1)
    if version > PROTOCOL:
        vm.fail(f"pickle protocol {version}; the newest known is {PROTOCOL}")


def _frame(vm: _Machine) -> None:
    length = vm.uint(8)  # a hint for buffering; the frame's opcodes follow as ever
    left = len(vm.data) - vm.pos
    if length > left:
        raise InputEnds(
            f"{vm.path}: pickle byte {vm.pos}: a frame of {length} bytes, {left} left; the file is "
            "truncated"
        )


def _setitem(vm: _Machine) -> None:
    value, key = vm.stack.pop(), vm.stack.pop()
    vm.set_item(vm.stack[-1], key, value)


def _setitems(vm: _Machine) -> None:
    items = vm.pop_mark()
    if len(items) % 2:
        vm.fail(f"sets items from {len(items)} keys and values, an odd number")
    for at in range(0, len(items), 2):
        vm.set_item(vm.stack[-1], items[at], items[at + 1])


def _add_items(vm: _Machine) -> None:
    items, target = vm.pop_mark(), vm.stack[-1]
    if type(target) is not set:
        vm.fail(f"adds members to {short(target)}")
    target.update(vm.members(items))


def _global(vm: _Machine) -> None:
    module = vm.line()
    vm.push(vm.name(module, vm.line()))


def _stack_global(vm: _Machine) -> None:
    name, module = vm.stack.pop(), vm.stack.pop()
    if type(name) is not str or type(module) is not str:
        vm.fail(f"a global named {short(module)} and {short(name)}")
    vm.push(vm.name(module, name))


def _reduce(vm: _Machine) -> None:
    args, func = vm.stack.pop(), vm.stack.pop()
    vm.push(vm.call(func, args))


def _newobj_ex(vm: _Machine) -> None:
    keywords, args, cls = vm.stack.pop(), vm.stack.pop(), vm.stack.pop()
    vm.push(_new_object_ex(vm, (cls, args, keywords)))


def _build(vm: _Machine) -> None:
    state = vm.stack.pop()
    target = vm.stack[-1]
    if type(target) is Stub:
        target.state = state
    elif not isinstance(target, (dict, TensorRef)):  # a state dict has an attribute _metadata
        vm.fail(f"gives a state to {short(target)}")


def _persistent(vm: _Machine) -> None:
    persistent_id = vm.stack.pop()
    if vm.persistent is None:
        vm.fail("refers to data outside the pickle, which only a file of torch.save has")
    vm.push(vm.persistent(persistent_id))


_STOP = ord(".")
_OPCODES: dict[bytes, _Op] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"(": lambda vm: vm.mark(),
    b"0": lambda vm: vm.stack.pop(),
    b"1": lambda vm: vm.pop_mark(),
    # constants and empty containers
    b"N": _push(None),
    b"\x88": _push(True),
    b"\x89": _push(False),
    b")": _push(()),
    b"]": lambda vm: vm.push([]),
    b"}": lambda vm: vm.push({}),
    b"\x8f": lambda vm: vm.push(set()),
    # numbers
    b"K": lambda vm: vm.push(vm.uint(1)),
    b"M": lambda vm: vm.push(vm.uint(2)),
    b"J": lambda vm: vm.push(int.from_bytes(vm.take(4), "little", signed=True)),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"G": lambda vm: vm.push(struct.unpack(">d", vm.take(8))[0]),
    # texts, first Python 2's, and bytes
    b"U": _string(1),
    b"T": _string(4),
    b"\x8c": _string(1),
    b"X": _string(4),
    b"\x8d": _string(8),
    b"C": _blob(1),
    b"B": _blob(4),
    b"\x8e": _blob(8),
    b"\x96": _blob(8),
    # memo
    b"q": _put(1),
    b"r": _put(4),
    b"\x94": _memoize,
    b"h": _get(1),
    b"j": _get(4),
    # containers
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": lambda vm: vm.push(tuple(vm.pop_mark())),
    b"a": lambda vm: vm.extend([vm.stack.pop()]),
    b"e": lambda vm: vm.extend(vm.pop_mark()),
    b"s": _setitem,
    b"u": _setitems,
    b"\x90": _add_items,
    b"\x91": lambda vm: vm.push(frozenset(vm.members(vm.pop_mark()))),
    # objects
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,  # cls.__new__(cls, *args)
    b"\x92": _newobj_ex,
    b"b": _build,
    b"Q": _persistent,
}
_OPS: list[_Op | None] = [_OPCODES.get(bytes([code])) for code in range(256)]

# --- writing --------------------------------------------------------------------------------

LEGACY_CLASSES = {dtype: name for name, dtype in _LEGACY_STORAGES.items()}


def contiguous(dtype: str, shape: tuple[int, ...], key: str) -> TensorRef:
    """A tensor that is the whole of storage ``key``, as ``torch.save`` would refer to it."""
    numel = math.prod(shape)
    if dtype in LEGACY_CLASSES:
        storage = StorageRef(dtype, key, numel)
    else:
        storage = StorageRef("U8", key, numel * ITEMSIZE[dtype])
    return TensorRef(storage, dtype, 0, shape, row_major(shape))
