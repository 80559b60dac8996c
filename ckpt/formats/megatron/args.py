"""Megatron-LM's `args`: the model that they describe, and args for another layout.

`args` is an argparse.Namespace with hundreds of values in every file that Megatron-LM writes.
Read, they are a dict whose values JSON can hold (args_codec.py); written, a dict of the values that
the pickle writer takes. Only args that a file held as such are ever decoded: what a config.json
says is compared and checked here, and becomes numbers, flags and texts alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...checkpoint.config import find_config, load_model, model_from
from ...checkpoint.types import ReadOptions
from ...containers import pickles
from ...containers.pickles import Global
from ...errors import CheckpointError
from ...model.dtypes import TO_TORCH
from ...model.family import Model
from ...move.storage import StoragePath
from .args_codec import decode

Args = dict[str, object]

# --- the model ---------------------------------------------------------------------------------

# args that change the model into one that no family table expresses: name -> values that do not
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "num_experts": (None, 0, 1),
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "attention_output_gate": (None, False),
    "squared_relu": (None, False),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "qk_l2_norm": (None, False),
    "fp8_param_gather": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "no_rope_freq": (None,),
    "window_attn_skip_freq": (None,),
}
_LATER = {"num_experts": "experts"}


def model_from_args(
    args: Mapping[str, object],
    origin: str,
    options: ReadOptions,
    padded_vocab: int,
    folder: StoragePath,
) -> tuple[Model, dict[str, object] | None, list[str]]:
    """The model, the config.json that args make (None where the user's is used), and notes.

    ``padded_vocab`` are the rows that the files hold: true ones for all that args say.
    """
    path = find_config(folder, options)
    if path is not None:
        model = load_model(path, options.vocab_size)
        _check_against(model, args, origin, str(path))
        return model, None, []
    config = config_from_args(args, origin)
    config["vocab_size"] = options.vocab_size or padded_vocab
    model = model_from(config, origin)
    notes = []
    if options.vocab_size is None:
        notes.append(
            f"args do not say how many of the {padded_vocab} vocabulary rows are true ones; all "
            "are kept (--vocab-size N or --config HF_DIR cuts them)"
        )
    return model, config, notes


def _check_against(model: Model, args: Mapping[str, object], origin: str, path: str) -> None:
    """A config of another model must not be believed over args."""
    says = {"layer": "num_layers", "h": "hidden_size", "n": "num_attention_heads"}
    for symbol, key in says.items():
        if args.get(key) is not None and model.sizes[symbol] != args[key]:
            raise CheckpointError(
                f"{origin}: args say {key} {args[key]}, {path} says {model.sizes[symbol]}; "
                "is it the config of this model?"
            )


def _number(args: Mapping[str, object], key: str, origin: str) -> int:
    value = args.get(key)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{origin}: args say {key} {value!r}, no whole number above 0")
    return value


def config_from_args(args: Mapping[str, object], origin: str) -> dict[str, object]:
    """A Hugging Face config, without vocab_size; CheckpointError for models of no family.

    An arg that is None says nothing: the default of Megatron-LM counts.
    """
    args = {key: value for key, value in args.items() if value is not None}
    for key, plain in _PLAIN.items():
        if args.get(key) not in plain:
            what = _LATER.get(key, f"a model with {key}={args[key]!r}")
            raise CheckpointError(
                f"{origin}: args say {key}={args[key]!r}; {what} cannot be read yet; known are "
                "Llama, Mistral, Qwen2, Qwen3 and GPT-2 (--config HF_DIR names a config)"
            )
    if _position(args) == "learned_absolute":
        return _gpt2(args, origin)
    return _llama(args, origin)


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
    gelu = "gelu_new" if args.get("openai_gelu") or args.get("bias_gelu_fusion") else "gelu"
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
_LLAMA3 = {
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
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
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


# --- args for another layout -------------------------------------------------------------------


def args_for(
    model: Model,
    source: Mapping[str, object],
    *,
    tp: int,
    pp: int,
    dp: int,
    vpp: int,
    stages: tuple[int, ...] | None,
    padded_vocab: int,
    vocab_multiple: int,
    distributed: bool,
    dtype: str,
    transformer_engine: bool = False,
    origin: str = "config.json",
) -> Args:
    """The args of a checkpoint in this layout: the source's, else what the config says.

    ``stages`` are the layers of each pipeline stage where they are uneven. ``dtype`` is a key of
    dtypes.ITEMSIZE. CheckpointError, which names ``origin``, for what args cannot say.
    """
    args: Args = {key: decode(value, f"state megatron.args.{key}") for key, value in source.items()}
    args = args or _from_config(model, transformer_engine, origin)
    layers = model.sizes["layer"]
    args.update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        transformer_pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_per_virtual_pipeline_stage=layers // (pp * vpp) if vpp > 1 else None,
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=tp,
        context_parallel_size=1,
        data_parallel_size=dp,
        world_size=tp * pp * dp,
        rank=0,
        padded_vocab_size=padded_vocab,
        make_vocab_size_divisible_by=vocab_multiple,
        use_distributed_optimizer=distributed,
        params_dtype=Global("torch", TO_TORCH[dtype]),
        bf16=dtype == "BF16",
        fp16=dtype == "F16",
        ckpt_format="torch",
    )
    if "local_rank" in args:
        args["local_rank"] = 0
    if tp == 1:
        args["sequence_parallel"] = False
    if stages is not None:
        args["decoder_first_pipeline_num_layers"] = stages[0]
        args["decoder_last_pipeline_num_layers"] = stages[-1]
    return args


def _from_config(model: Model, transformer_engine: bool, origin: str) -> Args:
    """What Megatron-LM needs to know of a model that it did not write."""
    config, sizes = model.config, model.sizes
    name = model.family.name

    def number(*keys: str, default: float) -> float:
        key = next((key for key in keys if config.get(key) is not None), "")
        return _number_of(config[key], key, origin) if key else default

    learned = "pos" in sizes
    ffn = sizes["gate"] if "gate" in sizes else sizes["f"]
    theta, scaling = _rotary(config, origin)
    bias = learned or "mlp_bias" in model.flags
    acts = (config.get(k) for k in ("activation_function", "hidden_act", "hidden_activation"))
    act = next((act for act in acts if act is not None), "")
    positions = number("max_position_embeddings", "n_positions", default=2048)
    epsilon = number("rms_norm_eps", "layer_norm_epsilon", default=1e-5)
    args: Args = {
        "num_layers": sizes["layer"],
        "hidden_size": sizes["h"],
        "ffn_hidden_size": ffn,
        "num_attention_heads": sizes["n"],
        "group_query_attention": sizes["g"] != sizes["n"],
        "num_query_groups": sizes["g"],
        "kv_channels": sizes["hd"],
        "max_position_embeddings": positions,
        "seq_length": positions,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "add_position_embedding": True,
        "rotary_base": int(theta) if float(theta).is_integer() else theta,
        "rotary_percent": number("partial_rotary_factor", default=_rotary_part(config, origin)),
        "rotary_interleaved": False,
        "use_rope_scaling": scaling is not None,
        "rope_scaling_factor": 8.0 if scaling is None else scaling,
        "normalization": "LayerNorm" if learned else "RMSNorm",
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": model.family.norm_offset == 1,
        "swiglu": not learned and act in ("silu", "swish", ""),
        "openai_gelu": act == "gelu_new",
        "squared_relu": False,
        "add_bias_linear": bias,
        "add_qkv_bias": bias or name == "qwen2" or "attention_bias" in model.flags,
        "qk_layernorm": name == "qwen3",
        "untie_embeddings_and_output_weights": "tie_word_embeddings" not in model.flags,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": number("initializer_range", default=0.02),
        "num_experts": None,
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "tokenizer_type": "HuggingFaceTokenizer",
        "vocab_size": sizes["vocab"],
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return args | _window_of(config, name, origin)


def _window_of(config: Mapping[str, object], family: str, origin: str) -> Args:
    """The args that limit attention to a window; CheckpointError for one of some layers only."""
    window = config.get("sliding_window")
    if family == "qwen2" and config.get("use_sliding_window") is True and window is not None:
        raise CheckpointError(
            f"{origin}: its config limits the attention of some layers to {window} tokens, which "
            "Megatron-LM's args cannot say; set use_sliding_window to false in a config that "
            "--config names if that is meant"
        )
    if family in ("mistral", "phi3") and type(window) is int:
        return {"window_size": (window - 1, 0)}  # the own token is not counted
    return {}


def _number_of(value: object, key: str, origin: str) -> float:
    """A number of a config, which becomes an arg; CheckpointError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63:
        return value  # NaN compares as false
    raise CheckpointError(
        f"{origin}: its config says {key} {pickles.short(value)}, no number that args of "
        "Megatron-LM can hold"
    )


def _rotary_part(config: Mapping[str, object], origin: str) -> float:
    """Where newer transformers keep partial_rotary_factor."""
    parameters = config.get("rope_parameters")
    part = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    return 1.0 if part is None else _number_of(part, "partial_rotary_factor", origin)


def _rotary(config: Mapping[str, object], origin: str) -> tuple[float, float | None]:
    """(base of the frequencies, factor of Llama 3's scaling or None) that a config says.

    CheckpointError for a scaling that args cannot say: weights with other args are another model.
    """
    new: Any = config.get("rope_parameters")
    old: Any = config.get("rope_scaling")
    rope = {**(new if isinstance(new, dict) else {}), **(old if isinstance(old, dict) else {})}
    base = config.get("rope_theta")
    if base is None:
        base = rope.get("rope_theta")
    base = 10000.0 if base is None else _number_of(base, "rope_theta", origin)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return base, None
    odd = [f"{k} {rope.get(k)!r}, not {n!r}" for k, n in _LLAMA3.items() if rope.get(k) != n]
    if kind != "llama3" or odd:
        what = f" with {'; '.join(odd)}" if kind == "llama3" else ""
        raise CheckpointError(
            f"{origin}: its config scales rotary positions by {kind!r}{what}, which Megatron-LM's "
            "args cannot say; name a config without that with --config, and tell Megatron-LM of "
            "the scaling by its own options"
        )
    return base, _number_of(rope.get("factor", 8.0), "factor", origin)


def json_text(config: Mapping[str, object]) -> str:
    """The text of a config.json."""
    return json.dumps(config, indent=2, allow_nan=False) + "\n"
