"""Rows that many decoder families share; a table picks and adds to them.

Stored names are megatron-core's local-spec names. QKV rows interleave per query group
([q heads of the group, k, v] for each group) and are cut contiguously over tp, also where
tp is larger than the number of groups; gated MLP rows hold [gate; up] of their rank.
"""

from __future__ import annotations

from ..model.family import Axes, Check, Part, Rule
from ..model.mesh import Shard, ShardByIndex

D = "decoder.layers.{layer}."
M = "model.layers.{layer}."
LAYER: Axes = {"pp": ShardByIndex("layer")}  # replicated over tp
COLUMN: Axes = {"tp": Shard(0), "pp": ShardByIndex("layer")}
ROW: Axes = {"tp": Shard(1), "pp": ShardByIndex("layer")}
FIRST, LAST = {"pp": "first"}, {"pp": "last"}

HEADS = (
    Check("{n} query heads do not divide over {g} KV heads", "n", "g"),
    Check("{n} query heads do not divide over tp={tp}", "n", "tp"),
    Check(
        "{g} KV heads neither divide over tp={tp} nor are divided by it", "g", "tp", either_way=True
    ),
)

# config keys of the Llama line; q, k, v, gate and up are the segments of packed rows
LLAMA_SIZES = {
    "layer": "num_hidden_layers",
    "h": "hidden_size",
    "n": "num_attention_heads",
    "g": "num_key_value_heads|n",
    "hd": "head_dim|h/n",
    "q": "n*hd",
    "k": "g*hd",
    "v": "g*hd",
    "gate": "intermediate_size",
    "up": "intermediate_size",
    "vocab": "vocab_size",
}

# the same for an MLP without a gate
PLAIN_SIZES = {key: value for key, value in LLAMA_SIZES.items() if key not in ("gate", "up")} | {
    "f": "intermediate_size"
}

OLD_BUFFERS = {
    r".*rotary_emb\.inv_freq": "a rotary table, computed from the config",
}


def embedding(fqn: str = "model.embed_tokens.weight") -> Rule:
    """The word embedding, rows over tp, on the first stage."""
    return Rule(
        "embedding.word_embeddings.weight",
        "vocab h",
        (Part(fqn, "vocab h"),),
        {"tp": Shard(0)},
        FIRST,
        pad="vocab",
    )


def head(
    tied_to: str = "model.embed_tokens.weight", fqn: str = "lm_head.weight"
) -> tuple[Rule, Rule]:
    """The output layer: its own tensor, or the last stage's copy of the embedding."""
    axes: Axes = {"tp": Shard(0)}
    own = (Part(fqn, "vocab h"),)
    tied = (Part(tied_to, "vocab h"),)
    name = "output_layer.weight"
    return (
        Rule(name, "vocab h", own, axes, LAST, pad="vocab", when=("!tie_word_embeddings",)),
        Rule(name, "vocab h", tied, axes, LAST, pad="vocab", when=("tie_word_embeddings", "pp>1")),
    )


def norm(name: str, fqn: str, dim: str = "h", when: tuple[str, ...] = ()) -> Rule:
    """A per-layer tensor, mostly a vector, that every tp rank holds whole."""
    return Rule(D + name, dim, (Part(fqn, dim),), LAYER, when=when)


def layer_norm(
    name: str, fqn: str, dim: str = "h", when: tuple[str, ...] = ()
) -> tuple[Rule, Rule]:
    """A per-layer LayerNorm: weight and bias."""
    return (
        norm(name + ".weight", fqn + ".weight", dim, when),
        norm(name + ".bias", fqn + ".bias", dim, when),
    )


def final_norm(name: str, fqn: str, when: tuple[str, ...] = ()) -> Rule:
    """The norm after the last layer."""
    return Rule("decoder.final_layernorm." + name, "h", (Part(fqn, "h"),), {}, LAST, when=when)


def final_layer_norm(fqn: str, when: tuple[str, ...] = ()) -> tuple[Rule, Rule]:
    """The LayerNorm after the last layer: weight and bias."""
    return final_norm("weight", fqn + ".weight", when), final_norm("bias", fqn + ".bias", when)


def qkv(prefix: str = M + "self_attn.") -> Rule:
    """q, k and v projections, packed per query group."""
    parts = tuple(Part(f"{prefix}{x}_proj.weight", f"{x} h") for x in "qkv")
    return Rule(
        D + "self_attention.linear_qkv.weight",
        "q+k+v h",
        parts,
        COLUMN,
        groups="qkv",
        checks=HEADS,
    )


def qkv_bias(when: tuple[str, ...] = (), prefix: str = M + "self_attn.") -> Rule:
    """The biases of q, k and v, packed as their weights."""
    parts = tuple(Part(f"{prefix}{x}_proj.bias", x) for x in "qkv")
    return Rule(
        D + "self_attention.linear_qkv.bias", "q+k+v", parts, COLUMN, groups="qkv", when=when
    )


def fused_qkv(fqn: str, bias: tuple[str, ...] | None = ()) -> tuple[Rule, ...]:
    """q, k and v that Hugging Face's files hold in one tensor, packed per query group as well.

    ``bias`` are the flags of the bias, None for none.
    """
    name = D + "self_attention.linear_qkv."
    parts = (Part(fqn + ".weight", "q+k+v h", "g"),)
    weight = Rule(name + "weight", "q+k+v h", parts, COLUMN, groups="qkv", checks=HEADS)
    if bias is None:
        return (weight,)
    own = (Part(fqn + ".bias", "q+k+v", "g"),)
    return weight, Rule(name + "bias", "q+k+v", own, COLUMN, groups="qkv", when=bias)


def attention_out(fqn: str = M + "self_attn.o_proj.weight") -> Rule:
    """The attention output projection, input features over tp."""
    return Rule(D + "self_attention.linear_proj.weight", "h q", (Part(fqn, "h q"),), ROW)


def fused_gate_up(fqn: str = M + "mlp.gate_up_proj.weight") -> Rule:
    """gate and up, which Hugging Face's files hold in one tensor."""
    parts = (Part(fqn, "gate+up h"),)
    return Rule(D + "mlp.linear_fc1.weight", "gate+up h", parts, COLUMN, groups="glu")


def gated_mlp(prefix: str = M + "mlp.") -> tuple[Rule, Rule]:
    """gate and up packed per rank, and down."""
    parts = (Part(prefix + "gate_proj.weight", "gate h"), Part(prefix + "up_proj.weight", "up h"))
    return (
        Rule(D + "mlp.linear_fc1.weight", "gate+up h", parts, COLUMN, groups="glu"),
        Rule(
            D + "mlp.linear_fc2.weight",
            "h gate",
            (Part(prefix + "down_proj.weight", "h gate"),),
            ROW,
        ),
    )


def plain_mlp(up: str, down: str, bias: tuple[str, ...] | None = ()) -> tuple[Rule, ...]:
    """Two linear layers without a gate; ``bias`` are the flags of their biases, None for none."""
    weights = (
        Rule(D + "mlp.linear_fc1.weight", "f h", (Part(up + ".weight", "f h"),), COLUMN),
        Rule(D + "mlp.linear_fc2.weight", "h f", (Part(down + ".weight", "h f"),), ROW),
    )
    if bias is None:
        return weights
    return (
        *weights,
        Rule(D + "mlp.linear_fc1.bias", "f", (Part(up + ".bias", "f"),), COLUMN, when=bias),
        norm("mlp.linear_fc2.bias", down + ".bias", when=bias),
    )
