"""Fingerprints: the same for every layout and format of the same values, and for nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from independent import pack_states, stored, write_native
from safetensors.numpy import load_file, save_file
from strategies import raw, write_hf

from shardwright.ckpt import CheckpointError, reshard
from shardwright.ckpt.fingerprint import as_json, fingerprint, read_fingerprints
from shardwright.ckpt.inspect import row_major_blocks
from shardwright.tools import verify_ckpt
from shardwright.tools.all_commands import main


@pytest.fixture(params=["llama", "gpt2"])
def case(request):
    return raw(request.param, heads=(4, 4), head_dim=4, layers=4, vocab=24)


@pytest.fixture
def hf(case, tmp_path) -> Path:
    write_hf(tmp_path / "hf", case)
    return tmp_path / "hf"


def digests(path: Path) -> dict[str, str]:
    return {name: found.digest for name, found in fingerprint(path).items()}


def test_a_digest_is_xxh3_of_the_bits_in_row_major_order(hf):
    truth = load_file(hf / "model.safetensors")
    found = digests(hf)
    assert found
    for name, digest in found.items():
        array = truth.get(name, truth.get(name.removeprefix("transformer.")))
        assert array is not None
        assert digest == xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).tobytes())


@pytest.mark.parametrize("words", [
    {"tp": 2, "pp": 2}, {"tp": 4, "safe_serialization": False}, {"to": "megatron", "tp": 2},
    {"to": "torch_dist", "pp": 2}, {"to": "hf", "max_shard_size": 4000},
])  # fmt: skip
def test_layout_and_format_do_not_change_it(words, hf, tmp_path):
    reshard(hf, tmp_path / "out", **words)
    assert digests(tmp_path / "out") == digests(hf)


def test_optimizer_state_has_digests_too(case, tmp_path):
    states = {"exp_avg": case.numbered(50_000), "exp_avg_sq": case.numbered(100_000)}
    write_native(
        tmp_path / "a", case.config, stored(case.config, case.state, 2, 2),
        pack_states(case.config, states, 2, 2),
    )  # fmt: skip
    reshard(tmp_path / "a", tmp_path / "b", tp=1, pp=4, dp=2)
    found = digests(tmp_path / "a")
    assert found == digests(tmp_path / "b")
    assert {name.split("/")[0] for name in found if "/" in name} == {"exp_avg", "exp_avg_sq"}


def test_a_checkpoint_whose_source_is_gone_is_checked_against_a_file(hf, tmp_path, capsys):
    reshard(hf, tmp_path / "out", tp=2, pp=2)
    assert main(["fingerprint", str(hf), "--json"]) == 0
    file = tmp_path / "f.json"
    file.write_text(capsys.readouterr().out)
    shutil.rmtree(hf)
    assert verify_ckpt.main([str(tmp_path / "out"), "--against", str(file)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


def test_one_bit_a_dtype_a_shape_and_a_name_are_differences(hf, tmp_path, capsys):
    file = tmp_path / "f.json"
    table = as_json(fingerprint(hf))
    file.write_text(json.dumps(table))
    arrays = load_file(hf / "model.safetensors")
    one, two, *_ = sorted(arrays)
    arrays[one].view(np.uint32).reshape(-1)[-1] ^= 1
    arrays[two] = arrays[two].astype(np.float16)
    save_file(arrays, hf / "model.safetensors", {"format": "pt"})
    assert verify_ckpt.main([str(hf), "--against", str(file)]) == 1
    said = capsys.readouterr().out
    assert "values differ: " in said
    assert "dtype F32 and F16" in said
    assert "different: 2 tensors differ; " in said
    del table["tensors"][next(iter(table["tensors"]))]
    file.write_text(json.dumps(table))
    assert verify_ckpt.main([str(hf), "--against", str(file)]) == 1
    assert f"missing in {file}" in capsys.readouterr().out


def test_a_file_of_another_scheme_is_refused(hf, tmp_path, capsys):
    file = tmp_path / "f.json"
    for text in ("{}", '{"scheme": "other", "tensors": {}}', "[1]", "not json"):
        file.write_text(text)
        with pytest.raises(CheckpointError):
            read_fingerprints(file)
    assert verify_ckpt.main([str(hf), "--against", str(file)]) == 2
    with pytest.raises(SystemExit):
        verify_ckpt.main([str(hf), str(hf), "--against", str(file)])


def test_the_list_ends_with_one_digest_of_all(hf, capsys):
    assert main(["fingerprint", str(hf)]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"{as_json(fingerprint(hf))['all']}  all {len(rows)} tensors"
    assert dict(reversed(row.split("  ")) for row in rows) == digests(hf)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3), (2, 3, 4), (1, 9, 1, 2)])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_blocks_are_runs_of_the_row_major_order(shape, most):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    parts = [array[block].reshape(-1) for block in row_major_blocks(shape, most)]
    assert all(part.size <= most for part in parts)
    assert np.array_equal(np.concatenate([np.empty(0, int), *parts]), array.reshape(-1))
