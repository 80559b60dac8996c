"""From a family table and a Hugging Face config to what a model computes.

The family's rows say what the model is made of: which biases, which norms, whether the MLP is
gated. The config says how it computes. Whatever megatron-core and ``modules.py`` cannot compute
exactly is refused by name, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwright.ckpt.errors import install
from shardwright.ckpt.families.rows import D as LAYER
from shardwright.ckpt.model.family import Model

from ..errors import TrainError
from .traits import FAMILIES, Traits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# The rows that a GPTModel has a parameter for, or that `_add_post_norm` makes one for.
_BUILDABLE = re.compile(
    r"embedding\.(word|position)_embeddings\.weight|output_layer\.weight"
    r"|decoder\.final_layernorm\.(weight|bias)"
    r"|decoder\.layers\.\{layer\}\.((input|pre_mlp)_layernorm\.(weight|bias)"
    r"|self_attention\.(linear_(qkv|proj)\.(weight|bias)|[qk]_layernorm\.weight)"
    r"|mlp\.linear_fc[12]\.(weight|bias)"
    r"|(self_attention\.linear_proj|mlp\.linear_fc2)\.post_layernorm\.weight)"
)
_ROPE = ("default", "linear", "llama3")  # kinds that change nothing but the frequencies


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, which Hugging Face calls gelu_new."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of what ReLU gives, which Hugging Face calls relu2."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": squared_relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class Said:
    """What rows and config say about a model's forward pass."""

    model: Model
    traits: Traits
    hf: PretrainedConfig  # with the defaults of its class filled in
    rows: Mapping[str, str]  # stored name -> dims
    rope: Mapping[str, object]  # empty where positions are learned

    def has(self, name: str) -> bool:
        """Whether each layer has this tensor."""
        return LAYER + name in self.rows

    def value(self, key: str) -> Any:
        """A config value; None for a key that the config's class does not declare.

        A file may hold such a key; the family's model does not read it.
        """
        known = hasattr(type(self.hf), key) or key in signature(type(self.hf)).parameters
        return getattr(self.hf, key, None) if known else None

    def number(self, key: str) -> float:
        """A config value as a number; 0 where there is none."""
        return float(self.value(key) or 0.0)

    @property
    def padding_token(self) -> int | None:
        """The token whose embedding transformers never trains (its row of the head it trains)."""
        pad = self.value("pad_token_id")
        if pad is None or self.traits.trains_padding:
            return None
        return int(pad) % self.model.sizes["vocab"]  # -1 is the last row, as in nn.Embedding

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the keys that a query sees, its own included; None: all before it."""
        width = self.value("sliding_window")
        kinds = self.value("layer_types") or ["sliding_attention"] * self.model.sizes["layer"]
        return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def read(model: Model) -> Said:
    """Rows and config side by side; TrainError with everything that cannot be expressed."""
    name = model.family.name
    if name not in FAMILIES:
        raise TrainError(
            f"the family {name} cannot be trained: its forward pass is not among those known "
            f"({', '.join(FAMILIES)})"
        )
    traits = FAMILIES[name]
    hf = _hf_config(model)
    rows = {rule.name: rule.dims for rule in model.rules()}
    learned = "embedding.position_embeddings.weight" in rows
    said = Said(model, traits, hf, rows, {} if learned else _rope(hf))
    if reasons := list(_inexpressible(said)):
        raise TrainError(f"megatron-core cannot express this {name}: {'; '.join(reasons)}")
    return said


def _hf_config(model: Model) -> PretrainedConfig:
    """The config as transformers reads it: old spellings translated, defaults filled in."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise TrainError(f"training: {install('transformers')}") from error
    name = str(model.config["model_type"])
    try:
        return CONFIG_MAPPING[name].from_dict(dict(model.config))
    except Exception as error:  # its validation raises types that only newer versions have
        raise TrainError(f"transformers cannot read this {name} config: {error}") from error


def _rope(hf: PretrainedConfig) -> Mapping[str, object]:
    """The rotary parameters, in the form of transformers 5."""
    found = getattr(hf, "rope_parameters", None)
    if found is None:  # transformers 4
        found = {"rope_theta": hf.rope_theta, **(getattr(hf, "rope_scaling", None) or {})}
    factor = getattr(hf, "partial_rotary_factor", 1.0)
    return {"rope_type": "default", "partial_rotary_factor": factor, **found}


def _inexpressible(said: Said) -> list[str]:
    """The reasons why this model cannot be computed exactly; empty if it can."""
    reasons = []
    if said.rope and said.rope["rope_type"] not in _ROPE:
        reasons.append(
            f"rotary embeddings of type {said.rope['rope_type']!r} (known: {', '.join(_ROPE)}), "
            "which scale more than the frequencies"
        )
    activation = said.value(said.traits.activation)
    if activation not in ACTIVATIONS:
        reasons.append(
            f"the activation {activation!r} ({said.traits.activation}; known: "
            f"{', '.join(ACTIVATIONS)})"
        )
    reasons += [
        f"{key}, since a GPTModel is causal and has no encoder"
        for key in ("use_bidirectional_attention", "add_cross_attention")
        if said.value(key)
    ]
    kinds = set(said.value("layer_types") or ()) - {"full_attention", "sliding_attention"}
    reasons += [f"layers of the type {kind!r}" for kind in sorted(kinds)]
    reasons += [
        f"{key} {value!r}"
        for key, plain in said.model.family.function.plain.items()
        if key not in said.traits.factors and (value := said.value(key)) not in plain
    ]
    alone = said.traits.mlp_dropout
    if alone and said.number(alone):
        reasons.append(f"{alone}, which this family has after the MLP alone")
    reasons += [f"the tensor {row}" for row in said.rows if not _BUILDABLE.fullmatch(row)]
    return reasons
