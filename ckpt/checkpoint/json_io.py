"""Reads the JSON of a checkpoint, with limits, and trusts nothing in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from ..containers.budget import check_json
from ..errors import CheckpointError
from ..move.storage import StoragePath, Where, is_path_below, storage_path

CHECKSUMS = "checksums.json"  # digests of an output without checkpoint.json
MAX_DEPTH = 100  # of JSON, so that it can be written again without deep recursion


def load_json(where: Where, *, finite: bool = True) -> dict[str, object]:
    """A JSON object; anything but an object is refused, and NaN and infinities if ``finite``.

    Python writes these numbers, so a config.json may hold them in keys that are no size or flag.
    There they are allowed, as in transformers.
    """

    path = storage_path(where)

    def refuse(text: str) -> float:
        if not finite:
            return float(text)
        raise CheckpointError(f"{path}: holds the number {text}, which JSON does not have")

    def number_of(text: str) -> float:
        return number if math.isfinite(number := float(text)) else refuse(text)

    raw = path.read_bytes()
    check_json(raw, str(path))
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse, parse_float=number_of)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object")
    if _is_deep(value):
        raise CheckpointError(f"{path}: its values are nested more than {MAX_DEPTH} deep")
    return value


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_digests(table: object, origin: StoragePath) -> dict[str, tuple[int, str]]:
    """Path below its folder -> (size, xxh3-128 or ""), from the ``files`` of ``origin``."""
    if table is not None and not isinstance(table, dict):
        raise CheckpointError(f"{origin}: files is a {type(table).__name__}, not name -> size")
    found = {}
    for name, row in (table or {}).items():
        if not is_path_below(name):
            raise CheckpointError(
                f"{origin}: files names {name!r}, which is not a file below its folder"
            )
        size = row.get("size") if isinstance(row, dict) else None
        mark = row.get("xxh3_128", "") if isinstance(row, dict) else ""
        if type(size) is not int or not isinstance(mark, str):
            raise CheckpointError(
                f"{origin}: the entry of {name!r} in files has no whole number as size, or a "
                "digest that is no text"
            )
        found[name] = (size, mark.lower())  # other tools write hex in capitals
    return found
