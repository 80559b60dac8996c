"""What Megatron-LM's own load_checkpoint and optimizers ask for, as its code of core_v0.16.1 reads.

Each claim here was seen in Megatron-LM itself, which these tests do without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_megatron import CONFIG, GPT2, _gpt2, _llama
from test_training_state import FULL, _classic, _common, _native

from shardwright.ckpt import CheckpointError, ReadOptions, merge, reshard, verify
from shardwright.ckpt.formats.megatron.args import says

FORMS: dict[str, dict[str, Any]] = {
    "classic": {"to": "megatron", "tp": 1, "pp": 1},
    "classic, flat": {"to": "megatron", "tp": 1, "pp": 1, "use_distributed_optimizer": True},
    "torch_dist": {"to": "torch_dist", "tp": 1, "pp": 1},
    "torch_dist, sharded": {"to": "torch_dist", "tp": 1, "pp": 1,
                            "use_distributed_optimizer": True},
}  # fmt: skip


def _file(made: Path, form: str) -> dict[str, Any]:
    return _common(made) if form.startswith("torch_dist") else _classic(made)


def _groups(made: Path, form: str) -> list[dict[str, Any]]:
    optimizer = _file(made, form)["optimizer"]
    found: list[dict[str, Any]] = optimizer.get("optimizer", optimizer)["param_groups"]
    return found


# --- groups: a loaded one replaces the optimizer's own ------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_groups_have_all_that_the_next_step_of_adam_reads(form: str, tmp_path: Path) -> None:
    """Of Apex's and TransformerEngine's; the step is a whole number in C++ there."""
    reshard(_native(tmp_path / "in", FULL), tmp_path / "made", **FORMS[form])
    for group in _groups(tmp_path / "made", form):
        assert {"lr", "betas", "eps", "weight_decay"} <= group.keys()
        assert group["bias_correction"] is True
        assert type(group["step"]) is int


@pytest.mark.parametrize("form", FORMS)
def test_the_groups_have_all_that_the_next_step_of_sgd_reads(form: str, tmp_path: Path) -> None:
    groups = [{"step": 7, "lr": 0.25, "weight_decay": 0.0, "momentum": 0.5}]
    source = _native(tmp_path / "in", {"param_groups": groups})
    file = source / "optimizer_tp_0_pp_0.safetensors"
    moments = load_file(file)
    about = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")["__metadata__"]
    buffers = {f"momentum_buffer/{n[8:]}": x for n, x in moments.items() if n[:8] == "exp_avg/"}
    save_file(buffers, file, about)
    reshard(source, tmp_path / "made", **FORMS[form])
    for group in _groups(tmp_path / "made", form):
        weight = torch.nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([weight], lr=1.0)
        state = {0: {"momentum_buffer": torch.full((2,), 2.0)}}
        sgd.load_state_dict({"state": state, "param_groups": [{**group, "params": [0]}]})
        weight.grad = torch.ones(2)
        sgd.step()
        assert weight.tolist() == [1 - 0.25 * (0.5 * 2 + 1)] * 2


def test_the_groups_of_torchs_adam_become_those_of_a_fused_one(golden: Path, tmp_path) -> None:
    """With the distributed optimizer; what both mean is the same."""
    source = golden / "llama_bf16_tp2pp2_torch"
    reshard(source, tmp_path / "made", to="megatron", tp=1, pp=1, use_distributed_optimizer=True)
    groups = _classic(tmp_path / "made")["optimizer"]["optimizer"]["param_groups"]
    assert [(g["bias_correction"], g["step"], type(g["step"])) for g in groups] == [
        (True, 3, int), (True, 3, int),
    ]  # fmt: skip
    assert verify(source, tmp_path / "made").same


PLAIN = [form for form in FORMS if form in ("classic", "torch_dist")]


@pytest.mark.parametrize("form", PLAIN)
def test_torchs_adam_makes_its_next_step_from_what_is_written_for_it(form: str, tmp_path) -> None:
    """megatron-core uses it where neither Apex nor TransformerEngine is installed."""
    source = _native(tmp_path / "in", FULL)
    said = reshard(source, tmp_path / "fused", **FORMS[form]).lines()
    assert any("--adam torch writes it for a megatron-core without both" in line for line in said)
    said = reshard(source, tmp_path / "made", adam="torch", **FORMS[form]).lines()
    assert not any("--adam" in line for line in said)
    assert verify(tmp_path / "fused", tmp_path / "made").same
    optimizer = _file(tmp_path / "made", form)["optimizer"]
    state = optimizer["state"]
    steps = [state["common_step"]] if form == "torch_dist" else [x["step"] for x in state.values()]
    assert {step.item() for step in steps} == {7.0}
    for group in _groups(tmp_path / "made", form):
        assert "step" not in group
        weight = torch.nn.Parameter(torch.ones(2))
        adam = torch.optim.AdamW([weight], lr=1.0)
        moments = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
        adam.load_state_dict({"state": {0: moments}, "param_groups": [{**group, "params": [0]}]})
        weight.grad = torch.ones(2)
        adam.step()  # both moments stay 1, each is divided by 1 - beta ** 8
        scaled = (1 - 0.95**8) ** 0.5 / (1 - 0.9**8)
        wanted = 1 - 0.25 * group["weight_decay"] - 0.25 * scaled
        assert weight.tolist() == pytest.approx([wanted] * 2)


def test_an_adam_of_the_other_class_is_written_for_the_golden_run(golden: Path, tmp_path) -> None:
    """What Megatron-LM itself cannot move from one to the other."""
    for source, adam in (("", "fused"), ("_fusedadam", "torch")):
        source = f"llama_bf16_tp2pp2{source}_torch"
        made = tmp_path / adam
        reshard(golden / source, made, to="megatron", tp=1, pp=1, adam=adam)
        optimizer = _classic(made)["optimizer"]["optimizer"]
        steps = {
            "fused": [g.get("step") for g in optimizer["param_groups"]],
            "torch": [s["step"].item() for s in optimizer["state"].values() if "step" in s],
        }
        assert set(steps[adam]) == {3}
        assert all(step is None for step in steps["fused" if adam == "torch" else "torch"])
        assert verify(golden / source, made).same


@pytest.mark.parametrize("form", ["classic, flat", "torch_dist, sharded"])
def test_torchs_adam_is_refused_where_megatron_core_cannot_load_it(form: str, tmp_path) -> None:
    source = _native(tmp_path / "in", FULL)
    with pytest.raises(CheckpointError, match="--no-use-distributed-optimizer"):
        reshard(source, tmp_path / "made", adam="torch", **FORMS[form])
    with pytest.raises(CheckpointError, match="--adam 'x': known are fused, torch"):
        reshard(source, tmp_path / "made", adam="x", **FORMS[form])
    with pytest.raises(CheckpointError, match="--adam: nothing that a checkpoint"):
        reshard(source, tmp_path / "made", adam="torch", to="shards")


# --- what a load is asked for -------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_args_say_what_a_load_of_torch_dist_must_not_ask_for(form: str, tmp_path: Path) -> None:
    """Megatron-LM fails at what it asks for and does not find; args of a file keep it from that."""
    source = _native(tmp_path / "in", FULL)
    said = reshard(source, tmp_path / "made", **FORMS[form]).lines()
    args = _file(tmp_path / "made", form)["args"]
    assert (args.no_save_rng, args.no_save_optim) == (True, False)
    more = ": load with --no-load-rng" if form.startswith("classic") else ""
    (line,) = [line for line in said if "random states are left out" in line]
    assert line.endswith(f"random states are left out{more}")
    assert ("cannot load flat buffers of fp32" in line) == (form == "classic, flat")
    options = {k: v for k, v in FORMS[form].items() if k != "use_distributed_optimizer"}
    said = reshard(source, tmp_path / "bare", weights_only=True, **options).lines()
    args = _file(tmp_path / "bare", form)["args"]
    assert (args.no_save_rng, args.no_save_optim) == (True, True)
    more = more and ": load with --no-load-optim --no-load-rng, or --finetune"
    assert f"weights alone{more}" in said


def _hf(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_gpt2() if config["model_type"] == "gpt2" else _llama(), folder / "model.safetensors")
    return folder


LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({**CONFIG, "rms_norm_eps": 1e-5}, ""),
    "epsilon": ({**CONFIG, "rms_norm_eps": 1e-6}, "--norm-epsilon 1e-06"),
    "linear": (
        {**CONFIG, "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "--rotary-seq-len-interpolation-factor 2",
    ),
    "window": (
        {**CONFIG, "rms_norm_eps": 1e-5, "model_type": "mistral", "sliding_window": 6},
        "--window-size 5,0",
    ),
    "exact gelu": (
        {**GPT2, "layer_norm_epsilon": 1e-5, "activation_function": "gelu"},
        "--no-bias-gelu-fusion",
    ),
    "tanh's gelu": ({**GPT2, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}, ""),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_release_loads_as_it_is_with_the_options_that_are_named(name: str, tmp_path) -> None:
    """--use-checkpoint-args keeps Megatron-LM's default for what it does not take over."""
    config, options = LEFT_OUT[name]
    said = reshard(_hf(tmp_path / "hf", config), tmp_path / "made", to="megatron", tp=1, pp=1)
    assert any("a release: Megatron-LM loads its weights" in line for line in said.lines())
    found = [line for line in said.lines() if "--use-checkpoint-args leaves out" in line]
    assert found == ([f"Megatron-LM's --use-checkpoint-args leaves out: {options}"] * bool(options))


# --- GELU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({"bias_gelu_fusion": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_tanh"),  # from before the core
        ({"bias_gelu_fusion": False, "openai_gelu": True, "use_legacy_models": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": False, "openai_gelu": True, "use_legacy_models": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True, "use_mcore_models": True}, "gelu"),
    ],
)
def test_the_gelu_of_megatron_core_is_tanhs_where_it_is_fused(args, wanted: str) -> None:
    assert says({"swiglu": False, **args})["activation"] == ("swiglu", wanted)


@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_a_trusted_configs_gelu_is_that_of_the_args_that_are_written(name: str, tmp_path) -> None:
    other = {"gelu": "gelu_new", "gelu_new": "gelu"}[name]
    hf = _hf(tmp_path / "hf", {**GPT2, "activation_function": other})
    reshard(hf, tmp_path / "one", to="megatron", tp=1, pp=1)
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "activation_function": name}))
    read = ReadOptions(config=tmp_path / "config.json", trust=frozenset({"config:swiglu"}))
    reshard(tmp_path / "one", tmp_path / "two", to="megatron", tp=1, pp=1, read=read)
    (tmp_path / "two" / "config.json").unlink(missing_ok=True)
    merge(tmp_path / "two", tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["activation_function"] == name
