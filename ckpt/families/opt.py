"""OPT: learned positions, of which two rows come before the first, LayerNorm, all biases.

The 350M model has other embedding sizes (project_in, project_out) and is refused by their names.
"""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from .rows import (
    FIRST,
    PLAIN_SIZES,
    attention_out,
    embedding,
    final_layer_norm,
    head,
    layer_norm,
    norm,
    plain_mlp,
    qkv,
    qkv_bias,
)

_M = "model.decoder.layers.{layer}."
_EMBEDDING = "model.decoder.embed_tokens.weight"
_BIAS = ("enable_bias",)

OPT = Family(
    name="opt",
    model_types=("opt",),
    sizes={
        **PLAIN_SIZES, "hd": "h/n", "g": "n", "f": "ffn_dim|4*h", "before": "2",
        "pos": "max_position_embeddings",
    },
    flags={
        "tie_word_embeddings": True, "enable_bias": True, "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
    },
    rules=(
        embedding(_EMBEDDING),
        Rule(
            "embedding.position_embeddings.weight",
            "before+pos h",
            (Part("model.decoder.embed_positions.weight", "before+pos h"),),
            {},
            FIRST,
        ),
        *layer_norm("input_layernorm", _M + "self_attn_layer_norm"),
        attention_out(_M + "self_attn.out_proj.weight"),
        norm("self_attention.linear_proj.bias", _M + "self_attn.out_proj.bias", when=_BIAS),
        qkv(_M + "self_attn."),
        qkv_bias(_BIAS, _M + "self_attn."),
        *layer_norm("pre_mlp_layernorm", _M + "final_layer_norm"),
        *plain_mlp(_M + "fc1", _M + "fc2", _BIAS),
        *final_layer_norm(
            "model.decoder.final_layer_norm", ("do_layer_norm_before", "!_remove_final_layer_norm")
        ),
        *head(_EMBEDDING),
    ),
    function=Function(
        {
            "layer_norm_eps": 1e-5, "activation_function": "relu", "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
        },
        plain={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
        beyond=("positions that begin at row 2",),
        layer_norm=True,
    ),
    prefixes={"decoder.": "model.decoder."},
    tied_names={"lm_head.weight": _EMBEDDING},
)  # fmt: skip

FAMILIES = (OPT,)
