"""What a config.json says about the function that the weights compute, in one spelling.

Two configs of one model may differ in keys that change nothing (versions, token numbers, dropout),
in spelling (``rope_theta`` or ``rope_parameters``, ``swish`` or ``silu``), and in defaults that one
leaves out. ``settings`` translates a config to common names and values. If two results differ, the
same weights compute another function. What a family computes and what its class takes by default
is in its table (``Family.function``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from ..model.family import Function, Model

Config = Mapping[str, object]
Settings = dict[str, object]

_EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_ACTIVATION = ("hidden_activation", "activation_function", "hidden_act", "activation")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")
_ROPE = ("rope_theta", "rotary_emb_base", "rope_scaling", "rope_parameters", *_PARTIAL,
         "rope_local_base_freq")  # fmt: skip
_SCORES = "attention_multiplier"  # where a family has it, it replaces 1 / sqrt(head size)
_NO_ROPE = ("no_rope_layers", "no_rope_layer_interval")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
           "sliding_window_pattern", "_sliding_window_pattern")  # fmt: skip
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

_HEADS = {"n": "query heads", "g": "key and value heads", "hd": "head size"}


def settings(config: Config, model: Model | None) -> Settings:
    """Everything of a config that changes the function, under one name each.

    ``model`` is the family's view of it; without one, keys are taken as they are.
    """
    function = Function() if model is None else model.family.function
    said = {**function.defaults, **config}
    found: Settings = {
        "norm epsilon": _first(said, _EPSILON),
        "activation": _activation(said),
        **_rope(config, function),
        _TIED: _tied(said, model),
    }
    known = {*_EPSILON, *_ACTIVATION, *_ROPE, _TIED}
    if model is None:
        found["model_type"] = str(config.get("model_type"))
    else:
        known |= {*_WINDOW, *_NO_ROPE, *_SIZES, *_tabled(model)}
        found |= {name: model.sizes[s] for s, name in _HEADS.items() if s in model.sizes}
        found["norm offset"] = model.family.norm_offset
        found["rotary pairs"] = function.rotary
        found["attention window"] = _window(said, function, model.sizes["layer"])
        found["layers without positions"] = _without_positions(said, model.sizes["layer"])
        odd = [key for key, plain in function.plain.items() if said.get(key) not in plain]
        if _SCORES in function.defaults:
            known.add(_SCORES)
            factor = found["factor of attention scores"] = said[_SCORES]
            if not is_usual_factor(factor, model.sizes["hd"]):
                odd.append(_SCORES)
        found["beyond a plain decoder"] = [*function.beyond, *odd]
    for key, value in said.items():
        if key not in known and not _is_harmless(key):
            found[key] = value
    return found


def is_usual_factor(factor: object, head: int) -> bool:
    """Whether attention scores are multiplied by 1 / sqrt(head size)."""
    usual = head**-0.5
    return isinstance(factor, (int, float)) and math.isclose(factor, usual, rel_tol=1e-6)


def _tabled(model: Model) -> set[str]:
    """Keys that the family's table reads: they decide shapes and which tensors there are."""
    family = model.family
    sizes = {key for text in family.sizes.values() for key in re.findall(r"[a-z_]\w*", text)}
    flags = {key.partition("==")[0] for key in family.flags}
    return (sizes | flags) - family.function.plain.keys()


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


def _rope(config: Config, function: Function) -> Settings:
    """Base, scaling and rotated part of rotary positions, from the old keys or the new one.

    Layers with a sliding window may have positions of their own.
    """
    new, local = config.get("rope_parameters"), "rope_local_base_freq"
    kinds = new if isinstance(new, dict) and isinstance(new.get("full_attention"), dict) else {}
    found = _one_rope(config, kinds.get("full_attention", new), function.defaults)
    if kinds or local in function.defaults:
        base = config.get(local, function.defaults.get(local))
        own = {"rope_parameters": {"rope_theta": found["rope theta"] if base is None else base}}
        own |= (
            {"rope_parameters": kinds["sliding_attention"]} if "sliding_attention" in kinds else {}
        )
        found["rope of layers with a window"] = _one_rope(own, own["rope_parameters"], {})
    return found


def _one_rope(said: Config, new: object, defaults: Config) -> Settings:
    """``new`` is the value of rope_parameters, or the part of it for one kind of layers."""
    old = said.get("rope_scaling")
    table = {**(old if isinstance(old, dict) else {}), **(new if isinstance(new, dict) else {})}
    base, part = table.pop("rope_theta", None), table.pop("partial_rotary_factor", None)
    given = _first(said, ("rope_theta", "rotary_emb_base"))
    if given is not None and base is not None and _canonical(given) != _canonical(base):
        base = f"{given} in rope_theta and {base} in rope_parameters"
    base = given if base is None else base
    part = _first(said, _PARTIAL) if part is None else part
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
        "rope theta": defaults.get("rope_theta", 10000.0) if base is None else base,
        "rope scaling": scaling,
        "rotated part of a head": defaults.get(_PARTIAL[0], 1.0) if part is None else part,
    }


def _without_positions(said: Config, layers: int) -> list[int] | None:
    """The numbers of layers whose queries and keys are not rotated; None if all are."""
    if _NO_ROPE[1] not in said:
        return None
    listed, every = (said.get(key) for key in _NO_ROPE)
    if isinstance(listed, list):  # 0 where there is none
        return [i for i, rotated in enumerate(listed[:layers]) if not rotated] or None
    if type(every) is not int or every < 1:
        return None
    return [i for i in range(layers) if (i + 1) % every == 0] or None


def _window(said: Config, function: Function, layers: int) -> object:
    """How many keys a query sees: one number, or one for each layer; None for all keys."""
    width = said.get("sliding_window")
    if function.window is None:  # it ignores the key
        return None
    if "use_sliding_window" in function.defaults and said.get("use_sliding_window") is not True:
        return None
    if width is None:
        return None
    types = said.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        types = _layer_types(said, function, layers)
    each = [width if name == "sliding_attention" else None for name in types]
    return each[0] if each and all(w == each[0] for w in each) else each


def _layer_types(said: Config, function: Function, layers: int) -> list[str]:
    """transformers' default if a config lists no layer types."""
    start, every = said.get("max_window_layers"), function.window
    if every and type(said.get("sliding_window_pattern")) is int:
        every = said["sliding_window_pattern"]  # type: ignore[assignment]
    resting = _without_positions(said, layers) if _NO_ROPE[1] in function.defaults else None

    def slides(layer: int) -> bool:
        if _NO_ROPE[1] in function.defaults:
            return layer in (resting or ())
        if "max_window_layers" in function.defaults:
            return not isinstance(start, int) or layer >= start
        return not every or (layer + 1) % every != 0

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
