"""A checksum that exists is a checksum that is checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from strategies import raw, write_hf

from shardwright.ckpt import CheckpointError, ReadOptions, RunOptions, merge, reshard, verify
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import reshard as reshard_tool

QUIET = RunOptions(workers=1)
SUMS = RunOptions(workers=1, checksum=True)
AS_IT_IS = RunOptions(workers=1, verify_source=False)
ROWS = ReadOptions(vocab_size=21)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """One model in every form that records a checksum, each in a folder of its own."""
    root = tmp_path_factory.mktemp("places")
    hf = write_hf(root / "hf", raw("llama", layers=2))
    found = {"hf bin": merge(hf, root / "hf bin", safe_serialization=False, run=QUIET).output}
    for to in ("megatron", "torch_dist"):
        found[to] = reshard(hf, root / to, to=to, tp=2, run=QUIET).output
        found[f"{to} digests"] = reshard(hf, root / f"{to} digests", to=to, tp=2, run=SUMS).output
    found["shards bin"] = reshard(
        hf, root / "shards bin", tp=2, safe_serialization=False, run=QUIET
    ).output
    found["shards digests"] = reshard(hf, root / "shards digests", tp=2, run=SUMS).output
    found["hf digests"] = merge(hf, root / "hf digests", run=SUMS).output
    return found


NAMES = (
    "hf bin", "hf digests", "shards bin", "shards digests", "megatron", "megatron digests",
    "torch_dist", "torch_dist digests",
)  # fmt: skip


def flipped(source: Path, folder: Path) -> tuple[Path, Path]:
    """A copy with one bit of one tensor flipped, and the file that holds it."""
    made = Path(shutil.copytree(source, folder))
    opened = read_checkpoint(made, None if "bin" in source.name else ReadOptions())
    fqn = next(f for f in opened.manifest.tensors if f.endswith("layers.1.mlp.down_proj.weight"))
    view = opened.manifest.chunks[fqn][0].view
    path = Path(view.file)
    data = bytearray(path.read_bytes())
    data[view.offset_bytes + 2] ^= 4
    path.write_bytes(data)
    return made, path


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_damage_wherever_a_checksum_is_recorded(name, places, tmp_path):
    """It was given a valid new checksum by the next conversion."""
    assert verify(places[name], run=QUIET).same
    made, path = flipped(places[name], tmp_path / "damaged")
    found = [f for f in verify(made, run=QUIET).findings if f.kind == "file"]
    assert found
    assert {f.name for f in found} == {str(path)}
    says = "xxh3-128" if "digests" in name else "CRC-32"
    assert any(says in f.text and "is recorded" in f.text for f in found)
    for job in (
        lambda run: merge(made, tmp_path / "hf", run=run),
        lambda run: reshard(made, tmp_path / "x", tp=1, to="shards", run=run),
    ):
        with pytest.raises(CheckpointError, match="the source is damaged") as error:
            job(QUIET)
        assert path.name in str(error.value)
        assert "--no-verify-source" in str(error.value)
        report = job(AS_IT_IS)
        assert "not checked (--no-verify-source)" in "\n".join(report.lines())
        shutil.rmtree(report.output)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("name", NAMES)
def test_the_report_says_what_was_checked(name, places, tmp_path):
    report = reshard(places[name], tmp_path / "x", tp=1, to="shards", read=None, run=QUIET)
    (line,) = [line for line in report.lines() if line.startswith("checksums of the source")]
    assert "all right" in line
    assert ("xxh3-128 of files: " in line) == ("digests" in name)
    assert ("CRC-32 of records: " in line) == ("digests" not in name)


def test_files_without_a_checksum_are_said_to_have_none(tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama", layers=2))
    report = reshard(hf, tmp_path / "x", tp=2, run=QUIET)
    assert "checksums of the source: none recorded; files that record none: 1" in report.lines()


def test_crcs_of_zero_throughout_mean_that_none_was_recorded(tmp_path):
    """torch can be told to write none."""
    case = raw("llama", layers=2)
    hf = write_hf(tmp_path / "hf", case)
    (hf / "model.safetensors").unlink()
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(case.state, hf / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(was)
    assert verify(hf, run=QUIET).same
    report = reshard(hf, tmp_path / "x", tp=2, run=QUIET)
    assert any("none recorded" in line for line in report.lines())


def test_what_a_job_does_not_read_is_not_checked(places, tmp_path):
    """Damage of the optimizer does not stop a merge, which leaves it out."""
    from independent import pack_states, stored, write_native

    case = raw("llama", layers=2)
    moments = {s: case.numbered(1000) for s in ("exp_avg", "exp_avg_sq")}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 2, 1),
        pack_states(case.config, moments, 2, 1),
    )
    made = reshard(source, tmp_path / "made", tp=2, run=SUMS).output
    path = made / "optimizer_tp_1_pp_0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    merge(made, tmp_path / "hf", run=QUIET)
    reshard(made, tmp_path / "w", tp=1, weights_only=True, run=QUIET)
    with pytest.raises(CheckpointError, match="optimizer_tp_1_pp_0"):
        reshard(made, tmp_path / "x", tp=1, run=QUIET)


def test_the_command_has_one_flag_for_it(places, tmp_path, capsys):
    made, path = flipped(places["shards digests"], tmp_path / "damaged")
    call = [str(made), "--tp", "1", "--output", str(tmp_path / "x")]
    assert reshard_tool.main(call) == 1
    assert path.name in capsys.readouterr().err
    assert reshard_tool.main([*call, "--no-verify-source"]) == 0
    assert json.loads((tmp_path / "x/checkpoint.json").read_text())["mesh"]["tp"] == 1


def test_a_resume_refuses_what_is_damaged(places, tmp_path):
    """Each rank checks its share of the files; of one process it is all of them."""
    from types import SimpleNamespace

    from shardwright.train.checkpoint.load import _check_source
    from shardwright.train.errors import TrainError

    one_rank, lines = SimpleNamespace(rank=0, control=None), []
    _check_source(read_checkpoint(places["shards digests"]), one_rank, lines.append)
    assert lines[0].startswith("checksums of the source, all right: xxh3-128 of files: 2")
    made, path = flipped(places["shards digests"], tmp_path / "damaged")
    with pytest.raises(TrainError, match=r"is damaged \(--no-verify-source") as error:
        _check_source(read_checkpoint(made), one_rank, lines.append)
    assert path.name in str(error.value)


def test_what_a_tensor_lies_in_is_checked_right_before_it_is_moved(places, tmp_path, monkeypatch):
    """All checks came first: a source larger than memory was read from its disk twice."""
    from shardwright.ckpt import integrity
    from shardwright.ckpt.move.executor import Mover

    log: list[object] = []
    move, check = Mover.move, integrity._fault
    monkeypatch.setattr(Mover, "move", lambda *a: (log.append(a[1]), move(*a))[1])
    monkeypatch.setattr(integrity, "_fault", lambda *a: (log.append(a[0]), check(*a))[1])
    report = reshard(places["shards bin"], tmp_path / "x", tp=1, to="shards", run=QUIET)
    checked: list[object] = []
    for row in log:
        if not isinstance(row, list):
            checked.append(row)
            continue
        for copy in row:
            start, stop = copy.src.extent()
            lies = [c for c in checked if c.file == copy.src.file and c.offset_bytes <= start]
            assert any(stop <= c.offset_bytes + c.length_bytes for c in lies), copy.fqn
    assert len(checked) == len(set(checked))  # fused tensors and replicas: each record once
    assert f"CRC-32 of records: {len(checked)}," in "\n".join(report.lines())
    first_move = next(i for i, row in enumerate(log) if isinstance(row, list))
    assert any(not isinstance(row, list) for row in log[first_move:])


def test_every_damaged_record_is_named_wherever_the_first_one_lies(places, tmp_path):
    made = Path(shutil.copytree(places["shards bin"], tmp_path / "damaged"))
    opened = read_checkpoint(made)
    wanted = set()
    for fqn in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        view = opened.manifest.chunks[fqn][0].view
        data = bytearray(Path(view.file).read_bytes())
        data[view.offset_bytes] ^= 1
        Path(view.file).write_bytes(data)
        wanted.add(f"bytes {view.offset_bytes} to ")
    with pytest.raises(CheckpointError, match=r"damaged .*\(3 faults\)") as error:
        reshard(made, tmp_path / "x", tp=1, run=RunOptions(workers=3))
    assert all(text in str(error.value) for text in wanted)


def test_crc_32_has_the_same_values_with_and_without_isa_l(monkeypatch):
    import importlib
    import random
    import sys
    import zlib

    from shardwright.ckpt.move import crc

    fast = crc.crc32
    monkeypatch.setitem(sys.modules, "isal", None)
    slow = importlib.reload(crc).crc32
    assert slow is zlib.crc32
    monkeypatch.undo()
    assert importlib.reload(crc).crc32 is fast
    rng = random.Random(0)
    assert fast(b"123456789", 0) == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    for size in (*range(70), 1000, 65_537):
        data, start = rng.randbytes(size), rng.getrandbits(32)
        assert fast(memoryview(data), start) == slow(data, start)


def test_digests_in_capitals_are_the_same_digests(places, tmp_path):
    made = Path(shutil.copytree(places["shards digests"], tmp_path / "made"))
    file = made / "checkpoint.json"
    table = json.loads(file.read_text())
    for row in table["files"].values():
        row["xxh3_128"] = row["xxh3_128"].upper()
    file.write_text(json.dumps(table))
    assert verify(made, run=QUIET).same
    merge(made, tmp_path / "hf", run=QUIET)


def test_a_recorded_dtype_that_no_weight_has_is_refused(places, tmp_path):
    made = Path(shutil.copytree(places["shards digests"], tmp_path / "made"))
    file = made / "checkpoint.json"
    table = json.loads(file.read_text())
    assert table["dtype"] == "float32"
    file.write_text(json.dumps({**table, "dtype": "bfloat16"}))
    for job in (lambda: verify(made), lambda: merge(made, tmp_path / "hf")):
        with pytest.raises(CheckpointError, match=r"dtype is bfloat16, the weights are float32"):
            job()
