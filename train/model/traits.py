"""The families that the trainer computes, and what their rows do not say. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family computes that its rows do not say; the strings are config keys."""

    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"
    attention_dropout: str = "attention_dropout"
    hidden_dropout: str = ""
    embedding_dropout: str = ""
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(H)
    trains_padding: bool = False  # the padding token's embedding gets gradients
    scaled_init: bool = False  # output projections start smaller by sqrt(2 x layers)


# The families whose forward pass is known here.
FAMILIES: Mapping[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(),
    "qwen3": Traits(),
    "phi3": Traits(hidden_dropout="resid_pdrop"),
    "gemma": Traits(scaled_embedding=True),
    "gemma2": Traits(activation="hidden_activation", scaled_embedding=True),
    "gpt2": Traits(
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        attention_dropout="attn_pdrop",
        hidden_dropout="resid_pdrop",
        embedding_dropout="embd_pdrop",
        trains_padding=True,
        scaled_init=True,
    ),
}
