"""CRC-32s and digests that are made while the files grow: those of the finished bytes."""

import json
import random
import threading
import zipfile
import zlib

import pytest
import xxhash
from fixtures_safety import write_hf, write_native
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ckpt import CheckpointError, RunOptions, jobs, merge, reshard
from shardwright.ckpt.model.box import full
from shardwright.ckpt.model.design import Design, OutFile
from shardwright.ckpt.model.file_layout import Checksum, FileLayout
from shardwright.ckpt.model.manifest import Manifest, View
from shardwright.ckpt.model.planner import Copy
from shardwright.ckpt.move import seal as sealer
from shardwright.ckpt.move.executor import Mover
from shardwright.ckpt.move.files import Files, create

RUN = {"checksum": True, "quiet": True}


def true_digest(path):
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def copy_to(name, path, offset, length):
    """A copy whose only side that matters here is the bytes that it writes."""
    view = View(str(path), offset, (length,), (1,), "U8")
    return Copy(name, full((length,)), view, view)


@st.composite
def growing_file(draw):
    """(size, tensors as (offset, length), whether each has a CRC-32, order of finishing)."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    at, tensors = 0, []
    for length in lengths:
        at += 4 + draw(st.integers(0, 3))  # a slot, and a gap
        tensors.append((at, length))
        at += length
    crc = draw(st.booleans())
    return at + 4 * len(tensors), tensors, crc, draw(st.permutations(range(len(tensors))))


@settings(max_examples=40)
@given(made=growing_file(), least=st.integers(1, 100))
def test_digest_and_crcs_are_those_of_the_whole_file_in_any_order(made, least, tmp_path_factory):
    size, tensors, crc, order = made
    path = tmp_path_factory.mktemp("x") / "f"
    tail = size - 4 * len(tensors)
    sums = tuple(Checksum(o, n, (o - 4, tail + 4 * i)) for i, (o, n) in enumerate(tensors))
    layout = FileLayout(size, {}, (), sums if crc else ())
    create(str(path), layout)
    work = [[copy_to(f"t{i}", path, o, n)] for i, (o, n) in enumerate(tensors)]
    design = Design([OutFile(str(path), layout)], Manifest({}, {}))
    old, sealer.STEP_BYTES = sealer.STEP_BYTES, least
    try:
        made = sealer.ChecksumFollower(design, work, checksum=True)
        with Files() as files:
            for i in order:
                offset, length = tensors[i]
                data = bytes(random.Random(i).randbytes(length))
                files.write(str(path), offset, memoryview(data))
                made.finish(i)
                made.follow(work[i], files, threading.Event())
        found = made.close(2)
    finally:
        sealer.STEP_BYTES = old
    data = path.read_bytes()
    assert found == {str(path): (size, xxhash.xxh3_128_hexdigest(data))}
    for i, (offset, length) in enumerate(tensors if crc else ()):
        want = zlib.crc32(data[offset : offset + length]).to_bytes(4, "little")
        assert data[offset - 4 : offset] == data[tail + 4 * i : tail + 4 * i + 4] == want


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("safe", [True, False])
def test_digests_are_those_of_the_files(workers, safe, tmp_path, monkeypatch):
    monkeypatch.setattr(sealer, "STEP_BYTES", 64)
    write_hf(tmp_path / "hf")
    run = RunOptions(workers=workers, **RUN)
    reshard(tmp_path / "hf", tmp_path / "s", tp=2, pp=2, safe_serialization=safe, run=run)
    table = json.loads((tmp_path / "s" / "checkpoint.json").read_text())["files"]
    assert len(table) == 4
    one = tmp_path / ("one.safetensors" if safe else "one.bin")
    report = merge(tmp_path / "s", one, run=run)
    files = {tmp_path / "s" / name: row["xxh3_128"] for name, row in table.items()}
    for path, mark in {**files, one: report.digests[one.name]}.items():
        assert mark == true_digest(path)
        assert safe or zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("safe", [True, False])
def test_a_continued_run_has_the_digests_of_the_whole_files(safe, tmp_path, monkeypatch):
    monkeypatch.setattr(sealer, "STEP_BYTES", 64)
    monkeypatch.setattr(jobs, "SYNC_SECONDS", -1.0)
    write_native(tmp_path / "native")
    out, how = tmp_path / "out", {"tp": 2, "pp": 1, "safe_serialization": safe}
    moved, move = [], Mover.move

    def failing(self, copies):
        moved.append(copies)
        if len(moved) == 7:
            raise CheckpointError("the disk is gone")
        move(self, copies)

    run = RunOptions(workers=1, resume=True, **RUN)
    monkeypatch.setattr(Mover, "move", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        reshard(tmp_path / "native", out, **how, run=run)
    report = reshard(tmp_path / "native", out, **how, run=run)
    assert any("continued: 6 tensors" in line for line in report.notes)
    table = json.loads((out / "checkpoint.json").read_text())["files"]
    for name, row in table.items():
        assert row["xxh3_128"] == true_digest(out / name)
        assert safe or zipfile.ZipFile(out / name).testzip() is None


def test_the_digest_is_nearly_done_when_the_last_tensor_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sealer, "STEP_BYTES", 1)
    write_hf(tmp_path / "hf")
    left, close = [], sealer.ChecksumFollower.close

    def watched(self, workers):
        left.extend(trail.path for trail in self._trails.values() if not trail.done)
        return close(self, workers)

    monkeypatch.setattr(sealer.ChecksumFollower, "close", watched)
    merge(tmp_path / "hf", tmp_path / "one.bin", run=RunOptions(workers=1, **RUN))
    assert left == []
