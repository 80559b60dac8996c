"""What a config.json says about the function that the weights compute, in one spelling.

Two configs of one model may differ in keys that change nothing (versions, token numbers, dropout),
in spelling (``rope_theta`` or ``rope_parameters``, ``swish`` or ``silu``), and in defaults that one
leaves out. ``settings`` translates a config to common names and values. If two results differ, the
same weights compute another function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..model.family import Model

Config = Mapping[str, object]
Settings = dict[str, object]

_EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_ACTIVATION = ("hidden_activation", "activation_function", "hidden_act")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_TIED = "tie_word_embeddings"
# Sizes are compared by shapes and by `_HEADS`; flags by the tensors that they add.
_SIZES = (
    "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_hidden_layers", "n_layer",
    "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "n_positions", "n_ctx", "attention_bias", "mlp_bias",
)  # fmt: skip
# Keys that do not change the function, but only how it is trained or run, or nothing.
_HARMLESS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
    "use_cache", "initializer_range", "pretraining_tp", "auto_map", "attn_implementation",
    "_attn_implementation", "gradient_checkpointing", "keys_to_ignore_at_inference", "id2label",
    "label2id", "task_specific_params", "reorder_and_upcast_attn", "is_decoder", "use_bfloat16",
    "torchscript", "return_dict", "max_length", "min_length", "cache_implementation",
    "scale_attn_weights_upcast", "unsloth_version", "unsloth_fixed", "problem_type",
})  # fmt: skip
_HARMLESS_ENDS = ("_token_id", "_token_ids", "dropout", "_pdrop", "_loss_coef")
_HARMLESS_STARTS = ("output_", "summary_")

_SAME_ACTIVATION = {
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip

# The defaults of transformers' config classes.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "mistral": {"rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 4096},
    "qwen2": {
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    "phi3": {"rms_norm_eps": 1e-5, "hidden_act": "silu"},
    "gemma": {"rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    "gpt2": {
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
}  # fmt: skip
_HEADS = {"n": "query heads", "g": "key and value heads", "hd": "head size"}
_SCALED_EMBEDDING = ("gemma", "gemma2")  # families that multiply embeddings by sqrt(hidden size)


def settings(config: Config, model: Model | None) -> Settings:
    """Everything of a config that changes the function, under one name each.

    ``model`` is the family's view of it; without one, keys are taken as they are.
    """
    kind = str(config.get("model_type"))
    said = {**_DEFAULTS.get(kind, {}), **config}
    found: Settings = {
        "norm epsilon": _first(said, _EPSILON),
        "activation": _activation(said),
        **_rope(said),
        _TIED: _tied(said, model),
    }
    known = {*_EPSILON, *_ACTIVATION, *_ROPE, _TIED}
    if model is None:
        found["model_type"] = kind
    else:
        known |= {*_WINDOW, *_SIZES}
        found |= {name: model.sizes[s] for s, name in _HEADS.items() if s in model.sizes}
        found["norm offset"] = model.family.norm_offset
        found["embeddings scaled by sqrt(hidden size)"] = model.family.name in _SCALED_EMBEDDING
        found["attention window"] = _window(said, kind, model.sizes["layer"])
    for key, value in said.items():
        if key not in known and not _is_harmless(key):
            found[key] = value
    return found


def contradictions(a: Settings, b: Settings) -> dict[str, tuple[object, object]]:
    """Settings that both sides have and that differ: name -> both values."""
    return {
        key: (value, b[key])
        for key, value in a.items()
        if key in b and _canonical(value) != _canonical(b[key])
    }


def _is_harmless(key: str) -> bool:
    return key in _HARMLESS or key.endswith(_HARMLESS_ENDS) or key.startswith(_HARMLESS_STARTS)


def _first(said: Config, keys: tuple[str, ...]) -> object:
    return next((said[key] for key in keys if said.get(key) is not None), None)


def _activation(said: Config) -> object:
    name = _first(said, _ACTIVATION)
    return _SAME_ACTIVATION.get(name, name) if isinstance(name, str) else name


def _tied(said: Config, model: Model | None) -> object:
    return _TIED in model.flags if model is not None else said.get(_TIED)


def _rope(said: Config) -> Settings:
    """Base, scaling and rotated part of rotary positions, from the old keys or the new one."""
    new, old = said.get("rope_parameters"), said.get("rope_scaling")
    table = {**(old if isinstance(old, dict) else {}), **(new if isinstance(new, dict) else {})}
    base, part = table.pop("rope_theta", None), table.pop("partial_rotary_factor", None)
    given = said.get("rope_theta")
    if given is not None and base is not None and _canonical(given) != _canonical(base):
        base = f"{given} in rope_theta and {base} in rope_parameters"
    base = given if base is None else base
    part = said.get("partial_rotary_factor") if part is None else part
    kind = table.pop("rope_type", None) or table.pop("type", None) or "default"
    table.pop("type", None)
    table = {key: value for key, value in table.items() if value is not None}
    if kind == "linear" and table.get("factor") in (1, 1.0):
        kind = "default"
    scaling = None if kind == "default" else {"rope_type": "longrope" if kind == "su" else kind}
    if scaling is not None:
        scaling |= table
        if kind in ("dynamic", "longrope", "su", "yarn"):  # these depend on the trained length
            scaling["max_position_embeddings"] = said.get("max_position_embeddings")
    return {
        "rope theta": 10000.0 if base is None else base,
        "rope scaling": scaling,
        "rotated part of a head": 1.0 if part is None else part,
    }


def _window(said: Config, kind: str, layers: int) -> object:
    """How many keys a query sees: one number, or one for each layer; None for all keys."""
    width = said.get("sliding_window")
    if kind in ("llama", "gemma", "gpt2"):  # these ignore the key
        width = None
    if kind in ("qwen2", "qwen3") and said.get("use_sliding_window") is not True:
        width = None
    if width is None:
        return None
    types = said.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        types = _layer_types(said, kind, layers)
    each = [width if name == "sliding_attention" else None for name in types]
    return each[0] if each and all(w == each[0] for w in each) else each


def _layer_types(said: Config, kind: str, layers: int) -> list[str]:
    """transformers' default if a config lists no layer types."""

    def slides(layer: int) -> bool:
        if kind == "gemma2":
            return layer % 2 == 0
        if kind in ("qwen2", "qwen3"):
            start = said.get("max_window_layers")
            return not isinstance(start, int) or layer >= start
        return True

    return ["sliding_attention" if slides(i) else "full_attention" for i in range(layers)]


def _canonical(value: object) -> str:
    """One text for values that mean the same: 1 and 1.0, keys in any order."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value
