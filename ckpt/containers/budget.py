"""Limits what decoding a file may cost, in proportion to its bytes.

A few bytes can mean a huge value. A pickle can put a list twice into a second list, that one twice
into a third, and so on. Thirty levels take 100 bytes and have 2^30 parts when something walks,
copies or prints them. So the result of a pickle is measured here first: its size if everything in
it were written out. After that, a walk over it takes time and memory in proportion to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from ..errors import CheckpointError

MAX_JSON_PARTS = 1 << 22  # values of a JSON text; more than 300,000 tensors have
PARTS_PER_BYTE = 4  # of a pickle: one byte can refer to an earlier value
FREE_PARTS = 10_000  # that any pickle may have
BYTES_PER_BYTE = 96  # memory for each byte of a pickle, while it is decoded
FREE_BYTES = 64 << 20  # memory that any pickle may take
# opcodes that make more than 64 bytes each: EMPTY_SET and FROZENSET -> bytes above that
_LARGE = {b"\x8f": 160, b"\x91": 160}
UNIT_BYTES = 16  # a text or number is one part, plus one for each of these


def check_json(raw: bytes, path: str) -> None:
    """Refuse a JSON text whose values take far more memory than its bytes: ``[[],[],[], ...``.

    A container counts by its opening bracket, an object fourfold: an empty one takes more
    memory than a number.
    """
    parts = raw.count(b",") + raw.count(b"[") + 4 * raw.count(b"{")
    if parts > MAX_JSON_PARTS:
        raise CheckpointError(
            f"{path}: JSON of about {parts} values; at most {MAX_JSON_PARTS} are read. Split the "
            "checkpoint into more files"
        )


def check_opcodes(data: bytes, start: int, path: str) -> None:
    """Refuse a pickle whose opcodes make far more than its bytes: at most `BYTES_PER_BYTE` for each
    and `FREE_BYTES` in all.

    Nearly every opcode makes less than half of that. Counted are those that make more, wherever
    their bytes occur, so the true number is smaller.
    """
    size = len(data) - start
    large = sum(extra * data.count(code, start) for code, extra in _LARGE.items())
    if large > FREE_BYTES + BYTES_PER_BYTE // 3 * size:
        raise CheckpointError(
            f"{path}: a pickle of {size} bytes that makes far more of them; nothing that saves a "
            "checkpoint writes it so"
        )


Inside = Callable[
    [object], Iterator[object] | None
]  # the parts of an object; None for any other value


def check_parts(root: object, nbytes: int, path: str, inside: Inside) -> None:
    """Refuse a value with too many parts for its file; shared parts count each time.

    ``inside`` gives the parts of objects other than Python's containers. A value that holds itself
    is refused too, unless such an object is in between, because walks do not enter it.
    """
    limit = FREE_PARTS + PARTS_PER_BYTE * nbytes
    if _parts(root, limit, inside) > limit:
        raise CheckpointError(
            f"{path}: {nbytes} bytes stand for values without end, or for more than {limit} of "
            "them; nothing that saves a checkpoint writes it so"
        )


class _Open:
    """A container whose parts are being counted."""

    __slots__ = ("children", "key", "objects", "parts")

    def __init__(self, key: int, children: Iterator[object], objects: int) -> None:
        self.key = key  # the id of the container
        self.children = children
        self.parts = 1
        self.objects = objects  # on the way from the root to here


def _parts(root: object, limit: int, inside: Inside) -> int:
    """The number of parts of a value, at most ``limit`` + 1, also if they have no end."""
    done: dict[int, int] = {}  # id of a container -> its parts
    top = _Open(0, iter((root,)), 0)
    path = [top]
    opened = {top.key: top}
    while True:
        for child in top.children:
            key = id(child)
            if key in done:
                top.parts += done[key]
            elif key in opened:
                if top.objects == opened[key].objects and inside(child) is None:
                    return limit + 1
                top.parts += 1
            elif (children := _children(child)) is not None:
                top = _Open(key, children, top.objects)
            elif (children := inside(child)) is not None:
                top = _Open(key, children, top.objects + 1)
            else:
                top.parts += _size(child)
            if top.key == key:
                path.append(top)
                opened[key] = top
                break
            if top.parts > limit:
                return limit + 1
        else:
            done[top.key] = top.parts
            del opened[path.pop().key]
            if not path:
                return top.parts
            path[-1].parts += top.parts
            top = path[-1]


def _size(value: object) -> int:
    """The parts of a value that holds no others."""
    if isinstance(value, (str, bytes)):
        return 1 + len(value) // UNIT_BYTES
    if isinstance(value, int):
        return 1 + value.bit_length() // (8 * UNIT_BYTES)
    return 1


def _children(value: object) -> Iterator[object] | None:
    if isinstance(value, dict):
        return chain(value, value.values())
    return iter(value) if isinstance(value, (list, tuple, set, frozenset)) else None
