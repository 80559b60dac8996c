"""Objects that a script registers: their state as a file that is read without running code.

``torch.load(weights_only=True)`` reads tensors, numbers, texts and containers of them. Other values
of a closed list (NumPy arrays and numbers, dates, deques, ...) are written as tables of these, with
the kind under ``_KIND``. Anything else is refused when it is saved, by its place.
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch

from ..errors import TrainError, raise_faults

_KIND = "shardwright.kind"
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
_NUMPY_KINDS = "biufcSUmM"  # of dtypes whose bytes are the values
_FACTORIES: Mapping[str, Callable[[], Any]] = {
    "int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set,
}  # fmt: skip


def write(path: Path, state: object, name: str) -> None:
    """Write the state of a registered object; TrainError names what cannot be written."""
    faults: list[str] = []
    made = _encode(state, name, faults)
    raise_faults("these values cannot be saved, since reading them would run code", faults)
    torch.save(made, path)
    try:  # what is not in the list below and torch takes: tensors, all kinds of which it must read
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainError(f"{name}: could be saved, but not loaded again ({error})") from error


def read(path: Path) -> Any:
    """The state that was written. TrainError if it is not such a file."""
    try:
        return _decode(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise TrainError(f"{path}: cannot be read ({error})") from error


def _encode(value: Any, where: str, faults: list[str]) -> Any:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if kind in (list, tuple, set):
        return kind(_encode(v, f"{where}[{i}]", faults) for i, v in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        items = ((_encode(k, where, faults), _encode(v, f"{where}.{k}", faults))
                 for k, v in value.items())  # fmt: skip
        made = kind(dict(items))
        return made if _KIND not in value else _table("dict", list(made.items()))
    if isinstance(value, (np.ndarray, np.generic)):
        return _numpy(value, where, faults)
    if isinstance(value, PurePath):
        return _table("path", str(value))
    for name, (type_, split, _) in _CODECS.items():
        if kind is type_:
            try:
                return _table(name, _encode(split(value), where, faults))
            except TrainError as error:
                faults.append(f"{where}: {error}")
                return None
    faults.append(f"{where} is a {kind.__module__}.{kind.__qualname__}")
    return None


def _table(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, "value": value}


def _numpy(value: Any, where: str, faults: list[str]) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMPY_KINDS:
        faults.append(f"{where} is a NumPy array of {array.dtype}")
        return None
    parts = (array.dtype.str, array.shape, _tensor(array.tobytes()))
    return _table("array" if isinstance(value, np.ndarray) else "scalar", parts)


def _tensor(data: bytes | bytearray) -> torch.Tensor:
    """Bytes as a tensor; in torch's pickles they would be texts of twice the size."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _array(parts: tuple[str, tuple[int, ...], torch.Tensor]) -> np.ndarray:
    dtype, shape, data = parts
    if np.dtype(dtype).kind not in _NUMPY_KINDS:
        raise TrainError(f"an array of {dtype}")
    return np.frombuffer(_bytes(data), np.dtype(dtype)).reshape(shape).copy()


def _split_time(value: dt.datetime | dt.time) -> tuple[Any, ...]:
    zone = value.tzinfo
    if zone is None:
        said: Any = None
    elif isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        said = zone.key
    elif isinstance(zone, dt.timezone):
        said = zone.utcoffset(None).total_seconds()
    else:
        raise TrainError(f"its time zone is a {type(zone).__name__}")
    return value.replace(tzinfo=None).isoformat(), value.fold, said


def _zone(said: Any) -> dt.tzinfo | None:
    if said is None:
        return None
    if isinstance(said, str):
        return zoneinfo.ZoneInfo(said)
    return dt.timezone(dt.timedelta(seconds=said))


def _time_of(type_: Any) -> Callable[[Any], Any]:
    return lambda v: type_.fromisoformat(v[0]).replace(fold=v[1], tzinfo=_zone(v[2]))


def _split_default(value: defaultdict[Any, Any]) -> tuple[Any, ...]:
    names = [name for name, made in _FACTORIES.items() if made is value.default_factory]
    if value.default_factory is not None and not names:
        raise TrainError("a defaultdict whose defaults are made by a function of the script's")
    return (names[0] if names else None, list(value.items()))


# kind -> (type, its parts, the value of them)
_CODECS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, _tensor, _bytes),
    "bytearray": (bytearray, _tensor, lambda v: bytearray(_bytes(v))),
    "datetime": (dt.datetime, _split_time, _time_of(dt.datetime)),
    "time": (dt.time, _split_time, _time_of(dt.time)),
    "date": (dt.date, dt.date.isoformat, dt.date.fromisoformat),
    "timedelta": (
        dt.timedelta, lambda v: (v.days, v.seconds, v.microseconds), lambda v: dt.timedelta(*v)
    ),
    "deque": (deque, lambda v: (list(v), v.maxlen), lambda v: deque(*v)),
    "frozenset": (frozenset, list, frozenset),
    "range": (range, lambda v: (v.start, v.stop, v.step), lambda v: range(*v)),
    "decimal": (Decimal, str, Decimal),
    "fraction": (Fraction, lambda v: (v.numerator, v.denominator), lambda v: Fraction(*v)),
    "uuid": (UUID, str, UUID),
    "defaultdict": (
        defaultdict, _split_default,
        lambda v: defaultdict(None if v[0] is None else _FACTORIES[v[0]], v[1]),
    ),
}  # fmt: skip


def _decode(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(_decode(v) for v in value)
    if kind in (dict, OrderedDict, Counter):
        if set(value) == {_KIND, "value"}:
            return _made(value[_KIND], _decode(value["value"]))
        return kind({_decode(k): _decode(v) for k, v in value.items()})
    return value


def _made(kind: str, parts: Any) -> Any:
    if kind == "dict":
        return dict(parts)
    if kind == "path":
        return Path(parts)
    if kind in ("array", "scalar"):
        made = _array(parts)
        return made if kind == "array" else made[()]
    if kind not in _CODECS:
        raise TrainError(f"a value of the unknown kind {kind!r}")
    return _CODECS[kind][2](parts)
