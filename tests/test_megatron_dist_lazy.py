"""Blobs of torch_dist files are looked at when a copy needs them, and each file is opened once."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_megatron_dist import (
    DPRESHARD,
    FULL,
    SOURCES,
    V013,
    _copy,
    _iteration,
    _replaced,
    _Unpickler,
)

from shardwright.ckpt import CheckpointError, ReadOptions, merge, open_checkpoint, reshard, verify
from shardwright.ckpt.jobs import RunOptions
from shardwright.ckpt.reader import read_checkpoint

FP32 = "gpt2_fp32_tp2pp2_torch_dist"
WEIGHT = "decoder.layers.mlp.linear_fc2.weight"
MOMENT = f"optimizer.state.exp_avg.{WEIGHT}"
_opened: list[str] | None = None


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(args[0]))


sys.addaudithook(_hook)  # cannot be taken away again, so one is enough for all tests


@contextmanager
def _opens() -> Iterator[Counter[str]]:
    """How often each .distcp file is opened, by whatever function."""
    global _opened
    counts: Counter[str] = Counter()
    _opened = found = []
    try:
        yield counts
    finally:
        _opened = None
        counts.update(Path(path).name for path in found if path.endswith(".distcp"))


def _damaged(root: Path, wanted: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Zero the blobs of tensors whose name is wanted; (file, tensor) of each."""
    content = _Unpickler(io.BytesIO((_iteration(root) / ".metadata").read_bytes())).load()
    found = []
    for index, info in content.storage_data.items():
        if index.offset is None or not wanted(index.fqn):
            continue
        with (_iteration(root) / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            file.write(bytes(info.length))
        found.append((info.relative_path, index.fqn))
    assert found
    return found


def _is_optimizer(name: str) -> bool:
    return name.startswith("optimizer.")


@pytest.mark.parametrize("name", SOURCES)
def test_names_shapes_and_dtypes_come_from_metadata_alone(
    golden: Path, tmp_path: Path, name: str
) -> None:
    root = _copy(golden, tmp_path, name)
    for path in _iteration(root).glob("*.distcp"):
        # The flat form keeps its hyperparameters in a blob.
        keep = name == DPRESHARD and path.read_bytes()
        path.write_bytes(keep or bytes(path.stat().st_size))
    if name == DPRESHARD:
        _damaged(root, lambda _: True)
    wanted, found = read_checkpoint(golden / name), read_checkpoint(root)
    assert found.manifest.tensors == wanted.manifest.tensors
    boxes = [
        {fqn: [chunk.box for chunk in chunks] for fqn, chunks in ckpt.manifest.chunks.items()}
        for ckpt in (wanted, found)
    ]
    assert boxes[0] == boxes[1]


@pytest.mark.parametrize("name", SOURCES)
def test_reading_opens_no_file_of_blobs_but_for_hyperparameters(golden: Path, name: str) -> None:
    with _opens() as counts:
        read_checkpoint(golden / name)
    assert sum(counts.values()) == (1 if name == DPRESHARD else 0)


def test_a_plan_opens_each_file_once(golden: Path, tmp_path: Path) -> None:
    files = {path.name for path in (golden / FP32).rglob("*.distcp")}
    with _opens() as counts:
        reshard(golden / FP32, tmp_path / "out", to="shards", tp=4, pp=1,
                run=RunOptions(dry_run=True))  # fmt: skip
    assert counts == dict.fromkeys(files, 1)


@pytest.mark.parametrize("name", [FULL, V013])
def test_a_look_at_masters_before_takes_two_opens_more(
    golden: Path, tmp_path: Path, name: str
) -> None:
    """One for the headers, one for the elements that are compared."""
    with _opens() as counts:
        reshard(golden / name, tmp_path / "out", to="shards", tp=4, pp=1,
                run=RunOptions(dry_run=True))  # fmt: skip
    assert counts
    assert max(counts.values()) <= 3


def test_a_slice_opens_the_files_that_hold_it(golden: Path) -> None:
    """The first pipeline stage's two ranks wrote the first layer."""
    array = open_checkpoint(golden / FP32)["transformer.h.0.attn.c_attn.weight"]
    with _opens() as counts:
        assert array[:1].shape[0] == 1
    assert counts
    assert all(name.startswith(("__0_", "__1_")) for name in counts)


@pytest.mark.parametrize("name", SOURCES)
def test_weights_do_not_need_the_optimizers_blobs(golden: Path, tmp_path: Path, name: str) -> None:
    root = _copy(golden, tmp_path, name)
    _damaged(root, _is_optimizer)
    found, wanted = open_checkpoint(root), open_checkpoint(golden / name)
    for fqn in wanted:
        if "/" not in fqn:
            assert torch.equal(found[fqn].torch(), wanted[fqn].torch()), fqn
    merge(root, tmp_path / "hf")
    reshard(root, tmp_path / "out", to="shards", tp=1, pp=2, weights_only=True)
    verdict = verify(tmp_path / "out", golden / name, weights_only=True)
    assert verdict.same, verdict.differences


@pytest.mark.parametrize("tensor", [WEIGHT, MOMENT])
def test_every_damaged_blob_that_is_needed_is_named_before_anything_is_written(
    golden: Path, tmp_path: Path, tensor: str
) -> None:
    root = _copy(golden, tmp_path, FP32)
    damaged = _damaged(root, lambda name: name == tensor)
    for use in (
        lambda: reshard(root, tmp_path / "out", to="shards", tp=2, pp=1),
        lambda: reshard(root, tmp_path / "out", to="torch_dist", run=RunOptions(dry_run=True)),
        lambda: verify(root),
        lambda: verify(root, golden / FP32),
    ):
        with pytest.raises(CheckpointError, match="no zip archive") as caught:
            use()
        assert all(f"{file}: {name} at byte " in str(caught.value) for file, name in damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_masters_of_fp32_weights_are_looked_at_though_none_is_moved(
    golden: Path, tmp_path: Path
) -> None:
    """Masters of fp32 weights, which the distributed optimizer writes, repeat the weights."""
    root = tmp_path / "in"
    reshard(golden / FP32, root, to="torch_dist", use_distributed_optimizer=True)
    assert verify(root).same
    _damaged(root, lambda name: name == f"optimizer.state.param.{WEIGHT}")
    with pytest.raises(CheckpointError, match=rf"state\.param\.{WEIGHT} at byte \d+: no zip"):
        reshard(root, tmp_path / "out", to="shards", tp=2, pp=1)
    reshard(root, tmp_path / "out", to="shards", tp=2, pp=1, weights_only=True)
    assert verify(root, read=ReadOptions(), weights_only=True).same
    with pytest.raises(CheckpointError, match=rf"state\.param\.{WEIGHT} at byte \d+: no zip"):
        verify(root)


# --- how a blob's elements lie, which its header says -------------------------------------------


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, its columns one after another."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("tensor", [WEIGHT, MOMENT, "decoder.layers.mlp.linear_fc1.weight"])
def test_a_blob_may_hold_its_dims_in_another_order(
    golden: Path, tmp_path: Path, tensor: str
) -> None:
    root = _copy(golden, tmp_path, FP32)
    _replaced(root, tensor, _turned)
    verdict = verify(root, golden / FP32)
    assert verdict.same, verdict.differences


# A pickle of that version imports megatron-core, which warns of what it lacks.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (V013, f"optimizer.state.exp_avg.{WEIGHT}"),
        (DPRESHARD, "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, "
                    "torch.float32).bucket_idx_0.exp_avg"),
    ],
)  # fmt: skip
def test_flattened_elements_that_lie_apart_are_refused_by_name(
    golden: Path, tmp_path: Path, name: str, tensor: str
) -> None:
    root = _copy(golden, tmp_path, name)
    _replaced(root, tensor, lambda x: torch.stack([x, x], -1)[..., 0])
    with pytest.raises(CheckpointError, match="its elements lie 2 apart") as caught:
        reshard(root, tmp_path / "out", to="shards", tp=1, pp=1)
    assert tensor in str(caught.value)
    assert not (tmp_path / "out").exists()
