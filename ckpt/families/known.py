"""What is known of each family, as its table says: for ``inspect-ckpt --families`` and the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..model.family import Family
from . import tables


@dataclass(frozen=True, slots=True)
class Known:
    """How far a family is known. Its weights go through every layout in any case."""

    name: str
    model_types: tuple[str, ...]
    beyond: tuple[str, ...]  # what args of Megatron-LM cannot say of it, whatever the config
    # config key -> "KEY is VALUE", without which a GPTModel does not compute it
    conditions: Mapping[str, str]

    @property
    def args(self) -> str:
        """What args of Megatron-LM say of it: "yes", "if ...", or "no: what they cannot say"."""
        return "no: " + ", ".join(self.beyond) if self.beyond else _if(self.conditions.values())

    def trained(self, factors: Iterable[str]) -> str:
        """The same for a trainer that knows the family and computes the config keys ``factors``."""
        return _if(text for key, text in self.conditions.items() if key not in factors)


def known() -> list[Known]:
    """Every family, by name."""
    families = {family.name: family for family in tables().values()}
    return [
        Known(name, family.model_types, family.function.beyond, _conditions(family))
        for name, family in sorted(families.items())
    ]


def _conditions(family: Family) -> dict[str, str]:
    function, scores = family.function, "attention_multiplier"
    found = {key: f"{key} is {json.dumps(values[0])}" for key, values in function.plain.items()}
    if scores in function.defaults:
        found[scores] = f"{scores} is 1/sqrt(head size)"
    return found


def _if(conditions: Iterable[str]) -> str:
    needed = ", ".join(conditions)
    return f"if {needed}" if needed else "yes"


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
