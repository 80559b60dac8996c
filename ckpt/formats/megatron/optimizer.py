"""Which parameter each entry of Megatron-LM's optimizer state belongs to.

The files hold no names: the plain optimizer numbers parameters group by group, the distributed one
puts them into flat buffers. Both use the order in which the model registers its parameters, which
is the order of the ``model`` dict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

ALIGN_ELEMS = 64  # a parameter of a flat buffer starts at a multiple of this
BUCKET_ELEMS = 40_000_000  # Megatron's default, or 1,000,000 for each data-parallel rank


@dataclass(frozen=True, slots=True)
class Param:
    """A trainable tensor of a rank, in registration order."""

    name: str  # ours, with the global layer number
    shape: tuple[int, ...]
    dtype: str
    chunk: int = 0  # virtual pipeline stage
    shared: bool = False  # a tied embedding that two stages hold

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def is_expert(name: str) -> bool:
    """Whether a stored tensor is one of an expert; with ep above 1 these have an optimizer of
    their own.
    """
    return ".mlp.experts." in name


# --- groups ------------------------------------------------------------------------------------

Group = Mapping[str, object]
_Key = tuple[bool, bool]  # has weight decay, has another learning rate


def _default_key(param: Param, group_has_own_lr: bool) -> _Key:
    flat = param.name.endswith(".bias") or len(param.shape) == 1
    own = group_has_own_lr and param.name.startswith(("embedding.", "output_layer."))
    return not flat, own


def _qk_norm_key(param: Param, group_has_own_lr: bool) -> _Key:
    """--apply-wd-to-qk-layernorm."""
    decay, own = _default_key(param, group_has_own_lr)
    return decay or ".q_layernorm." in param.name or ".k_layernorm." in param.name, own


def _no_groups_key(param: Param, group_has_own_lr: bool) -> _Key:
    return True, False


def decays(group: Group) -> bool:
    """Whether a group has weight decay."""
    decay = group.get("wd_mult", group.get("pre_wd_mult"))
    if decay is None:
        decay = group.get("weight_decay", 0.0)
    return bool(decay)


def _group_key(group: Group) -> _Key:
    return decays(group), group.get("is_decoupled_lr") is True


def group_params(groups: Sequence[Group], params: Sequence[Param]) -> list[list[Param]] | None:
    """The parameters of each group in its order; None if no known rule gives its numbers.

    A group's ``params`` are its numbers; they count through all groups.
    """
    counts = []
    for group in groups:
        numbers = group.get("params")
        if not isinstance(numbers, list):
            return None
        counts.append(len(numbers))
    own = any(group.get("is_decoupled_lr") is True for group in groups)
    rules: tuple[Callable[[Param, bool], _Key], ...] = (_default_key, _qk_norm_key, _no_groups_key)
    for rule in rules:
        keys = [(True, False)] if rule is _no_groups_key else [_group_key(g) for g in groups]
        if len(set(keys)) < len(groups) and len(groups) > 1:
            continue
        buckets = [[p for p in params if rule(p, own) == key] for key in keys]
        if [len(b) for b in buckets] == counts and sum(counts) == len(params):
            return buckets
    return None


def assigned(groups: Sequence[Group], params: Sequence[Param]) -> list[list[Param]] | None:
    """The parameters of each group before it has numbers; None if unclear."""
    keys = [_group_key(group) for group in groups]
    if len(groups) == 1:
        return [list(params)]
    own = any(group.get("is_decoupled_lr") is True for group in groups)
    if len(set(keys)) < len(keys):
        return None
    buckets = [[p for p in params if _default_key(p, own) == key] for key in keys]
    return buckets if sum(map(len, buckets)) == len(params) else None


# --- flat buffers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter lies in a flat buffer, in elements."""

    param: Param
    start: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat buffer: its parameters, and its length without padding at the end of buckets."""

    spans: list[Span]
    length: int


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_ELEMS) * ALIGN_ELEMS


def flat_buffer(params: Sequence[Param], bucket_elems: int | None) -> Flat:
    """Lay parameters out as megatron-core's buffers do: in reverse, in buckets, 64-aligned.

    A bucket ends with the parameter that reaches ``bucket_elems`` (None: one bucket); a tied
    embedding has a separate one. The file holds the buckets one after another, without the padding
    at their ends. Source: megatron.core.distributed.param_and_grad_buffer.
    """
    spans = []
    base = offset = 0  # of the bucket in the buffer, in the bucket
    for param in reversed(params):
        if param.shared and offset:
            base, offset = base + _aligned(offset), 0
        start = _aligned(offset)
        spans.append(Span(param, base + start))
        offset = start + param.numel
        if param.shared or (bucket_elems is not None and offset >= bucket_elems):
            base, offset = base + offset, 0
    return Flat(spans, base + offset)


def bucketed(params: Sequence[Param], lengths: Sequence[int]) -> Flat | None:
    """The same from recorded lengths of the buckets; None if they do not fit.

    Lengths are those that are stored, one bucket after another.
    """
    spans = []
    base = offset = 0
    rest = list(lengths)
    for param in reversed(params):
        start = _aligned(offset)
        if rest and start + param.numel > rest[0]:
            base, offset, start = base + rest.pop(0), 0, 0
        if not rest or start + param.numel > rest[0]:
            return None
        spans.append(Span(param, base + start))
        offset = start + param.numel
    if len(rest) != 1 or _aligned(offset) < rest[0]:
        return None
    return Flat(spans, sum(lengths))


def bucket_sizes(
    args: Mapping[str, object], dp: int, stage: int, chunk: int
) -> Iterator[int | None]:
    """Possible bucket sizes of a buffer, the most likely first."""
    said = args.get("ddp_bucket_size")
    default = said if type(said) is int else max(BUCKET_ELEMS, 1_000_000 * dp)
    single = stage > 0 or chunk > 0 or args.get("overlap_grad_reduce") is not True
    yield from (None, default) if single else (default, None)


# --- registration order ------------------------------------------------------------------------

_IN_LAYER = (  # of the local spec; TransformerEngine fuses norms into the layers that follow them
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.kv_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_FUSED_LAYER = (_IN_LAYER[1], _IN_LAYER[0], *_IN_LAYER[2:])
_IN_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_OUTER = ("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers",
          "decoder.final_layernorm", "mtp.layers", "output_layer")  # fmt: skip
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc(\d)")
_MTP_INNER = re.compile(r"mtp\.layers\.(\d+)\.(transformer_layer\.)?(.*)")


def registration_key(name: str, fused: bool = False, grouped: bool = False) -> tuple[int, ...]:
    """Sorts our names in the order in which megatron-core's GPTModel registers parameters.

    ``fused``: with TransformerEngine's layers; ``grouped``: where these compute all experts of a
    rank at once, and have the first linear layer of all before the second. Source:
    megatron.core.models.gpt.
    """
    outer = next((i for i, head in enumerate(_OUTER) if name.startswith(head + ".")), len(_OUTER))
    kind = int(name.endswith((".bias", ".expert_bias")))
    mtp = _MTP_INNER.fullmatch(name)
    if mtp:
        within = "transformer_layer" if mtp[2] else mtp[3].partition(".")[0]
        at = _IN_MTP.index(within) if within in _IN_MTP else len(_IN_MTP)
        inner = _layer_key(mtp[3], fused, grouped) if mtp[2] else (0, 0, 0)
        return outer, int(mtp[1]), at, *inner, kind
    if not name.startswith("decoder.layers."):
        return outer, 0, 0, 0, 0, 0, kind
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return outer, int(number), 0, *_layer_key(rest, fused, grouped), kind


def _layer_key(rest: str, fused: bool, grouped: bool) -> tuple[int, int, int]:
    """The place of a tensor in its layer; of experts, their number and linear layer."""
    inner = rest.rpartition(".")[0]
    order = _FUSED_LAYER if fused else _IN_LAYER
    expert = _EXPERT.match(rest)
    if expert:
        number, linear = int(expert[1]), int(expert[2])
        return order.index("mlp.experts"), *((linear, number) if grouped else (number, linear))
    return order.index(inner) if inner in order else len(order), 0, 0
