"""CRC-32s that files record: found, right, and checked where descriptions are read."""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from fixtures_safety import case, write_hf, write_native

from shardwright.ckpt import CheckpointError, reshard
from shardwright.ckpt.containers import torch_zip
from shardwright.ckpt.reader import read_checkpoint

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
}


def saved(path: Path, value: object = TENSORS) -> Path:
    torch.save(value, path)
    return path


def as_recorded(data: bytes, found) -> None:
    """Each checksum that was found is that of its bytes."""
    for row in found:
        part = data[row.offset_bytes : row.offset_bytes + row.length_bytes]
        assert zlib.crc32(part) == row.crc32


def test_every_storage_of_a_zip_has_its_checksum_with_the_place_of_its_bytes(tmp_path):
    path = saved(tmp_path / "a.bin")
    found = list(torch_zip.checksums(path))
    assert sorted(row.length_bytes for row in found) == [10, 48]
    entries = torch_zip.index(path).entries
    assert {row.offset_bytes for row in found} == {entries[n].offset_bytes for n in ("a", "b")}
    as_recorded(path.read_bytes(), found)


def test_a_file_that_was_told_to_record_no_checksums_has_none(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "a.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    assert list(torch_zip.checksums(path)) == []
    assert set(torch_zip.index(path).entries) == set(TENSORS)


def test_the_old_form_and_safetensors_record_none(tmp_path):
    path = tmp_path / "a.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    assert list(torch_zip.checksums(path)) == []
    assert list(read_checkpoint(write_hf(tmp_path / "hf")).checksums()) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_description_that_lost_a_bit_is_refused_with_both_checksums(tmp_path):
    path = saved(tmp_path / "a.bin", OrderedDict(TENSORS))
    at = path.read_bytes().index(b"bfloat16" if b"bfloat16" in path.read_bytes() else b"storage")
    flip(path, path.read_bytes().index(b"cpu", at) + 1)  # a name that nothing depends on
    with pytest.raises(
        CheckpointError, match=r"data\.pkl.* has the CRC-32 \w{8}, .* records \w{8}"
    ):
        torch_zip.index(path)


def test_a_flipped_bit_of_a_tensor_shows_in_its_checksum_alone(tmp_path):
    path = saved(tmp_path / "a.bin")
    entries = torch_zip.index(path).entries
    flip(path, entries["a"].offset_bytes + 5)
    assert set(torch_zip.index(path).entries) == set(TENSORS)  # no description was hit
    data = path.read_bytes()
    wrong = [
        row.offset_bytes
        for row in torch_zip.checksums(path)
        if zlib.crc32(data[row.offset_bytes :][: row.length_bytes]) != row.crc32
    ]
    assert wrong == [entries["a"].offset_bytes]


@pytest.mark.parametrize("to", ["megatron", "torch_dist", "shards", "hf"])
def test_what_is_written_records_the_checksums_of_all_its_tensors(to, tmp_path):
    source = write_native(tmp_path / "native", 1, 1, made=case(), multiple=2)
    options = {} if to in ("megatron", "torch_dist") else {"safe_serialization": False}
    reshard(source, tmp_path / "out", to=to, **options)
    found = list(read_checkpoint(tmp_path / "out").checksums())
    by_file: dict[str, int] = {}
    for row in found:
        data = Path(row.file).read_bytes()
        assert zlib.crc32(data[row.offset_bytes :][: row.length_bytes]) == row.crc32
        by_file[row.file] = by_file.get(row.file, 0) + row.length_bytes
    held = read_checkpoint(tmp_path / "out").manifest
    extents = [c.view.extent() for chunks in held.chunks.values() for c in chunks] if to in (
        "shards", "hf",
    ) else [(0, 1)]  # fmt: skip
    assert sum(by_file.values()) >= sum(stop - start for start, stop in extents)


@pytest.mark.parametrize("name", ["llama_bf16_tp2pp2_torch", "llama_bf16_tp2pp2_torch_dist"])
def test_the_checksums_of_golden_checkpoints_are_those_of_their_bytes(name, golden):
    found = list(read_checkpoint(golden / name).checksums())
    assert len(found) > 20
    for row in found:
        with open(row.file, "rb") as file:
            file.seek(row.offset_bytes)
            assert zlib.crc32(file.read(row.length_bytes)) == row.crc32


def test_one_storage_under_two_types_is_refused(tmp_path):
    """torch.save refuses to write it; torch.load would take the first type for both."""
    path = saved(tmp_path / "a.bin", {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.int32)})
    data = path.read_bytes()
    entries = torch_zip.index(path).entries
    assert {e.dtype for e in entries.values()} == {"F32", "I32"}
    at = data.index(b"X\x01\x00\x00\x001")  # the key of the second storage
    path.write_bytes(resealed(data[:at] + b"X\x01\x00\x00\x000" + data[at + 6 :]))
    with pytest.raises(CheckpointError, match="storage '0' is 4 F32 in one place and 4 I32 in"):
        torch_zip.index(path)


def resealed(data: bytes) -> bytes:
    """The archive, whose first record is data.pkl, with the CRC-32 of that record put right."""
    start, row = data.index(b"PK\3\4"), data.index(b"PK\1\2")
    names, extras = struct.unpack_from("<2H", data, start + 26)
    (size,) = struct.unpack_from("<L", data, row + 24)
    body = start + 30 + names + extras
    assert data[start + 30 :][:names].endswith(b"/data.pkl")
    crc = struct.pack("<L", zlib.crc32(data[body : body + size]))
    changed = bytearray(data)
    changed[start + 14 : start + 18] = changed[row + 16 : row + 20] = crc
    return bytes(changed)
