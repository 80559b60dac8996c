"""What is no checkpoint: each says what it is and the line to type, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from independent import stored, write_native
from safetensors.torch import load_file, save_file
from strategies import raw, write_hf

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.reader import read_checkpoint

QUIET = RunOptions(workers=1)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def hf(tmp_path) -> Path:
    return write_hf(tmp_path / "hf", raw("llama", layers=2), sides=True)


def refusal(path: object, **options: object) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path, **options)
    return str(error.value)


# --- single files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model_tp_0_pp_1.safetensors", "one rank of a checkpoint of several; give its folder"),
        ("pytorch_model_tp_0_pp_0.bin", "one rank"),
        ("model-00001-of-00003.safetensors", "one part of the weights; give its folder"),
        ("optimizer.bin", "the state of an optimizer"),
        ("optimizer_tp_0_pp_0.safetensors", "the state of an optimizer"),
        ("scheduler.pt", "a trainer's state"),
        ("rng_state_0.pth", "a trainer's state"),
        ("random_states_0.safetensors", "a trainer's state"),
        ("training_args.bin", "a trainer's state"),
        ("adapter_model.safetensors", "a LoRA adapter"),
        ("distrib_optim.pt", "Megatron-LM; give the folder of its iteration"),
        ("common.pt", "a part of a distributed checkpoint"),
        ("__0_0.distcp", "a part of a distributed checkpoint"),
        ("tiny.Q4_K_M.gguf", "a GGUF file"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py"),
        ("model_world_size_2_rank_0.pt", "verl"),
    ],
)
def test_a_single_file_that_is_no_model_is_refused_by_name(name, part, tmp_path):
    """Any safetensors file was taken for a Hugging Face model."""
    save_file({"x": torch.ones(2)}, tmp_path / name)
    said = refusal(tmp_path / name)
    assert part in said
    assert "\n" not in said
    if "folder: " in said:
        assert str(tmp_path) in said.partition("folder: ")[2]


def test_one_rank_file_gives_one_line(tmp_path):
    case = raw("llama", layers=4)
    folder = write_native(tmp_path / "a", case.config, stored(case.config, case.state, 2, 2))
    said = refusal(folder / "model_tp_1_pp_0.safetensors")
    assert "\n" not in said
    assert said.endswith(f"give its folder: {folder}")


def test_a_file_without_a_config_says_that_names_are_not_checked(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "weights.safetensors")
    (note,) = read_checkpoint(tmp_path / "weights.safetensors").notes
    assert "no config.json" in note
    assert "--config" in note


# --- folders ------------------------------------------------------------------------------------


def _lora(folder):
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def _verl(folder):
    for rank in range(2):
        (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"x")


def _fsdp(folder):
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "optimizer_0").mkdir()


def _dcp(folder):
    (folder / "__0_0.distcp").write_bytes(b"x")
    (folder / "metadata.txt").write_bytes(b"x")


def _trainer(folder):
    for step in (500, 1000, 90):
        (folder / f"checkpoint-{step}").mkdir()


def _rank(folder):
    (folder / "model_optim_rng.pt").write_bytes(b"x")


def _gguf(folder):
    (folder / "tiny.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (_lora, ("a LoRA adapter of 'org/base'", "merge_and_unload")),
        (_verl, ("verl", "verl.model_merger merge --backend fsdp --local_dir")),
        (_fsdp, ("FSDP", "accelerate merge-weights", "pytorch_model_fsdp_0 OUT")),
        (_trainer, ("3 checkpoints", "checkpoint-1000")),
        (_rank, ("one rank of a checkpoint of Megatron-LM", "give the folder above: ")),
        (_gguf, ("GGUF",)),
    ],
)
def test_a_folder_of_another_tool_is_named_with_the_way_on(make, parts, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    said = refusal(folder)
    for part in parts:
        assert part in said, said
    assert "neither" not in said


def test_iterations_of_megatron_are_found_without_a_tracker_and_inside_each_other(hf, tmp_path):
    made = reshard(hf, tmp_path / "made", to="megatron", tp=1, run=QUIET).output
    (name,) = [child.name for child in made.iterdir() if child.name.startswith(("iter_", "rel"))]
    whole = open_checkpoint(made)["model.norm.weight"][:]
    (made / TRACKER).unlink()
    said = refusal(made)
    assert f"{TRACKER}: is missing" in said
    assert name in said
    assert (open_checkpoint(made / name)["model.norm.weight"][:] == whole).all()
    ranks = made / name / "mp_rank_00"
    ranks = next(c for c in (made / name).iterdir() if c.name.startswith("mp_rank_"))
    assert f"give the folder above: {made / name}" in refusal(ranks)
    assert f"give the folder of its iteration: {made / name}" in refusal(
        ranks / "model_optim_rng.pt"
    )
    (tmp_path / "outer" / name).mkdir(parents=True)
    shutil.move(made / name, tmp_path / "outer" / name / name)
    (tmp_path / "outer" / TRACKER).write_text("release" if name == "release" else name[5:])
    said = refusal(tmp_path / "outer")
    assert "an iteration inside an iteration" in said
    assert str(tmp_path / "outer" / name / name) in said


# --- names that are no paths --------------------------------------------------------------------


def test_a_hub_name_says_how_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal("org/tiny-model")
    assert "fetch it with --download, or with: hf download org/tiny-model" in said
    assert "hf download org/tiny-model --revision v1" in refusal("org/tiny-model@v1")
    assert "hf download" not in refusal("a/b/c")
    assert "hf download" not in refusal(tmp_path / "absent")


# --- what hides the cause -----------------------------------------------------------------------

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named_for_what_it_is(name, hf):
    (hf / name).write_text(POINTER)
    said = refusal(hf)
    assert f"{name}: a Git LFS pointer" in said
    assert f"git -C {hf} lfs pull" in said


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_wrapper_around_all_names_is_said_first(prefix, hf):
    path = hf / "model.safetensors"
    save_file({prefix + name: x for name, x in load_file(path).items()}, path)
    said = refusal(hf)
    first = said.splitlines()[0]
    assert f"every name begins with {prefix!r}" in first
    assert prefix + "lm_head.weight" in first or prefix + "model." in first


def test_a_quantization_config_beside_plain_weights_is_said(hf):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    said = refusal(hf)
    assert "the weights are plain (F32)" in said


def test_weights_of_8_bits_under_a_plain_config_are_refused(hf):
    path = hf / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.int8)
    save_file(state, path)
    assert "lm_head.weight: I8 and no scale" in refusal(hf)


def test_a_tied_flag_beside_a_head_of_its_own_names_both(tmp_path):
    case = raw("llama-tied", layers=2)
    case.state["lm_head.weight"] = case.state["model.embed_tokens.weight"] + 1
    hf = write_hf(tmp_path / "hf", case)
    with pytest.raises(CheckpointError) as error:
        reshard(hf, tmp_path / "x", tp=1, run=QUIET)
    (line,) = verify(hf, run=QUIET).differences
    for said in (str(error.value), line):
        for part in ("model.embed_tokens.weight: ", "lm_head.weight is stored beside it",
                     '"tie_word_embeddings": false'):  # fmt: skip
            assert part in said


# --- two formats, two descriptions --------------------------------------------------------------


def test_a_checkpoint_json_wins_over_a_stray_file_with_a_line(hf, tmp_path):
    made = reshard(hf, tmp_path / "made", tp=2, run=QUIET).output
    other = raw("llama", layers=2, start=7)
    save_file(other.state, made / "model.safetensors", {"format": "pt"})
    found = read_checkpoint(made)
    assert found.format == "shards"
    assert any("--format hf reads them" in note for note in found.notes)
    assert verify(hf, made).same
    stray = read_checkpoint(made, ReadOptions(format="hf"))
    assert stray.format == "hf"
    assert not verify(hf, made, read_b=ReadOptions(format="hf")).same
    assert "holds shards and hf" in refusal(made, format="megatron")
    assert "not a format" in refusal(made, format="gguf")


def test_two_formats_without_a_description_are_refused_until_one_is_named(hf, tmp_path):
    made = reshard(hf, tmp_path / "made", to="megatron", tp=1, run=QUIET).output
    shutil.copy(hf / "model.safetensors", made)
    said = refusal(made)
    assert "holds checkpoints of 2 formats, megatron and hf" in said
    assert "--format" in said
    assert open_checkpoint(made, format="megatron", vocab_size=21).format == "megatron"
    assert open_checkpoint(made, format="hf").format == "hf"


def test_checkpoint_json_and_config_json_must_describe_one_model(hf, tmp_path):
    made = reshard(hf, tmp_path / "made", tp=2, run=QUIET).output
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    said = refusal(made)
    for part in ("checkpoint.json: vocab_size is 21", "config.json says 20"):
        assert part in said


@pytest.mark.parametrize("kind", ["hf", "shards"])
def test_a_config_option_does_not_override_the_checkpoints_own(kind, hf, tmp_path):
    source = hf if kind == "hf" else reshard(hf, tmp_path / "made", tp=2, run=QUIET).output
    config = json.loads((hf / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    changed = {**config, "rope_theta": 8e6, "rms_norm_eps": 1e-3, "eos_token_id": 9}
    (other / "config.json").write_text(json.dumps(changed))
    said = refusal(source, config=other)
    for part in (
        "rope theta is",
        "8000000.0",
        "norm epsilon is",
        "0.001",
        str(other),
        "config.json",
    ):
        assert part in said
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    assert open_checkpoint(source, config=other).format == kind


# --- what is not needed is not asked for --------------------------------------------------------


def test_optimizer_files_that_are_gone_do_not_stop_what_does_without(hf, tmp_path):
    case = raw("llama", layers=2)
    from independent import pack_states

    moments = {s: case.numbered(1000) for s in ("exp_avg", "exp_avg_sq")}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 2, 1),
        pack_states(case.config, moments, 2, 1),
    )
    made = reshard(source, tmp_path / "made", tp=2, run=QUIET).output
    for path in made.glob("optimizer_*"):
        path.unlink()
    merge(made, tmp_path / "hf2", run=QUIET)
    reshard(made, tmp_path / "b", tp=1, weights_only=True, run=QUIET)
    assert verify(made, weights_only=True).same
    with pytest.raises(
        CheckpointError, match=r"optimizer_tp_0_pp_0\.safetensors: is missing.*--we"
    ):
        reshard(made, tmp_path / "c", tp=1, run=QUIET)
    found = verify(made).findings
    assert {f.kind for f in found} == {"optimizer", "file"}
    assert "optimizer_tp_0_pp_0.safetensors: is missing" in found[0].text
    made = reshard(source, tmp_path / "one", tp=2, run=QUIET).output
    (made / "optimizer_tp_1_pp_0.safetensors").unlink()
    merge(made, tmp_path / "hf3", run=QUIET)
    said = refusal(made)
    assert re.search(r"optimizer_tp_1_pp_0\.safetensors: is missing", said)


# --- a source that changes ----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["after the header", "times put back"])
def test_a_file_exchanged_after_its_header_was_read_is_noticed(when, hf, tmp_path, monkeypatch):
    import os

    from shardwright.ckpt.containers import safetensors

    path = hf / "model.safetensors"
    other = tmp_path / "other.safetensors"
    save_file({k: x + 1 for k, x in load_file(path).items()}, other, {"format": "pt"})
    was = path.stat()
    real = safetensors.index

    def exchange(file):
        found = real(file)
        if other.exists():
            if when == "times put back":
                path.write_bytes(other.read_bytes())
                other.unlink()
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            else:
                os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
                other.rename(path)
        return found

    monkeypatch.setattr(safetensors, "index", exchange)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        reshard(hf, tmp_path / "out", tp=2, run=QUIET)
    assert not (tmp_path / "out").exists()
