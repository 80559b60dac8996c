"""Megatron-LM's classic checkpoints are read: weights, optimizer state, old forms, faults.

Golden files were written by Megatron-LM itself. Hand-made ones are packed by independent.py and
saved by torch.save.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from independent import Ranks, Tensors, engine_names, renumbered, stored

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    formats,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.move.storage import storage_path
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_command

SOURCES = ("gpt2_fp32_tp2pp2_torch", "llama8_fp32_tp2pp2vpp2_torch", "llama_bf16_tp2pp2_torch")
ORACLES = (
    "gpt2_fp32_tp2pp2_torch_dist__to_tp1pp1_torch",
    "gpt2_fp32_tp2pp2_torch_dist__to_tp4pp1_torch",
    "llama8_fp32_tp2pp2vpp2_torch_dist__to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp1pp4_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp4pp1_torch",
)
CONVERTED = (
    "gpt2_fp32_tp2pp2_torch__convertpy_to_tp1pp4_torch",
    "llama_bf16_tp1pp1_torch__convertpy_to_tp2pp2_torch",
    "llama_bf16_tp2pp2_torch__convertpy_to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch__convertpy_to_tp2pp1_torch",
)
DP = "llama_bf16_tp1pp2dp2_distopt_"
DISTRIBUTED = (  # of one training run: every pair is equal
    f"{DP}dpreshard_torch_dist__to_tp1pp2dp1_torch",
    f"{DP}fullyreshard_torch_dist__to_tp1pp1dp1_torch",
    f"{DP}fullyreshard_torch_dist__to_tp2pp1dp2_torch",
)
ALONE = (
    f"{DP}v013_torch_dist__to_tp2pp1dp1_torch",
    "llama_bf16_tp2pp1dp2_distopt_torch",
    "llama_bf16_tp2pp2_fusedadam_torch",
    "llama_bf16_tp1pp1_torch",
)
TRUE_ROWS = {"gpt2": 234, "llama8": 251, "llama": 251}

CONFIG = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "head_dim": 4,
          "num_key_value_heads": 4, "intermediate_size": 24, "num_hidden_layers": 4,
          "vocab_size": 32, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 4, "n_inner": 24,
        "n_positions": 8, "vocab_size": 32}  # fmt: skip
EMBEDDING = "embedding.word_embeddings.weight"


# --- hand-made checkpoints ---------------------------------------------------------------------


def _llama(groups: int = 4) -> Tensors:
    """A Llama model under Hugging Face's names."""
    made = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,),
              "lm_head.weight": (32, 16)}  # fmt: skip
    for i in range(4):
        m = f"model.layers.{i}."
        shapes |= {
            m + "input_layernorm.weight": (16,), m + "post_attention_layernorm.weight": (16,),
            m + "self_attn.q_proj.weight": (16, 16), m + "self_attn.o_proj.weight": (16, 16),
            m + "self_attn.k_proj.weight": (4 * groups, 16),
            m + "self_attn.v_proj.weight": (4 * groups, 16),
            m + "mlp.gate_proj.weight": (24, 16), m + "mlp.up_proj.weight": (24, 16),
            m + "mlp.down_proj.weight": (16, 24),
        }  # fmt: skip
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def _gpt2() -> Tensors:
    made = torch.Generator().manual_seed(2)
    shapes = {"wte.weight": (32, 16), "wpe.weight": (8, 16), "ln_f.weight": (16,),
              "ln_f.bias": (16,)}  # fmt: skip
    for i in range(4):
        m = f"h.{i}."
        shapes |= {
            m + "ln_1.weight": (16,), m + "ln_1.bias": (16,), m + "ln_2.weight": (16,),
            m + "ln_2.bias": (16,), m + "attn.c_attn.weight": (16, 48),
            m + "attn.c_attn.bias": (48,), m + "attn.c_proj.weight": (16, 16),
            m + "attn.c_proj.bias": (16,), m + "mlp.c_fc.weight": (16, 24),
            m + "mlp.c_fc.bias": (24,), m + "mlp.c_proj.weight": (24, 16),
            m + "mlp.c_proj.bias": (16,),
        }  # fmt: skip
    return {f"transformer.{n}": torch.randn(s, generator=made) for n, s in shapes.items()}


def _args(tp: int, pp: int, gpt2: bool = False, **more: object) -> argparse.Namespace:
    values: dict[str, object] = {
        "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
        "max_position_embeddings": 8, "padded_vocab_size": 32, "params_dtype": torch.float32,
        "make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }  # fmt: skip
    if not gpt2:
        values |= {
            "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
            "untie_embeddings_and_output_weights": True, "add_bias_linear": False,
            "kv_channels": 4,
        }  # fmt: skip
    return argparse.Namespace(**{**values, **more})


def _save(
    root: Path,
    models: Mapping[str, Mapping[str, object]],
    args: argparse.Namespace | None,
    *,
    version: float | None = 3.0,
    iteration: int = 5,
    release: bool = False,
    **more: object,
) -> Path:
    """``models``: rank folder -> the top-level keys that hold its model."""
    name = "release" if release else f"iter_{iteration:07d}"
    for rank, model in models.items():
        content: dict[str, object] = {"iteration": iteration, **model, **more}
        if args is not None:
            content["args"] = args
        if version is not None:
            content["checkpoint_version"] = version
        folder = root / name / rank
        folder.mkdir(parents=True)
        torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(
        "release" if release else str(iteration)
    )
    return root


def _models(ranks: Ranks) -> dict[str, dict[str, object]]:
    pp = 1 + max(p for _, p in ranks)
    return {
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""): {"model": tensors}
        for (t, p), tensors in renumbered(ranks).items()
    }


def _small(root: Path, tp: int = 2, pp: int = 2, **more: object) -> Path:
    return _save(root, _models(stored(CONFIG, _llama(), tp, pp, multiple=8)), _args(tp, pp, **more))


def _check(path: Path, wanted: Tensors, **options: object) -> None:
    found = open_checkpoint(path, **options)  # type: ignore[arg-type]
    assert {k for k in found if not k.startswith("padding/")} == set(wanted)
    for name, x in wanted.items():
        assert torch.equal(found[name].torch(), x), name


def _edit(root: Path, rank: str, change: Callable[[dict], object]) -> None:
    (path,) = root.glob(f"iter_*/{rank}/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


# --- Megatron-LM's own files -------------------------------------------------------------------


def _rows_of(name: str) -> ReadOptions:
    return ReadOptions(vocab_size=TRUE_ROWS[name.partition("_")[0]])


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_source_equals_what_megatron_made_of_its_twin_optimizer_included(
    golden: Path, oracle: str
) -> None:
    source = oracle.partition("_dist__")[0]
    rows = _rows_of(source)
    verdict = verify(golden / source, golden / oracle, read=rows, read_b=rows)
    assert verdict.same, verdict.differences
    assert verdict.tensors >= 3 * 39


@pytest.mark.parametrize("oracle", CONVERTED)
def test_a_source_equals_what_convert_py_made_of_it(golden: Path, oracle: str) -> None:
    source = oracle.partition("__")[0]
    verdict = verify(golden / source, golden / oracle, weights_only=True)
    assert verdict.same, verdict.differences


@pytest.mark.parametrize("other", DISTRIBUTED[1:])
def test_distributed_optimizers_of_one_run_are_equal_in_every_layout(
    golden: Path, other: str
) -> None:
    verdict = verify(golden / DISTRIBUTED[0], golden / other)
    assert verdict.same, verdict.differences
    assert verdict.tensors == 4 * 39


@pytest.mark.parametrize("name", ALONE)
def test_masters_round_to_the_weights_in_every_element(golden: Path, name: str) -> None:
    found = open_checkpoint(golden / name)
    weights = [fqn for fqn in found if "/" not in fqn]
    assert len(weights) == 39
    for fqn in weights:
        assert torch.equal(found["master/" + fqn].torch().bfloat16(), found[fqn].torch()), fqn


@pytest.mark.parametrize("name", [*SOURCES, *ALONE])
def test_nothing_of_a_file_is_left_without_an_account(golden: Path, name: str) -> None:
    ckpt = read_checkpoint(golden / name)
    assert not ckpt.unread_optimizer
    assert {reason for reason, _ in ckpt.left_out} - {
        "the rerun machine's state belongs to the saving run"
    } == {"_extra_state holds no weights", "random states belong to the ranks of the saving run"}
    assert [side.name for side in ckpt.manifest.side_files] == ["config.json"]
    assert ckpt.step == 3


@pytest.mark.parametrize(
    ("name", "step_in"),
    [("llama_bf16_tp2pp2_torch", "state"), ("llama_bf16_tp2pp2_fusedadam_torch", "groups"),
     ("llama_bf16_tp2pp1dp2_distopt_torch", "groups"), ("gpt2_fp32_tp2pp2_torch", "state")],
)  # fmt: skip
def test_hyperparameters_step_and_schedule_are_carried(
    golden: Path, name: str, step_in: str
) -> None:
    state = read_checkpoint(golden / name).manifest.state
    optimizer = state["megatron"]["optimizer"]
    assert (optimizer["step"], optimizer["step_in"]) == (3, step_in)
    assert [group["wd_mult"] for group in optimizer["param_groups"]] == [1.0, 0.0]
    assert state["param_groups"][0] == {
        "step": 3, "lr": 0.001, "weight_decay": 0.01, "eps": 1e-8, "wd_mult": 1.0,
        "lr_mult": 1.0, "betas": [0.9, 0.95],
    }  # fmt: skip
    assert state["schedule"]["style"] == "cosine"
    assert state["schedule"]["lr"] == 0.01
    assert state["schedule"]["num_steps"] == 3
    assert len(state["megatron"]["args"]) > 600
    json.dumps(state, allow_nan=False)


@pytest.mark.parametrize("name", SOURCES)
def test_the_merged_model_computes_what_megatron_computed(
    golden: Path, tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    merge_ckpt.command([str(golden / name), "--output", str(tmp_path / "hf"), "--quiet"])
    said = torch.load(golden / "forward" / f"{name}.pt", weights_only=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=said["logits"].dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(said["tokens"]).logits.float()
    assert logits.shape == said["logits"].shape
    tolerance = 5e-3 if "bf16" in name else 1e-6
    assert (logits - said["logits"].float()).abs().max() < tolerance


def test_the_commands_read_megatron_folders(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(golden / "llama8_fp32_tp2pp2vpp2_torch")
    assert inspect_ckpt.main([source]) == 0
    out = capsys.readouterr().out
    assert "format      megatron, family llama" in out
    assert "mesh        tp=2 pp=2" in out
    assert "not copied: random states" in out
    assert verify_ckpt.main([source]) == 0
    shards = str(tmp_path / "shards")
    words = [source, "--tp", "1", "--pp", "4", "--to", "shards", "--output", shards]
    assert reshard_command.main(words) == 0
    assert verify_ckpt.main([source, shards]) == 0
    table = json.loads((tmp_path / "shards" / "checkpoint.json").read_text())
    assert table["megatron"]["checkpoint_version"] == 3.0
    assert table["step"] == 3
    assert merge_ckpt.main([source, "--output", str(tmp_path / "hf"), "--vocab-size", "251"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 251


def test_a_folder_of_one_iteration_is_read_as_well(golden: Path) -> None:
    root = golden / "llama_bf16_tp2pp2_torch"
    assert verify(root, root / "iter_0000003").same


def test_a_distributed_optimizer_becomes_shards_of_another_layout(
    golden: Path, tmp_path: Path
) -> None:
    source = golden / "llama_bf16_tp2pp1dp2_distopt_torch"
    reshard(source, tmp_path / "out", tp=1, pp=2, dp=2, to="shards")
    assert verify(source, tmp_path / "out").same


# --- forms that hand-made files have ----------------------------------------------------------


def test_a_layout_is_read_back_to_the_logical_weights(tmp_path: Path) -> None:
    _check(_small(tmp_path), _llama())


def test_query_groups_interleave_as_the_golden_files_do(tmp_path: Path) -> None:
    config = {**CONFIG, "num_key_value_heads": 2}
    ranks = stored(config, _llama(2), 2, 1, multiple=8)
    args = _args(2, 1, num_query_groups=2, group_query_attention=True)
    _check(_save(tmp_path, _models(ranks), args), _llama(2))


def test_the_names_of_transformer_engine_are_read_and_extra_states_counted(tmp_path: Path) -> None:
    models = _models(engine_names(stored(CONFIG, _llama(), 2, 2, multiple=8)))
    for model in models.values():
        model["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = io.BytesIO(b"x")
        model["model"]["decoder.layers.1.mlp.linear_fc2._extra_state"] = None
    root = _save(tmp_path, models, _args(2, 2))
    _check(root, _llama())
    reasons = [reason for reason, _ in read_checkpoint(root).left_out]
    assert reasons.count("_extra_state holds no weights") == 2 * 4 + 4 * 2


@pytest.mark.parametrize(
    ("version", "packing"), [(None, "per_rank"), (0, "per_rank"), (1.0, "per_row"),
                             (2.0, "per_group"), (3.0, "per_group")],
)  # fmt: skip
def test_each_version_packs_its_rows_in_its_own_order(
    tmp_path: Path, version: float | None, packing: str
) -> None:
    ranks = stored(GPT2, _gpt2(), 2, 2, multiple=8, qkv=packing)
    root = _save(tmp_path, _models(ranks), _args(2, 2, gpt2=True), version=version)
    _check(root, _gpt2())
    assert read_checkpoint(root).layout["qkv"] == packing


def test_query_groups_in_a_version_without_them_are_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "num_key_value_heads": 2}
    models = _models(stored(config, _llama(2), 1, 1, multiple=8))
    root = _save(tmp_path, models, _args(1, 1, num_query_groups=2), version=None)
    with pytest.raises(CheckpointError, match=r"knows no query groups.*--layout qkv=per_group"):
        read_checkpoint(root)
    _check(root, _llama(2), layout={"qkv": "per_group"})


_LEGACY = {
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def _legacy(tensors: Tensors, body: str) -> dict[str, object]:
    """The nested dicts of before megatron-core."""
    language: dict[str, dict] = {body: {}}
    model: dict[str, object] = {"language_model": language}
    for name, x in tensors.items():
        head, _, rest = name.partition(".")
        if name == "output_layer.weight":
            model["word_embeddings_for_head"] = {"weight": x}
        elif head == "embedding":
            table, _, kind = rest.partition(".")
            language.setdefault("embedding", {})[table] = {kind: x}
        else:
            for ours, theirs in _LEGACY.items():
                if body == "encoder" and ".linear_" in ours and "attn" not in theirs:
                    theirs = theirs.replace("attention.", "self_attention.")
                rest = rest.replace(ours + ".", theirs + ".")
            language[body][rest] = x
    language[body]["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    return model


@pytest.mark.parametrize("body", ["encoder", "transformer"])
def test_names_of_before_megatron_core_are_read(tmp_path: Path, body: str) -> None:
    models = _models(stored(GPT2, _gpt2(), 2, 2, multiple=8))
    models = {rank: {"model": _legacy(m["model"], body)} for rank, m in models.items()}
    root = _save(tmp_path, models, _args(2, 2, gpt2=True), version=2.0)
    _check(root, _gpt2())
    reasons = {reason for reason, _ in read_checkpoint(root).left_out}
    assert reasons == {"a rotary table, computed from the config"}


def test_virtual_stages_hold_every_second_group_of_layers(tmp_path: Path) -> None:
    whole = stored(CONFIG, _llama(), 2, 4, multiple=8)
    models: dict[str, dict[str, object]] = {}
    for (t, stage), tensors in renumbered(whole).items():
        p, v = stage % 2, stage // 2
        models.setdefault(f"mp_rank_{t:02d}_{p:03d}", {})[f"model{v}"] = tensors
    args = _args(2, 2, virtual_pipeline_model_parallel_size=2)
    root = _save(tmp_path, models, args)
    _check(root, _llama())
    assert read_checkpoint(root).mesh.owned["pp"] == ((0, 2), (1, 3))


def test_stages_may_be_uneven(tmp_path: Path) -> None:
    ranks = stored(CONFIG, _llama(), 1, 3, multiple=8, pp_layers=(1, 2, 1))
    root = _save(tmp_path, _models(ranks), _args(1, 3, decoder_first_pipeline_num_layers=1))
    _check(root, _llama())
    assert read_checkpoint(root).mesh.owned["pp"] == ((0,), (1, 2), (3,))


def test_a_release_is_no_step_of_a_run(tmp_path: Path) -> None:
    models = _models(stored(CONFIG, _llama(), 1, 1, multiple=8))
    root = _save(tmp_path, models, _args(1, 1), release=True)
    _check(root, _llama())
    assert read_checkpoint(root).step is None


def test_iteration_picks_one_of_several(tmp_path: Path) -> None:
    _small(tmp_path)
    other = {name: x + 1 for name, x in _llama().items()}
    models = _models(stored(CONFIG, other, 1, 1, multiple=8))
    _save(tmp_path, models, _args(1, 1), iteration=9)
    _check(tmp_path, other)
    picked = read_checkpoint(tmp_path, ReadOptions(iteration=5))
    assert (picked.step, picked.mesh.size("tp")) == (5, 2)
    with pytest.raises(CheckpointError, match=r"iter_0000007: is not there.*iter_0000005, iter_0"):
        read_checkpoint(tmp_path, ReadOptions(iteration=7))


def test_one_suffix_counts_stages_where_args_or_the_contents_say_so(tmp_path: Path) -> None:
    models = _models(stored(CONFIG, _llama(), 1, 2, multiple=8))
    silent = _args(1, 2)
    del silent.pipeline_model_parallel_size
    _check(_save(tmp_path / "a", models, silent), _llama())
    alike = {f"mp_rank_00_{e:03d}": {"model": stored(CONFIG, _llama(), 1, 1, multiple=8)[0, 0]}
             for e in range(2)}  # fmt: skip
    for name, args in (("b", silent), ("c", _args(1, 1))):
        root = _save(tmp_path / name, alike, args)
        with pytest.raises(
            CheckpointError, match="expert-parallel rank, and the model has no experts"
        ):
            read_checkpoint(root)


def test_what_accelerate_adds_is_named_and_stays_behind(tmp_path: Path) -> None:
    root = _small(tmp_path / "in")
    for name in ("random_states_0.pkl", "sampler.bin", "scheduler.bin", "custom_checkpoint_0.pkl"):
        (root / name).write_bytes(b"x")
    (root / "tokenizer.json").write_text("{}")
    (root / "tensorboard").mkdir()
    ckpt = read_checkpoint(root)
    (line,) = [note for note in ckpt.notes if "Accelerate" in note]
    assert "random_states_0.pkl" in line
    assert "sampler.bin" in line
    assert any("tensorboard" in note for note in ckpt.notes)
    assert [side.name for side in ckpt.manifest.side_files] == ["tokenizer.json", "config.json"]


def test_a_config_of_hugging_face_cuts_the_vocabulary(tmp_path: Path) -> None:
    root = _small(tmp_path / "in")
    config = {**CONFIG, "vocab_size": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = {k: x[:30] if x.shape[0] == 32 else x for k, x in _llama().items()}
    _check(root, wanted, config=tmp_path)


def test_a_model_of_tied_stages_has_its_copy_compared(tmp_path: Path) -> None:
    ranks = stored(GPT2, _gpt2(), 1, 2, multiple=8)
    root = _save(tmp_path, _models(ranks), _args(1, 2, gpt2=True))
    assert verify(root).same
    _edit(root, "mp_rank_00_001", lambda c: c["model"]["output_layer.weight"].add_(1))
    assert not verify(root).same


# --- what is wrong is named ---------------------------------------------------------------------


def _mixed(root: Path) -> None:
    _edit(root, "mp_rank_01_000", lambda c: c.update(iteration=6))


def _of_another_width(root: Path) -> None:
    def change(content: dict) -> None:
        content["args"].hidden_size = 32

    for rank in ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
        _edit(root, rank, change)


def _without(root: Path) -> None:
    shutil.rmtree(root / "iter_0000005" / "mp_rank_01_001")


def _empty(root: Path) -> None:
    (root / "iter_0000005" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()


def _muon(root: Path) -> None:
    _empty(root)
    (root / "iter_0000005" / "mp_rank_01_001" / "layer_wise_optimizer_0.pt").write_bytes(b"")


def _unknown_tensor(root: Path) -> None:
    _edit(root, "mp_rank_01_001", lambda c: c["model"].update({"decoder.odd": torch.ones(2)}))


def _lacks_one(root: Path) -> None:
    _edit(root, "mp_rank_01_001", lambda c: c["model"].pop("decoder.final_layernorm.weight"))


def _strange_version(root: Path) -> None:
    _edit(root, "mp_rank_00_000", lambda c: c.update(checkpoint_version=4.5))


def _tracker(text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / "latest_checkpointed_iteration.txt").write_text(text)

    return change


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_mixed, "different saves: iteration is mp_rank_00_000 5.*mp_rank_01_000 6"),
    (_of_another_width, r"shape \[16.*needs"),
    (_without, "mp_rank_01_001: is missing"),
    (_empty, "mp_rank_01_001/model_optim_rng.pt: is missing"),
    (_muon, "layer_wise_optimizer_0.pt is of a layer-wise optimizer"),
    (_unknown_tensor, r"decoder.odd: unknown tensor.*\[2\]"),
    (_lacks_one, "mp_rank_01_001.*decoder.final_layernorm.weight: missing"),
    (_strange_version, "checkpoint_version 4.5; 0, 1, 2 and 3 are known"),
    (_tracker("8"), "iter_0000008: is not there, and latest_.* says 8; iterations here: iter_0000"),
    (_tracker("soon"), "says 'soon', neither an iteration nor 'release'"),
]


@pytest.mark.parametrize(("change", "says"), FAULTS, ids=[c.__name__ + s[:9] for c, s in FAULTS])
def test_a_fault_is_named(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    root = _small(tmp_path)
    change(root)
    with pytest.raises(CheckpointError, match=re.compile(says, re.DOTALL)):
        read_checkpoint(root)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_experts": 8}, r"layers.0.mlp.experts.local_experts.0.linear_fc1.weight: missing"),
        ({"multi_latent_attention": True}, "multi_latent_attention=True and kv_lora_rank None"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'.*--config"),
        ({"normalization": "LayerNorm"}, "rotary positions without RMSNorm and SwiGLU"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"padded_vocab_size": 64}, "padded_vocab_size 64, its files hold 32 rows on 2 ranks"),
        ({"num_layers": 6}, "args say 6 layers, the files hold 4"),
        ({"tensor_model_parallel_size": 4}, "mp_rank_03_001: is missing"),
        ({"tensor_model_parallel_size": 1}, "args say tp 1, the folders are those of 2"),
        ({"fp8": "hybrid"}, "fp8 with delayed scaling.*--weights-only"),
    ],
)
def test_args_that_are_not_those_of_the_files_are_refused(
    tmp_path: Path, more: dict[str, object], says: str
) -> None:
    args = _args(2, 2, **more) if "tensor" not in next(iter(more)) else _args(2, 2)
    vars(args).update(more)
    root = _save(tmp_path, _models(stored(CONFIG, _llama(), 2, 2, multiple=8)), args)
    with pytest.raises(CheckpointError, match=re.compile(says, re.DOTALL)):
        read_checkpoint(root)


def test_fp8_weights_are_read_without_the_training_state(tmp_path: Path) -> None:
    assert read_checkpoint(_small(tmp_path, fp8="hybrid"), ReadOptions(weights_only=True)).model
    assert read_checkpoint(_small(tmp_path / "b", fp8="hybrid", fp8_recipe="blockwise")).model


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("executed"),))


def test_an_unknown_global_is_named_and_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = _models(stored(CONFIG, _llama(), 1, 1, multiple=8))
    root = _save(tmp_path / "in", models, _args(1, 1), odd=_Evil())
    with pytest.raises(CheckpointError, match="refused, nothing was executed"):
        read_checkpoint(root)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt",
                                  "zero_pp_rank_0_mp_rank_00_optim_states.pt"])  # fmt: skip
def test_folders_of_deepspeed_are_told_apart(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"DeepSpeed or GPT-NeoX.*convert_neox_to_hf\.py"):
        read_checkpoint(tmp_path)


# --- optimizers that cannot be trusted ---------------------------------------------------------


def _copy(golden: Path, name: str, into: Path) -> Path:
    return Path(shutil.copytree(golden / name, into / name))


def _poked(path: Path, change: Callable[[dict], object]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_masters_that_do_not_round_to_the_weights_leave_the_optimizer_unread(
    golden: Path, tmp_path: Path
) -> None:
    root = _copy(golden, "llama_bf16_tp2pp1dp2_distopt_torch", tmp_path)
    file = root / "iter_0000003" / "mp_rank_01" / "distrib_optim.pt"
    _poked(file, lambda c: next(iter(c[0].values()))["param"].neg_())
    ckpt = read_checkpoint(root)
    assert re.search("distrib_optim.pt: buffer 0: element 0 of the master", ckpt.unread_optimizer)
    with pytest.raises(CheckpointError, match="--weights-only"):
        reshard(root, tmp_path / "out", tp=1)
    assert read_checkpoint(root, ReadOptions(weights_only=True)).manifest.tensors


def _truncated(content: dict) -> None:
    (values,) = content[0].values()
    values["numel_unpadded"] -= 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_truncated, "no known order of buckets"),
        (lambda c: c.pop("buckets_coalesced"), "of before 2024"),
        (lambda c: c.update({1: c[0]}), "2 buffers, the parameters of this rank make 1"),
    ],
    ids=["total", "uncoalesced", "buffers"],
)
def test_a_flat_buffer_that_does_not_fit_is_said(
    golden: Path, tmp_path: Path, change: Callable[[dict], object], says: str
) -> None:
    root = _copy(golden, "llama_bf16_tp2pp1dp2_distopt_torch", tmp_path)
    _poked(root / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt", change)
    assert says in read_checkpoint(root).unread_optimizer


def test_a_missing_distrib_optim_is_named(golden: Path, tmp_path: Path) -> None:
    root = _copy(golden, "llama_bf16_tp2pp1dp2_distopt_torch", tmp_path)
    (root / "iter_0000003" / "mp_rank_01" / "distrib_optim.pt").unlink()
    assert "mp_rank_01/distrib_optim.pt: is missing" in read_checkpoint(root).unread_optimizer


def test_a_loss_scale_travels_as_a_number(tmp_path: Path) -> None:
    hf = _llama()
    ranks = {r: {n: x.half() for n, x in t.items()}
             for r, t in stored(CONFIG, hf, 1, 1, multiple=8).items()}  # fmt: skip
    (weights,) = ranks.values()
    decays = [[n for n, x in weights.items() if (x.dim() > 1) == flag] for flag in (True, False)]
    flat = [n for group in decays for n in group]
    groups = [{"wd_mult": float(flag), "params": [flat.index(n) for n in group], "lr": 0.5}
              for flag, group in zip((1, 0), decays, strict=True)]  # fmt: skip
    optimizer = {
        "optimizer": {
            "state": {i: {"exp_avg": weights[n].float() + 1, "exp_avg_sq": weights[n].float() + 2}
                      for i, n in enumerate(flat)},
            "param_groups": groups,
        },
        "fp32_from_fp16_params": [[weights[n].float() for n in group] for group in decays],
        "grad_scaler": {"scale": torch.tensor([1024.0]), "growth_tracker": 3},
    }  # fmt: skip
    args = _args(1, 1, params_dtype=torch.float16, fp16=True)
    root = _save(tmp_path, _models(ranks), args, optimizer=optimizer)
    found = open_checkpoint(root)
    scaler = found.state["megatron"]["optimizer"]["grad_scaler"]
    assert scaler == {"scale": 1024.0, "growth_tracker": 3}
    for name in hf:
        assert torch.equal(found["exp_avg/" + name].torch(), hf[name].half().float() + 1), name
        assert torch.equal(found["master/" + name].torch(), hf[name].half().float()), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the import
@pytest.mark.parametrize("rank", ["mp_rank_00_000", "mp_rank_01_001"])
def test_one_rank_without_an_optimizer_is_named(rank: str, golden: Path, tmp_path: Path) -> None:
    """It was one fault of the plan for each of its tensors, and no word of the file."""
    root = _copy(golden, "llama_bf16_tp2pp2_torch", tmp_path)
    _edit(root, rank, lambda file: file.pop("optimizer"))
    with pytest.raises(CheckpointError) as error:
        reshard(root, tmp_path / "out", tp=1)
    assert str(error.value).startswith(
        f"{root}/iter_0000003/{rank}/model_optim_rng.pt: holds no optimizer, other ranks' files do"
    )
    assert "\n" not in str(error.value)
    found = [f for f in verify(root).findings if f.kind == "optimizer"]
    assert any(rank in f.text for f in found)
    assert merge(root, tmp_path / "hf").output.is_dir()  # needs none


# What a format is recognised by: names of files, and folders (with a slash).
TELLING = (
    "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt", "release/mp_rank_00/x",
    "iter_0000005/mp_rank_00/x", "iter_0000005/metadata.json", "iter_0000005/__0_0.distcp",
    "latest_checkpointed_iteration.txt", "dist_ckpt/.metadata", "metadata.json", ".metadata",
    "common.pt", "__0_0.distcp", "checkpoint.json", "model.safetensors", "notes.txt",
    "pytorch_model_tp_0_pp_0.bin", "model-00001-of-00002.safetensors", "checkpoint-5/x",
)  # fmt: skip


@pytest.mark.parametrize("first", TELLING)
def test_a_reader_that_is_not_imported_for_a_folder_would_not_have_read_it(first, tmp_path):
    """Alone and beside any other: each reader's own answer, and that by the folder's names."""
    for i, second in enumerate(TELLING):
        folder = tmp_path / str(i)
        for name in {first, second}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        path = storage_path(folder)
        asked = [fmt.NAME for fmt in formats.formats() if fmt.sniff(path)]
        assert [fmt.NAME for fmt in formats.fitting(path)] == asked
