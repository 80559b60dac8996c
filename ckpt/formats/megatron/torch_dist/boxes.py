"""Which box of the whole tensor each blob holds: halves of gated layers, and flattened tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ....containers.dcp import Blob, Grid, Stored
from ....errors import CheckpointError
from ....model.box import Box, range_boxes, row_major


def half_of_gated(name: str) -> tuple[int | None, str]:
    """``linear_fc1.weight_w`` and ``_v`` are the halves of a gated layer's rows."""
    match = re.fullmatch(r"(.*linear_fc1\.(?:weight|bias))_([wv])", name)
    return ("wv".index(match[2]), match[1]) if match else (None, name)


def boxes(stored: Stored, original: tuple[int, ...] | None) -> Iterator[tuple[Box, Grid]]:
    """Boxes of the whole tensor, and where their elements lie."""
    for blob in stored.blobs:
        if original is None:
            yield blob.box, Grid(blob)
        else:
            yield from _unflattened(stored, blob, original)


def _unflattened(
    stored: Stored, blob: Blob, original: tuple[int, ...]
) -> Iterator[tuple[Box, Grid]]:
    """A tensor of core 0.15 and older: cells of the original, each flattened into a last dim.

    A cell (i, j, k) of local shape (x, y, z) lies at (i x, j y, k z).
    """
    cells = stored.shape[:-1]
    local = tuple(n // c if c and n % c == 0 else -1 for n, c in zip(original, cells, strict=True))
    if -1 in local or math.prod(local) != stored.shape[-1] or math.prod(blob.box.sizes[:-1]) != 1:
        raise CheckpointError(
            f"{blob.file}: {stored.name}: flattened as {list(stored.shape)}, which is no cut of "
            f"{list(original)}"
        )
    start, count = blob.box.offsets[-1], blob.box.sizes[-1]
    corner = tuple(o * n for o, n in zip(blob.box.offsets[:-1], local, strict=True))
    steps = row_major(local)
    for box in range_boxes(local, start, start + count):
        first = sum(o * s for o, s in zip(box.offsets, steps, strict=True)) - start
        at = tuple(c + o for c, o in zip(corner, box.offsets, strict=True))
        yield Box(at, box.sizes), Grid(blob, first, steps)
