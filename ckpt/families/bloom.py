"""BLOOM: ALiBi positions, a norm after the embedding, q, k and v of each head in one tensor."""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from .rows import (
    FIRST,
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

_H = "transformer.h.{layer}."
_EMBEDDING = "transformer.word_embeddings.weight"

BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    sizes={
        **PLAIN_SIZES, "layer": "n_layer|num_hidden_layers", "h": "hidden_size|n_embed",
        "n": "n_head|num_attention_heads", "g": "n", "hd": "h/n", "f": "4*h",
    },
    flags={"tie_word_embeddings": True},
    rules=(
        embedding(_EMBEDDING),
        *(
            Rule(
                f"embedding.word_embeddings_layernorm.{x}",
                "h",
                (Part(f"transformer.word_embeddings_layernorm.{x}", "h"),),
                {},
                FIRST,
            )
            for x in ("weight", "bias")
        ),
        *layer_norm("input_layernorm", _H + "input_layernorm"),
        attention_out(_H + "self_attention.dense.weight"),
        norm("self_attention.linear_proj.bias", _H + "self_attention.dense.bias"),
        *fused_qkv(_H + "self_attention.query_key_value"),
        *layer_norm("pre_mlp_layernorm", _H + "post_attention_layernorm"),
        *plain_mlp(_H + "mlp.dense_h_to_4h", _H + "mlp.dense_4h_to_h"),
        *final_layer_norm("transformer.ln_f"),
        *head(_EMBEDDING),
    ),
    function=Function(
        {
            "layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new", "alibi": True,
            "apply_residual_connection_post_layernorm": False,
        },
        plain={"apply_residual_connection_post_layernorm": (False,)},
        beyond=("ALiBi positions", "a norm after the embedding"),
        layer_norm=True,
    ),
    prefixes={
        "word_embeddings.": "transformer.word_embeddings.",
        "word_embeddings_layernorm.": "transformer.word_embeddings_layernorm.",
        "h.": "transformer.h.",
        "ln_f.": "transformer.ln_f.",
    },
    tied_names={"lm_head.weight": _EMBEDDING},
)  # fmt: skip

FAMILIES = (BLOOM,)
