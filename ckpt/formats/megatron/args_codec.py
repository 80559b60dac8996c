"""Values of Megatron-LM's `args` as JSON and back: a closed list of types, in both directions.

JSON lacks tuples, sets, dtypes, paths, namespaces and numbers like NaN: these are tagged
(``{"$tuple": [...]}``). A tag names a kind of value and never a class or a function. So any value
in a JSON file becomes plain data, whoever wrote it. A member of an enum keeps its class's name in
JSON, for readers; decoding gives its value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ...containers.pickles import Global, Stub
from ...errors import CheckpointError
from ...model.dtypes import FROM_TORCH
from . import known_args

_MAX_DEPTH = 20  # of values inside each other in args
_MAX_VALUES = 100_000  # in one value of args; a list of shared lists has more parts than bytes
_MAX_INT_BITS = 1_024  # random states have 128
# whose one-argument objects are members of enums: options of a run
_ENUMS = ("megatron.", "transformer_engine.", "nemo.", "modelopt.", "signal.")
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


class Unknown(Exception):
    """A value that cannot travel; its text names it."""


def encode(value: object) -> object:
    """A value of the pickle machine as JSON; raises Unknown for what has no such form."""
    return _Encoder(plain=False).value(value, 0)


def encode_plain(value: object) -> object:
    """The same, only for numbers, flags, texts and their containers; raises Unknown for others."""
    return _Encoder(plain=True).value(value, 0)


class _Encoder:
    """Counts what one value holds, so that a small file cannot stand for a large one."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self.left = _MAX_VALUES

    def value(self, value: object, depth: int) -> object:
        self.left -= 1
        if depth > _MAX_DEPTH or self.left < 0:
            raise Unknown("values inside each other without end")
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            if value.bit_length() > _MAX_INT_BITS:
                raise Unknown(f"a number of {value.bit_length()} bits")
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, list):
            return [self.value(item, depth + 1) for item in value]
        if isinstance(value, tuple):
            return {"$tuple": [self.value(item, depth + 1) for item in value]}
        if isinstance(value, (set, frozenset)):
            return {"$set": sorted((self.value(v, depth + 1) for v in value), key=json.dumps)}
        if isinstance(value, dict):
            return self._table(value, depth)
        if not self.plain:
            return self._special(value, depth)
        raise Unknown(_name(value))

    def _table(self, value: Mapping[Any, object], depth: int) -> object:
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            rows = value.items()
            return {
                "$dict": [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in rows]
            }
        return {key: self.value(item, depth + 1) for key, item in value.items()}

    def _special(self, value: object, depth: int) -> object:
        if isinstance(value, Global) and value.dtype is not None:
            return {"$dtype": value.name}
        if not isinstance(value, Stub):
            raise Unknown(_name(value))
        path = _name(value)
        if path in _NAMESPACES and isinstance(value.state, (dict, type(None))):
            rows = (value.state or {}).items()
            return {"$namespace": {str(k): self.value(v, depth + 1) for k, v in rows}}
        if value.module.partition(".")[0] == "pathlib" and all(
            isinstance(part, str) for part in value.args
        ):
            return {"$path": "/".join(map(str, value.args))}
        if (
            path.startswith(_ENUMS)
            and len(value.args) == 1
            and value.state is None
            and not value.items
        ):
            return {"$enum": path, "value": self.value(value.args[0], depth + 1)}
        raise Unknown(path)


def _name(value: object) -> str:
    if isinstance(value, (Global, Stub)):
        return f"{value.module}.{value.name}"
    return type(value).__name__


def decode(value: object, where: str = "megatron.args") -> object:
    """The value that was encoded, of the kinds that pickle_writer.py takes.

    Paths become texts and members of enums their values. CheckpointError, which names ``where``,
    for a tag that is not one of ``encode``'s, or that holds something else than it says.
    """
    return _decode(value, where, False, 0)


def decode_plain(value: object, where: str) -> Any:  # noqa: ANN401
    """The same, only for numbers, flags, texts and containers of them."""
    return _decode(value, where, True, 0)


def _decode(value: object, where: str, plain: bool, depth: int) -> object:
    if depth > 2 * _MAX_DEPTH:
        raise CheckpointError(f"{where}: values inside each other without end")
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise CheckpointError(f"{where}: a number of {value.bit_length()} bits")
    if isinstance(value, list):
        return [_decode(item, where, plain, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), "")
    if not tag:
        return {key: _decode(item, where, plain, depth + 1) for key, item in value.items()}
    if plain and tag not in ("$float", "$tuple", "$set", "$dict"):
        raise CheckpointError(f"{where}: holds {tag[1:][:40]!r}, which is no plain value")
    try:
        return _untagged(tag, value, where, plain, depth + 1)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: {value!r:.200} is no value of {tag[:40]}") from error


def _untagged(tag: str, value: Mapping[str, Any], where: str, plain: bool, depth: int) -> object:
    """The value of one tag; TypeError or ValueError where it holds something else."""

    def inside(item: object) -> object:
        return _decode(item, where, plain, depth)

    inner = value[tag]
    if tag == "$float":
        return float(inner)
    if tag == "$tuple" and isinstance(inner, list):
        return tuple(inside(item) for item in inner)
    if tag == "$set" and isinstance(inner, list):
        return {inside(item) for item in inner}
    if tag == "$dict" and isinstance(inner, list):
        return {inside(key): inside(item) for key, item in inner}
    if tag == "$dtype" and inner in FROM_TORCH:
        return Global("torch", inner)
    if tag == "$namespace":
        return Stub("argparse", "Namespace", (), {k: inside(v) for k, v in inner.items()})
    if tag == "$path":
        return str(inner)
    if tag == "$enum":
        return inside(value["value"])
    raise ValueError(tag)


def namespace(value: object, origin: str) -> tuple[dict[str, object], list[str]]:
    """The values of an ``args``, and the names of those that cannot travel."""
    if not isinstance(value, Stub) or not isinstance(value.state, dict):
        raise CheckpointError(f"{origin}: its args are no argparse.Namespace")
    known_args.check_numbers(value.state, origin)
    args: dict[str, object] = {}
    lost = []
    for key, item in value.state.items():
        try:
            args[str(key)] = encode(item)
        except Unknown as error:
            lost.append(f"{key} ({error})")
    return args, lost


def keep_plain(key: str, value: object, table: dict[str, object], notes: list[str]) -> None:
    """Put the plain values of ``value`` under ``key``; the others are named in the notes.

    A scheduler or a counter holds numbers, flags and texts; a class does not belong there.
    """
    if value is None:
        return
    if not isinstance(value, dict):
        rows, lost = plain_rows({key: value})
        table |= rows
    else:
        table[key], lost = plain_rows(value)
        lost = [f"{key}.{name}" for name in lost]
    if lost:
        notes.append(f"not copied, no plain values: {', '.join(lost)}")


def plain_rows(table: Mapping[Any, object]) -> tuple[dict[str, object], list[str]]:
    """The plain values of a table as JSON, and the names of the others."""
    rows: dict[str, object] = {}
    lost = []
    for key, item in table.items():
        try:
            rows[str(key)] = encode_plain(item)
        except Unknown as error:
            lost.append(f"{key} ({error})")
    return rows, lost
