"""One declarative table per model family; ``find`` picks one by a config's ``model_type``.

Every module in this folder is imported and its ``FAMILIES`` are used, so a new family is one new
file. Import errors are raised: a broken table must not look like an unknown family.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ..errors import CheckpointError
from ..model.family import Family


@cache
def tables() -> dict[str, Family]:
    """``model_type`` -> family, over all table files."""
    found: dict[str, Family] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for family in getattr(importlib.import_module(f".{module}", __name__), "FAMILIES", ()):
            for model_type in family.model_types:
                assert model_type not in found, f"{model_type} is in two tables"
                found[model_type] = family
    return found


def is_known(model_type: object) -> bool:
    """Whether a config's ``model_type``, which may be anything, has a table."""
    return isinstance(model_type, str) and model_type in tables()


def find(model_type: object, origin: str) -> Family:
    """The family of a config's ``model_type``; CheckpointError if there is none."""
    family = tables().get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{origin}: model_type {model_type!r} has no family table (inspect-ckpt --families "
            "lists them); CONTRIBUTING.md says how to add one"
        )
    return family
