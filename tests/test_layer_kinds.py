"""Rows that not every layer, config or checkpoint has: kinds, sizes of 0, tensors in a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.ckpt import CheckpointError
from shardwright.ckpt.families.llama import LLAMA
from shardwright.ckpt.families.rows import D, M, gated_mlp, norm
from shardwright.ckpt.model import layer_kinds
from shardwright.ckpt.model.family import (
    Model,
    build_mesh,
    evaluate,
    has_tensors,
    model_flags,
    size_flags,
    with_tensors,
)
from shardwright.ckpt.model.placement import Placement, shapes_of

MLP = layer_kinds.listed("mlp_layer_types", {"dense": "dense", "sparse": "moe"},
                         layer_kinds.dense_first)  # fmt: skip
SPARSE = "mlp.sparse.weight"
LORA = "q_lora_rank"


def family():
    """Llama with sparse layers, a size that may be absent, and a tensor that a file may have."""
    rules = [replace(r, layers="dense") if ".mlp." in r.name else r for r in LLAMA.rules]
    rules.append(norm(SPARSE, M + SPARSE))
    rules[-1] = replace(rules[-1], layers="moe")
    rules.append(norm("mlp.rank.weight", M + "rank", "ql", when=("ql>0",)))
    rules.append(norm("mlp.scale.bias", M + "scale.bias", when=("has " + M + "scale.bias",)))
    sizes = {**LLAMA.sizes, "ql": LORA + "|0"}
    return replace(LLAMA, sizes=sizes, rules=tuple(rules), kinds=(MLP,))


def model(**config) -> Model:
    config = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
              "num_attention_heads": 2, "vocab_size": 16, **config}  # fmt: skip
    of = family()
    sizes = {"one": 1, **evaluate(of, config, "x")}
    kinds = zip(*(each(config, 4, "x") for each in of.kinds), strict=True)
    flags = model_flags(of, config, "x") | size_flags(of, sizes)
    return Model(of, config, sizes, flags, tuple(map(frozenset, kinds)))


@pytest.mark.parametrize(
    ("config", "moe"),
    [
        ({"first_k_dense_replace": 1}, {1, 2, 3}),
        ({"first_k_dense_replace": 4}, set()),
        ({}, {0, 1, 2, 3}),
        ({"moe_layer_freq": 2}, {0, 2}),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, {1, 3}),
    ],
)
def test_a_row_of_some_layers_is_on_these_alone(config, moe):
    made = model(**config)
    shapes = shapes_of(made)
    for layer in range(4):
        assert (f"model.layers.{layer}.{SPARSE}" in shapes) == (layer in moe)
        assert (f"model.layers.{layer}.mlp.gate_proj.weight" in shapes) == (layer not in moe)
    here = Placement.written(made, build_mesh(made, (("tp", 1), ("pp", 2))), 1)
    for coord, rows in here.placed.items():
        names = {row.name for row in rows}
        for layer in here.mesh.owned["pp"][dict(coord)["pp"]]:
            assert (f"decoder.layers.{layer}.{SPARSE}" in names) == (layer in moe)


def test_rows_that_no_layer_has_put_no_condition_on_the_layout():
    odd = {"intermediate_size": 13}
    every = model(**odd)
    Placement.written(every, build_mesh(every, (("tp", 2), ("pp", 1))), 1)
    some = model(**odd, first_k_dense_replace=1)
    with pytest.raises(CheckpointError, match="size 13 does not divide"):
        Placement.written(some, build_mesh(some, (("tp", 2), ("pp", 1))), 1)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"decoder_sparse_step": 2}, ["dense", "moe", "dense", "moe"]),
        ({"mlp_only_layers": [0, 2]}, ["dense", "moe", "dense", "moe"]),
        ({"mlp_only_layers": None}, ["moe"] * 4),
    ],
)
def test_qwens_keys_say_which_layers_have_experts(config, wanted):
    assert list(layer_kinds.sparse_steps(config, 4, "x")) == wanted


@pytest.mark.parametrize(
    ("config", "moe"),
    [({"moe_layers": [0, 3], "step": 2}, {0, 3}), ({"step": 2}, {1, 3}), ({}, {0, 1, 2, 3})],
)
def test_numbered_layers_count_before_each_nth(config, moe):
    kinds = layer_kinds.each_nth("moe_layers", "step")(config, 4, "x")
    assert {i for i, kind in enumerate(kinds) if kind == "moe"} == moe
    with pytest.raises(CheckpointError, match="moe_layers is"):
        layer_kinds.each_nth("moe_layers", "step")({"moe_layers": [4]}, 4, "x")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"mlp_layer_types": ["dense"]}, "no list of 4 words"),
        ({"mlp_layer_types": ["dense", "odd", "dense", "odd"]}, "names 'odd'; known are dense"),
        ({LORA: -1}, "q_lora_rank is -1, not a whole number from 0 on"),
    ],
)
def test_other_values_are_refused_by_name(config, says):
    with pytest.raises(CheckpointError, match=says):
        model(**config)


@pytest.mark.parametrize(("said", "has"), [(None, False), (0, False), (6, True)])
def test_a_size_may_be_absent_null_or_0(said, has):
    shapes = shapes_of(model(**{LORA: said}))
    assert ("model.layers.0.rank" in shapes) == has
    assert shapes.get("model.layers.3.rank", (6,)) == (6,)


def test_a_row_may_depend_on_a_tensor_in_the_file():
    plain = model()
    assert "model.layers.2.scale.bias" not in shapes_of(plain)
    found = with_tensors(plain, ["model.layers.2.scale.bias"])
    assert "model.layers.2.scale.bias" in shapes_of(found)
    assert with_tensors(found, has_tensors(found)).flags == found.flags
    assert with_tensors(found, []).flags == plain.flags
    stored = with_tensors(plain, [D.format(layer=7) + "mlp.scale.bias"], stored=True)
    assert stored.flags == found.flags
    assert with_tensors(plain, [row.name for row in gated_mlp()], stored=True) == plain
