"""StarCoder 2: LayerNorm, biases everywhere, an MLP without gate, tied head."""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import (
    OLD_BUFFERS,
    PLAIN_SIZES,
    M,
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

_BIAS = ("use_bias",)

STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    sizes={**PLAIN_SIZES, "g": "num_key_value_heads|2"},
    flags={"tie_word_embeddings": True, "use_bias": True},
    rules=(
        embedding(),
        *layer_norm("input_layernorm", M + "input_layernorm"),
        attention_out(),
        norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
        qkv(),
        qkv_bias(_BIAS),
        *layer_norm("pre_mlp_layernorm", M + "post_attention_layernorm"),
        *plain_mlp(M + "mlp.c_fc", M + "mlp.c_proj", _BIAS),
        *final_layer_norm("model.norm"),
        *head(),
    ),
    function=Function(
        {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"}, layer_norm=True, window=0
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (STARCODER2,)
