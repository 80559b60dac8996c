"""Args and a config describe one model, or the difference is refused by name: one table."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_megatron import CONFIG, GPT2, _edit, _llama, _small

from shardwright.ckpt import CheckpointError, ReadOptions, merge, reshard
from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.formats.megatron import args_out, known_args
from shardwright.ckpt.formats.megatron.args import config_from_args, says
from shardwright.ckpt.model.family import build_mesh
from shardwright.ckpt.model.layout import default_layout
from shardwright.ckpt.model.placement import Placement
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import merge_ckpt
from shardwright.tools import reshard as reshard_command

LISTS = {"expressed": known_args.EXPRESSED, "plain": frozenset(known_args.PLAIN),
         "harmless": known_args.HARMLESS}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the import
def test_every_field_of_megatron_cores_config_is_in_one_list() -> None:
    from megatron.core.transformer import transformer_config as core

    for field in dataclasses.fields(core.MLATransformerConfig):
        assert sum(field.name in names for names in LISTS.values()) == 1, field.name
    for field in dataclasses.fields(core.TransformerConfig):
        if field.name in known_args.PLAIN:
            assert field.default in known_args.PLAIN[field.name], field.name
    assert not LISTS["expressed"] & LISTS["harmless"]
    assert not LISTS["plain"] & (LISTS["expressed"] | LISTS["harmless"])


def test_every_arg_of_the_golden_files_is_in_a_list(golden: Path) -> None:
    for name in ("llama_bf16_tp2pp2_torch", "llama_bf16_tp1pp2dp2_distopt_v013_torch_dist",
                 "../golden-core020"):  # fmt: skip
        state: Any = read_checkpoint(golden / name).manifest.state
        assert known_args.unknown(state["megatron"]["args"]) == []


# --- what is written -----------------------------------------------------------------------------

QWEN = {**CONFIG, "model_type": "qwen2"}
GEMMA = {**CONFIG, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
SAID = {
    "llama": CONFIG,
    "query groups": {**CONFIG, "num_key_value_heads": 2},
    "tied": {**CONFIG, "tie_word_embeddings": True},
    "all biases": {**CONFIG, "attention_bias": True, "mlp_bias": True},
    "base": {**CONFIG, "rope_theta": 5e5},
    "base of newer": {**CONFIG, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "linear": {**CONFIG, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {**CONFIG, "model_type": "mistral", "sliding_window": 6},
    "mistral's own window": {**CONFIG, "model_type": "mistral"},
    "qwen2": QWEN,
    "qwen3": {**CONFIG, "model_type": "qwen3"},
    "phi3": {**CONFIG, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gpt2": GPT2,
    "gpt2, gelu": {**GPT2, "activation_function": "gelu"},
}
UNSAID: dict[str, tuple[dict[str, object], str]] = {
    "attention_bias alone": ({**CONFIG, "attention_bias": True}, "linear_proj.bias"),
    "mlp_bias alone": ({**CONFIG, "mlp_bias": True}, "no tensors linear_proj.bias"),
    "qwen3's": ({**CONFIG, "model_type": "qwen3", "attention_bias": True}, "linear_proj.bias"),
    "another activation": ({**CONFIG, "hidden_act": "gelu"}, "activation 'gelu'"),
    "relu": ({**GPT2, "activation_function": "relu"}, "activation 'relu'"),
    "windows of some layers": (
        {**QWEN, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        "attention window [None, None, 4, 4]",
    ),
    "gemma": (GEMMA, "embeddings scaled by sqrt(hidden size)"),
    "gemma2": ({**GEMMA, "model_type": "gemma2"}, "attn_logit_softcapping 50.0"),
    "two bases": (
        {**CONFIG, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope theta",
    ),
    "yarn": ({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    "multipliers": ({**CONFIG, "residual_multiplier": 0.5}, "residual_multiplier 0.5"),
    "gpt2's own": ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx True"),
}  # fmt: skip


def _made(config: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The args of a model, and what they cannot say."""
    notes: list[str] = []
    model = model_from(config, "x")
    args = args_out.args_for(
        model, {}, mesh=build_mesh(model, (("tp", 1), ("pp", 1))), dp=1, padded_vocab=32,
        vocab_multiple=1, distributed=False, dtype="F32", allow_incomplete=True, notes=notes,
    )  # fmt: skip
    return args, notes


@pytest.mark.parametrize("name", SAID)
def test_what_args_say_comes_back_from_them(name: str) -> None:
    config = SAID[name]
    args, lacks = _made(config)
    assert lacks == []
    assert args_out.cannot_say(model_from(config, "x"), args, "x") == []
    if config["model_type"] != "phi3":  # no args tell it from Llama, whose tensors it has
        args["params_dtype"] = {"$dtype": "float32"}
        again = {**config_from_args(args, "x"), "vocab_size": 32} if not (
            config["model_type"] == "qwen2" and "window_size" in args) else config  # fmt: skip
        wanted = model_from(config, "x")
        assert model_from(again, "x").sizes == wanted.sizes
        assert args_out.cannot_say(model_from(again, "x"), args, "x") == []


@pytest.mark.parametrize("name", UNSAID)
def test_what_args_cannot_say_is_refused_by_name(name: str) -> None:
    config, said = UNSAID[name]
    _, notes = _made(config)
    assert any(said in note and note.startswith("args lack") for note in notes), notes
    model = model_from(config, "x")
    with pytest.raises(CheckpointError, match="--allow-incomplete-args") as caught:
        args_out.args_for(
            model, {}, mesh=build_mesh(model, (("tp", 1), ("pp", 1))), dp=1, padded_vocab=32,
            vocab_multiple=1, distributed=False, dtype="F32", notes=[],
        )  # fmt: skip
    assert said in str(caught.value)


def _hf(folder: Path, **more: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    save_file(_llama(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_the_command_refuses_and_goes_on_when_told(to: str, tmp_path: Path, capsys) -> None:
    source = _hf(tmp_path / "hf", hidden_act="relu")
    argv = [str(source), "--to", to, "--output", str(tmp_path / "out")]
    assert reshard_command.main(argv) == 1
    assert "activation 'relu'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert reshard_command.main([*argv, "--allow-incomplete-args"]) == 0
    said = capsys.readouterr()
    assert "args lack (--allow-incomplete-args): activation 'relu'" in said.out + said.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", "x"), ("rope_theta", [1]), ("rope_theta", True), ("rope_theta", 10**400),
        ("rms_norm_eps", {"a": 1}), ("max_position_embeddings", 2**63),
        ("initializer_range", "0.02"), ("rope_parameters", {"rope_theta": "x"}),
        ("partial_rotary_factor", [0.5]), ("rope_scaling", {"type": "linear", "factor": "2"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_a_number_of_a_config_that_is_none_is_an_error_of_ours(to, key, value, tmp_path) -> None:
    source = _hf(tmp_path / "hf", **{key: value})
    with pytest.raises(CheckpointError):
        reshard(source, tmp_path / "out", to=to, tp=1, pp=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value", [{1, "a", None}, 2**3000, -(2**5000), {"x": [2**3000]}, (2**63, {3, "b"})]
)
@pytest.mark.parametrize("to", ["megatron", "torch_dist", "shards"])
def test_odd_args_travel_or_are_left_behind_by_name(to: str, value: object, tmp_path: Path) -> None:
    source = _small(tmp_path / "in", 1, 1)
    _edit(source, "mp_rank_00", lambda file: setattr(file["args"], "odd", value))
    report = reshard(source, tmp_path / "out", to=to, tp=1, pp=1)
    kept = read_checkpoint(tmp_path / "out").manifest.state["megatron"]["args"]
    assert "odd" in kept or any("odd (a number of" in note for note in report.notes)


# --- what is read --------------------------------------------------------------------------------

CONTRADICTIONS: dict[str, object] = {
    "rotary_base": 8_000_000, "rotary_percent": 0.5, "layernorm_epsilon": 1e-3,
    "apply_layernorm_1p": True, "rotary_interleaved": True, "use_rope_scaling": True,
    "kv_channels": 8, "ffn_hidden_size": 32, "window_size": (3, 0),
    "untie_embeddings_and_output_weights": False, "swiglu": False, "squared_relu": True,
    "softmax_type": "learnable", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "window_attn_skip_freq": [1, 0, 1, 0], "no_rope_freq": 2, "qk_l2_norm": True,
    "num_attention_heads": 8,
}  # fmt: skip


def _with(folder: Path, **args: object) -> Path:
    source = _small(folder, 1, 1)

    def change(file: dict[str, Any]) -> None:
        said: argparse.Namespace = file["args"]
        vars(said).update(rotary_base=10000, rotary_percent=1.0, layernorm_epsilon=1e-6, **{})
        vars(said).update(args)

    _edit(source, "mp_rank_00", change)
    return source


@pytest.mark.parametrize("field", CONTRADICTIONS)
def test_a_config_that_contradicts_args_is_refused_by_field(field: str, tmp_path: Path) -> None:
    source = _with(tmp_path / "in", **{field: CONTRADICTIONS[field]})
    config = _hf(tmp_path / "hf")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(source, ReadOptions(config=config))
    assert f"args say {field} " in str(caught.value)
    assert f"--trust config:{field}" in str(caught.value)
    for trust in ({"config"}, {f"config:{field}"}):
        found = read_checkpoint(source, ReadOptions(config=config, trust=frozenset(trust)))
        assert any(f"args say {field} " in n and "--trust" in n for n in found.notes)
    with pytest.raises(CheckpointError):
        read_checkpoint(source, ReadOptions(config=config, trust=frozenset({"config:other"})))


def test_a_trusted_config_reaches_the_args_that_are_written(tmp_path: Path) -> None:
    source, config = _with(tmp_path / "in", rotary_base=8_000_000), _hf(tmp_path / "hf")
    trusted = ReadOptions(config=config, trust=frozenset({"config:rotary_base"}))
    reshard(source, tmp_path / "out", to="megatron", read=trusted)
    (file,) = (tmp_path / "out").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    assert torch.load(file, weights_only=False)["args"].rotary_base == 10000


NEWER = ("softmax_type", "glu_linear_offset", "no_rope_freq", "activation_func_clamp_value",
         "window_attn_skip_freq")  # fmt: skip


@pytest.mark.parametrize("field", NEWER)
def test_args_of_newer_cores_that_change_the_function_are_no_plain_llama(field, tmp_path) -> None:
    source = _with(tmp_path / "in", **{field: CONTRADICTIONS[field]})
    with pytest.raises(CheckpointError, match=f"args say {field}="):
        read_checkpoint(source)


def test_args_of_forks_are_named_in_one_line_and_never_refuse(tmp_path: Path) -> None:
    forks = {f"my_option_{i}": i for i in range(20)}
    found = read_checkpoint(_with(tmp_path / "in", **forks, off=False, none=None))
    (note,) = [note for note in found.notes if "does not have" in note]
    assert "my_option_1, " in note
    assert note.endswith("and 7 more")  # of the 19 that are set


def test_a_config_in_the_folder_huggingface_is_used(tmp_path: Path) -> None:
    source = _with(tmp_path / "in")
    _hf(tmp_path / "in" / "huggingface", vocab_size=30)
    merge(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 30
    found = read_checkpoint(tmp_path / "out")
    assert found.manifest.tensors["model.embed_tokens.weight"].shape == (30, 16)


def test_the_command_line_takes_trust(tmp_path: Path, capsys) -> None:
    source, config = _with(tmp_path / "in", rotary_base=8_000_000), _hf(tmp_path / "hf")
    argv = [str(source), "--config", str(config), "--output", str(tmp_path / "out")]
    assert merge_ckpt.main(argv) == 1
    assert "--trust config:rotary_base" in capsys.readouterr().err
    assert merge_ckpt.main([*argv, "--trust", "config:rotary_base"]) == 0
    said = capsys.readouterr()
    assert "args say rotary_base 8000000" in said.out + said.err
    assert merge_ckpt.main([*argv, "--trust", "args"]) == 1


def test_what_args_do_not_say_contradicts_nothing() -> None:
    assert says({}) == {}
    assert says({"rotary_base": None, "swiglu": None}) == {}


# --- objects of other libraries ------------------------------------------------------------------


class Option:
    """Stands for any class of a library that is not here when the file is read."""

    def __init__(self) -> None:
        self.size = 7

    def __reduce__(self) -> tuple[object, ...]:
        return (Option, (), {"size": 7})


def _old_form(file: Path) -> None:
    content = torch.load(file, weights_only=False)
    torch.save(content, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("form", ["classic", "torch_dist", "classic before zip"])
def test_foreign_objects_in_args_are_inert_named_and_left_behind(
    form: str, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("toolkit.models")
    module.Option = Option  # type: ignore[attr-defined]
    monkeypatch.setattr(Option, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, "toolkit", types.ModuleType("toolkit"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    odd = {"option": Option(), "wait": timedelta(seconds=5), "call": functools.partial(Option, 1),
           "inside": [1, {"deep": Option()}]}  # fmt: skip
    source = _small(tmp_path / "in", 1, 1)
    if form == "torch_dist":
        reshard(_small(tmp_path / "plain", 1, 1), tmp_path / "dist", to="torch_dist")
        source = tmp_path / "dist"
        (file,) = source.glob("iter_*/common.pt")
        content = torch.load(file, weights_only=False)
        vars(content["args"]).update(odd)
        torch.save(content, file)
    else:
        _edit(source, "mp_rank_00", lambda file: vars(file["args"]).update(odd))
    if form == "classic before zip":
        (file,) = source.rglob("model_optim_rng.pt")
        _old_form(file)
    monkeypatch.delitem(sys.modules, module.__name__)
    found = read_checkpoint(source)
    (note,) = [note for note in found.notes if "args that cannot travel" in note]
    assert "option (toolkit.models.Option)" in note
    for name, cls in (("wait", "datetime.timedelta"), ("call", "functools.partial"),
                      ("inside", "toolkit.models.Option")):  # fmt: skip
        assert f"{name} ({cls})" in note
    reshard(source, tmp_path / "out", to="megatron")
    (file,) = (tmp_path / "out").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    assert not vars(torch.load(file, weights_only=False)["args"]).keys() & odd.keys()


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.parametrize("call", [(os.system, "true"), (eval, "1"), (getattr, "a", "b")])
def test_what_executes_still_refuses_the_file(
    call: tuple[Any, ...], old: bool, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (call[0], call[1:])

    source = _small(tmp_path / "in", 1, 1)
    (file,) = source.rglob("model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    vars(content["args"]).update(x=Evil())
    torch.save(content, file, _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match="refused, nothing was executed"):
        read_checkpoint(source)


# --- packing of old versions ---------------------------------------------------------------------


def test_rows_that_alternate_in_a_model_of_gpt3s_size_are_refused_with_the_way_on() -> None:
    """checkpoint_version 1 makes a piece of each row: 7 million of them here."""
    config = {"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96,
              "n_positions": 2048, "vocab_size": 50257}  # fmt: skip
    model = model_from(config, "x")
    mesh = build_mesh(model, (("tp", 8), ("pp", 8)))
    says = r"linear_qkv\.weight: .* pieces.*checkpoint_version 1 wrote.*Megatron-LM.*save it again"
    with pytest.raises(CheckpointError, match=says):
        Placement.of(model, mesh, {**default_layout(model.family), "qkv": "per_row"}, 51200)
    assert Placement.of(model, mesh, default_layout(model.family), 51200).placed


@pytest.mark.parametrize("to", ["shards", "hf", "megatron"])
@pytest.mark.parametrize("value", [10**400, 2**64, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["rotary_base", "layernorm_epsilon", "init_method_std"])
def test_an_infinite_number_in_args_is_refused_with_or_without_a_config(
    name: str, value: float, to: str, tmp_path: Path
) -> None:
    """They reached config.json, or checkpoint.json for whoever reads that next."""
    source = _with(tmp_path / "in", norm_epsilon=1e-6, **{name: value})
    layout = {} if to == "hf" else {"tp": 1}
    for read in (ReadOptions(), ReadOptions(config=_hf(tmp_path / f"hf {to}"))):
        with pytest.raises(CheckpointError, match=rf"model_optim_rng.pt: args say {name} .*model"):
            reshard(source, tmp_path / "out", to=to, read=read, **layout)
        shutil.rmtree(tmp_path / f"hf {to}", ignore_errors=True)
    assert not (tmp_path / "out").exists()


def test_what_shards_keep_of_args_is_checked_and_named_by_its_file(tmp_path: Path) -> None:
    made = reshard(_with(tmp_path / "in"), tmp_path / "made", to="shards", tp=1).output
    file = made / "checkpoint.json"
    table = json.loads(file.read_text())
    for name, value, text in (
        ("norm_epsilon", {"$float": "inf"}, "megatron: args say norm_epsilon inf, which no model"),
        ("odd", {"$call": "os.system"}, "megatron.args.odd: .* is no value of \\$call"),
        ("odd", 2**5000, r"megatron.args.odd: a number of 5001 bits"),
    ):
        args = {**table["megatron"]["args"], name: value}
        file.write_text(json.dumps({**table, "megatron": {**table["megatron"], "args": args}}))
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: {text}"):
            reshard(made, tmp_path / "out", to="megatron", tp=1)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
@pytest.mark.parametrize("given", ["save folder", "iteration"])
@pytest.mark.parametrize("place", ["save folder", "iteration"])
def test_config_and_tokenizer_are_found_beside_an_iteration_and_in_it(
    place: str, given: str, to: str, tmp_path: Path
) -> None:
    """Padded rows were kept where the other folder had the config; tokenizers were lost."""
    made = reshard(_with(tmp_path / "in"), tmp_path / "made", to=to, tp=1, pp=1).output
    (made / "config.json").unlink()
    folders = {"save folder": made, "iteration": next(made.glob("iter_*"))}
    _hf(folders[place] / "huggingface", vocab_size=30)
    (folders[place] / "tokenizer").mkdir()
    (folders[place] / "tokenizer" / "tokenizer.json").write_text("{}")
    merge(folders[given], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 30
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_what_dtype_leaves_as_it_is_is_said(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int8)}, tmp_path / "x.safetensors"
    )
    report = merge(tmp_path / "x.safetensors", tmp_path / "y.safetensors", dtype="bf16")
    assert "--dtype bf16: 1 of the weights stay as they are (I8), first b" in report.notes
    report = merge(tmp_path / "x.safetensors", tmp_path / "z.safetensors")
    assert not [note for note in report.notes if "stay as they are" in note]
