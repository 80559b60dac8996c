"""The parallel layout that an output is to have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .family import Model
from .manifest import TensorMeta, category_of
from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Target:
    """The layout that an output is to have."""

    model: Model
    mesh: Mesh  # ``owned["pp"]`` has the layers of each stage, in their order
    dp: int  # data-parallel ranks
    sharded: bool  # the optimizer state is cut over them
    vocab_multiple: int  # rows are padded to a multiple of this times tp
    safe: bool  # safetensors, not torch zips, if a format has both
    step: int | None


def main_dtype(metas: Mapping[str, TensorMeta]) -> str:
    """The dtype that most bytes of the weights have."""
    totals: dict[str, int] = {}
    for fqn, meta in metas.items():
        if category_of(fqn) == "":
            totals[meta.dtype] = totals.get(meta.dtype, 0) + meta.nbytes
    return max(totals, key=lambda d: totals[d], default="F32")
