"""This rank's part of a megatron-core GPTModel.

The layers are megatron's local ones with the modules of ``modules.py``. What a plain GPTModel
lacks is added with forward hooks, so that parameters keep the names of ``ckpt.families``.

Shapes: B batch, S sequence, H hidden, V padded vocabulary of this rank.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.placement import padded_vocab

from ..core.layout import Layout, Place
from ..patches.megatron import import_megatron
from .config import config_of
from .modules import CoreAttention, Norm
from .options import ModelOptions
from .read import Said, read

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig


def build(
    model: Model, place: Place, layout: Layout, options: ModelOptions, device: torch.device
) -> list[GPTModel]:
    """This rank's part of the model, randomly initialized: one GPTModel per virtual stage.

    Parameters lie on ``device`` in the type that ``options`` names; their names and shapes
    are those that ``ckpt.family.place`` gives this rank (see ``stored_parameters``). Called with
    ``labels`` a chunk of the last stage returns each token's loss [B, S] in fp32, without them
    the logits [B, S, V]; padded vocabulary rows have a logit of minus infinity in both.
    """
    assert (place.tp, place.pp) == (layout.tp, layout.pp), "a rank of another layout"
    said = read(model)
    config = config_of(said, layout, options)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    chunks = layout.chunks(model.sizes["layer"])[place.pp_rank]
    import_megatron("parallel_state").set_virtual_pipeline_model_parallel_world_size(
        len(chunks) if len(chunks) > 1 else None
    )
    return [
        _build_chunk(said, config, place, options, device, virtual_stage=v, of=len(chunks))
        for v in range(len(chunks))
    ]


def _build_chunk(
    said: Said,
    config: TransformerConfig,
    place: Place,
    options: ModelOptions,
    device: torch.device,
    *,
    virtual_stage: int,
    of: int,
) -> GPTModel:
    model = said.model
    vocab = padded_vocab(model.sizes["vocab"], options.vocab_multiple, place.tp)
    chunk = import_megatron("models.gpt").GPTModel(
        config,
        _block_spec(said, config, virtual_stage if of > 1 else None),
        vocab_size=vocab,
        max_sequence_length=model.sizes.get("pos", said.hf.max_position_embeddings),
        pre_process=place.is_first_stage and virtual_stage == 0,
        post_process=place.is_last_stage and virtual_stage == of - 1,
        share_embeddings_and_output_weights="tie_word_embeddings" in model.flags,
        position_embedding_type="rope" if said.rope else "learned_absolute",
        rotary_percent=said.rope.get("partial_rotary_factor") or 1.0,
        rotary_base=said.rope.get("rope_theta", 0),
        vp_stage=virtual_stage if of > 1 else None,
    )
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        if said.has(name + ".post_layernorm.weight"):
            for layer in chunk.decoder.layers:
                _add_post_norm(layer.get_submodule(name), config)
    if said.traits.residual_factor:
        for layer in chunk.decoder.layers:
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                _multiply(linear, said.number(said.traits.residual_factor))
    # megatron makes position embeddings on the CPU and in fp32, and expects this call
    chunk.to(device=device, dtype=config.params_dtype)
    if said.rope:
        # megatron's cache of angles belongs to the class and would never free the model
        rotary: Any = chunk.rotary_pos_emb
        angles = functools.partial(type(rotary).forward.__wrapped__, rotary)
        rotary.forward = functools.lru_cache(maxsize=32)(angles)
    if said.rope and said.rope["rope_type"] != "default":
        _set_frequencies(chunk, said.hf, str(said.rope["rope_type"]), device)
    if chunk.pre_process:
        _finish_embedding(chunk, said, config, options)
    if chunk.post_process:
        softcap = said.value("final_logit_softcapping")
        divisor = said.number(said.traits.logits_divisor) if said.traits.logits_divisor else 1.0
        _finish_logits(chunk, model.sizes["vocab"], vocab, softcap, divisor)
    _zero_padding(chunk, model.sizes["vocab"], place.tp_rank)
    return chunk


def _block_spec(said: Said, config: TransformerConfig, virtual_stage: int | None) -> object:
    """The layers of one chunk: megatron's local ones with our norms and core attention."""
    attention = import_megatron("transformer.attention")
    block = import_megatron("transformer.transformer_block")
    layer = import_megatron("transformer.transformer_layer")
    mlp = import_megatron("transformer.mlp")
    spec = import_megatron("transformer.spec_utils").ModuleSpec
    linears = import_megatron("tensor_parallel")
    causal = import_megatron("transformer.enums").AttnMaskType.causal
    add = import_megatron("fusions.fused_bias_dropout").get_bias_dropout_add

    def linear(kind: type, name: str) -> type:
        return _with_bias(kind, said.has(name + ".bias"))

    qk_norm = Norm if config.qk_layernorm else None
    self_attention = attention.SelfAttentionSubmodules(
        linear_qkv=linear(linears.ColumnParallelLinear, "self_attention.linear_qkv"),
        core_attention=functools.partial(
            CoreAttention,
            windows=said.windows,
            softcap=said.value("attn_logit_softcapping"),
            by_layer=bool(said.value("scale_attn_by_inverse_layer_idx")),
        ),
        linear_proj=linear(linears.RowParallelLinear, "self_attention.linear_proj"),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    feed_forward = mlp.MLPSubmodules(
        linear_fc1=linear(linears.ColumnParallelLinear, "mlp.linear_fc1"),
        linear_fc2=linear(linears.RowParallelLinear, "mlp.linear_fc2"),
    )
    submodules = layer.TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=spec(attention.SelfAttention, {"attn_mask_type": causal}, self_attention),
        self_attn_bda=add,
        pre_mlp_layernorm=Norm,
        mlp=spec(mlp.MLP, {"ffn_hidden_size": config.ffn_hidden_size}, feed_forward),
        mlp_bda=add,
    )
    count = block.get_num_layers_to_build(config, virtual_stage)
    layers = [spec(layer.TransformerLayer, submodules=submodules)] * count
    return block.TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


@functools.cache
def _with_bias(kind: type, bias: bool) -> type:
    """A parallel linear layer with or without bias; megatron has one switch for all of them."""

    class Linear(kind):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": bias})

    Linear.__name__ = Linear.__qualname__ = kind.__name__
    return Linear


def _add_post_norm(linear: torch.nn.Module, config: TransformerConfig) -> None:
    """A norm after a row-parallel layer and its bias, before the residual is added."""
    norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
    linear.add_module("post_layernorm", norm)

    def apply(
        module: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, None]:
        x, bias = output
        return norm(x if bias is None else x + bias), None

    linear.register_forward_hook(apply)


def _multiply(linear: torch.nn.Module, factor: float) -> None:
    """A factor of what a row-parallel layer and its bias give, before the residual is added."""

    def apply(
        module: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, None]:
        x, bias = output
        return (x if bias is None else x + bias) * factor, None

    linear.register_forward_hook(apply)


def _set_frequencies(
    chunk: GPTModel, hf: PretrainedConfig, kind: str, device: torch.device
) -> None:
    """Rotary frequencies scaled as transformers scales them.

    megatron's llama3 scaling has constants of its own, not the config's.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, device)
    assert factor == 1.0, f"{kind} scales the amplitudes as well"
    chunk.rotary_pos_emb.inv_freq = frequencies


def _finish_embedding(
    chunk: GPTModel, said: Said, config: TransformerConfig, options: ModelOptions
) -> None:
    """The embedding's own dropout, its factor, and the padding token that it does not train."""
    if said.traits.embedding_dropout and options.hidden_dropout is None:
        chunk.embedding.embedding_dropout.p = said.number(said.traits.embedding_dropout)
    words = chunk.embedding.word_embeddings
    if (pad := said.padding_token) is not None:

        def detach(
            module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor
        ) -> torch.Tensor:
            is_pad = args[0] == pad  # [B, S]
            if words.reduce_scatter_embeddings:  # output is [S / tp, B, H]
                is_pad = is_pad.t().chunk(config.tensor_model_parallel_size)[words.tp_group.rank()]
            # contiguous, or every later activation would inherit the order of dims
            return torch.where(is_pad.contiguous()[..., None], output.detach(), output)

        words.register_forward_hook(detach)
    if said.traits.scaled_embedding:
        # rounded to the weights' type, as the models were trained
        factor = torch.tensor(config.hidden_size**0.5).to(words.weight)
        words.register_forward_hook(lambda module, args, output: output * factor)
    if said.traits.embedding_factor:
        times = said.number(said.traits.embedding_factor)
        words.register_forward_hook(lambda module, args, output: output * times)


def _finish_logits(
    chunk: GPTModel, vocab: int, padded: int, softcap: float | None, divisor: float
) -> None:
    """Logits divided or bounded by tanh where the model does; minus infinity for padded rows."""
    rank = chunk.output_layer.tp_group.rank()

    def finish(
        module: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, bias = output  # [S, B, V], or all ranks' V when gathered
        if divisor != 1.0:
            logits = logits / divisor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        width = logits.shape[-1]
        first = 0 if width == padded else rank * width
        real = max(0, vocab - first)  # columns of real vocabulary rows
        if real < width:
            logits[..., real:] = -torch.inf
        return logits, bias

    chunk.output_layer.register_forward_hook(finish)


def _zero_padding(chunk: GPTModel, vocab: int, tp_rank: int) -> None:
    """Zero padded rows, as resharding makes new ones; no gradient ever reaches them."""
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = dict(chunk.named_parameters()).get(name)
        if weight is not None:
            with torch.no_grad():
                weight[max(0, vocab - tp_rank * weight.shape[0]) :] = 0


_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")


def stored_name(name: str, first_layer: int) -> str:
    """The name that rank files use: a chunk's parameter with its global 0-based layer number.

    ``first_layer`` is the number of the chunk's first layer.
    """
    return _LAYER_NAME.sub(lambda match: f"decoder.layers.{first_layer + int(match[1])}.", name)


def stored_parameters(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter of a chunk by its stored name, in the order of the modules.

    Wrappers around the chunk (data parallelism) are looked through.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
    first = layers[0].layer_number - 1 if len(layers) else 0
    return {stored_name(name, first): p for name, p in chunk.named_parameters()}
