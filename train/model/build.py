"""From a family table and a Hugging Face config to this rank's part of a megatron-core GPTModel.

The family's rows say what the model is made of: which biases, which norms, whether the MLP is
gated. The config says how it computes. Whatever megatron-core and the modules below cannot
compute exactly is refused by name, before anything is built.

The layers are megatron's local ones except two modules of our own: ``Norm``, which may run on a
part of the sequence, and ``CoreAttention``, which never holds the matrix of scores. What a plain
GPTModel lacks is added with forward hooks, so that parameters keep the names of ``ckpt.families``.

Shapes: B batch, S sequence, H hidden, N query heads and G KV heads of this rank, D head size,
V padded vocabulary of this rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwright.ckpt.families.rows import D as LAYER
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.placement import padded_vocab

from ..core.layout import Layout, check_layout
from ..core.process import Parallel
from ..errors import TrainError
from ..patches.megatron import import_megatron
from .options import ModelOptions

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a family computes that its rows do not say; the strings are config keys."""

    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"
    attention_dropout: str = "attention_dropout"
    hidden_dropout: str = ""
    embedding_dropout: str = ""
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(H)
    trains_padding: bool = False  # the padding token's embedding gets gradients
    scaled_init: bool = False  # output projections start smaller by sqrt(2 x layers)


# The families whose forward pass is known here.
_FAMILIES: Mapping[str, _Traits] = {
    "llama": _Traits(),
    "mistral": _Traits(),
    "qwen2": _Traits(),
    "qwen3": _Traits(),
    "phi3": _Traits(hidden_dropout="resid_pdrop"),
    "gemma": _Traits(scaled_embedding=True),
    "gemma2": _Traits(activation="hidden_activation", scaled_embedding=True),
    "gpt2": _Traits(
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        attention_dropout="attn_pdrop",
        hidden_dropout="resid_pdrop",
        embedding_dropout="embd_pdrop",
        trains_padding=True,
        scaled_init=True,
    ),
}

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


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class _Said:
    """What rows and config say of a model's forward pass."""

    model: Model
    traits: _Traits
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
        """The token whose embedding transformers never trains (its head row it does)."""
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


def _read(model: Model) -> _Said:
    """Rows and config side by side; TrainError with all that cannot be expressed."""
    name = model.family.name
    if name not in _FAMILIES:
        raise TrainError(
            f"the family {name} cannot be trained: its forward pass is not among those known "
            f"({', '.join(_FAMILIES)})"
        )
    traits = _FAMILIES[name]
    hf = _hf_config(model)
    rows = {rule.name: rule.dims for rule in model.family.select(model.flags)}
    learned = "embedding.position_embeddings.weight" in rows
    said = _Said(model, traits, hf, rows, {} if learned else _rope(hf))
    if reasons := list(_inexpressible(said)):
        raise TrainError(f"megatron-core cannot express this {name}: {'; '.join(reasons)}")
    return said


def _hf_config(model: Model) -> PretrainedConfig:
    """The config as transformers reads it: old spellings translated, defaults filled in."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise TrainError(
            "training needs transformers; install it with: pip install 'shardwright[train]'"
        ) from error
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


def _inexpressible(said: _Said) -> list[str]:
    """The reasons why this model cannot be computed exactly; empty if it can."""
    reasons = []
    if said.rope and said.rope["rope_type"] not in _ROPE:
        reasons.append(
            f"rotary embeddings of type {said.rope['rope_type']!r} (known: {', '.join(_ROPE)}), "
            "which scale more than the frequencies"
        )
    activation = said.value(said.traits.activation)
    if activation not in _ACTIVATIONS:
        reasons.append(
            f"the activation {activation!r} ({said.traits.activation}; known: "
            f"{', '.join(_ACTIVATIONS)})"
        )
    reasons += [
        f"{key}, since a GPTModel is causal and has no encoder"
        for key in ("use_bidirectional_attention", "add_cross_attention")
        if said.value(key)
    ]
    kinds = set(said.value("layer_types") or ()) - {"full_attention", "sliding_attention"}
    reasons += [f"layers of the type {kind!r}" for kind in sorted(kinds)]
    reasons += [f"the tensor {row}" for row in said.rows if not _BUILDABLE.fullmatch(row)]
    return reasons


def transformer_config(
    model: Model, parallel: Parallel, layout: Layout, options: ModelOptions
) -> TransformerConfig:
    """megatron-core's config of this model in this layout.

    Gradients are sums over tokens, which ``finalize_model_grads`` divides by their number
    (``calculate_per_token_loss``). TrainError or CheckpointError names what does not fit.
    """
    assert (parallel.tp, parallel.pp) == (layout.tp, layout.pp), "a rank of another layout"
    return _config(_read(model), layout, options)


def _config(said: _Said, layout: Layout, options: ModelOptions) -> TransformerConfig:
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


def _fusions(said: _Said, options: ModelOptions) -> dict[str, object]:
    """The fused kernels of a GPU: megatron's own, and those that ``fusions`` puts in."""
    if not options.fusions or not torch.cuda.is_available():
        return {}
    architecture = _architecture(said)
    swiglu = architecture["activation_func"] is F.silu and architecture["gated_linear_unit"]
    return {
        "apply_rope_fusion": bool(said.rope),
        "bias_activation_fusion": bool(swiglu),
        "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": True,
    }


def _architecture(said: _Said) -> dict[str, object]:
    """What the model is."""
    sizes, rows = said.model.sizes, said.rows
    ffn = rows[LAYER + "mlp.linear_fc2.weight"].split()[1]
    layer_norm = said.has("input_layernorm.bias")
    scale = None  # 1 / sqrt(D)
    if (scalar := said.value("query_pre_attn_scalar")) is not None:
        scale = scalar**-0.5
    if said.value("scale_attn_weights") is False:
        scale = 1.0
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
        "activation_func": _ACTIVATIONS[said.value(said.traits.activation)],
        "softmax_scale": scale,
    }


def _randomness(said: _Said, options: ModelOptions) -> dict[str, object]:
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


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dim, whose input may be a part of the sequence.

    Its parameters carry ``sequence_parallel``: megatron then adds their gradients over tp.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.zero_centered = config.layernorm_zero_centered_gamma  # multiply by 1 + weight
        device = torch.cuda.current_device()
        fill = functools.partial(torch.full, self.shape, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(fill(0.0 if self.zero_centered else 1.0))
        self.bias = torch.nn.Parameter(fill(0.0)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed input, in its shape and type."""
        if self.zero_centered:  # 1 + weight has more digits than a small weight's own type
            return self._norm(x.float(), 1 + self.weight.float()).to(x.dtype)
        return self._norm(x, self.weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias.to(x.dtype), self.eps)


class CoreAttention(torch.nn.Module):
    """Causal attention by ``scaled_dot_product_attention``; takes megatron's place of it.

    ``windows`` has one entry per layer of the model, ``softcap`` bounds the scores by tanh, and
    ``by_layer`` divides them by the 1-based layer number.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        windows: tuple[int | None, ...],
        softcap: float | None = None,
        by_layer: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.scale = scale / layer_number if by_layer else scale
        self.window = windows[layer_number - 1]
        self.softcap = softcap
        self.dropout = config.attention_dropout
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **unused: object,
    ) -> torch.Tensor:
        """[S, B, N x D] from a query of [S, B, N, D] and key and value of [S, B, G, D].

        ``attention_mask`` is None, or true where a key is hidden from a query in addition to
        causality: [B, 1, 1, S] for padding, or [B, 1, S, S].
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, N or G, S, D]
        visible, blind = self._visible(q.shape[2], q.device, attention_mask), None
        if attention_mask is not None and visible is not None:
            # a row without keys has no softmax; as in transformers' SDPA its result is zero
            blind = ~visible.any(-1, keepdim=True)  # [B, 1, S, 1]: padding before the text
            visible = visible | blind
        dropout = self.dropout if self.training else 0.0
        with self._rng(dropout):
            if self.softcap is not None:
                out = self._capped(q, k, v, visible, dropout)
            else:
                out = self._attend(q, k, v, visible, dropout)
        if blind is not None:
            out = out.masked_fill(blind, 0.0)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _rng(self, dropout: float) -> contextlib.AbstractContextManager[object]:
        """The random state for heads that differ between tp ranks.

        With sequence parallelism megatron runs the whole block in it.
        """
        if not dropout or self.sequence_parallel:
            return contextlib.nullcontext()
        return import_megatron("tensor_parallel").get_cuda_rng_tracker().fork()

    def _visible(
        self, length: int, device: torch.device, hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        """[1 or B, 1, S, S], true where a query sees a key; None for plain causality."""
        window = self.window if self.window is not None and self.window < length else None
        if window is None and hidden is None and self.softcap is None:
            return None
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if hidden is None:
            return seen[None, None]
        return seen & ~hidden

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        if visible is not None and grouped:  # the kernels that take a mask take no groups
            k, v = self._expand(q, k), self._expand(q, v)
            grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            dropout_p=dropout,
            is_causal=visible is None,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _capped(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Attention whose scores go through tanh: no fused kernel does, so they are held."""
        assert self.softcap is not None
        assert visible is not None
        scores = q @ self._expand(q, k).transpose(2, 3) * self.scale  # [B, N, S, S]
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.float().masked_fill(~visible, -torch.inf)
        weights = F.dropout(scores.softmax(-1).to(q.dtype), dropout)
        return weights @ self._expand(q, v)

    @staticmethod
    def _expand(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[B, G, S, D] with each KV head repeated for its N / G query heads."""
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def padding_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """A Hugging Face ``attention_mask`` as the model takes it.

    From [B, S] with 1 for tokens to [B, 1, 1, S] with true for padding; None where all are
    tokens, so that the fast causal path is taken. Reads the values, which waits for a GPU.
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return ~attention_mask.bool()[:, None, None, :]


def hidden_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Either form of an attention mask, [B, S] or [B, 1, S, S], as the model takes it."""
    return mask.bool() if mask is not None and mask.dim() == 4 else padding_mask(mask)


def build(
    model: Model, parallel: Parallel, layout: Layout, options: ModelOptions
) -> list[GPTModel]:
    """This rank's part of the model, randomly initialized: one GPTModel per virtual stage.

    Parameters lie on the rank's device in the type that ``options`` says; their names and shapes
    are those that ``ckpt.family.place`` gives this rank (see ``stored_parameters``). Called with
    ``labels`` a chunk of the last stage returns each token's loss [B, S] in fp32, without them
    the logits [B, S, V]; padded vocabulary rows have a logit of minus infinity in both.
    """
    assert (parallel.tp, parallel.pp) == (layout.tp, layout.pp), "a rank of another layout"
    said = _read(model)
    config = _config(said, layout, options)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it said
        torch.use_deterministic_algorithms(True)
    chunks = layout.chunks(model.sizes["layer"])[parallel.pp_rank]
    import_megatron("parallel_state").set_virtual_pipeline_model_parallel_world_size(
        len(chunks) if len(chunks) > 1 else None
    )
    return [
        _build_chunk(said, config, parallel, options, virtual_stage=v, of=len(chunks))
        for v in range(len(chunks))
    ]


def _build_chunk(
    said: _Said,
    config: TransformerConfig,
    parallel: Parallel,
    options: ModelOptions,
    *,
    virtual_stage: int,
    of: int,
) -> GPTModel:
    model = said.model
    vocab = padded_vocab(model.sizes["vocab"], options.vocab_multiple, parallel.tp)
    chunk = import_megatron("models.gpt").GPTModel(
        config,
        _block_spec(said, config, virtual_stage if of > 1 else None),
        vocab_size=vocab,
        max_sequence_length=model.sizes.get("pos", said.hf.max_position_embeddings),
        pre_process=parallel.is_first_stage and virtual_stage == 0,
        post_process=parallel.is_last_stage and virtual_stage == of - 1,
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
    # megatron makes position embeddings on the CPU and in fp32, and expects this call
    chunk.to(device=parallel.device, dtype=config.params_dtype)
    if said.rope:
        # megatron's cache of angles belongs to the class and would keep the whole model for good
        rotary: Any = chunk.rotary_pos_emb
        angles = functools.partial(type(rotary).forward.__wrapped__, rotary)
        rotary.forward = functools.lru_cache(maxsize=32)(angles)
    if said.rope and said.rope["rope_type"] != "default":
        _set_frequencies(chunk, said.hf, str(said.rope["rope_type"]), parallel.device)
    if chunk.pre_process:
        _finish_embedding(chunk, said, config, options)
    if chunk.post_process:
        softcap = said.value("final_logit_softcapping")
        _finish_logits(chunk, model.sizes["vocab"], vocab, softcap)
    _zero_padding(chunk, model.sizes["vocab"], parallel.tp_rank)
    return chunk


def _block_spec(said: _Said, config: TransformerConfig, virtual_stage: int | None) -> object:
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


def _set_frequencies(
    chunk: GPTModel, hf: PretrainedConfig, kind: str, device: torch.device
) -> None:
    """Rotary frequencies scaled as transformers scales them.

    megatron has llama3's scaling with constants of its own in place of the config's.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, device)
    assert factor == 1.0, f"{kind} scales the amplitudes as well"
    chunk.rotary_pos_emb.inv_freq = frequencies


def _finish_embedding(
    chunk: GPTModel, said: _Said, config: TransformerConfig, options: ModelOptions
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


def _finish_logits(chunk: GPTModel, vocab: int, padded: int, softcap: float | None) -> None:
    """Logits bounded by tanh where the model does, then minus infinity for padded rows."""
    rank = chunk.output_layer.tp_group.rank()

    def finish(
        module: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, bias = output  # [S, B, V], or all ranks' V when gathered
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        width = logits.shape[-1]
        first = 0 if width == padded else rank * width
        real = max(0, vocab - first)  # columns that are true vocabulary
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
