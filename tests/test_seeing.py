"""What commands show: lists of tensors, also of damaged folders, and outputs that are verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from independent import pack_states, stored, write_native
from safetensors.numpy import load_file
from strategies import raw, write_hf

from shardwright.ckpt import reshard
from shardwright.tools import inspect_ckpt, merge_ckpt
from shardwright.tools import reshard as reshard_tool


@pytest.fixture
def case():
    return raw("llama", heads=(4, 4), head_dim=4, layers=4, vocab=24)


@pytest.fixture
def hf(case, tmp_path) -> Path:
    write_hf(tmp_path / "hf", case)
    return tmp_path / "hf"


@pytest.fixture
def trained(case, tmp_path) -> Path:
    states = {"exp_avg": case.numbered(50_000), "exp_avg_sq": case.numbered(100_000)}
    write_native(
        tmp_path / "run", case.config, stored(case.config, case.state, 2, 2),
        pack_states(case.config, states, 2, 2),
    )  # fmt: skip
    return tmp_path / "run"


def listed(capsys, *words: object, code: int = 0) -> dict:
    """The JSON of ``inspect-ckpt ... --json``."""
    capsys.readouterr()
    assert inspect_ckpt.main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- inspect-ckpt --tensors ----------------------------------------------------------------------


def test_a_pattern_lists_names_types_and_shapes(hf, capsys):
    truth = load_file(hf / "model.safetensors")
    rows = listed(capsys, hf, "--tensors", "*")["tensors"]
    assert {r["name"]: (r["dtype"], tuple(r["shape"])) for r in rows} == {
        name: ("F32", array.shape) for name, array in truth.items()
    }
    rows = listed(capsys, hf, "--tensors", "*.layers.[12].mlp.*")["tensors"]
    assert {r["name"] for r in rows} == {n for n in truth if ".1.mlp." in n or ".2.mlp." in n}
    rows = listed(capsys, hf, "--tensors", "q_proj")["tensors"]
    assert {r["name"] for r in rows} == {n for n in truth if "q_proj" in n}


def test_statistics_are_numpys(trained, case, capsys):
    rows = listed(capsys, trained, "--tensors", "*", "--statistics")["tensors"]
    assert {r["name"].split("/")[0] for r in rows if "/" in r["name"]} >= {"exp_avg", "exp_avg_sq"}
    for row in rows:
        if row["name"] in case.state:
            truth = np.asarray(case.state[row["name"]], np.float64)
            found = row["statistics"]
            assert (found["min"], found["max"]) == (truth.min(), truth.max())
            assert found["mean"] == pytest.approx(truth.mean())
            assert found["std"] == pytest.approx(truth.std(), rel=1e-6)
    assert inspect_ckpt.main([str(trained), "--tensors", "model.norm.weight", "--statistics"]) == 0
    line = " ".join(capsys.readouterr().out.splitlines()[0].split())
    assert line.startswith("model.norm.weight F32 [16] min ")


def test_a_folder_that_lacks_a_rank_shows_the_others_and_the_fault(trained, capsys):
    whole = load_file(trained / "model_tp_0_pp_0.safetensors")
    (trained / "model_tp_1_pp_1.safetensors").unlink()
    (trained / "model_tp_1_pp_0.safetensors").write_bytes(b"\xff" * 9)
    found = listed(capsys, trained, "--tensors", "*", "--statistics", code=1)
    assert "model_tp_1_pp_1.safetensors: is missing" in found["fault"]
    rows = [r for r in found["tensors"] if r["file"] == "model_tp_0_pp_0.safetensors"]
    assert {r["name"]: tuple(r["shape"]) for r in rows} == {n: a.shape for n, a in whole.items()}
    for row in rows:
        assert row["statistics"]["max"] == whole[row["name"]].max()
    (broken,) = [r for r in found["tensors"] if r["file"] == "model_tp_1_pp_0.safetensors"]
    assert "fault" in broken
    assert inspect_ckpt.main([str(trained), "--tensors", "qkv"]) == 1
    captured = capsys.readouterr()
    assert "model_tp_0_pp_0.safetensors:\n" in captured.out
    assert "is missing" in captured.err


@pytest.mark.parametrize("safe", [True, False])
def test_the_file_of_one_rank_is_shown_alone(safe, trained, tmp_path, capsys):
    truth = load_file(trained / "model_tp_1_pp_0.safetensors")
    folder = tmp_path / "out"
    reshard(trained, folder, tp=2, pp=2, safe_serialization=safe)
    name = "model_tp_1_pp_0.safetensors" if safe else "pytorch_model_tp_1_pp_0.bin"
    shutil.move(folder / name, tmp_path / name)
    found = listed(capsys, tmp_path / name, "--tensors", "*", "--statistics")
    assert {r["name"]: tuple(r["shape"]) for r in found["tensors"]} == {
        n: a.shape for n, a in truth.items()
    }
    for row in found["tensors"]:
        assert row["statistics"]["min"] == truth[row["name"]].min()


def test_a_torch_dist_folder_that_lacks_a_file_lists_its_tensors(hf, tmp_path, capsys):
    reshard(hf, tmp_path / "td", to="torch_dist", tp=2)
    for file in (tmp_path / "td").rglob("*.distcp"):
        file.unlink()
    found = listed(capsys, tmp_path / "td", "--tensors", "norm", "--statistics", code=1)
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["decoder.layers.self_attention.linear_qkv.layer_norm_weight"]["shape"] == [4, 16]
    assert rows["decoder.final_layernorm.weight"]["shape"] == [16]
    assert all("is missing" in row["note"] for row in rows.values())
    assert ".metadata" in rows["decoder.final_layernorm.weight"]["file"]


def test_no_match_and_a_misspelled_name_say_what_there_is(hf, capsys):
    assert inspect_ckpt.main([str(hf), "--tensors", "nothing*"]) == 1
    assert "no tensor matches nothing*" in capsys.readouterr().err
    assert inspect_ckpt.main([str(hf), "--tensor", "q_proj"]) == 1
    assert "similar names: model.layers.0.self_attn.q_proj" in capsys.readouterr().err
    assert inspect_ckpt.main([str(hf), "--tensor", "%%%"]) == 1
    assert "--tensors '*' lists all" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        inspect_ckpt.main([str(hf), "--statistics"])
    assert stopped.value.code == 2


# --- --verify -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["--tp 4 --pp 1", "--tp 1 --to megatron", "--tp 2 --to torch_dist", "--to hf",
     "--tp 2 --dtype bf16", "--tp 4 --weights-only", "--dtype bf16"],
)  # fmt: skip
def test_reshard_verifies_what_it_wrote(words, trained, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(trained), *words.split(), "--output", str(out), "--verify"]
    assert reshard_tool.main(command) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("verified: ")
    assert said.endswith(" tensors equal")
    full = not ({"hf", "--weights-only"} & set(words.split()))
    assert (int(said.split()[1]) > 60) == full, "optimizer state is compared as well"


@pytest.mark.parametrize("tool", [reshard_tool, merge_ckpt])
def test_an_output_that_differs_is_found(tool, trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    words = ["--to", "hf"] if tool is reshard_tool else []
    from shardwright.ckpt import convert

    real = convert.verify_output

    def damaged(*args: object, **more: object) -> object:
        file = out / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return real(*args, **more)

    monkeypatch.setattr(convert, "verify_output", damaged)
    assert tool.main([str(trained), *words, "--output", str(out), "--verify"]) == 1
    assert "differs: " in capsys.readouterr().out


def test_a_dry_run_cannot_be_verified(trained, capsys):
    with pytest.raises(SystemExit) as stopped:
        reshard_tool.main([str(trained), "--tp", "1", "--dry-run", "--verify"])
    assert stopped.value.code == 2
