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
    mlp_dropout: str = ""  # of the MLP's output alone, which must be 0
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(H)
    trains_padding: bool = False  # the padding token's embedding gets gradients
    scaled_init: bool = False  # output projections start smaller by sqrt(2 x layers)
    embedding_factor: str = ""  # embeddings are multiplied by it
    residual_factor: str = ""  # so is what attention and MLP add
    logits_divisor: str = ""
    attention_factor: str = ""  # of scores, in place of 1 / sqrt(D)

    @property
    def factors(self) -> tuple[str, ...]:
        """All keys of factors that the family has."""
        every = (
            self.embedding_factor, self.residual_factor, self.logits_divisor, self.attention_factor,
        )  # fmt: skip
        return tuple(key for key in every if key)


# The families whose forward pass is known here.
FAMILIES: Mapping[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(),
    "qwen3": Traits(),
    "phi3": Traits(hidden_dropout="resid_pdrop"),
    "gemma": Traits(scaled_embedding=True),
    "gemma2": Traits(activation="hidden_activation", scaled_embedding=True),
    "glm": Traits(),
    "glm4": Traits(),
    "granite": Traits(
        embedding_factor="embedding_multiplier",
        residual_factor="residual_multiplier",
        logits_divisor="logits_scaling",
        attention_factor="attention_multiplier",
    ),
    "seed_oss": Traits(hidden_dropout="residual_dropout"),
    "smollm3": Traits(),
    "arcee": Traits(),
    "nemotron": Traits(norm_eps="norm_eps"),
    "stablelm": Traits(norm_eps="layer_norm_eps", mlp_dropout="hidden_dropout"),
    "starcoder2": Traits(
        norm_eps="norm_epsilon",
        hidden_dropout="residual_dropout",
        embedding_dropout="embedding_dropout",
    ),
    "gpt_neox": Traits(
        norm_eps="layer_norm_eps",
        hidden_dropout="hidden_dropout",
        embedding_dropout="hidden_dropout",
        trains_padding=True,
    ),
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
