"""fp32 masters against the half-precision weights that they round to.

Files of optimizers hold no names, so this tells whether their order is right. A few elements of
some parameters are compared, however large the model is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...model.dtypes import ITEMSIZE
from ...model.file_layout import Entry
from ...model.manifest import Chunk, View, locate
from ...move.files import Files

if TYPE_CHECKING:
    from ...move.cast import Array

SAMPLED = 64  # parameters of a rank whose masters are compared with their weights
_SAMPLE_ELEMS = 16


def differing(
    master_file: str, masters: Mapping[str, Entry], file: str, weights: Mapping[str, Entry]
) -> str:
    """A few elements of some masters must round to their weights; what is wrong, or ""."""
    from ...move.cast import cast, values

    names = list(masters)
    step = max(1, len(names) // SAMPLED)
    with Files() as files:
        for name in names[::step]:
            master, weight = masters[name], weights[name]
            if master.shape != weight.shape:
                return f"{name}: a master of shape {list(master.shape)}, {list(weight.shape)}"
            for (at, a), (_, b) in zip(
                _samples(files, master_file, master), _samples(files, file, weight), strict=True
            ):
                x = values(cast(a, master.dtype, weight.dtype), weight.dtype)
                y = values(b, weight.dtype)
                for i, (one, two) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
                    if one != two and (one == one or two == two):
                        return (
                            f"element {at + i} of the master of {name} is {one}, the weight {two}"
                        )
    return ""


def _samples(files: Files, path: str, entry: Entry) -> Iterator[tuple[int, Array]]:
    """(first element, raw elements) at the start and at the end of a tensor."""
    import numpy as np

    from ...move.cast import raw

    total, size = math.prod(entry.shape), ITEMSIZE[entry.dtype]
    count = min(total, _SAMPLE_ELEMS)
    for at in sorted({0, total - count}):
        data = bytearray(count * size)
        files.read_into(path, entry.offset_bytes + at * size, memoryview(data))
        yield at, np.frombuffer(data, raw(entry.dtype))


def differing_chunks(rows: Iterable[tuple[str, Sequence[Chunk], Sequence[Chunk]]]) -> str:
    """Masters whose chunks do not round to the weights, by (name, masters, weights); "" if all do.

    Compared are the first and the last element that the first and the last chunk of masters share
    with each chunk of weights. Headers and elements are read file by file.
    """
    pairs = [
        (name, chunk, other, offsets)
        for name, masters, weights in rows
        for chunk in dict.fromkeys((masters[0], masters[-1]))
        for other in weights
        for offsets in _corners(chunk, other)
    ]
    locate(chunk.place for _, *both, _ in pairs for chunk in both)
    places = [(_at(one, at), _at(two, at)) for _, one, two, at in pairs]
    found = _elements(view for both in places for view in both)
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, (one, two) in enumerate(places):
        kinds.setdefault((one.dtype, two.dtype), []).append(i)
    wrong: dict[int, str] = {}
    for (theirs, ours), members in kinds.items():
        sides = [[found[_key(places[i][side])] for i in members] for side in (0, 1)]
        for i, x, y in zip(members, *_rounded(theirs, ours, sides), strict=True):
            if x != y and (x == x or y == y):
                name, *_, at = pairs[i]
                wrong[i] = f"{name}{list(at)}: the master rounds to {x}, the weight is {y}"
    return wrong[min(wrong)] if wrong else ""


def _rounded(theirs: str, ours: str, sides: list[list[bytes]]) -> tuple[list[float], list[float]]:
    """Masters cast to the weights' dtype, and the weights, of single elements' bytes."""
    import numpy as np

    from ...move.cast import cast, raw, values

    masters, weights = (
        np.frombuffer(b"".join(side), raw(dtype))
        for side, dtype in zip(sides, (theirs, ours), strict=True)
    )
    return values(cast(masters, theirs, ours), ours).tolist(), values(weights, ours).tolist()


def _corners(one: Chunk, two: Chunk) -> tuple[tuple[int, ...], ...]:
    """The first and the last element of a logical tensor that both chunks hold."""
    common = one.box.intersect(two.box)
    if common is None or not common.numel:
        return ()
    return (
        common.offsets,
        tuple(o + n - 1 for o, n in zip(common.offsets, common.sizes, strict=True)),
    )


def _at(chunk: Chunk, offsets: tuple[int, ...]) -> View:
    """One element of a logical tensor."""
    inside = tuple(o - c for o, c in zip(offsets, chunk.box.offsets, strict=True))
    return chunk.view.narrow(inside, (1,) * len(offsets))


def _key(view: View) -> tuple[str, int, int]:
    """(file, first byte, bytes) of a single element."""
    return view.file, view.offset_bytes, ITEMSIZE[view.dtype]


def _elements(places: Iterable[View]) -> dict[tuple[str, int, int], bytes]:
    """The bytes of single elements, read file by file."""
    found: dict[tuple[str, int, int], bytes] = {}
    with Files() as files:
        for key in sorted({_key(view) for view in places}):
            data = bytearray(key[2])
            files.read_into(key[0], key[1], memoryview(data))
            found[key] = bytes(data)
    return found
