"""What is known of each family, as its table says: for ``inspect-ckpt --families`` and the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..model.family import Family
from . import tables


@dataclass(frozen=True, slots=True)
class Known:
    """How far a family is known. Its weights go through every layout in any case."""

    name: str
    model_types: tuple[str, ...]
    # what args of Megatron-LM say of it: "yes", "if KEY is VALUE", or "no: what they cannot say"
    args: str


def known() -> list[Known]:
    """Every family, by name."""
    families = {family.name: family for family in tables().values()}
    return [
        Known(name, family.model_types, _args(family)) for name, family in sorted(families.items())
    ]


def _args(family: Family) -> str:
    function = family.function
    if function.beyond:
        return "no: " + ", ".join(function.beyond)
    plain = [f"{key} is {json.dumps(values[0])}" for key, values in function.plain.items()]
    if "attention_multiplier" in function.defaults:
        plain.append("attention_multiplier is 1/sqrt(head size)")
    return f"if {', '.join(plain)}" if plain else "yes"


# --- an unknown model ---------------------------------------------------------------------------


def nearest(names: Iterable[str]) -> tuple[str, list[str]]:
    """The family whose names a model's tensors resemble most, and the tensors that it lacks.

    Numbers in names stand as ``{}``; each such name comes once, in the order given.
    """
    have = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name) for name in names))
    wanted = {
        family.name: {
            re.sub(r"\{\w+\}", "{}", part.fqn) for rule in family.rules for part in rule.parts
        }
        for family in tables().values()
    }
    best = min(wanted, key=lambda name: (len(set(have) - wanted[name]), name))
    return best, [name for name in have if name not in wanted[best]]
