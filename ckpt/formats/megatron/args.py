"""Megatron-LM's `args` as a description of the model: compared with a config.json, or made one.

`args` is an argparse.Namespace with hundreds of values in every file that Megatron-LM writes; here
it is a dict whose values JSON can hold (args_codec.py). known_args.py lists which of them are read,
which are refused, and which change nothing. args_out.py writes args.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...checkpoint.config import MAX_LAYERS, find_config, load_model, model_from
from ...checkpoint.function import Settings, contradictions, settings
from ...checkpoint.types import ReadOptions
from ...containers import pickles
from ...errors import CheckpointError
from ...model.family import Model
from ...move.storage import StoragePath
from . import expert_args, known_args
from .classic.files import HUGGINGFACE

# expressed by families that args alone do not tell apart: with --config
_NO_FAMILY: Mapping[str, tuple[object, ...]] = {
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "squared_relu": (None, False),
    "rotary_interleaved": (None, False),
    "no_rope_freq": (None,),
}


def model_from_args(
    args: Mapping[str, object],
    origin: str,
    options: ReadOptions,
    padded_vocab: int,
    homes: Sequence[StoragePath],
) -> tuple[Model, dict[str, object] | None, list[str]]:
    """The model, the config.json made from args (None if another one is used), and notes.

    ``padded_vocab`` are the rows in the files; args do not say how many of them are real. A
    config.json is looked for in ``homes``.
    """
    if not args and options.config is None:
        raise CheckpointError(
            f"{origin}: holds no args, so the model is unknown; name the folder of a Hugging Face "
            "config with --config"
        )
    notes = _say_unknown(args)
    own = (find_config(home, options) for home in homes)
    path = next((config for config in own if config is not None), None)
    inner = [home / HUGGINGFACE / "config.json" for home in homes]
    if path is None and (there := [config for config in inner if config.is_file()]):
        path = there[0]
        notes.append(f"the model and its vocabulary are those of {HUGGINGFACE}/config.json")
    if path is not None:
        model = load_model(path, options.vocab_size)
        notes += check_against(model, args, origin, str(path), options.trust)
        return model, None, notes
    config = config_from_args(args, origin)
    config["vocab_size"] = options.vocab_size or padded_vocab
    model = model_from(config, origin)
    if options.vocab_size is None:
        notes.append(
            f"number of real vocabulary rows unknown; kept all {padded_vocab} (--vocab-size N or "
            "--config HF_DIR cuts them)"
        )
    return model, config, notes


def check_precision(args: Mapping[str, object], origin: str, options: ReadOptions) -> None:
    """fp8 with delayed scaling: the scales are a part of the training state."""
    delayed = args.get("fp8") and args.get("fp8_recipe", "delayed") == "delayed"
    if delayed and not options.weights_only:
        raise CheckpointError(
            f"{origin}: trained in fp8 with delayed scaling, whose history of scales cannot be "
            "carried; pass --weights-only to leave it and the optimizer out"
        )


def _say_unknown(args: Mapping[str, object]) -> list[str]:
    """One line for args that forks add: their effect is unknown."""
    names = known_args.unknown(args)
    if not names:
        return []
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    shown = ", ".join(name if name.isidentifier() else repr(name) for name in names[:12])
    return [f"args that Megatron-LM does not have, taken to change nothing: {shown}{more}"]


def check_against(
    model: Model, args: Mapping[str, object], origin: str, path: str, trust: frozenset[str]
) -> list[str]:
    """Refuse a config that contradicts args, field by field; notes on those that are trusted.

    ``trust`` holds "config" for all fields, or "config:FIELD".
    """
    rows = {
        name: f"args say {name} {shown(one)}, {path} says {what} {shown(two)}"
        for name, (what, one, two) in contradicted(model, args).items()
    }
    rows |= {
        name: f"args say {name} {shown(args[name])}, which {path} does not have"
        for name, plain in known_args.PLAIN.items()
        if args.get(name) not in plain
    }
    refused = {n: row for n, row in rows.items() if not {"config", f"config:{n}"} & trust}
    if refused:
        fields = " ".join(f"--trust config:{name}" for name in refused)
        raise CheckpointError(
            f"{origin}: " + "; ".join(refused.values()) + f". Is it the config of this model? If "
            f"it is, and args are wrong: {fields} (--trust config accepts all)"
        )
    return [f"{row}: the config is taken (--trust)" for row in rows.values()]


def shown(value: object) -> str:
    """A value for a message."""
    return f"{value!r:.160}" if isinstance(value, (list, dict)) else pickles.short(value)


def contradicted(model: Model, args: Mapping[str, object]) -> dict[str, tuple[str, object, object]]:
    """arg -> (what it is, its value, the config's), where args and a model's config differ."""
    wanted: Settings = dict(settings(model.config, model))
    wanted |= {name: model.sizes[symbol] for symbol, name in SIZES.items() if symbol in model.sizes}
    wanted |= expert_args.sizes_of(model)
    said = says(args)
    found = contradictions({what: value for what, (_, value) in said.items()}, wanted)
    return {said[what][0]: (what, *values) for what, values in found.items()}


# what a model's size is called here
SIZES = {"layer": "layers", "h": "hidden size", "gate": "MLP size", "f": "MLP size"}


def says(args: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    """Setting -> (arg, value), for the settings of checkpoint/function.py that args say.

    An arg that is absent or None is left out.
    """
    args = {key: value for key, value in args.items() if value is not None}
    found: dict[str, tuple[str, object]] = {}

    def say(what: str, name: str, value: object) -> None:
        if name in args:
            found[what] = (name, value)

    heads = args.get("num_attention_heads")
    say("layers", "num_layers", args.get("num_layers"))
    say("hidden size", "hidden_size", args.get("hidden_size"))
    say("MLP size", "ffn_hidden_size", args.get("ffn_hidden_size"))
    say("query heads", "num_attention_heads", heads)
    if type(heads) is int:
        say("key and value heads", "num_query_groups", _groups(args, heads))
    say("head size", "kv_channels", args.get("kv_channels"))
    found |= expert_args.says(args)
    if expert_args.is_latent(args):
        for what in ("key and value heads", "head size"):
            found.pop(what, None)
    for name in ("layernorm_epsilon", "norm_epsilon"):  # the second is what old versions take
        say("norm epsilon", name, args.get(name))
    for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        if name in args and (args[name] is True or "norm offset" not in found):
            say("norm offset", name, int(args[name] is True))
    say("activation", "swiglu", "silu" if args.get("swiglu") is True else _gelu(args))
    if args.get("squared_relu") is True:  # Megatron-LM refuses it together with swiglu
        say("activation", "squared_relu", "relu2")
    say(
        "tie_word_embeddings",
        "untie_embeddings_and_output_weights",
        args.get("untie_embeddings_and_output_weights") is not True,
    )
    if _position(args) == "rope":
        say("rope theta", "rotary_base", args.get("rotary_base"))
        say("rotated part of a head", "rotary_percent", args.get("rotary_percent"))
        say("rope scaling", "use_rope_scaling", _scaling(args))
        interleaved = args.get("rotary_interleaved") is True
        say("rotary pairs", "rotary_interleaved", "interleaved" if interleaved else "half")
        say("layers without positions", "no_rope_freq", _without_positions(args))
        if args.get("rotary_seq_len_interpolation_factor") not in (None, 1):
            say("rope scaling", "rotary_seq_len_interpolation_factor", _scaling(args))
    if "window_size" in args:
        say("attention window", "window_size", _window(args["window_size"], "args"))
    return found


def _without_positions(args: Mapping[str, object]) -> object:
    """The numbers of layers without rotary positions; a text of Megatron-LM stays what it is."""
    every, layers = args.get("no_rope_freq"), args.get("num_layers")
    if type(every) is int and every > 0 and type(layers) is int:
        return [i for i in range(min(layers, MAX_LAYERS)) if (i + 1) % every == 0]
    if isinstance(every, list):
        return [i for i, without in enumerate(every) if without]
    return every


def _gelu(args: Mapping[str, object]) -> str:
    return "gelu_tanh" if _is_tanh(args) else "gelu"


def _is_tanh(args: Mapping[str, object]) -> bool:
    """Whether GELU is tanh's approximation: where it is fused with a bias.

    The models from before megatron-core also had --openai-gelu, which it ignores.
    """
    core = args.get("use_legacy_models") is False or args.get("use_mcore_models") is True
    return bool(args.get("bias_gelu_fusion")) or (bool(args.get("openai_gelu")) and not core)


def _scaling(args: Mapping[str, object]) -> dict[str, object] | None:
    """Rotary scaling as a config has it."""
    if args.get("use_rope_scaling"):
        factor = args.get("rope_scaling_factor", 8.0)
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    factor = args.get("rotary_seq_len_interpolation_factor")
    return None if factor in (None, 1) else {"rope_type": "linear", "factor": factor}


def _number(args: Mapping[str, object], key: str, origin: str) -> int:
    value = args.get(key)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{origin}: args say {key} {value!r}, no whole number above 0")
    return value


def config_from_args(args: Mapping[str, object], origin: str) -> dict[str, object]:
    """A Hugging Face config, without vocab_size; CheckpointError for models of no family.

    For an arg that is None, Megatron-LM's default counts.
    """
    args = {key: value for key, value in args.items() if value is not None}
    for key, plain in {**known_args.PLAIN, **_NO_FAMILY}.items():
        if args.get(key) not in plain:
            value = shown(args[key])
            raise CheckpointError(
                f"{origin}: args say {key}={value}, which no family here has; known are Llama, "
                "Mistral, Qwen2, Qwen3 and GPT-2, and models with experts, latent attention or MTP "
                "layers (--config HF_DIR names a config)"
            )
    if _position(args) == "learned_absolute":
        return _gpt2(args, origin)
    return expert_args.config_of(args, _llama(args, origin), origin)


def _position(args: Mapping[str, object]) -> object:
    if args.get("use_rotary_position_embeddings") is True:  # of older versions
        return "rope"
    return args.get("position_embedding_type", "learned_absolute")


def _refuse(origin: str, says: str) -> None:
    raise CheckpointError(
        f"{origin}: args say {says}, which no family here has; name the folder of a Hugging Face "
        "config with --config"
    )


def _eps(args: Mapping[str, object]) -> object:
    return args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))


def _tied(args: Mapping[str, object]) -> bool:
    return args.get("untie_embeddings_and_output_weights") is not True


def _dtype(args: Mapping[str, object]) -> str:
    said = args.get("params_dtype")
    if isinstance(said, dict) and isinstance(said.get("$dtype"), str):
        return str(said["$dtype"])
    return "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"


def _bias(args: Mapping[str, object]) -> bool:
    if "add_bias_linear" in args:
        return args["add_bias_linear"] is True
    return args.get("disable_bias_linear") is not True


def _gpt2(args: Mapping[str, object], origin: str) -> dict[str, object]:
    h, n = _number(args, "hidden_size", origin), _number(args, "num_attention_heads", origin)
    if args.get("normalization", "LayerNorm") != "LayerNorm" or args.get("swiglu"):
        _refuse(origin, "learned positions with RMSNorm or SwiGLU")
    if not _bias(args):
        _refuse(origin, "learned positions without biases")
    if _groups(args, n) != n or args.get("kv_channels", h // n) != h // n:
        _refuse(origin, "learned positions with query groups or a kv_channels of its own")
    gelu = "gelu_new" if _is_tanh(args) else "gelu"
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": h,
        "n_layer": _number(args, "num_layers", origin),
        "n_head": n,
        "n_inner": args.get("ffn_hidden_size") or 4 * h,
        "n_positions": _number(args, "max_position_embeddings", origin),
        "activation_function": gelu,
        "layer_norm_epsilon": _eps(args),
        "initializer_range": args.get("init_method_std", 0.02),
        "tie_word_embeddings": _tied(args),
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": _dtype(args),
    }


def _groups(args: Mapping[str, object], heads: int) -> int:
    groups = args.get("num_query_groups")
    if args.get("group_query_attention") is False or type(groups) is not int:
        return heads
    return groups


def _llama(args: Mapping[str, object], origin: str) -> dict[str, object]:
    if _position(args) != "rope":
        _refuse(origin, f"position_embedding_type={_position(args)!r}")
    if args.get("normalization") != "RMSNorm" or args.get("swiglu") is not True:
        _refuse(origin, "rotary positions without RMSNorm and SwiGLU")
    if args.get("rotary_percent", 1.0) not in (1, 1.0):
        _refuse(origin, f"rotary_percent={args['rotary_percent']}")
    h, n = _number(args, "hidden_size", origin), _number(args, "num_attention_heads", origin)
    bias, qk_norm = _bias(args), args.get("qk_layernorm") is True
    qkv_bias, window = args.get("add_qkv_bias") is True, args.get("window_size")
    kind = "llama"
    if qk_norm:
        kind = "qwen3"
    elif qkv_bias and not bias:
        kind = "qwen2"
    elif window is not None:
        kind = "mistral"
    if bias and kind != "llama":
        _refuse(origin, f"biases in all linear layers with {'qk_layernorm' if qk_norm else kind}")
    if window is not None and kind != "mistral":
        _refuse(origin, f"window_size={window!r} with {kind}'s other settings")
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config: dict[str, object] = {
        "architectures": [names[kind] + "ForCausalLM"],
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": args.get("ffn_hidden_size") or 4 * h,
        "num_hidden_layers": _number(args, "num_layers", origin),
        "num_attention_heads": n,
        "num_key_value_heads": _groups(args, n),
        "head_dim": args.get("kv_channels") or h // n,
        "hidden_act": "silu",
        "max_position_embeddings": args.get("max_position_embeddings")
        or args.get("seq_length", 2048),
        "rms_norm_eps": _eps(args),
        **_rope(args, origin),
        "initializer_range": args.get("init_method_std", 0.02),
        "attention_dropout": args.get("attention_dropout", 0.0) or 0.0,
        "tie_word_embeddings": _tied(args),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": _dtype(args),
    }
    if kind == "llama":
        config |= {"attention_bias": bias, "mlp_bias": bias}
    if kind == "qwen3":
        config["attention_bias"] = qkv_bias
    if kind == "mistral":
        config["sliding_window"] = _window(window, origin)
    return config


# Megatron-LM's --use-rope-scaling is Llama 3's, with these constants and a factor of the user's
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope(args: Mapping[str, object], origin: str) -> dict[str, object]:
    """Rotary frequencies under the keys of older transformers and under those of newer ones.

    Each kind ignores the other's keys and falls back to a base of 10000 in silence.
    """
    base = _above_zero(args, "rotary_base", 10000, origin)
    scaling: dict[str, object] | None = None
    if args.get("use_rope_scaling"):
        factor = _above_zero(args, "rope_scaling_factor", 8.0, origin)
        scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    if args.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        if scaling:
            _refuse(origin, "use_rope_scaling and rotary_seq_len_interpolation_factor together")
        factor = _above_zero(args, "rotary_seq_len_interpolation_factor", 1, origin)
        scaling = {"rope_type": "linear", "factor": factor}
    parameters = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }


def _above_zero(args: Mapping[str, object], key: str, default: float, origin: str) -> float:
    value = args.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise CheckpointError(f"{origin}: args say {key} {pickles.short(value)}, no number above 0")
    return float(value)


def _window(window: object, origin: str) -> int | None:
    """``(s - 1, 0)`` looks back s tokens, the own one included; -1 has no limit."""
    sides = window.get("$tuple") if isinstance(window, dict) else window
    sides = list(sides) if isinstance(sides, tuple) else sides
    if (
        not isinstance(sides, list)
        or [type(side) for side in sides] != [int, int]
        or sides[0] < -1
        or sides[1] not in (0, -1)
    ):
        raise CheckpointError(
            f"{origin}: args say window_size {window!r}, not how many tokens back and 0 ahead; "
            "name the folder of a Hugging Face config with --config"
        )
    back: int = sides[0]
    return None if back == -1 else back + 1


def json_text(config: Mapping[str, object]) -> str:
    """The text of a config.json."""
    return json.dumps(config, indent=2, allow_nan=False) + "\n"
