"""Campaign ``reader``: mutated files of every container, each through its reader.

A file is read right or refused by CheckpointError. Right is what the library of the format reads,
where it reads the file too, and in any case nothing outside of the file.
"""

from __future__ import annotations

import io
import json
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import damage
import numpy as np
import safetensors
import torch
from bounded import measured
from fixtures_safety import case, write_hf, write_native, write_split
from torture_sources import OPTIONS, SMALL, broken_unless, model_case

from shardwright.ckpt import CheckpointError, reshard
from shardwright.ckpt.checkpoint.config import load_model
from shardwright.ckpt.checkpoint.json_io import load_json
from shardwright.ckpt.containers import dcp, torch_zip
from shardwright.ckpt.containers import safetensors as own_safetensors
from shardwright.ckpt.inspect import describe
from shardwright.ckpt.model.dtypes import ITEMSIZE
from shardwright.ckpt.model.file_layout import Index
from shardwright.ckpt.move.storage import storage_path
from shardwright.ckpt.reader import read_checkpoint

CONTAINERS = ("safetensors", "torch_zip", "torch_legacy", "dcp", "json")
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "phi3", "gemma", "gemma2")
OLD = {"_use_new_zipfile_serialization": False}


class Reader:
    """One container's inputs; ``run`` gives what came of a seed."""

    total = 100_000
    step = 500  # seeds that a worker takes at once

    def __init__(self, container: str, home: Path) -> None:
        self.room = home / "input"
        self.room.mkdir(parents=True)
        self._play = getattr(self, f"_{container}")
        self._bases = getattr(self, f"_{container}_bases")(home / "bases")

    def run(self, seed: int) -> tuple[str, object]:
        """(outcome, cost); raises what a promise that is broken raises."""
        rng = random.Random(seed)
        base = self._bases[seed % len(self._bases)]
        with measured() as cost:
            try:
                self._play(base, rng)
                outcome = "read"
            except CheckpointError:
                outcome = "refused"
        return outcome, cost

    # --- safetensors --------------------------------------------------------------------------

    def _safetensors_bases(self, home: Path) -> list[bytes]:
        odd = {
            "a.b": torch.arange(6, dtype=torch.float64).reshape(2, 3), "none": torch.zeros(0, 4),
            "step": torch.tensor(7), "flags": torch.tensor([True, False]),
            "half": torch.arange(5).bfloat16(), "byte": torch.arange(3, dtype=torch.uint8),
        }  # fmt: skip
        made = [write_hf(home / "hf", **SMALL) / "model.safetensors"]
        made += sorted(write_native(home / "native", 2, 1, made=model_case(), **OPTIONS)
                       .glob("*.safetensors"))[:2]  # fmt: skip
        return [safetensors.torch.save(odd), *(path.read_bytes() for path in made)]

    def _safetensors(self, base: bytes, rng: random.Random) -> None:
        path = self.room / "x.safetensors"
        path.write_bytes(base)
        if rng.random() < 0.5:
            damage.damage_table(path, damage.random_json_edits(rng))
        if rng.random() < 0.6:
            damage.damage_bytes(path, damage.random_byte_edits(rng))
        index = own_safetensors.index(path)
        data = path.read_bytes()
        check_extents(index, len(data))
        try:
            wanted = dict(safetensors.deserialize(data))
        except Exception:
            return  # looser than the library: unaligned tensors and spaces in the header
        found = {
            name: data[entry.offset_bytes :][: math.prod(entry.shape) * ITEMSIZE[entry.dtype]]
            for name, entry in index.entries.items()
        }
        broken_unless(found.keys() == wanted.keys(), "other names than the library's")
        for name, row in wanted.items():
            same = list(index.entries[name].shape) == row["shape"] and found[name] == row["data"]
            broken_unless(same, f"{name}: another shape or other bytes than the library's")

    # --- torch.save ---------------------------------------------------------------------------

    def _torch_zip_bases(self, home: Path) -> list[bytes]:
        return [*_saved(), *_rank_files(home)]

    def _torch_zip(self, base: bytes, rng: random.Random) -> None:
        data = base
        if rng.random() < 0.7:
            data = damage.damage_archive(
                data, lambda name, record: damage.damage_pickle(record, rng), _pick(rng)
            )
        if data == base or rng.random() < 0.3:
            data = damage.damaged_bytes(data, damage.random_byte_edits(rng, near=400))
        self._indexed(data)

    def _torch_legacy_bases(self, home: Path) -> list[bytes]:
        return _saved(**OLD)

    def _torch_legacy(self, base: bytes, rng: random.Random) -> None:
        if rng.random() < 0.6:
            base = damage.damage_pickle(base, rng)
        else:
            base = damage.damaged_bytes(base, damage.random_byte_edits(rng, near=800))
        self._indexed(base)

    def _indexed(self, data: bytes) -> None:
        path = self.room / "x.bin"
        path.write_bytes(data)
        index = torch_zip.index(path)
        check_extents(index, len(data))
        json.dumps(repr(index.extra))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = dict(_flat(torch.load(path, weights_only=True)))
        except Exception:
            return  # stricter than we are about classes, and laxer about nothing that is compared
        for name, entry in index.entries.items():
            if name in wanted and wanted[name].device.type == "cpu":
                broken_unless(_same(data, entry, wanted[name]), f"{name}: torch.load reads another")

    # --- torch.distributed.checkpoint ---------------------------------------------------------

    def _dcp_bases(self, home: Path) -> list[dict[str, bytes]]:
        native = write_native(home / "native", 1, 1, made=model_case(), **OPTIONS)
        hf = write_hf(home / "hf", **SMALL)
        reshard(hf, home / "weights", to="torch_dist")
        reshard(native, home / "all", to="torch_dist", tp=2)
        found = []
        for name in ("weights", "all"):
            folder = next(path.parent for path in (home / name).rglob(dcp.METADATA))
            found.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
        return found

    def _dcp(self, base: dict[str, bytes], rng: random.Random) -> None:
        files = dict(base)
        name = rng.choice([dcp.METADATA, dcp.METADATA, *files])
        if name == dcp.METADATA and rng.random() < 0.7:
            files[name] = damage.damage_pickle(files[name], rng)
        else:
            files[name] = damage.damaged_bytes(files[name], damage.random_byte_edits(rng))
        for key, data in files.items():
            _put(self.room / key, data)
        folder = storage_path(self.room)
        listing = dcp.listing(folder)
        blobs = [blob for stored in listing.tensors.values() for blob in stored.blobs]
        dcp.read_headers(blobs)
        for blob in blobs:
            span = _span(blob.box.sizes, blob.strides) * ITEMSIZE[blob.dtype]
            inside = blob.start_bytes <= blob.offset_bytes
            stop = blob.start_bytes + blob.length_bytes
            broken_unless(inside and blob.offset_bytes + span <= stop, f"{blob.name}: outside")
        for blob in listing.objects.values():
            json.dumps(repr(dcp.objects(blob).extra))

    # --- JSON ---------------------------------------------------------------------------------

    def _json_bases(self, home: Path) -> list[tuple[str, dict[str, bytes]]]:
        found = []
        for family in FAMILIES:
            config = json.dumps(case(family, layers=2).config).encode()
            found.append(("config.json", {"config.json": config}))
        native = write_native(home / "native", 1, 1, made=model_case(), **OPTIONS)
        split = write_split(home / "split", parts=2, made=model_case())
        for folder, name in ((native, "checkpoint.json"), (split, "model.safetensors.index.json")):
            files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
            found += [(name, files), ("config.json", files)]
        return found

    def _json(self, base: tuple[str, dict[str, bytes]], rng: random.Random) -> None:
        name, files = base
        folder = self.room / f"{name}-{len(files)}"
        folder.mkdir(exist_ok=True)
        for key, data in files.items():
            _put(folder / key, data)
        path = folder / name
        if rng.random() < 0.8:
            damage.damage_table(path, damage.random_json_edits(rng))
        if rng.random() < 0.3:
            damage.damage_bytes(path, damage.random_byte_edits(rng, near=300))
        table = load_json(path, finite=False)
        wanted = json.loads(path.read_bytes())
        broken_unless(repr(table) == repr(wanted), "other values than json reads")
        if len(files) == 1:
            load_model(path)
        else:
            json.dumps(describe(read_checkpoint(folder)))


# --- what must hold ---------------------------------------------------------------------------


def check_extents(index: Index, size: int) -> None:
    """Every element of every tensor lies in the file."""
    for name, entry in index.entries.items():
        stop = entry.offset_bytes + _span(entry.shape, entry.strides) * ITEMSIZE[entry.dtype]
        broken_unless(entry.offset_bytes >= 0 and stop <= size, f"{name}: outside of the file")


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _same(data: bytes, entry: object, tensor: torch.Tensor) -> bool:
    """Whether an entry's elements are the tensor's, bit by bit."""
    if tuple(tensor.shape) != entry.shape:
        return False
    if tensor.numel() == 0 or tensor.numel() > 1 << 20:
        return True
    width = ITEMSIZE[entry.dtype]
    span = _span(entry.shape, entry.strides) * width
    raw = np.frombuffer(data, np.uint8, span, entry.offset_bytes)
    steps = tuple(step * width for step in entry.strides)
    view = np.lib.stride_tricks.as_strided(raw, (*entry.shape, width), (*steps, 1))
    mine = np.ascontiguousarray(view).tobytes()
    return mine == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _flat(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(joined key, tensor) of every tensor inside dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield name.removeprefix("."), value
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from _flat(inner, f"{name}.{key}")


# --- inputs -----------------------------------------------------------------------------------


def _saved(**options: object) -> list[bytes]:
    """Files of torch.save: weights, an optimizer, odd tensors and views."""
    made, line = model_case(), torch.arange(24, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    adam = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    adam.step()
    odd = {
        "views": [line[3:9], line.reshape(4, 6).t(), line.expand(2, 24)], "step": torch.tensor(3),
        "half": torch.arange(4).bfloat16(), "none": torch.zeros(0, 5), "flag": True, "lr": 1e-3,
        "names": {"a", "b"}, "nested": {"b": (torch.ones(2, dtype=torch.int64), None)},
    }  # fmt: skip
    found = []
    for value in (made.state, {"model": made.state, "optimizer": adam.state_dict()}, odd):
        out = io.BytesIO()
        torch.save(value, out, **options)
        found.append(out.getvalue())
    return found


def _rank_files(home: Path) -> list[bytes]:
    """A native .bin file, and one of Megatron's with args and optimizer."""
    native = write_native(home / "native", 1, 1, made=model_case(), **OPTIONS)
    binary = write_native(home / "bin", 1, 1, made=model_case(), safe=False, **OPTIONS)
    reshard(native, home / "classic", to="megatron")
    paths = [*sorted(binary.glob("*.bin")), *(home / "classic").rglob("*.pt")]
    return [path.read_bytes() for path in paths]


def _pick(rng: random.Random) -> int:
    """Which record of an archive: mostly the first, the pickle."""
    return rng.choice([0, 0, 0, rng.randint(0, 50)])


def _put(path: Path, data: bytes) -> None:
    """Write a file unless it has these bytes."""
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
