"""Names of Megatron-LM's tensors: TransformerEngine's, legacy ones, and ours (the local spec's)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

EXTRA = "_extra_state"  # holds no weights: fp8 scales, or nothing
LAYER = re.compile(r"(decoder\.layers\.)(\d{1,9})(\..*)")

# TransformerEngine's names for norms that it fuses into the next linear layer
FUSED_NORMS = (
    (
        re.compile(r"(.*)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)"),
        r"\1.input_layernorm.\2",
    ),
    (re.compile(r"(.*)\.mlp\.linear_fc1\.layer_norm_(weight|bias)"), r"\1.pre_mlp_layernorm.\2"),
)

# TransformerEngine's other names, and those of newer cores
_OTHER_LAYERS = (
    (
        re.compile(r"(.*)\.self_attention\.linear_q_up_proj\.layer_norm_weight"),
        r"\1.self_attention.q_layernorm.weight",
    ),
    (
        re.compile(r"(.*)\.self_attention\.linear_kv_up_proj\.layer_norm_weight"),
        r"\1.self_attention.kv_layernorm.weight",
    ),
    (
        re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d{1,6})"),
        r"\1.local_experts.\4.\2.\3",
    ),
    (re.compile(r"(mtp\.layers\.\d{1,6})\.mtp_model_layer\."), r"\1.transformer_layer."),
)
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.weight([12])")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d{1,6})(\..*)")

# before megatron-core: model["language_model"]["encoder" or "transformer"]["layers.0..."]
_LEGACY_LAYER = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_LEGACY_REST = {
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.output_layer.weight": "output_layer.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "word_embeddings.weight": "output_layer.weight",
}
_BODY = re.compile(r"language_model\.(?:encoder|transformer)\.(.*)")
_OLD_LAYER = re.compile(r"layers\.(\d{1,9})\.(.+)\.(weight|bias)")
_TABLES = re.compile(r".*(rotary_emb\.inv_freq|rotary_pos_emb.*)")


def is_table(name: str) -> bool:
    """Whether a stored tensor is a rotary table, which is computed from the config."""
    return _TABLES.fullmatch(name) is not None


def is_legacy(name: str) -> bool:
    """Whether the name is one from before megatron-core."""
    return name.startswith("language_model.") or name in _LEGACY_REST


def ours(name: str) -> str:
    """The local spec's name for any of them; unknown names come back as they are."""
    for pattern, local in FUSED_NORMS:
        name = pattern.sub(local, name)
    for pattern, local in _OTHER_LAYERS:
        name = pattern.sub(local, name)
    if not is_legacy(name):
        return name
    if name in _LEGACY_REST:
        return _LEGACY_REST[name]
    body = _BODY.fullmatch(name)
    if body is None:
        return name
    rest = body[1]
    layer = _OLD_LAYER.fullmatch(rest)
    if layer and layer[2] in _LEGACY_LAYER:
        return f"decoder.layers.{layer[1]}.{_LEGACY_LAYER[layer[2]]}.{layer[3]}"
    for old in ("final_layernorm.", "final_norm."):
        if rest.startswith(old):
            return "decoder.final_layernorm." + rest.removeprefix(old)
    return name


def fused(name: str, *, moe: bool = False, latent: bool = False) -> str:
    """TransformerEngine's name for one of ours; ``moe`` in a layer with experts, ``latent`` with
    latent attention: there other norms are fused.
    """
    if latent:
        name = re.sub(
            r"\.self_attention\.(q|kv)_layernorm\.weight",
            r".self_attention.linear_\1_up_proj.layer_norm_weight",
            name,
        )
    else:
        name = re.sub(
            r"\.input_layernorm\.(weight|bias)", r".self_attention.linear_qkv.layer_norm_\1", name
        )
    if moe:
        return name
    return re.sub(r"\.pre_mlp_layernorm\.(weight|bias)", r".mlp.linear_fc1.layer_norm_\1", name)


def grouped(name: str) -> str:
    """TransformerEngine's name for one of ours where it computes all experts of a rank at once."""
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$", r".\2\1", name)


def shifted(name: str, by: int) -> str:
    """The name with ``by`` added to its layer number."""
    match = LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + by}{match[3]}" if match else name


def renumbered(name: str, to: int) -> str:
    """The name with that layer number."""
    match = LAYER.fullmatch(name)
    return f"{match[1]}{to}{match[3]}" if match else name


def layer_of(name: str) -> int | None:
    """The layer number of one of our names."""
    match = LAYER.fullmatch(name)
    return int(match[2]) if match else None


def expert_shifted(name: str, by: int) -> str:
    """The name with ``by`` added to its expert's number."""
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}{int(match[2]) + by}{match[3]}" if match else name


def is_whole_down(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether a tensor is a projection into a latent space that is not cut over tp."""
    return name.endswith("linear_kv_down_proj.weight") and list(shape[:1]) == [sizes.get("kd")]


def all_experts(name: str) -> tuple[str, int] | None:
    """Of a tensor that holds a linear layer of all experts of a rank (megatron-core's GroupedMLP):
    our name with ``{expert}``, and the layer's number.
    """
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None:
        return None
    return f"{match[1]}.local_experts.{{expert}}.linear_fc{match[2]}.weight", int(match[2])
