"""StableLM: LayerNorm, a gated MLP, rotary positions on a quarter of each head.

The 12B model has attention and MLP side by side, and a norm of its own for each head of q and k.
"""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import (
    LLAMA_SIZES,
    OLD_BUFFERS,
    M,
    attention_out,
    embedding,
    final_layer_norm,
    gated_mlp,
    head,
    layer_norm,
    norm,
    qkv,
    qkv_bias,
)

_QK_NORM = ("qk_layernorm",)

STABLELM = Family(
    name="stablelm",
    model_types=("stablelm",),
    sizes={**LLAMA_SIZES, "hd": "h/n", "q_head": "n", "k_head": "g"},
    flags={
        "tie_word_embeddings": False, "use_qkv_bias": False, "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    rules=(
        embedding(),
        *layer_norm("input_layernorm", M + "input_layernorm"),
        attention_out(),
        qkv(),
        qkv_bias(("use_qkv_bias",)),
        *(
            norm(
                f"self_attention.{x}_layernorm.norms.{{{x}_head}}.weight",
                f"{M}self_attn.{x}_layernorm.norms.{{{x}_head}}.weight",
                "hd",
                _QK_NORM,
            )
            for x in "qk"
        ),
        *layer_norm(
            "pre_mlp_layernorm", M + "post_attention_layernorm", when=("!use_parallel_residual",)
        ),
        *gated_mlp(),
        *final_layer_norm("model.norm"),
        *head(),
    ),
    function=Function(
        {
            "layer_norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 0.25,
            "use_parallel_residual": False, "qk_layernorm": False,
        },
        plain={"use_parallel_residual": (False,), "qk_layernorm": (False,)},
        layer_norm=True,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (STABLELM,)
