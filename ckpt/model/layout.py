"""Layout tags: how stored tensors are packed where a family's rows allow several ways.

Every native checkpoint records its tags. They are never guessed, and an unknown tag or value is
refused: a wrong guess scrambles rows, and nothing shows it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError, raise_all
from .family import Family

# packing tag -> value -> the size symbol that gives the number of interleaved rounds
PACKINGS: dict[str, dict[str, str]] = {
    "qkv": {
        "per_group": "g",  # q heads of a KV group, its k, its v; then the next group (megatron)
        "per_rank": "tp",  # all q of the rank, all k, all v (Megatron checkpoint version 0)
        "per_row": "q",  # one row of q, of k, of v in turn (Megatron checkpoint version 1)
        "flat": "one",  # all q, all k, all v of the model, then cut
    },
    "glu": {
        "per_rank": "tp",  # gate of the rank, then up of the rank (megatron)
        "flat": "one",  # all gate, all up of the model, then cut
    },
}
NORMS = ("plain", "zero_centered")  # a norm multiplies by w, or by 1 + w


def default_layout(family: Family) -> dict[str, str]:
    """The tags of checkpoints that this tool writes; they are megatron's."""
    return {
        "qkv": "per_group",
        "glu": "per_rank",
        "norm": NORMS[family.norm_offset],
        "rotary": family.function.rotary,
    }


def check_layout(layout: Mapping[str, str], family: Family, origin: str) -> dict[str, str]:
    """All four tags, with defaults; CheckpointError for an unknown tag or value."""
    default = default_layout(family)
    allowed = {
        **{tag: list(values) for tag, values in PACKINGS.items()},
        "norm": [default["norm"]],
        "rotary": [default["rotary"]],
    }
    raise_all(
        (
            f"{origin}: layout tag {tag}={value!r} is not one that {family.name} can be read with "
            f"({tag}: {', '.join(allowed[tag])})"
            if tag in allowed
            else f"{origin}: unknown layout tag {tag!r} (known: {', '.join(allowed)})"
            for tag, value in layout.items()
            if tag not in allowed or value not in allowed[tag]
        ),
        "",
    )
    return {**default, **layout}


def rounds(layout: Mapping[str, str]) -> dict[str, str]:
    """Packing tag -> size symbol, the form that ``family.place`` takes."""
    return {tag: values[layout[tag]] for tag, values in PACKINGS.items()}


def parse_layout(options: list[str]) -> dict[str, str]:
    """``["qkv=per_rank"]`` -> ``{"qkv": "per_rank"}``."""
    found = {}
    for option in options:
        tag, equals, value = option.partition("=")
        if not equals:
            raise CheckpointError(f"--layout {option}: write it as KEY=VALUE, e.g. qkv=per_rank")
        found[tag] = value
    return found
