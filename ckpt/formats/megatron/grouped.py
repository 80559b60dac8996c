"""megatron-core's GroupedMLP: all experts of a rank in one tensor, each the transpose of ours.

The shapes of the two tensors, [hidden, experts x width] and [experts x width, hidden], are labels
alone: in memory expert follows expert, [hidden, gate and up] of each, then [width, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...model.dtypes import ITEMSIZE
from ...model.file_layout import Entry
from ...model.placement import Placed
from . import names as megatron_names


def each_expert(
    name: str, entry: Entry, rows: Mapping[str, Placed]
) -> Iterator[tuple[Placed, Entry]]:
    """The stored tensors of a rank that lie in such a tensor, and where each is."""
    found = megatron_names.all_experts(name)
    assert found is not None, name
    template, number = found
    head, tail = template.split("{expert}")
    own = [row for key, row in rows.items() if key.startswith(head) and key.endswith(tail)]
    own.sort(key=lambda row: dict(row.numbers)["expert"])
    if len(entry.shape) != 2 or not own or entry.shape[2 - number] % len(own):
        return
    hidden, width = entry.shape if number == 1 else entry.shape[::-1]
    width //= len(own)
    size = hidden * width * ITEMSIZE[entry.dtype]
    shape, steps = ((width, hidden), (1, width)) if number == 1 else ((hidden, width), (1, hidden))
    for place, row in enumerate(own):
        at = entry.offset_bytes + place * size
        yield row, replace(entry, shape=shape, strides=steps, offset_bytes=at)
