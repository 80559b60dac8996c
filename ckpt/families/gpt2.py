"""GPT-2: learned positions, LayerNorm, biases everywhere, tied head.

Hugging Face keeps its linear layers as Conv1D, ``[in, out]``: the transpose of the stored
tensor, which the dims strings say by their order.
"""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from .rows import COLUMN, FIRST, HEADS, ROW, D, embedding, final_norm, head, norm

_H = "transformer.h.{layer}."

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    sizes={
        "layer": "num_hidden_layers|n_layer",
        "h": "hidden_size|n_embd",
        "n": "num_attention_heads|n_head",
        "g": "n",
        "hd": "h/n",
        "q": "h",
        "k": "h",
        "v": "h",
        "f": "n_inner|4*h",
        "pos": "max_position_embeddings|n_positions",
        "vocab": "vocab_size",
    },
    flags={"tie_word_embeddings": True},
    rules=(
        embedding("transformer.wte.weight"),
        Rule(
            "embedding.position_embeddings.weight",
            "pos h",
            (Part("transformer.wpe.weight", "pos h"),),
            {},
            FIRST,
        ),
        norm("input_layernorm.weight", _H + "ln_1.weight"),
        norm("input_layernorm.bias", _H + "ln_1.bias"),
        Rule(
            D + "self_attention.linear_proj.weight",
            "h q",
            (Part(_H + "attn.c_proj.weight", "q h"),),
            ROW,
        ),
        norm("self_attention.linear_proj.bias", _H + "attn.c_proj.bias"),
        Rule(
            D + "self_attention.linear_qkv.weight",
            "q+k+v h",
            (Part(_H + "attn.c_attn.weight", "h q+k+v"),),
            COLUMN,
            groups="qkv",
            checks=HEADS,
        ),
        Rule(
            D + "self_attention.linear_qkv.bias",
            "q+k+v",
            (Part(_H + "attn.c_attn.bias", "q+k+v"),),
            COLUMN,
            groups="qkv",
        ),
        norm("pre_mlp_layernorm.weight", _H + "ln_2.weight"),
        norm("pre_mlp_layernorm.bias", _H + "ln_2.bias"),
        Rule(D + "mlp.linear_fc1.weight", "f h", (Part(_H + "mlp.c_fc.weight", "h f"),), COLUMN),
        Rule(D + "mlp.linear_fc1.bias", "f", (Part(_H + "mlp.c_fc.bias", "f"),), COLUMN),
        Rule(D + "mlp.linear_fc2.weight", "h f", (Part(_H + "mlp.c_proj.weight", "f h"),), ROW),
        norm("mlp.linear_fc2.bias", _H + "mlp.c_proj.bias"),
        final_norm("weight", "transformer.ln_f.weight"),
        final_norm("bias", "transformer.ln_f.bias"),
        *head("transformer.wte.weight"),
    ),
    function=Function(
        {
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        layer_norm=True,
    ),
    ignore={
        r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)": "the causal mask, not a weight",
    },
    prefixes={
        "wte.": "transformer.wte.",
        "wpe.": "transformer.wpe.",
        "h.": "transformer.h.",
        "ln_f.": "transformer.ln_f.",
    },
    tied_names={"lm_head.weight": "transformer.wte.weight"},
)

FAMILIES = (GPT2,)
