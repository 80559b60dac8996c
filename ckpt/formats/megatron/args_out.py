"""Args for a checkpoint in another layout or format: the source's, or made from a config.

A model that args cannot describe is refused, because megatron-core would build another model from
them, without an error. Only args that were read from a file of Megatron-LM are decoded
(args_codec.py); values of a config.json become numbers, flags and texts only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...checkpoint.function import Settings, is_usual_factor, settings
from ...containers import pickles
from ...containers.pickles import Global
from ...errors import CheckpointError
from ...model.dtypes import TO_TORCH
from ...model.family import Model
from ...model.mesh import Mesh
from . import expert_args, pipeline
from .args import LLAMA3, contradicted, says, shown
from .args_codec import decode

Args = dict[str, object]
ALLOW = "--allow-incomplete-args"
# What the tensors of a layer are called that megatron-core's GPTModel makes.
_NORMS = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm")
_LINEAR = ("linear_proj", "linear_fc1", "linear_fc2")
# settings that args have no place for -> the values that change nothing
_UNSAID: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
}
# what no output has: parallelism over contexts
_FIXED: Mapping[str, object] = {
    "context_parallel_size": 1,
    "rank": 0,  # classic files say their own
    "ckpt_format": "torch",
}
# what a config says nothing of
_OF_A_NEW_RUN: Mapping[str, object] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": None,
    "tokenizer_type": "HuggingFaceTokenizer",
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
}
_EPSILON = 1e-5  # Megatron-LM's default
_ACTIVATION = ("swiglu", "bias_gelu_fusion", "openai_gelu", "squared_relu")  # all of it in args
_PARTIAL = "partial_rotary_factor"  # families that have it may rotate a part of a head
_SCALES = re.compile(r".*(multiplier|scaling|softcap\w*|_scale|logit_cap)")


def args_for(
    model: Model,
    source: Mapping[str, object],
    *,
    mesh: Mesh,
    dp: int,
    padded_vocab: int,
    vocab_multiple: int,
    distributed: bool,
    dtype: str,
    transformer_engine: bool = False,
    origin: str = "config.json",
    state_origin: str = "state",
    allow_incomplete: bool = False,
    notes: list[str],
) -> Args:
    """The args of a checkpoint in this layout: the source's, else what the config says.

    ``dtype`` is a key of dtypes.ITEMSIZE. CheckpointError with ``origin`` for what args cannot say;
    with ``allow_incomplete``, ``notes`` names it. ``state_origin`` is the file that ``source`` is
    from.
    """
    args = _model_args(
        model, source, transformer_engine, origin, state_origin, allow_incomplete, notes
    )
    tp, pp = mesh.size("tp"), mesh.size("pp")
    args.update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        transformer_pipeline_model_parallel_size=pp,
        **pipeline.written(mesh, model.sizes["layer"], expert_args.mtp_layers(model)),
        expert_model_parallel_size=1 if mesh.experts is None else mesh.experts.size("ep"),
        expert_tensor_parallel_size=tp if mesh.experts is None else mesh.experts.size("tp"),
        data_parallel_size=dp,
        world_size=tp * pp * dp,
        padded_vocab_size=padded_vocab,
        make_vocab_size_divisible_by=vocab_multiple,
        use_distributed_optimizer=distributed,
        params_dtype=Global("torch", TO_TORCH[dtype]),
        bf16=dtype == "BF16",
        fp16=dtype == "F16",
        **_FIXED,
    )
    if "local_rank" in args:
        args["local_rank"] = 0
    if tp == 1:
        args["sequence_parallel"] = False
    return args


def _model_args(
    model: Model,
    source: Mapping[str, object],
    transformer_engine: bool,
    origin: str,
    state_origin: str,
    allow_incomplete: bool,
    notes: list[str],
) -> Args:
    """The source's args, else those that the config makes; CheckpointError as in ``args_for``."""
    args: Args = {
        key: decode(value, f"{state_origin}: megatron.args.{key}") for key, value in source.items()
    }
    made = _from_config(model, transformer_engine, origin)
    lacks = cannot_say(model, made, origin)
    if lacks and not allow_incomplete:
        raise CheckpointError(
            f"{origin}: args of Megatron-LM cannot say all of this model, and megatron-core would "
            f"build another one from them: {'; '.join(lacks)}. Pass {ALLOW} to write what args "
            "can say, and set up the rest by code of your own"
        )
    notes += [f"args lack ({ALLOW}): {row}" for row in lacks]
    if not args:
        return made
    names = contradicted(model, source)  # then the config was trusted
    args |= {name: made.get(name) for name in names}
    if "swiglu" in names:
        args |= {name: made[name] for name in _ACTIVATION}
    return args


def cannot_say(model: Model, args: Mapping[str, object], origin: str) -> list[str]:
    """What args do not say about a model, or say wrongly; empty if they say everything."""
    wanted, said = settings(model.config, model), says(args)
    function = model.family.function
    rows = [
        *function.beyond,
        *(
            f"{key} {shown(wanted[key])}"
            for key, plain in function.plain.items()
            if wanted.get(key) not in plain
        ),
    ]
    rows += [
        f"{what} {shown(two)}"
        for what, one, two in contradicted(model, args).values()
        if one != two
    ]
    for what, value in wanted.items():
        neutral = None if what in function.plain else _UNSAID.get(what)
        if neutral is None and what not in {*said, *function.plain} and _SCALES.fullmatch(what):
            neutral = (None, False, 1)
        if neutral is not None and value not in neutral:
            rows.append(f"{what} {shown(value)}")
    part = wanted["rotated part of a head"]
    if part != 1 and _PARTIAL not in function.defaults:
        rows.append(f"rotated part of a head {shown(part)}, which {model.family.name} has not")
    rows += _scores_unsaid(wanted, model.sizes["hd"])
    rows += [
        f"{what} {shown(wanted[what])}"
        for what in ("rope scaling", "attention window", "layers without positions")
        if what not in said and wanted.get(what) is not None
    ]
    return rows + expert_args.cannot_say(model) + _tensors_unsaid(model, args)


def _scores_unsaid(wanted: Settings, head: int) -> list[str]:
    """Factors of attention scores other than one by the square root of the head size."""
    rows = []
    scalar = wanted.get("query_pre_attn_scalar")
    if scalar is not None and scalar != head:
        rows.append(f"query_pre_attn_scalar {shown(scalar)}, heads of {head}")
    factor = wanted.get("factor of attention scores")
    if factor is not None and not is_usual_factor(factor, head):
        rows.append(f"attention_multiplier {shown(factor)}, heads of {head}")
    return rows


def say_options(args: Mapping[str, object]) -> list[str]:
    """A note on the options that args need beside them; empty if they need none.

    Megatron-LM's --use-checkpoint-args uses only some of the args. With the defaults of the others
    it computes another function, without an error.
    """
    asked = []
    if args["norm_epsilon"] != _EPSILON:
        asked.append(f"--norm-epsilon {args['norm_epsilon']}")
    if args["qk_layernorm"]:
        asked.append("--qk-layernorm")
    if args["use_rope_scaling"]:
        asked.append(f"--use-rope-scaling --rope-scaling-factor {args['rope_scaling_factor']}")
    if "rotary_seq_len_interpolation_factor" in args:
        factor = args["rotary_seq_len_interpolation_factor"]
        asked.append(f"--rotary-seq-len-interpolation-factor {factor}")
    window = args.get("window_size")
    if isinstance(window, tuple):
        asked.append("--window-size " + ",".join(map(str, window)))
    if args.get("no_rope_freq") is not None:
        asked.append(f"--no-rope-freq '{args['no_rope_freq']}'")
    if args["add_bias_linear"] and not args["swiglu"] and not args["bias_gelu_fusion"]:
        asked.append("--no-bias-gelu-fusion")
    if not asked:
        return []
    return [f"Megatron-LM's --use-checkpoint-args leaves out: {' '.join(asked)}"]


def _stored_names(model: Model) -> set[str]:
    return {rule.name for rule in model.rules()}


def _tensors_unsaid(model: Model, args: Mapping[str, object]) -> list[str]:
    """Tensors of the model that megatron-core would not create from args, and the reverse."""
    learned, rms = "pos" in model.sizes, args["normalization"] == "RMSNorm"
    wanted = set()
    for name in _NORMS:
        wanted |= {f"{name}.weight"} | (set() if rms else {f"{name}.bias"})
    wanted |= {f"{name}.weight" for name in ("linear_qkv", *_LINEAR)}
    if args["add_bias_linear"]:
        wanted |= {f"{name}.bias" for name in ("linear_qkv", *_LINEAR)}
    if args["add_qkv_bias"]:
        wanted.add("linear_qkv.bias")
    if args["qk_layernorm"]:
        wanted |= {"q_layernorm.weight", "k_layernorm.weight"}
    added, absent = expert_args.tensors_of(args)
    wanted = (wanted - absent) | added
    wanted |= {"word_embeddings.weight"} | ({"position_embeddings.weight"} if learned else set())
    have = {".".join(name.split(".")[-2:]) for name in _stored_names(model)}
    have.discard("output_layer.weight")  # tied on several stages, where it repeats the embedding
    rows = []
    if have - wanted:
        rows.append(f"tensors {', '.join(sorted(have - wanted))}")
    if wanted - have:
        rows.append(f"no tensors {', '.join(sorted(wanted - have))}")
    return rows


def _head_args(model: Model, names: set[str]) -> Args:
    """Args of the attention heads: how many, how wide, with which biases and norms."""
    heads, groups = model.sizes["n"], model.sizes["g"]
    return {
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": model.sizes["hd"],
        "add_qkv_bias": any(name.endswith("linear_qkv.bias") for name in names),
        "qk_layernorm": any(name.endswith("q_layernorm.weight") for name in names),
    }


def _from_config(model: Model, transformer_engine: bool, origin: str) -> Args:
    """Args made from the model's config."""
    config, sizes = model.config, model.sizes
    wanted, names = settings(config, model), _stored_names(model)

    def number(what: str, default: float) -> float:
        value = wanted.get(what)
        return default if value is None else _number_of(value, what, origin)

    learned, gated = "pos" in sizes, "gate" in sizes
    without = "none" if wanted.get("alibi") is True else ""  # of positions in the embedding
    gated = gated or "xgate" in sizes
    ffn = sizes.get("gate", sizes.get("xgate", sizes.get("f")))
    bias = any(name.endswith("mlp.linear_fc1.bias") for name in names)
    # megatron-core's GELU is the exact one, and tanh's approximation where it is fused with a bias;
    # --openai-gelu counts for the models from before it alone
    tanh = bias and wanted["activation"] == "gelu_tanh"
    keys = ("max_position_embeddings", "n_positions")
    said = next((config[key] for key in keys if config.get(key) is not None), 2048)
    positions = _number_of(said, "max_position_embeddings", origin)
    epsilon, spread = number("norm epsilon", 1e-5), config.get("initializer_range") or 0.02
    args: Args = {
        "num_layers": sizes["layer"],
        "hidden_size": sizes["h"],
        "ffn_hidden_size": ffn,
        "num_attention_heads": sizes["n"],
        **_head_args(model, names),
        "max_position_embeddings": positions,
        "seq_length": positions,
        "position_embedding_type": "learned_absolute" if learned else without or "rope",
        "add_position_embedding": True,
        "rotary_percent": number("rotated part of a head", 1.0),
        "rotary_interleaved": wanted["rotary pairs"] == "interleaved",
        **_rotary_args(model, wanted.get("rope scaling"), origin),
        "normalization": "LayerNorm" if model.family.function.layer_norm else "RMSNorm",
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": model.family.norm_offset == 1,
        "swiglu": gated,
        "bias_gelu_fusion": tanh,
        "openai_gelu": tanh,
        "squared_relu": not gated and wanted["activation"] == "relu2",
        "add_bias_linear": bias,
        "untie_embeddings_and_output_weights": "tie_word_embeddings" not in model.flags,
        "init_method_std": _number_of(spread, "initializer_range", origin),
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "vocab_size": sizes["vocab"],
        **_OF_A_NEW_RUN,
        **expert_args.args_of(model),
    }
    if (resting := wanted["layers without positions"]) is not None:
        assert isinstance(resting, list)
        args["no_rope_freq"] = [int(layer in resting) for layer in range(sizes["layer"])]
    window = wanted.get("attention window")
    if type(window) is int:
        args["window_size"] = (window - 1, 0)  # without the token itself
    return args


def _theta(model: Model, origin: str) -> float:
    """The base of rotary frequencies; two different ones are refused elsewhere."""
    config, default = model.config, model.family.function.defaults.get("rope_theta", 10000.0)
    new = config.get("rope_parameters")
    tables = [new, new.get("full_attention")] if isinstance(new, dict) else []
    said = [config.get("rope_theta"), config.get("rotary_emb_base")]
    said += [table.get("rope_theta") for table in tables if isinstance(table, dict)]
    base = next((value for value in said if value is not None), default)
    return _number_of(base, "rope_theta", origin)


def _rotary_args(model: Model, scaling: object, origin: str) -> Args:
    """The base, Llama 3's scaling and linear interpolation; another scaling is refused later."""
    theta = _theta(model, origin)
    table = scaling if isinstance(scaling, dict) else {}
    kind, factor = table.get("rope_type"), table.get("factor", 8.0)
    args: Args = {
        "rotary_base": int(theta) if float(theta).is_integer() else theta,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    if kind == "llama3" and all(table.get(key) == value for key, value in LLAMA3.items()):
        args |= {"use_rope_scaling": True}
        args["rope_scaling_factor"] = _number_of(factor, "factor", origin)
    elif kind == "linear":
        times = _number_of(factor, "factor", origin)
        args["rotary_seq_len_interpolation_factor"] = int(times) if times == int(times) else times
    return args


def _number_of(value: object, key: str, origin: str) -> float:
    """A number of a config, which becomes an arg; CheckpointError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63:
        return value  # NaN compares as false
    raise CheckpointError(
        f"{origin}: its config says {key} {pickles.short(value)}, no number that args of "
        "Megatron-LM can hold"
    )
