"""GPT-NeoX and Pythia: LayerNorm, all biases, q, k and v of each head in one tensor."""

from __future__ import annotations

from ..model.family import Family, Function
from .rows import (
    OLD_BUFFERS,
    PLAIN_SIZES,
    attention_out,
    embedding,
    final_layer_norm,
    fused_qkv,
    head,
    layer_norm,
    norm,
    plain_mlp,
)

_M = "gpt_neox.layers.{layer}."
_BIAS = ("attention_bias",)

GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    sizes={**PLAIN_SIZES, "hd": "h/n", "g": "n"},
    flags={"tie_word_embeddings": False, "attention_bias": True},
    rules=(
        embedding("gpt_neox.embed_in.weight"),
        *layer_norm("input_layernorm", _M + "input_layernorm"),
        attention_out(_M + "attention.dense.weight"),
        norm("self_attention.linear_proj.bias", _M + "attention.dense.bias", when=_BIAS),
        *fused_qkv(_M + "attention.query_key_value", _BIAS),
        *layer_norm("pre_mlp_layernorm", _M + "post_attention_layernorm"),
        *plain_mlp(_M + "mlp.dense_h_to_4h", _M + "mlp.dense_4h_to_h"),
        *final_layer_norm("gpt_neox.final_layer_norm"),
        *head("gpt_neox.embed_in.weight", "embed_out.weight"),
    ),
    function=Function(
        {
            "layer_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        plain={"use_parallel_residual": (False,)},
        layer_norm=True,
    ),
    ignore={
        **OLD_BUFFERS, r".*attention\.(bias|masked_bias)": "the causal mask, not a weight",
    },
    prefixes={"lm_head.": "embed_out."},  # as transformers names it in memory
    tied_names={"embed_out.weight": "gpt_neox.embed_in.weight"},
)  # fmt: skip

FAMILIES = (GPT_NEOX,)
