"""What a checkpoint of hundreds of billions of parameters says of itself: read, at a stated cost.

torch's own classes write the metadata; the files that it names are sparse.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import bounded
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.ckpt import CheckpointError
from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.containers import dcp
from shardwright.ckpt.model.family import build_mesh
from shardwright.ckpt.model.placement import MAX_PIECES, _too_many
from shardwright.ckpt.move.storage import MAX_PARSED_BYTES, storage_path

BLOB_BYTES = 1500
TIMES = 24  # memory for each byte of `.metadata`; docs/commands.md says so


def written(folder: Path, layers: int, experts: int, planner: object = None) -> int:
    """``.metadata`` of so many experts' weights and three states each, cut into 4; its bytes."""
    tensors, places = {}, {}
    ends: dict[str, int] = {}
    properties = TensorProperties(dtype=torch.bfloat16)
    heads = ["", *(f"optimizer.state.{s}." for s in ("exp_avg", "exp_avg_sq", "fp32_param"))]
    names = [
        f"{head}decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        for head in heads
        for layer in range(layers)
        for expert in range(experts)
    ]
    for number, name in enumerate(names):
        chunks = []
        for rank in range(4):
            offsets = torch.Size([4 * rank, 0])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([4, 8])))
            file = f"__{rank}_{number % 8}.distcp"
            at = ends.get(file, 0)
            ends[file] = at + BLOB_BYTES
            places[MetadataIndex(name, offsets, rank)] = _StorageInfo(file, at, BLOB_BYTES)
        tensors[name] = TensorStorageMetadata(properties, torch.Size([16, 8]), chunks)
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, planner, places)))
    for file, size in ends.items():
        with (folder / file).open("wb") as opened:
            opened.truncate(size)
    return (folder / ".metadata").stat().st_size


def test_metadata_costs_a_stated_multiple_of_its_bytes(tmp_path: Path) -> None:
    size = written(tmp_path / "x", 6, 64)
    with bounded.measured() as cost:
        found = dcp.listing(storage_path(tmp_path / "x"))
    assert len(found.tensors) == 4 * 6 * 64
    assert all(len(stored.blobs) == 4 for stored in found.tensors.values())
    assert cost.peak_bytes < TIMES * size + (4 << 20)
    assert cost.cpu_s < bounded.CPU_SECONDS


def test_metadata_may_be_larger_than_a_header(tmp_path: Path) -> None:
    """Beyond 100 MB it was refused. Most of it are often the ranks' plans, which nobody needs."""
    plans = [f"{number:08d}" * 4000 for number in range(3300)]
    size = written(tmp_path / "x", 1, 2, plans)
    assert size > MAX_PARSED_BYTES
    with bounded.measured() as cost:
        found = dcp.listing(storage_path(tmp_path / "x"))
    assert len(found.tensors) == 8
    assert cost.peak_bytes < 3 * size


@pytest.mark.slow
def test_metadata_of_half_a_million_blobs_costs_the_same_multiple(tmp_path: Path) -> None:
    size = written(tmp_path / "x", 58, 680)
    assert size > MAX_PARSED_BYTES
    with bounded.measured(stop_after_s=600) as cost:
        found = dcp.listing(storage_path(tmp_path / "x"))
    assert len(found.tensors) == 4 * 58 * 680
    assert cost.peak_bytes < TIMES * size


@pytest.mark.parametrize("head", [b"", b"\x80\x04"])
def test_a_sparse_file_is_refused_before_it_is_read(head: bytes, tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(head)
        file.truncate(3 << 30)
    with bounded.measured() as cost, pytest.raises(CheckpointError, match="are no pickle"):
        dcp.listing(storage_path(tmp_path))
    assert cost.peak_bytes < 1 << 20


GPT3 = {
    "model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048,
    "vocab_size": 50257,
}  # fmt: skip


def test_rows_of_the_first_checkpoint_version_are_placed_if_the_files_have_the_bytes() -> None:
    """GPT-3 in version 1 has a piece for each row of query, key and value: 7 million."""
    model = model_from(GPT3, "config")
    mesh = build_mesh(model, (("tp", 8), ("pp", 8)))
    scope = {**model.sizes, "padded_vocab": 51200, **dict(mesh.axes)}
    rows = 3 * model.sizes["h"]
    packed = {"qkv": "h"}  # a round for each row
    rules = [rule for rule in model.rules() if not rule.mesh]
    assert 96 * rows * 2 > MAX_PIECES
    assert _too_many(rules, scope, mesh, packed, 0)
    assert not _too_many(rules, scope, mesh, packed, 2 * 175_000_000_000)
    assert _too_many(rules, scope, mesh, packed, 1 << 20)
