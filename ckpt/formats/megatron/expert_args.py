"""Args of experts, latent attention and MTP layers: made into a config, and made from a model."""

from __future__ import annotations

from collections.abc import Mapping

from ...checkpoint.config import MAX_LAYERS
from ...containers import pickles
from ...errors import CheckpointError
from ...model.family import MTP, Model, is_mtp

Args = Mapping[str, object]
MOE = "moe"  # the kind of layers with experts
MEGATRON_GPT = "megatron_gpt"  # the family of what no model of transformers computes
_TRANSFORMERS_BEST = 2  # its models score a group of experts by so many of its best
# families whose routers score with a sigmoid
SIGMOID = ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "llama4")
# families that renormalise the chosen experts' scores whatever the config says
_RENORMALISED = ("mixtral", "granitemoe")
# size of a model -> (what it is called in messages, arg)
SIZES: Mapping[str, tuple[str, str]] = {
    "expert": ("experts", "num_experts"),
    "xgate": ("MLP size of experts", "moe_ffn_hidden_size"),
    "sgate": ("MLP size of shared experts", "moe_shared_expert_intermediate_size"),
    "ql": ("latent size of queries", "q_lora_rank"),
    "kl": ("latent size of keys and values", "kv_lora_rank"),
    "dn": ("head size without positions", "qk_head_dim"),
    "dr": ("head size with positions", "qk_pos_emb_head_dim"),
    "dv": ("head size of values", "v_head_dim"),
    MTP: ("MTP layers", "mtp_num_layers"),
}
# of MLATransformerConfig: args of older versions do not have it
_ORIGINAL_LENGTH = 4096
_LATENT = ("ql", "kl", "dn", "dr", "dv")
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
LAYERS = "layers with experts"


def has_experts(args: Args) -> bool:
    """Whether args are of a model with experts."""
    said = args.get("num_experts")
    return type(said) is int and said > 1


def is_latent(args: Args) -> bool:
    """Whether attention is latent."""
    return args.get("multi_latent_attention") is True


def sizes_of(model: Model) -> dict[str, object]:
    """The sizes of a model under the names that ``says`` gives them, absent ones left out."""
    found: dict[str, object] = {
        what: model.sizes[symbol] for symbol, (what, _) in SIZES.items() if model.sizes.get(symbol)
    }
    if model.kinds and model.sizes.get("expert"):
        found[LAYERS] = [int(MOE in kinds) for kinds in model.kinds]
    return found


def says(args: Args) -> dict[str, tuple[str, object]]:
    """What args say of these, as args.says: setting -> (arg, value)."""
    found: dict[str, tuple[str, object]] = {}
    for symbol, (what, name) in SIZES.items():
        value = args.get(name)
        of_moe, of_mla = symbol in ("expert", "xgate", "sgate"), symbol in _LATENT
        if (of_moe and not has_experts(args)) or (of_mla and not is_latent(args)) or not value:
            continue
        found[what] = (name, value)
    if has_experts(args):
        if "MLP size of experts" not in found and args.get("ffn_hidden_size"):
            found["MLP size of experts"] = ("ffn_hidden_size", args["ffn_hidden_size"])
        if args.get("moe_router_topk") is not None:
            found["num_experts_per_tok"] = ("moe_router_topk", args["moe_router_topk"])
        layers = args.get("num_layers")
        if type(layers) is int and 0 < layers <= MAX_LAYERS:
            found[LAYERS] = ("moe_layer_freq", _pattern(args, layers, "args"))
    return found


def _pattern(args: Args, layers: int, origin: str) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    said = args.get("moe_layer_freq", 1)
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{origin}: args say {layers} layers; the limit is {MAX_LAYERS}")
    if type(said) is int and said > 0:
        return [int(i % said == 0) for i in range(layers)]
    if isinstance(said, list) and len(said) == layers and all(n in (0, 1) for n in said):
        return [int(bool(n)) for n in said]
    raise CheckpointError(
        f"{origin}: args say moe_layer_freq {pickles.short(said)}, no list of {layers} layers"
    )


# --- args -> config ------------------------------------------------------------------------------


def config_of(args: Args, base: dict[str, object], origin: str) -> dict[str, object]:
    """``base``, the config of a plain decoder, with experts, latent attention and MTP layers."""
    if not (has_experts(args) or is_latent(args) or args.get("mtp_num_layers")):
        return base
    if base.get("attention_bias") and base.get("mlp_bias"):
        raise CheckpointError(
            f"{origin}: args say add_bias_linear; experts, latent attention and MTP layers are "
            "known without it"
        )
    drop = ("architectures", "attention_bias", "mlp_bias", "sliding_window")
    latent = is_latent(args)
    table = {key: value for key, value in base.items() if key not in drop} | {
        "model_type": MEGATRON_GPT,
        "qkv_bias": args.get("add_qkv_bias") is True,
        "use_qk_norm": args.get("qk_layernorm") is True and not latent,
    }
    if latent:
        table |= _latent_config(args, origin)
    if has_experts(args):
        table |= _experts_config(args, origin)
    if args.get("mtp_num_layers"):
        table["num_nextn_predict_layers"] = args["mtp_num_layers"]
    for narrow in (_mixtral, _qwen3_moe, _deepseek_v3):
        found = narrow(table)
        if found is not None:
            return found
    return table


def _latent_config(args: Args, origin: str) -> dict[str, object]:
    for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        value = args.get(name)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{origin}: args say multi_latent_attention=True and {name} "
                f"{pickles.short(value)}, no whole number above 0"
            )
    found: dict[str, object] = {
        "q_lora_rank": args.get("q_lora_rank"),
        "kv_lora_rank": args.get("kv_lora_rank"),
        "qk_nope_head_dim": args.get("qk_head_dim"),
        "qk_rope_head_dim": args.get("qk_pos_emb_head_dim"),
        "v_head_dim": args.get("v_head_dim"),
        "head_dim": args.get("qk_pos_emb_head_dim"),
    }
    factor = args.get("rotary_scaling_factor")
    if args.get("rope_type", "yarn") == "yarn" and factor not in (None, 1, 1.0):
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
        }
        scaling |= {key: args[key] for key in _YARN if args.get(key) is not None}
        found |= {
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": args.get("rotary_base", 10000), **scaling},
        }
    return found


def _experts_config(args: Args, origin: str) -> dict[str, object]:
    layers = args.get("num_layers")
    assert type(layers) is int, "checked by the plain decoder's config"
    sigmoid = args.get("moe_router_score_function", "softmax") == "sigmoid"
    pattern = _pattern(args, layers, origin)
    return {
        "num_experts": args["num_experts"],
        "moe_intermediate_size": args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size"),
        "num_experts_per_tok": args.get("moe_router_topk", 2),
        "mlp_layer_types": ["sparse" if moe else "dense" for moe in pattern],
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "norm_topk_prob": sigmoid or args.get("moe_router_pre_softmax") is not True,
        "routed_scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": args.get("moe_router_num_groups") or 1,
        "topk_group": args.get("moe_router_group_topk") or 1,
        "router_bias": args.get("moe_router_enable_expert_bias") is True,
        "shared_expert_intermediate_size": args.get("moe_shared_expert_intermediate_size") or 0,
        "shared_expert_gate": args.get("moe_shared_expert_gate") is True,
    }


_OWN = ("qkv_bias", "use_qk_norm", "router_bias", "shared_expert_gate", "mlp_layer_types",
        "scoring_func", "shared_expert_intermediate_size", "num_experts", "n_group", "topk_group",
        "routed_scaling_factor")  # fmt: skip


def _is(table: Mapping[str, object], **wanted: object) -> bool:
    return all(table.get(key, 0) == value for key, value in wanted.items())


_PLAIN_ROUTER = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1,
                 "router_bias": False, "shared_expert_intermediate_size": 0, "kv_lora_rank": 0,
                 "num_nextn_predict_layers": 0, "qkv_bias": False}  # fmt: skip


def _rest(table: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in table.items() if key not in _OWN}


def _mixtral(table: Mapping[str, object]) -> dict[str, object] | None:
    types = table.get("mlp_layer_types")
    if not isinstance(types, list) or "dense" in types or table.get("norm_topk_prob") is not True:
        return None
    if not _is(table, use_qk_norm=False, **_PLAIN_ROUTER):
        return None
    found = _rest(table) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": table["num_experts"],
        "intermediate_size": table["moe_intermediate_size"],
        "sliding_window": None,
    }
    del found["moe_intermediate_size"], found["norm_topk_prob"]
    return found


def _qwen3_moe(table: Mapping[str, object]) -> dict[str, object] | None:
    types = table.get("mlp_layer_types")
    if not isinstance(types, list) or not _is(table, use_qk_norm=True, **_PLAIN_ROUTER):
        return None
    return _rest(table) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": table["num_experts"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(types) if kind == "dense"],
        "attention_bias": False,
    }


def _deepseek_v3(table: Mapping[str, object]) -> dict[str, object] | None:
    types, shared = table.get("mlp_layer_types"), table.get("shared_expert_intermediate_size")
    width = table.get("moe_intermediate_size")
    if not table.get("kv_lora_rank") or not isinstance(types, list):
        return None
    first = types.count("dense")
    if types[:first].count("dense") != first or table["qkv_bias"]:
        return None
    if not _is(table, scoring_func="sigmoid", router_bias=True, shared_expert_gate=False):
        return None
    if type(shared) is not int or type(width) is not int or shared % width:
        return None
    if _best_of_group(table) != _TRANSFORMERS_BEST:
        return None
    return _rest(table) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": table["num_experts"],
        "n_shared_experts": shared // width,
        "first_k_dense_replace": first,
        "scoring_func": "sigmoid",
        **{key: table[key] for key in ("n_group", "topk_group", "routed_scaling_factor")},
    }


# --- model -> args -------------------------------------------------------------------------------


def args_of(model: Model) -> dict[str, object]:
    """The args of experts, latent attention and MTP layers of a model that has any of them."""
    sizes, config = model.sizes, model.config
    found: dict[str, object] = {}
    if sizes.get("kl"):
        found |= {"multi_latent_attention": True, **_named(sizes, _LATENT), "rope_type": "rope",
                  "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
                  "qk_layernorm": True, **_yarn(config)}  # fmt: skip
    if sizes.get("expert"):
        sigmoid = model.family.name in SIGMOID or config.get("scoring_func") == "sigmoid"
        normed = config.get("norm_topk_prob") is True or model.family.name in _RENORMALISED
        pattern = [int(MOE in kinds) for kinds in model.kinds]
        groups = config.get("n_group")
        grouped = type(groups) is int and groups > 1
        scaling = config.get("routed_scaling_factor")
        found |= {
            **_named(sizes, ("expert", "xgate")),
            "moe_router_topk": config.get("num_experts_per_tok", 2),
            "moe_layer_freq": 1 if all(pattern) else pattern,
            "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
            "moe_router_pre_softmax": not sigmoid and not normed,
            "moe_router_topk_scaling_factor": None if scaling in (None, 1, 1.0) else scaling,
            "moe_router_num_groups": groups if grouped else None,
            "moe_router_group_topk": config.get("topk_group") if grouped else None,
            "moe_router_enable_expert_bias": any(
                rule.name.endswith("router.expert_bias") for rule in model.rules()
            ),
            "moe_shared_expert_intermediate_size": sizes.get("sgate") or None,
            "moe_shared_expert_gate": any(
                rule.name.endswith("shared_experts.gate_weight") for rule in model.rules()
            ),
            "moe_grouped_gemm": False,
        }
    if mtp_layers(model):
        found["mtp_num_layers"] = mtp_layers(model)
    return found


def _best_of_group(config: Mapping[str, object]) -> int:
    """How many of its best experts megatron-core scores a group by: as many as are chosen from each
    group. Without groups, what transformers has.
    """
    groups, chosen, best = (
        config.get(key) for key in ("n_group", "topk_group", "num_experts_per_tok")
    )
    if type(groups) is not int or groups < 2 or type(chosen) is not int or type(best) is not int:
        return _TRANSFORMERS_BEST
    return best // chosen if chosen > 0 else 0


def cannot_say(model: Model) -> list[str]:
    """What megatron-core computes otherwise than transformers' model: scores of groups."""
    each = _best_of_group(model.config)
    if model.family.name == MEGATRON_GPT or each == _TRANSFORMERS_BEST:
        return []
    return [
        f"groups of experts scored by their best {_TRANSFORMERS_BEST} (megatron-core: by {each})"
    ]


def check_mtp(model: Model, args: Mapping[str, object], origin: object) -> None:
    """CheckpointError if args say of layers that predict further tokens and no file has them."""
    said = args.get("mtp_num_layers")
    if said and model.sizes.get(MTP) and not mtp_layers(model):
        raise CheckpointError(
            f"{origin}: args say mtp_num_layers={said}, but no file holds a tensor mtp.layers.*; "
            "get the files of the last pipeline stage again, or, if the layers were removed, name "
            "a config without num_nextn_predict_layers with --config HF_DIR"
        )


def mtp_layers(model: Model) -> int:
    """How many layers predict further tokens."""
    return model.sizes.get(MTP, 0) if any(map(is_mtp, model.rules())) else 0


def _named(sizes: Mapping[str, int], symbols: tuple[str, ...]) -> dict[str, object]:
    return {SIZES[symbol][1]: sizes[symbol] or None for symbol in symbols}


def _yarn(config: Mapping[str, object]) -> dict[str, object]:
    """The args of YaRN, if a config asks for it."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    table = {**(old if isinstance(old, dict) else {}), **(new if isinstance(new, dict) else {})}
    if (table.get("rope_type") or table.get("type")) != "yarn":
        return {}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": table.get("factor"),
        **{key: table[key] for key in _YARN if table.get(key) is not None},
    }


def tensors_of(args: Args) -> tuple[set[str], set[str]]:
    """(added, absent): the ends of stored names of what args describe here, beside a plain layer's
    and in place of them.
    """
    added: set[str] = set()
    absent: set[str] = set()
    if args.get("multi_latent_attention"):
        absent |= {
            "linear_qkv.weight",
            "linear_qkv.bias",
            "k_layernorm.weight",
            "q_layernorm.weight",
        }
        added |= {"linear_kv_down_proj.weight", "linear_kv_up_proj.weight", "kv_layernorm.weight"}
        low = {"linear_q_down_proj.weight", "linear_q_up_proj.weight", "q_layernorm.weight"}
        added |= low if args.get("q_lora_rank") else {"linear_q_proj.weight"}
    if args.get("num_experts"):
        added.add("router.weight")
        added |= {"router.expert_bias"} if args.get("moe_router_enable_expert_bias") else set()
        if args.get("moe_shared_expert_gate"):
            added.add("shared_experts.gate_weight")
    if args.get("mtp_num_layers"):
        added |= {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    return added, absent
