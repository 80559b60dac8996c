"""Damage to files: what may happen to bytes, tables, pickles and archives, and by which seed.

An edit is a value, so that hypothesis can draw and shrink it (test_fuzz.py), and so that a number
gives the same one everywhere (torture.py). Nothing here imports the code under test.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickletools
import random
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

BYTE_KINDS = ["flip", "flip", "set", "insert", "remove", "cut"]
BYTE_ANCHORS = ["start", "start", "end", "any"]
JSON_KINDS = ["set", "set", "set", "drop", "rename", "add", "swap", "nudge"]

# (kind, anchor, place, extra bytes); (kind, walk, value)
ByteEdit = tuple[str, str, int, bytes]
JsonEdit = tuple[str, list[int], object]


def damage_bytes(path: Path, changes: Sequence[ByteEdit]) -> None:
    """Apply edits to a file."""
    path.write_bytes(damaged_bytes(path.read_bytes(), changes))


def damaged_bytes(whole: bytes, changes: Sequence[ByteEdit]) -> bytes:
    """Flip, set, insert, remove and cut."""
    data = bytearray(whole)
    for kind, anchor, place, extra in changes:
        at = (len(data) - place if anchor == "end" else place) % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << extra[0] % 8
        elif kind == "set":
            data[at : at + len(extra)] = extra
        elif kind == "insert":
            data[at:at] = extra
        elif kind == "remove":
            del data[at : at + len(extra)]
        elif kind == "cut":
            del data[at:]
    return bytes(data)


ODD = [
    *(None, True, False, 0, 1, 2, 3, -1, 7, 21, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308),
    *("", "0", "x", "..", "/", "\u2603", "\ud800", "a\0b", "model.norm.weight"),
    *("F32", "BF16", "U8", "flat", "per_rank", "gpt2", "qwen3"),
    *([], [0], [1, 2], [0, 0], [[]], [[0], [1]], {}, {"a": 1}),
]


def damage_json(table, changes: Sequence[JsonEdit]):
    """Apply edits to the values of JSON; each walks to some value and changes it there."""
    for kind, walk, value in changes:
        spot, keys, odd = table, None, copy.deepcopy(value)
        for step in walk:
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            if not keys:
                break
            key = keys[step % len(keys)]
            if step == walk[-1] or not isinstance(spot[key], (dict, list)):
                break
            spot = spot[key]
        if not keys:
            continue
        value = spot[key]
        if kind == "set":
            spot[key] = odd
        elif kind == "drop":
            del spot[key]
        elif kind == "rename" and isinstance(spot, dict):
            spot[odd if isinstance(odd, str) else f"{key}x"] = spot.pop(key)
        elif kind == "add" and isinstance(spot, dict):
            spot[odd if isinstance(odd, str) else f"{key}x"] = value
        elif kind == "swap":
            other = keys[walk[0] % len(keys)]
            spot[key], spot[other] = spot[other], value
        elif kind == "nudge" and type(value) in (int, float):
            spot[key] = value + 1
    return table


def damage_table(path: Path, changes: Sequence[JsonEdit]) -> None:
    """Apply JSON edits to a JSON file, a safetensors header, or our record in a torch zip."""
    if path.suffix == ".json":
        path.write_text(json.dumps(damage_json(json.loads(path.read_text()), changes)))
    elif path.suffix == ".safetensors":
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = json.dumps(damage_json(json.loads(data[8 : 8 + length]), changes)).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    else:
        with zipfile.ZipFile(path) as old:
            records = {info.filename: old.read(info) for info in old.infolist()}
        for name in records:
            if name.endswith("shardwright.json"):
                text = json.dumps(damage_json(json.loads(records[name]), changes))
                records[name] = text.encode()
        with zipfile.ZipFile(path, "w") as new:
            for name, record in records.items():
                new.writestr(name, record)


# --- by seed ----------------------------------------------------------------------------------


def random_byte_edits(rng: random.Random, most: int = 4, near: int = 1500) -> list[ByteEdit]:
    """Edits for ``damage_bytes``; ``near`` bytes of start and end are where headers are."""
    found = []
    for _ in range(rng.randint(1, most)):
        anchor = rng.choice(BYTE_ANCHORS)
        place = rng.randint(0, 1 << 20 if anchor == "any" else near)
        found.append((rng.choice(BYTE_KINDS), anchor, place, rng.randbytes(rng.randint(1, 9))))
    return found


def random_json_edits(rng: random.Random, most: int = 3) -> list[JsonEdit]:
    """Edits for ``damage_json``."""
    return [
        (
            rng.choice(JSON_KINDS),
            [rng.randint(0, 99) for _ in range(rng.randint(1, 4))],
            rng.choice(ODD),
        )
        for _ in range(rng.randint(1, most))
    ]


# Opcodes that name again, build, call, or claim a length.
_OPCODES = [bytes([code]) for code in b"0123(.)]}{NRabcdeghijlopqrstu\x80\x81\x85\x86\x87\x93\x94"]
_NUMBERS = [b"K\x00", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff",
            b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"G\x7f\xf8" + b"\x00" * 6,
            b"X\xff\xff\xff\xff", b"X\x01\x00\x00\x00/", b"q\x01", b"h\x01"]  # fmt: skip


def damage_pickle(data: bytes, rng: random.Random) -> bytes:
    """Whole opcodes changed, which keeps most of a pickle readable, or any of its bytes."""
    starts = _opcode_starts(data)
    if starts and rng.random() < 0.6:
        return _damaged_opcodes(data, starts, rng)
    return _damaged_anywhere(data, rng)


@lru_cache(maxsize=64)
def _opcode_starts(data: bytes) -> tuple[int, ...]:
    """Where each opcode begins, of one pickle after another; and where the last one ends."""
    found, start = [], 0
    with contextlib.suppress(Exception):  # bytes of tensors follow
        while start < len(data):
            one = [start + at for _, _, at in pickletools.genops(data[start:])]
            found += one
            start = one[-1] + 1
    return (*found, start) if found else ()


def _damaged_opcodes(data: bytes, starts: Sequence[int], rng: random.Random) -> bytes:
    """Opcodes removed, repeated, exchanged, put in, or given another argument."""
    count = len(starts) - 1
    for index in sorted((rng.randrange(count) for _ in range(rng.choice([1, 1, 2]))), reverse=True):
        at, stop, other = starts[index], starts[index + 1], rng.randrange(count)
        mine, theirs = data[at:stop], data[starts[other] : starts[other + 1]]
        kind = rng.randrange(6)
        if kind == 0:
            mine = b""
        elif kind == 1:
            mine *= rng.choice([2, 2, 30])
        elif kind == 2:
            mine = theirs
        elif kind == 3:
            mine += theirs
        elif kind == 4:
            mine = rng.choice(_NUMBERS)
        elif len(mine) > 1:
            place = rng.randrange(1, len(mine))
            mine = (
                mine[:place]
                + bytes([mine[place] + rng.choice([1, 255, 128]) & 255])
                + mine[place + 1 :]
            )
        data = data[:at] + mine + data[stop:]
    return data


def _damaged_anywhere(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, opcodes put in, and stretches of the pickle repeated, moved or removed."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randint(0, len(data))
        stop = min(len(data), at + rng.choice([1, 2, 5, 20, 100]))
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + rng.choice(_OPCODES) + data[at:]
        elif kind == 2:
            data = data[:at] + rng.choice(_NUMBERS) + data[at:]
        elif kind == 3:
            data = data[:at] + data[stop:]
        elif kind == 4:
            data = data[:stop] + data[at:stop] * rng.choice([1, 1, 3, 30]) + data[stop:]
        elif kind == 5:
            to = rng.randint(0, len(data))
            data = data[:to] + data[at:stop] + data[to:]
        else:
            old = rng.choice(WORDS)
            data = data.replace(old, rng.choice(WORDS), rng.randint(1, 3))
    return data


WORDS = [b"FloatStorage", b"HalfStorage", b"LongStorage", b"BFloat16Storage", b"OrderedDict",
         b"_rebuild_tensor_v2", b"collections", b"torch", b"builtins", b"cpu", b"storage", b"0",
         b"1", b"weight", b"layers", b"exp_avg", b"args", b"Namespace"]  # fmt: skip


def damage_archive(data: bytes, change: Callable[[str, bytes], bytes], pick: int) -> bytes:
    """A zip whose ``pick``-th record is what ``change(name, record)`` gives; its CRCs are true."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        rows = [(info.filename, old.read(info)) for info in old.infolist()]
    chosen = pick % len(rows)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for index, (name, record) in enumerate(rows):
            new.writestr(name, change(name, record) if index == chosen else record)
    return out.getvalue()


def is_archive(data: bytes) -> bool:
    """Whether these bytes are a zip that Python's own library opens."""
    return zipfile.is_zipfile(io.BytesIO(data))
