"""Models with experts in every layout: each expert on the ranks that own it, nothing stored twice.

Expected shards are made here by plain slicing. E experts of width X, H hidden, L layers.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from independent import Tensors, assert_same, load_hf
from safetensors.torch import load_file, save_file
from strategies import number

from shardwright.ckpt import CheckpointError, RunOptions, merge, reshard, verify
from shardwright.ckpt.reader import read_checkpoint

QUIET = RunOptions(workers=1)
E, X, H, L, S = 4, 12, 8, 4, 8
BASE = {"hidden_size": H, "intermediate_size": 24, "num_hidden_layers": L, "vocab_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
        "moe_intermediate_size": X, "torch_dtype": "float32"}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_local_experts": E, "intermediate_size": X}
QWEN3 = {"model_type": "qwen3_moe", "num_experts": E}
QWEN2 = {"model_type": "qwen2_moe", "num_experts": E, "shared_expert_intermediate_size": S,
         "mlp_only_layers": [0, 2]}  # fmt: skip
OLMOE = {"model_type": "olmoe", "num_experts": E, "intermediate_size": X}
KINDS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "qwen2": QWEN2, "olmoe": OLMOE}


def shapes(config: dict[str, object], experts: int, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's files, spelled by hand."""
    kind, x = config["model_type"], config.get("moe_intermediate_size")
    x = config["intermediate_size"] if kind in ("mixtral", "olmoe") else x
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, H)}
    for i in range(L):
        m = f"model.layers.{i}."
        found |= {f"{m}{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
        found |= {f"{m}self_attn.{n}_proj.weight": (H, H) for n in "qkvo"}
        if kind == "qwen2_moe":
            found |= {f"{m}self_attn.{n}_proj.bias": (H,) for n in "qkv"}
        if kind in ("qwen3_moe", "olmoe"):
            wide = 2 if kind == "qwen3_moe" else H
            found |= {f"{m}self_attn.{n}_norm.weight": (wide,) for n in "qk"}
        if i in config.get("mlp_only_layers", []):
            found |= {f"{m}mlp.{n}_proj.weight": (24, H) for n in ("gate", "up")}
            found[f"{m}mlp.down_proj.weight"] = (H, 24)
            continue
        mlp = m + ("block_sparse_moe." if kind == "mixtral" else "mlp.")
        found[mlp + "gate.weight"] = (experts, H)
        if stacked:
            found[mlp + "experts.gate_up_proj"] = (experts, 2 * x, H)
            found[mlp + "experts.down_proj"] = (experts, H, x)
        for e in range(0 if stacked else experts):
            found |= {f"{mlp}experts.{e}.{n}.weight": (x, H) for n in names[:2]}
            found[f"{mlp}experts.{e}.{names[2]}.weight"] = (H, x)
        if kind == "qwen2_moe":
            found |= {f"{mlp}shared_expert.{n}_proj.weight": (S, H) for n in ("gate", "up")}
            found[mlp + "shared_expert.down_proj.weight"] = (H, S)
            found[mlp + "shared_expert_gate.weight"] = (1, H)
    return found | {"model.norm.weight": (H,), "lm_head.weight": (16, H)}


def write(
    folder: Path, kind: str, *, stacked: bool = False, experts: int = E, **more: object
) -> Tensors:
    """A Hugging Face folder; returns its tensors, whose elements are all different."""
    config = {**BASE, **KINDS[kind], **more}
    config["num_local_experts" if kind == "mixtral" else "num_experts"] = experts
    state = number(shapes(config, experts, stacked), 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


def glu(gate: torch.Tensor, up: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """For each rank its part of gate, then its part of up."""
    return [torch.cat(both) for both in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]


def made(source: Path, out: Path, **options: object) -> Path:
    reshard(source, out, make_vocab_size_divisible_by=1, run=QUIET, **options)
    return out


def back(source: Path, out: Path) -> Tensors:
    merge(source, out, run=QUIET)
    return load_hf(out)


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_leads_back_to_the_same_bytes(kind, stacked, tmp_path):
    state = write(tmp_path / "hf", kind, stacked=stacked)
    at = tmp_path / "hf"
    for i, options in enumerate(
        (
            {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
            {"tp": 1, "pp": 1, "ep": 4, "etp": 3},
            {"tp": 4, "pp": 2, "vpp": 2, "ep": 1, "etp": 2},
            {"pp_layout": "Et||ttt|L", "pp": 2, "ep": 2, "etp": 4},
        )
    ):
        at = made(at, tmp_path / f"{i}", **options)
    assert_same(back(at, tmp_path / "again"), state)
    assert verify(tmp_path / "hf", at, weights_only=True).same


@pytest.mark.parametrize(("tp", "pp", "ep", "etp"), [(2, 2, 2, 1), (1, 1, 4, 3), (2, 1, 1, 2)])
def test_each_rank_has_its_slice_of_its_experts(tp, pp, ep, etp, tmp_path):
    state = write(tmp_path / "hf", "qwen2")
    out = made(tmp_path / "hf", tmp_path / "out", tp=tp, pp=pp, ep=ep, etp=etp)
    seen = set()
    for t, p, e in itertools.product(range(etp), range(pp), range(ep)):
        held = load_file(out / f"experts_tp_{t}_pp_{p}_ep_{e}.safetensors")
        for layer, x in itertools.product(range(L), range(E)):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{x}.linear_fc{{}}.weight"
            here = layer in (1, 3) and layer // (L // pp) == p and x // (E // ep) == e
            assert (name.format(1) in held) == (name.format(2) in held) == here
            if here:
                m = f"model.layers.{layer}.mlp.experts.{x}."
                gate, up, down = (state[f"{m}{n}_proj.weight"] for n in ("gate", "up", "down"))
                assert torch.equal(held.pop(name.format(1)), glu(gate, up, etp)[t])
                assert torch.equal(held.pop(name.format(2)), down.chunk(etp, 1)[t])
                seen.add((layer, x, t))
        assert not held
    assert len(seen) == 2 * E * etp
    for t, p in itertools.product(range(tp), range(pp)):
        held = load_file(out / f"model_tp_{t}_pp_{p}.safetensors")
        assert not [name for name in held if ".local_experts." in name]
        for layer in (1, 3):
            name, m = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
            if layer // (L // pp) == p:
                assert torch.equal(held[name + "router.weight"], state[m + "gate.weight"])
                gate = state[m + "shared_expert_gate.weight"]
                assert torch.equal(held[name + "shared_experts.gate_weight"], gate)
                two = [state[f"{m}shared_expert.{n}_proj.weight"] for n in ("gate", "up")]
                wanted = glu(*two, tp)[t]
                assert torch.equal(held[name + "shared_experts.linear_fc1.weight"], wanted)


def test_nothing_is_stored_twice_but_what_every_tensor_parallel_rank_needs(tmp_path):
    state = write(tmp_path / "hf", "mixtral")
    out = made(tmp_path / "hf", tmp_path / "out", tp=2, pp=2, ep=4, etp=1)
    held = [x for file in out.glob("experts_*") for x in load_file(file).values()]
    wanted = [x for name, x in state.items() if ".experts." in name]
    assert sum(x.numel() for x in held) == sum(x.numel() for x in wanted)
    assert len(list(out.glob("experts_*.safetensors"))) == 8
    assert len(list(out.glob("model_*.safetensors"))) == 4


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_expert_numbers_of_one_two_and_three_digits_stay_apart(ep, tmp_path):
    state = write(tmp_path / "hf", "mixtral", experts=102, num_hidden_layers=L)
    out = made(tmp_path / "hf", tmp_path / "out", tp=1, pp=2, ep=ep)
    for p, e in itertools.product(range(2), range(ep)):
        held = load_file(out / f"experts_tp_0_pp_{p}_ep_{e}.safetensors")
        numbers = {int(n) for name in held for n in re.findall(r"local_experts\.(\d+)\.", name)}
        assert numbers == set(range(e * 102 // ep, (e + 1) * 102 // ep))
        for x in numbers & {9, 10, 99, 100}:
            w2 = state[f"model.layers.{2 * p}.block_sparse_moe.experts.{x}.w2.weight"]
            name = f"decoder.layers.{2 * p}.mlp.experts.local_experts.{x}.linear_fc2.weight"
            assert torch.equal(held[name], w2)
    again = made(out, tmp_path / "two", tp=2, pp=1, ep=3, etp=1)
    assert_same(back(again, tmp_path / "again"), state)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_detour_over_any_layout_changes_nothing(data, tmp_path):
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    write(
        folder / "hf", data.draw(st.sampled_from(sorted(KINDS))), stacked=data.draw(st.booleans())
    )

    def layout() -> dict[str, object]:
        pp = data.draw(st.sampled_from((1, 2, 4)))
        found = {"tp": data.draw(st.sampled_from((1, 2, 4))), "pp": pp,
                 "ep": data.draw(st.sampled_from((1, 2, 4))),
                 "etp": data.draw(st.sampled_from((1, 2, 3, 4)))}  # fmt: skip
        if pp == 2 and data.draw(st.booleans()):
            found |= data.draw(st.sampled_from(({"vpp": 2}, {"pp_layers": (1, 3)},
                                                {"pp_layout": "E|tt|tt|L"})))  # fmt: skip
        return found

    one, two = layout(), layout()
    first = made(folder / "hf", folder / "a", **one)
    detour = made(first, folder / "c", **two)
    direct = made(folder / "hf", folder / "b", **two)
    files = sorted(f.name for f in direct.iterdir())
    assert files == sorted(f.name for f in detour.iterdir())
    for name in files:
        assert (direct / name).read_bytes() == (detour / name).read_bytes(), name


def test_without_a_word_etp_follows_tp_and_stays_where_it_was_chosen(tmp_path):
    write(tmp_path / "hf", "mixtral")
    first = made(tmp_path / "hf", tmp_path / "a", tp=2, pp=1)
    assert read_checkpoint(first).mesh.experts.axes == (("tp", 2), ("pp", 1), ("ep", 1))
    then = made(first, tmp_path / "b", tp=4, ep=2)
    assert read_checkpoint(then).mesh.experts.axes == (("tp", 4), ("pp", 1), ("ep", 2))
    chosen = made(then, tmp_path / "c", etp=1)
    kept = made(chosen, tmp_path / "d", tp=1)
    other = made(chosen, tmp_path / "e", tp=2)
    for folder in (kept, other):
        assert read_checkpoint(folder).mesh.experts.axes == (("tp", 1), ("pp", 1), ("ep", 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ep": 3}, "4 experts do not divide over ep=3"),
        ({"etp": 5}, "etp=5"),
        ({"ep": 0}, "--ep 0: must be at least 1"),
        ({"tp": 3, "etp": 1}, "tp=3"),
    ],
)
def test_impossible_layouts_of_experts_are_refused_by_name(options, says, tmp_path):
    write(tmp_path / "hf", "qwen3")
    with pytest.raises(CheckpointError, match=re.escape(says)):
        made(tmp_path / "hf", tmp_path / "out", **options)


def test_a_model_without_experts_has_no_ranks_for_them(tmp_path):
    write(tmp_path / "hf", "mixtral")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError):
        made(tmp_path / "hf", tmp_path / "out", ep=2)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_missing_file_of_experts_is_named(ending, tmp_path):
    write(tmp_path / "hf", "mixtral")
    out = made(tmp_path / "hf", tmp_path / "out", tp=2, pp=1, ep=2, etp=1,
               safe_serialization=ending == "safetensors")  # fmt: skip
    (out / f"experts_tp_0_pp_0_ep_1.{ending}").unlink()
    with pytest.raises(CheckpointError, match=rf"experts_tp_0_pp_0_ep_1\.{ending}: is missing"):
        read_checkpoint(out)
