"""megatron-core's TransformerConfig of a model in a layout."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from shardwright.ckpt.families.rows import D as LAYER
from shardwright.ckpt.model.family import Model

from ..core.layout import Layout, check_layout
from ..errors import TrainError
from ..patches.megatron import import_megatron
from .options import ModelOptions
from .read import ACTIVATIONS, Said, read

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(model: Model, layout: Layout, options: ModelOptions) -> TransformerConfig:
    """megatron-core's config of this model in this layout.

    Losses are sums over tokens (``calculate_per_token_loss``), which ``grad_scale_func`` divides.
    TrainError or CheckpointError names what does not fit.
    """
    return config_of(read(model), layout, options)


def config_of(said: Said, layout: Layout, options: ModelOptions) -> TransformerConfig:
    """The same of a model that is read."""
    model = said.model
    check_layout(model, layout, options.vocab_multiple)
    fields = {
        **_architecture(said),
        **_randomness(said, options),
        **_parallelism(model.sizes["layer"], layout, options),
        **_recomputation(model.sizes["layer"], layout, options),
        "cross_entropy_loss_fusion": options.fused_cross_entropy,
        **_fusions(said, options),
        "deterministic_mode": options.deterministic,
        "calculate_per_token_loss": True,
        "cuda_graph_scope": [],  # the default is a deprecated spelling of this
    }
    made = import_megatron("transformer.transformer_config").TransformerConfig
    with warnings.catch_warnings():  # of recomputing Transformer Engine's attention: ours is not
        warnings.filterwarnings("ignore", message="If you are using transformer_engine")
        return made(**fields)


def _fusions(said: Said, options: ModelOptions) -> dict[str, object]:
    """The fused kernels of a GPU: megatron's own, and those that ``fusions`` puts in."""
    if not options.fusions or not torch.cuda.is_available():
        return {}
    architecture = _architecture(said)
    swiglu = architecture["activation_func"] is F.silu and architecture["gated_linear_unit"]
    return {
        "apply_rope_fusion": bool(said.rope) and not architecture["rotary_interleaved"],
        "bias_activation_fusion": bool(swiglu),
        "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": True,
    }


def _architecture(said: Said) -> dict[str, object]:
    """What the model is."""
    sizes, rows = said.model.sizes, said.rows
    ffn = rows[LAYER + "mlp.linear_fc2.weight"].split()[1]
    layer_norm = said.has("input_layernorm.bias")
    scale = None  # 1 / sqrt(D)
    if (scalar := said.value("query_pre_attn_scalar")) is not None:
        scale = scalar**-0.5
    if said.value("scale_attn_weights") is False:
        scale = 1.0
    if said.traits.attention_factor:
        scale = said.number(said.traits.attention_factor)
    rotated = said.value("no_rope_layers") or ()  # 0 for layers without
    return {
        "num_layers": sizes["layer"],
        "hidden_size": sizes["h"],
        "num_attention_heads": sizes["n"],
        "num_query_groups": sizes["g"],
        "kv_channels": sizes["hd"],
        "ffn_hidden_size": sizes[ffn],
        "normalization": "LayerNorm" if layer_norm else "RMSNorm",
        "layernorm_epsilon": said.number(said.traits.norm_eps),
        "layernorm_zero_centered_gamma": bool(said.model.family.norm_offset),
        "qk_layernorm": said.has("self_attention.q_layernorm.weight"),
        "add_bias_linear": said.has("mlp.linear_fc1.bias"),
        "add_qkv_bias": said.has("self_attention.linear_qkv.bias"),
        "gated_linear_unit": "+" in rows[LAYER + "mlp.linear_fc1.weight"].split()[0],
        "activation_func": ACTIVATIONS[said.value(said.traits.activation)],
        "softmax_scale": scale,
        "rotary_interleaved": said.model.family.function.rotary == "interleaved",
        "no_rope_freq": None if all(rotated) else [int(not turned) for turned in rotated],
    }


def _randomness(said: Said, options: ModelOptions) -> dict[str, object]:
    """Initial weights as Hugging Face draws them, and dropout."""
    std = said.number("initializer_range")
    attention, hidden = options.attention_dropout, options.hidden_dropout
    normal = import_megatron("utils").init_method_normal(std)
    fields: dict[str, object] = {
        "init_method_std": std,
        "attention_dropout": said.number(said.traits.attention_dropout)
        if attention is None
        else attention,
        "hidden_dropout": said.number(said.traits.hidden_dropout) if hidden is None else hidden,
    }
    # left alone, megatron scales the output projections' deviation by 1 / sqrt(2 x layers)
    return fields if said.traits.scaled_init else {**fields, "output_layer_init_method": normal}


def _parallelism(num_layers: int, layout: Layout, options: ModelOptions) -> dict[str, object]:
    """How it is split, and the types that travel between stages."""
    dtype = _DTYPES[options.precision]
    fields: dict[str, object] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "sequence_parallel": layout.sequence_parallel,
        "bf16": options.precision == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if layout.pp == 1:
        return fields
    chunks = layout.chunks(num_layers)
    virtual = len(chunks[0])
    stages = [["decoder"] * len(chunks[p][v]) for v in range(virtual) for p in range(layout.pp)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {
        **fields,
        "pipeline_model_parallel_layout": stages,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        # Two neighbours that are each other's next and previous need sends apart from each other.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
        "batch_p2p_sync": False,  # waiting for the GPU after each exchange helped old torch only
        "deallocate_pipeline_outputs": True,
    }


def _recomputation(num_layers: int, layout: Layout, options: ModelOptions) -> dict[str, object]:
    """Which activations are computed a second time instead of kept."""
    if options.recompute == "none":
        return {}
    if options.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if options.distribute_saved_activations and layout.sequence_parallel:
        raise TrainError(
            "distribute_saved_activations: sequence parallelism distributes them already; turn "
            "one of the two off"
        )
    method, unit = options.recompute_method or "uniform", options.recompute_num_layers or 1
    sizes = {len(chunk) for stage in layout.chunks(num_layers) for chunk in stage}
    if method == "uniform" and any(size % unit for size in sizes):
        raise TrainError(
            f"recompute_num_layers={unit} does not divide the {min(s for s in sizes if s % unit)} "
            "layers of a stage; name a divisor, or recompute_method block"
        )
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": unit,
        "distribute_saved_activations": options.distribute_saved_activations,
    }
