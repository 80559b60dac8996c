"""SmolLM3: Llama's tensors; every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import LLAMA_SIZES, OLD_BUFFERS

SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    sizes={**LLAMA_SIZES, "g": "num_key_value_heads|4"},
    flags={"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
    rules=LLAMA.rules,
    function=Function(
        {
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4, "use_sliding_window": False,
        },
        window=0,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (SMOLLM3,)
