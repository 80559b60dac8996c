"""Granite: Llama's tensors; its multipliers live in the config alone."""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import LLAMA_SIZES, OLD_BUFFERS

GRANITE = Family(
    name="granite",
    model_types=("granite",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    rules=LLAMA.rules,
    function=Function(
        {
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
        plain={
            "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
        },
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (GRANITE,)
