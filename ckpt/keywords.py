"""Keywords of the API that mirror the commands' options: ``overwrite=True`` is ``--overwrite``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .checkpoint.types import ReadOptions
from .errors import CheckpointError
from .jobs import RunOptions
from .model.mesh import AXES
from .move.progress import parse_bytes

_RUN: dict[str, tuple[type, ...]] = {
    "break_lock": (bool,),
    "checksum": (bool,),
    "dry_run": (bool,),
    "memory_budget": (int, str),  # bytes, or "64MiB"
    "overwrite": (bool,),
    "quiet": (bool,),
    "replicas": (str,),  # "compare" or "first"
    "resume": (bool,),
    "verify_source": (bool,),
    "workers": (int,),
}
_READ: dict[str, tuple[type, ...]] = {
    "config": (str, os.PathLike),
    "copy_all": (bool,),
    "dequantize": (bool,),
    "drop_vision": (bool,),
    "follow_links": (bool,),
    "format": (str,),
    "iteration": (int,),
    "layout": (Mapping,),
    "trust": (str, Iterable),
    "vocab_size": (int,),
}


def take_axes(function: str, given: dict[str, object]) -> dict[str, int | None]:
    """The sizes of mesh axes among the keywords, which leave ``given``."""
    found: dict[str, int | None] = {}
    for name in AXES:
        size = given.pop(name, None)
        if size is not None:
            _check(function, name, size, (int,))
            assert isinstance(size, int)
            found[name] = size
    return found


def _check(function: str, name: str, value: object, kinds: tuple[type, ...]) -> None:
    """TypeError for a value of the wrong type; a bool is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{function}(): {name}={value!r:.80}: must be {wanted}")


def take_options(
    function: str,
    given: Mapping[str, object],
    read: ReadOptions | None,
    run: RunOptions | None,
    *,
    own: Iterable[str] = (),
    reading: bool = True,
) -> tuple[ReadOptions, RunOptions]:
    """``read`` and ``run`` with what the keywords say; TypeError for one that is unknown.

    ``own`` names the function's own parameters, for the hint. Without ``reading`` the keywords
    about a source are not taken.
    """
    known = {**(_READ if reading else {}), **_RUN}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, [*known, *own], 1, 0.5)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword {name}{meant}")
        _check(function, name, value, known[name])
    says = {name: value for name, value in given.items() if name in _READ}
    runs = {name: value for name, value in given.items() if name in _RUN}
    if "trust" in says:
        trust = says["trust"]
        says["trust"] = frozenset([trust] if isinstance(trust, str) else trust)  # type: ignore[call-overload]
    if isinstance(budget := runs.get("memory_budget"), str):
        runs["memory_budget"] = parse_bytes(budget)
    if "replicas" in runs:
        which = runs.pop("replicas")
        if which not in ("compare", "first"):
            raise CheckpointError(f"replicas={which!r:.80}: must be 'compare' or 'first'")
        runs["compare_replicas"] = which == "compare"
    return (
        replace(read or ReadOptions(), **says),  # type: ignore[arg-type]
        replace(run or RunOptions(), **runs),  # type: ignore[arg-type]
    )
