"""Every family beside the first ones: files of transformers through random layouts and back, packed
rows against plain torch ops, and what megatron-core computes, or why it cannot.

Shapes: n query heads, g KV heads, d head size, F MLP width.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from independent import Tensors, assert_same, load_hf, load_ranks, pack_glu, pack_qkv
from megatron_computes import Computed
from safetensors.torch import save_file
from strategies import VARIANTS
from test_expert_families import TINY as EXPERTS

from shardwright.ckpt import CheckpointError, RunOptions, families, merge, reshard
from shardwright.ckpt.checkpoint.config import load_model, model_from
from shardwright.ckpt.checkpoint.function import Settings, contradictions, settings
from shardwright.ckpt.model.box import Box
from shardwright.ckpt.model.family import build_mesh
from shardwright.ckpt.model.layout import default_layout
from shardwright.ckpt.model.placement import Placement, shapes_of
from shardwright.tools.inspect_ckpt import main
from shardwright.train import TrainError
from shardwright.train.model.read import read
from shardwright.train.model.traits import FAMILIES as TRAINED

QUIET = RunOptions(workers=1)
N, G, D, H, F, LAYERS = 12, 6, 4, 24, 36, 4
BASE: dict[str, Any] = {
    "hidden_size": H, "num_attention_heads": N, "num_key_value_heads": G, "head_dim": D,
    "intermediate_size": F, "num_hidden_layers": LAYERS, "vocab_size": 64,
    "max_position_embeddings": 32, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SIZES = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings",
         "n_head", "n_layer", "ffn_dim", "num_kv_heads", "new_decoder_architecture",
         "multi_query")  # fmt: skip
Rows = Callable[[Tensors], list[torch.Tensor]]  # layer 0's tensors, prefix cut -> q, k, v and so on


def split(*names: str) -> Rows:
    """Parts that are tensors of their own."""
    return lambda layer: [layer[name] for name in names]


QKV = split(*(f"self_attn.{x}_proj.weight" for x in "qkv"))
QKV_BIAS = split(*(f"self_attn.{x}_proj.bias" for x in "qkv"))
GATED = split("mlp.gate_proj.weight", "mlp.up_proj.weight")
UP = split("mlp.up_proj.weight")
QUARTER = {"hidden_size": 96, "head_dim": ...}  # heads of 8, of which 2 dims are rotated


def FUSED(layer: Tensors) -> list[torch.Tensor]:
    """gate and up of one tensor."""
    return list(layer["mlp.gate_up_proj.weight"].chunk(2))


def per_group(name: str, groups: int, queries: int) -> Rows:
    """q, k and v of one tensor in which the heads of each KV group lie side by side."""

    def parts(layer: Tensors) -> list[torch.Tensor]:
        heads = layer[name].unflatten(0, (groups, queries + 2, -1))  # g, heads, d, and H
        return [x.flatten(0, 2) for x in heads.split((queries, 1, 1), 1)]

    return parts


def falcon(groups: int) -> dict[str, Any]:
    """What the variants of Falcon share."""
    rows = per_group("self_attention.query_key_value.weight", groups, N // groups)
    return {"qkv": rows, "fc1": split("mlp.dense_h_to_4h.weight"), "groups": groups,
            "layer": "transformer.h.0.", "tps": (4, 2) if groups == 1 else (3, 6, 12)}  # fmt: skip


LESS = dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size"), ...)
NEOX = {**QUARTER, "num_key_value_heads": ...}
FALCON = {**LESS, "max_position_embeddings": 32}


@dataclass(frozen=True)
class Tiny:
    """A variant of a family."""

    kind: str  # model_type
    config: dict[str, Any] = field(default_factory=dict)  # beside BASE
    refused: str = ""  # what args of Megatron-LM cannot say of it; empty: they say all
    qkv: Rows = QKV
    fc1: Rows = GATED  # gate and up, or one tensor
    qkv_bias: Rows | None = None
    groups: int = G
    layer: str = "model.layers.0."
    tps: tuple[int, ...] = (3, 1, 2, 6, 12)

    @property
    def said(self) -> dict[str, Any]:
        table = {**BASE, **self.config, "model_type": self.kind}
        return {key: value for key, value in table.items() if value is not ...}


TINY = {
    "olmo2": Tiny("olmo2", refused="norms over all heads of q and k"),
    "olmo2 bias": Tiny("olmo2", {"attention_bias": True}, "norms after", qkv_bias=QKV_BIAS),
    "olmo3": Tiny("olmo3", {"sliding_window": 5}, "attention window"),
    "granite": Tiny(
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
         "logits_scaling": 4.0},
        "embedding_multiplier 12",
    ),
    "granite plain": Tiny("granite", {"attention_multiplier": D**-0.5}),
    "granite scores": Tiny("granite", {}, "attention_multiplier 1"),  # the default of the class
    "starcoder2": Tiny("starcoder2", fc1=split("mlp.c_fc.weight"), qkv_bias=QKV_BIAS),
    "starcoder2 window": Tiny(
        "starcoder2", {"sliding_window": 5}, fc1=split("mlp.c_fc.weight"), qkv_bias=QKV_BIAS
    ),
    "starcoder2 no bias": Tiny(
        "starcoder2", {"use_bias": False}, "gelu_tanh", fc1=split("mlp.c_fc.weight")
    ),
    "gemma3": Tiny("gemma3_text", {"sliding_window": 5}, "norms after attention"),
    "glm": Tiny("glm", fc1=FUSED, qkv_bias=QKV_BIAS),
    "glm no bias": Tiny("glm", {"attention_bias": False, "partial_rotary_factor": 1.0}, fc1=FUSED),
    "glm4": Tiny("glm4", {}, "norms after attention", fc1=FUSED, qkv_bias=QKV_BIAS),
    "seed_oss": Tiny("seed_oss", qkv_bias=QKV_BIAS),
    "seed_oss out": Tiny(
        "seed_oss", {"attention_out_bias": True}, "linear_proj.bias", qkv_bias=QKV_BIAS
    ),
    "seed_oss biases": Tiny(
        "seed_oss", {"attention_out_bias": True, "mlp_bias": True}, qkv_bias=QKV_BIAS
    ),
    "nemotron": Tiny("nemotron", fc1=UP),
    "nemotron biases": Tiny(
        "nemotron", {"attention_bias": True, "mlp_bias": True}, fc1=UP, qkv_bias=QKV_BIAS
    ),
    "arcee": Tiny("arcee", fc1=UP),
    "stablelm": Tiny("stablelm", QUARTER),
    "stablelm bias": Tiny("stablelm", {**QUARTER, "use_qkv_bias": True}, qkv_bias=QKV_BIAS),
    "stablelm parallel": Tiny(
        "stablelm", {**QUARTER, "use_parallel_residual": True}, "use_parallel_residual True"
    ),
    "stablelm norms": Tiny("stablelm", {**QUARTER, "qk_layernorm": True}, "qk_layernorm True"),
    "cohere": Tiny("cohere", {}, "attention and MLP side by side"),
    "cohere norms": Tiny(
        "cohere", {"use_qk_norm": True, "logit_scale": 1.0}, "use_qk_norm True"
    ),
    "phi": Tiny(
        "phi", {}, "side by side", fc1=split("mlp.fc1.weight"), qkv_bias=QKV_BIAS
    ),
    "phi norms": Tiny(
        "phi", {"qk_layernorm": True, "head_dim": H // N}, "qk_layernorm True",
        fc1=split("mlp.fc1.weight"), qkv_bias=QKV_BIAS,
    ),
    "opt": Tiny(
        "opt", {"ffn_dim": F}, "positions that begin at row 2", fc1=split("fc1.weight"),
        qkv_bias=QKV_BIAS, groups=N, layer="model.decoder.layers.0.",
    ),
    "opt after": Tiny(
        "opt", {"ffn_dim": F, "do_layer_norm_before": False, "enable_bias": False},
        "do_layer_norm_before False", fc1=split("fc1.weight"), groups=N,
        layer="model.decoder.layers.0.",
    ),
    "gpt_neox": Tiny(
        "gpt_neox", {**NEOX, "use_parallel_residual": True}, "use_parallel_residual True",
        qkv=per_group("attention.query_key_value.weight", N, 1),
        fc1=split("mlp.dense_h_to_4h.weight"),
        qkv_bias=per_group("attention.query_key_value.bias", N, 1),
        groups=N, layer="gpt_neox.layers.0.",
    ),
    "gpt_neox in turn": Tiny(
        "gpt_neox", {**NEOX, "use_parallel_residual": False},
        qkv=per_group("attention.query_key_value.weight", N, 1),
        fc1=split("mlp.dense_h_to_4h.weight"),
        groups=N, layer="gpt_neox.layers.0.",
    ),
    "bloom": Tiny(
        "bloom", {"n_head": N, "n_layer": LAYERS, **LESS}, "ALiBi",
        qkv=per_group("self_attention.query_key_value.weight", N, 1),
        fc1=split("mlp.dense_h_to_4h.weight"),
        qkv_bias=per_group("self_attention.query_key_value.bias", N, 1),
        groups=N, layer="transformer.h.0.",
    ),
    "falcon 7b": Tiny("falcon", FALCON, "parallel_attn True", **falcon(1)),
    "falcon 40b": Tiny(
        "falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 6},
        "parallel_attn True", **falcon(6),
    ),
    "falcon 11b": Tiny(
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 6, "bias": True,
         "num_ln_in_parallel_attn": 1},
        "parallel_attn True", **falcon(6),
    ),
    "falcon rw": Tiny(
        "falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        "alibi True", **falcon(N),
    ),
    "falcon in turn": Tiny("falcon", {**FALCON, "parallel_attn": False}, **falcon(1)),
    "smollm3": Tiny("smollm3"),
    "smollm3 all rotate": Tiny("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "smollm3 window": Tiny(
        "smollm3", {"use_sliding_window": True, "sliding_window": 5}, "attention window"
    ),
}  # fmt: skip


def test_every_family_is_tested_here_or_with_the_first_ones_or_with_experts():
    tested = {tiny.kind for tiny in (*TINY.values(), *EXPERTS.values())}
    tested |= {kind for kind, _ in VARIANTS.values()}
    known = families.tables()
    of_transformers = {x.name for kind, x in known.items() if kind in transformers.CONFIG_MAPPING}
    assert {known[kind].name for kind in tested} == of_transformers


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Computed:
    """Every model as transformers saves it, with norms and biases that are random too."""
    computed = Computed(tmp_path_factory.mktemp("families"))
    for name, tiny in TINY.items():
        computed.model(name, tiny.said)
    return computed


def layouts(name: str) -> list[dict[str, Any]]:
    """Two layouts, the second one with stages of unequal size."""
    rng = random.Random(name)
    cuts = sorted(rng.sample(range(1, LAYERS), rng.choice((1, 2))))
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True))
    first, second = rng.sample(TINY[name].tps, 2)
    return [
        {"tp": first, "pp": rng.choice((1, 2, 4))},
        {"tp": second, "pp": len(counts), "pp_layers": counts},
    ]


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """As transformers computes them; unexpected or missing names are an error."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("name", TINY)
def test_a_model_is_the_same_after_random_layouts(name, made, tmp_path):
    source = made.folder / name
    state = load_hf(source)
    count = sum(math.prod(s) for s in shapes_of(load_model(source / "config.json")).values())
    assert count == sum(x.numel() for x in state.values())
    at = source
    for i, layout in enumerate(layouts(name)):
        reshard(at, tmp_path / str(i), run=QUIET, **layout)
        at = tmp_path / str(i)
    merge(at, tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)
    config = (source / "config.json").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(config)
    assert made.logits[name].std() > 0.01
    assert torch.equal(logits(tmp_path / "out", made.tokens), made.logits[name])


@pytest.mark.parametrize("name", TINY)
def test_packed_rows_are_those_of_plain_torch_ops(name, made, tmp_path):
    tiny, tp = TINY[name], TINY[name].tps[0]
    reshard(made.folder / name, tmp_path / "out", tp=tp, run=QUIET)
    ranks, state = load_ranks(tmp_path / "out"), load_hf(made.folder / name)
    layer = {k.removeprefix(tiny.layer): x for k, x in state.items() if k.startswith(tiny.layer)}
    mlp = tiny.fc1(layer)
    wanted = {
        "self_attention.linear_qkv.weight": pack_qkv(
            *tiny.qkv(layer), tiny.groups, tp, "per_group"
        ),
        "mlp.linear_fc1.weight": pack_glu(*mlp, tp, "per_rank")
        if len(mlp) == 2
        else list(mlp[0].chunk(tp)),
    }
    if tiny.qkv_bias:
        rows = tiny.qkv_bias(layer)
        wanted["self_attention.linear_qkv.bias"] = pack_qkv(*rows, tiny.groups, tp, "per_group")
    for t in range(tp):
        found = {k: ranks[t, 0]["decoder.layers.0." + k] for k in wanted}
        assert_same(found, {k: rows[t] for k, rows in wanted.items()})


@pytest.mark.parametrize("tag", ["per_rank", "per_row", "flat"])
@pytest.mark.parametrize("name", ["gpt_neox in turn", "falcon rw"])
def test_rows_that_alternate_in_hugging_face_files_are_found_in_every_packing(name, tag, made):
    tiny, tp, state = TINY[name], 3, load_hf(made.folder / name)
    model = load_model(made.folder / name / "config.json")
    layout = {**default_layout(model.family), "qkv": tag}
    mesh = build_mesh(model, (("tp", tp), ("pp", 1)))
    here = Placement.of(model, mesh, layout, model.sizes["vocab"] + 2)
    layer = {k.removeprefix(tiny.layer): x for k, x in state.items() if k.startswith(tiny.layer)}
    wanted = pack_qkv(*tiny.qkv(layer), tiny.groups, tp, tag)
    for t in range(tp):
        row = here.find((("tp", t), ("pp", 0)), "decoder.layers.0.self_attention.linear_qkv.weight")
        found = torch.full(row.shape, torch.nan)
        for piece in row.pieces:
            found[slices(piece.stored)] = state[piece.fqn][slices(piece.box)]
        assert torch.equal(found, wanted[t])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


# --- what configs say --------------------------------------------------------------------------

OLD = {  # spelled as by older versions of transformers
    "gemma3": {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2,
               "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo3": {"rope_theta": 5e5, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 5000},
    "glm": {"partial_rotary_factor": 1.0, "rope_theta": 5e3},
    "stablelm": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2},
    "nemotron": {"partial_rotary_factor": 0.25, "rope_theta": 5e3},
    "cohere": {"rope_theta": 8e6, "logit_scale": 0.25},
    "granite": {"attention_multiplier": 0.5},
    "starcoder2": {"sliding_window": 5},
}  # fmt: skip


def said(config: dict[str, Any]) -> Settings:
    return settings(config, model_from(config, "config.json"))


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the spelling of the installed transformers, defaults filled in."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    return json.loads(json.dumps(kind.from_dict(json.loads(json.dumps(config))).to_dict()))


@pytest.mark.parametrize("name", TINY)
def test_defaults_and_spellings_are_those_of_transformers(name):
    least = {key: x for key, x in TINY[name].said.items() if key in (*SIZES, "pad_token_id")}
    assert contradictions(said(least), said(as_written(least))) == {}
    full = TINY[name].said | OLD.get(name, {})
    assert contradictions(said(full), said(as_written(full))) == {}
    if name in OLD:
        changed = contradictions(said(TINY[name].said), said(full))
        assert changed, "an old spelling that is not read"


def test_a_model_beyond_a_plain_decoder_is_no_llama_of_the_same_tensors():
    plain = {**BASE, "model_type": "llama"}
    granite = {**BASE, "attention_multiplier": D**-0.5, "model_type": "granite"}
    assert contradictions(said(plain), said(granite)) == {}
    for changes in ({"residual_multiplier": 0.5}, {"attention_multiplier": 0.3}):
        found = contradictions(said(plain), said({**granite, **changes}))
        assert found == {"beyond a plain decoder": ([], list(changes))}


@pytest.mark.parametrize(("name", "norm", "rotary"), [
    ("nemotron", "zero_centered", "half"), ("gemma3", "zero_centered", "half"),
    ("glm", "plain", "interleaved"), ("cohere", "plain", "interleaved"),
    ("olmo2", "plain", "half"),
])  # fmt: skip
def test_shards_record_how_norms_and_rotary_pairs_are_meant(name, norm, rotary, made, tmp_path):
    reshard(made.folder / name, tmp_path / "out", tp=1, run=QUIET)
    layout = json.loads((tmp_path / "out" / "checkpoint.json").read_text())["layout"]
    assert (layout["norm"], layout["rotary"]) == (norm, rotary)


def test_megatron_core_computes_what_args_say_and_the_rest_is_refused_by_name(made):
    pytest.importorskip("megatron.core")
    for name, tiny in TINY.items():
        if not tiny.refused:
            made.write(name, "megatron", 1, 1)
            continue
        with pytest.raises(CheckpointError, match="--allow-incomplete-args") as error:
            made.write(name, "megatron", 1, 1)
        assert tiny.refused in str(error.value)
    assert made.differing() == []
    computed = {tiny.kind for tiny in TINY.values() if not tiny.refused}
    assert computed == {tiny.kind for tiny in TINY.values() if not _beyond(tiny.kind)}


def _beyond(kind: str) -> tuple[str, ...]:
    return families.tables()[kind].function.beyond


# --- what is known, and what is not ---------------------------------------------------------------


def test_the_list_of_families_is_that_of_the_tables_and_of_the_trainer(capsys):
    assert main(["--families", "--json"]) == 0
    rows = {row["family"]: row for row in json.loads(capsys.readouterr().out)}
    kinds = [kind for row in rows.values() for kind in row["model_type"].split(", ")]
    assert sorted(kinds) == sorted(families.tables())
    assert {name for name, row in rows.items() if row["train"] != "no"} == set(TRAINED)
    assert rows["gpt_neox"]["train"] == "if use_parallel_residual is false"
    assert rows["granite"]["train"] == rows["llama"]["train"] == "yes"
    for kind, family in families.tables().items():
        says = rows[family.name]["megatron"]
        assert says.startswith("no: ") == bool(_beyond(kind))
        assert says.startswith("if ") == bool(family.function.plain and not _beyond(kind))
    assert main(["--families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1 : lines.index("")]} == set(rows)
    with pytest.raises(SystemExit):
        main(["--families", "somewhere"])


def test_the_trainer_refuses_the_others_by_name(made):
    for name, tiny in TINY.items():
        model = load_model(made.folder / name / "config.json")
        if model.family.name in TRAINED:
            continue
        with pytest.raises(TrainError, match=f"the family {model.family.name} cannot be trained"):
            read(model)
        assert tiny.kind not in TRAINED


def test_an_unknown_model_is_refused_with_the_tensors_that_the_nearest_family_lacks(tmp_path):
    config = {**BASE, "model_type": "mystery"}
    tensors = {
        f"model.layers.{i}.{name}": torch.ones(4)
        for i in range(11)
        for name in ("self_attn.q_proj.weight", "self_attn.q_norm.weight", "self_attn.gate.weight")
    }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="'mystery' has no family table") as error:
        reshard(tmp_path / "hf", tmp_path / "out", tp=2, run=QUIET)
    said = str(error.value)
    assert "has no model.layers.{}.self_attn.gate.weight" in said
    assert said.count("gate.weight") == 1, "each name once, whatever the layer"
    assert "q_norm" not in said
    assert "CONTRIBUTING.md" in said
    assert "inspect-ckpt --families" in said
