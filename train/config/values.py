"""The kinds of values that settings take, and which of several sources counts.

Imports neither torch nor yaml.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Sourced = Mapping[str, tuple[object, str]]  # name -> (value, where it comes from)


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError
    return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]


def _real(value: object) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):  # type: ignore[arg-type]
        raise ValueError
    return number


def _truth(value: object) -> bool:
    word = str(value).strip().lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    if word in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ValueError


def _text(value: object) -> str:
    return os.fspath(value)  # type: ignore[call-overload]


def _backend(value: object) -> bool | str:
    if value in ("auto", "sdpa"):
        return True
    names = ("flash", "fused", "unfused", "local")
    return value if isinstance(value, str) and value in names else _truth(value)


def _wholes(value: object) -> list[int]:
    parts = value.split(",") if isinstance(value, str) else value
    return [_whole(part) for part in parts]  # type: ignore[attr-defined]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, (list, tuple)) else (_text(value),)


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def _callable(value: object) -> object:
    if not callable(value):
        raise TypeError
    return value


# kind -> (what makes a value of it from a text or an object, its name in errors)
KINDS: dict[str, tuple[Callable[[object], object], str]] = {
    "int": (_whole, "a whole number"),
    "float": (_real, "a number"),
    "bool": (_truth, "true or false"),
    "str": (_text, "a text"),
    "ints": (_wholes, "a list of whole numbers"),
    "texts": (_texts, "a text or a list of texts"),
    "dict": (_table, "a dict"),
    "callable": (_callable, "a function or class, which only the constructor can give"),
    "backend": (_backend, "true, false, auto, flash, fused, unfused or local"),
    "any": (lambda value: value, "anything"),
}


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a name may take."""

    kind: str  # a key of KINDS
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, value: object) -> Any:
        """``value``, or its text, as the right type; ValueError says what fits."""
        make, expected = KINDS[self.kind]
        try:
            made: Any = make(value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError(f"expected {expected}") from None
        if self.choices and made not in self.choices:
            raise ValueError(f"choose one of {', '.join(self.choices)}")
        for number in made if isinstance(made, list) else [made]:
            if self.least is not None and number < self.least:
                raise ValueError(f"must be at least {self.least:g}")
            if self.most is not None and number > self.most:
                raise ValueError(f"must be at most {self.most:g}")
        return made


class Setting(Protocol):
    """A row of a table of settings."""

    @property
    def values(self) -> Values:
        """What the setting may be."""

    @property
    def default(self) -> object:
        """Its default."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The outcome of several sources."""

    values: dict[str, Any]
    origins: dict[str, str]  # of the values that were given
    overridden: list[str]  # a line for each value that another source overrides
    faults: list[str]


def resolve(table: Mapping[str, Setting], sources: Sequence[Sourced]) -> Resolved:
    """For each name of ``table`` the first value that is not None, read as the table says."""
    found = Resolved({}, {}, [], [])
    for name, entry in table.items():
        found.values[name] = entry.default
        said = [source[name] for source in sources if name in source]
        said = [(value, where) for value, where in said if value is not None]
        if not said:
            continue
        try:
            value = entry.values.read(said[0][0])
        except ValueError as error:
            found.faults.append(f"{name}={said[0][0]!r} ({said[0][1]}): {error}")
            continue
        found.values[name], found.origins[name] = value, said[0][1]
        for other, where in said[1:]:
            if _differs(entry.values, other, value):
                line = f"{name}: {value} ({said[0][1]}) overrides {other} ({where})"
                found.overridden.append(line)
    return found


def _differs(values: Values, other: object, value: object) -> bool:
    try:
        return bool(values.read(other) != value)
    except ValueError:
        return True
