"""Memory and time of one layout, by arithmetic over a model's sizes.

Memory is the peak that ``torch.cuda.max_memory_allocated`` would show on a rank, by part; what
CUDA and NCCL take besides it is a part of its own. The activations of a layer follow Korthikanti
et al. 2022, "Reducing activation recomputation in large transformer models", section 4, with what
this trainer adds (rotated queries and keys) and what it never has (the matrix of scores). Micro-
batches under way follow Narayanan et al. 2021, "Efficient large-scale language model training on
GPU clusters using Megatron-LM", section 2.2.

Time is a roofline: matrix products at a share of the peak, everything else at a share of the
memory's bandwidth, collectives at a share of the link's. The shares are fitted to measurements on
two H200 (docs/performance.md). bf16 training throughout. Imports neither torch nor NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.families.rows import D as LAYER
from shardwright.ckpt.model.family import Model, build_mesh
from shardwright.ckpt.model.mesh import named_axes
from shardwright.ckpt.model.placement import Placement, padded_vocab

from ..model.traits import FAMILIES
from .hardware import GIB, GPU, PCIE
from .pipeline import bubble_share

VOCAB_MULTIPLE = 128
CONTEXT = int(0.5 * GIB)  # CUDA's context and kernels
COMMUNICATOR = int(0.25 * GIB)  # buffers of NCCL for one group of ranks
SPARE = 0.03  # of the allocated bytes: gaps that the allocator cannot use
# Shares of the data sheets' figures that are reached, fitted to the runs in docs/performance.md.
MATMUL, MEMORY, LINK = 0.69, 0.6, 0.55
LATENCY = 20e-6  # seconds until a collective's first byte
LOSS_BYTES = 3.3  # per logit: bf16 logits and their gradient, partly at once


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model counts here; elements."""

    name: str
    layers: int
    h: int
    q: int  # columns of all query heads
    kv: int  # columns of all keys; as many of the values
    heads: int
    f: int  # inputs of the MLP's second matrix
    gated: bool
    rotary: bool
    head_norm: bool  # norms of queries and keys
    post_norms: bool  # norms after attention and MLP too
    dropout: bool  # of residual branches
    tied: bool
    vocab: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one tensor-parallel rank."""

    layer: int
    embedding: int  # word and position embeddings
    head: int  # the output layer, tied or not
    last: int  # the final norm


@dataclass(frozen=True, slots=True)
class RunLayout:
    """One layout of one run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1  # of each stage: more than 1 interleaves them
    stages: tuple[int, ...] | None = None  # layers of each stage; None: even
    micro: int = 1  # sequences of a micro-batch
    count: int = 1  # micro-batches of a step, on each data-parallel rank
    seq: int = 2048  # tokens of a sequence
    sequence_parallel: bool = False
    distributed: bool = False  # optimizer over data-parallel ranks
    recompute: str = "none"
    optimizer: str = "adamw"

    def layers(self, total: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.stages or (total // self.pp,) * self.pp

    @property
    def short(self) -> str:
        """A name for tables: only what splits."""
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [f"vpp{self.chunks}"] if self.chunks > 1 else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"mbs{self.micro}"]
        return " ".join(parts + (["full"] if self.recompute == "full" else []))


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines."""

    gpu: GPU
    gpus: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.gpus // self.per_node)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its peak."""

    weights: float
    gradients: float
    masters: float
    moments: float
    activations: float
    logits: float  # or the backward pass of a layer, the larger of the two: see `memory`
    buffers: float  # what travels between stages
    outside: float  # CUDA, NCCL and gaps; max_memory_allocated does not show them

    @property
    def allocated(self) -> float:
        """What ``max_memory_allocated`` shows."""
        return self.total - self.outside

    @property
    def total(self) -> float:
        """What the GPU must have."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name -> bytes, in the order of a picture."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, and bytes that a GPU sends in one by kind of link."""

    micro: float  # one micro-batch, forward and backward, on the slowest stage
    compute: float  # of which matrix products and passes over memory
    data_parallel: float  # once per step
    optimizer: float
    step: float
    bubble: float  # share of the pipeline's time in which a stage waits
    volume: Mapping[str, float] = field(default_factory=dict)


# --- the model ---------------------------------------------------------------------------------


def shape_of(model: Model, name: str) -> Shape:
    """The sizes of a model that ``ckpt`` has read."""
    s = model.sizes
    rows = {rule.name: rule.dims for rule in model.rules()}
    if any(rule.mesh for rule in model.rules()):
        raise CheckpointError(f"{name}: models with experts ({model.family.name}) are not planned")
    f = rows[LAYER + "mlp.linear_fc2.weight"].split()[1]
    traits = FAMILIES.get(model.family.name)
    if traits is None:
        raise CheckpointError(
            f"{name}: layouts are planned for the trainer, which does not compute the family "
            f"{model.family.name} (it computes {', '.join(sorted(FAMILIES))})"
        )
    default = 0.1 if model.family.name in ("gpt2", "seed_oss") else 0.0  # of their config classes
    drop = model.config.get(traits.hidden_dropout, default)
    return Shape(
        name, s["layer"], s["h"], s["q"], s["k"], s["n"], s[f],
        gated="+" in rows[LAYER + "mlp.linear_fc1.weight"].split()[0],
        rotary="embedding.position_embeddings.weight" not in rows,
        head_norm=LAYER + "self_attention.q_layernorm.weight" in rows,
        post_norms=LAYER + "mlp.linear_fc2.post_layernorm.weight" in rows,
        dropout=bool(drop),
        tied="tie_word_embeddings" in model.flags,
        vocab=s["vocab"],
    )  # fmt: skip


def weights_of(model: Model, tp: int) -> Weights:
    """Parameters of a tensor-parallel rank; CheckpointError where ``tp`` cannot split the model."""
    one = replace(model, sizes={**model.sizes, "layer": 1})
    mesh = build_mesh(one, named_axes({"tp": tp, "pp": 1}), (((0,),),))
    placed = Placement.written(one, mesh, VOCAB_MULTIPLE).placed
    counts = {row.name: prod(row.shape) for row in placed[(("tp", 0), ("pp", 0))]}
    word = counts["embedding.word_embeddings.weight"]
    found = {"decoder.layers.": 0, "embedding.": 0, "decoder.final_layernorm.": 0}
    for name, count in counts.items():
        for prefix in found:
            found[prefix] += count * name.startswith(prefix)
    return Weights(found["decoder.layers."], found["embedding."], word,
                   found["decoder.final_layernorm."])  # fmt: skip


def parameters(shape: Shape, weights: Weights) -> int:
    """All parameters, where ``weights`` are those of tp=1; padded vocabulary rows included."""
    head = 0 if shape.tied else weights.head
    return shape.layers * weights.layer + weights.embedding + head + weights.last


def stage_parameters(shape: Shape, weights: Weights, layout: RunLayout, stage: int) -> int:
    """Parameters of a rank of one stage; a tied head is a second copy on a stage of its own."""
    count = layout.layers(shape.layers)[stage] * weights.layer
    if stage == 0:
        count += weights.embedding
    if stage == layout.pp - 1:
        count += weights.last
        if not shape.tied or layout.pp > 1:
            count += weights.head
    return count


# --- memory ------------------------------------------------------------------------------------


def layer_bytes(shape: Shape, tp: int = 1, sequence_parallel: bool = False) -> float:
    """What one layer keeps of one token for its backward pass.

    Whole on every tp rank, except with sequence parallelism: inputs and outputs of the norms, and
    a byte for each element under dropout. Split over tp: the products' outputs and what attention
    keeps. For GELU, dropout and q = kv = h, f = 4 h that is h (10 + 24 / t) of Korthikanti et al.,
    equation 2, and 34 h / t with sequence parallelism, apart from attention's 4 bytes per head.
    """
    h, q, kv, f = shape.h, shape.q, shape.kv, shape.f
    common = 8 * h + (2 * h if shape.dropout else 0) + (4 * h if shape.post_norms else 0)
    split = 2 * (q + 2 * kv) + 2 * q + 4 * shape.heads
    split += (4 if shape.gated else 2) * f + 2 * f
    if shape.rotary:
        split += 2 * (q + kv) + 2 * kv  # rotated queries and keys, values made contiguous
    if shape.head_norm:
        split += 2 * (q + kv)
    return common / (tp if sequence_parallel else 1) + split / tp


def saved_layer_bytes(shape: Shape, layout: RunLayout) -> float:
    """The same under the layout's recomputation.

    Full keeps a layer's input, 2 h. Selective repeats the attention, whose matrix of scores this
    trainer never holds: only the softmax's sums, 4 bytes per head, are saved by it.
    """
    if layout.recompute == "full":
        return 2 * shape.h / (layout.tp if layout.sequence_parallel else 1)
    kept = layer_bytes(shape, layout.tp, layout.sequence_parallel)
    return kept - (4 * shape.heads / layout.tp if layout.recompute == "selective" else 0)


def in_flight(layout: RunLayout, stage: int, layers: int) -> float:
    """Layers times micro-batches whose activations a stage holds at once.

    1F1B: min(m, p - stage) micro-batches. Interleaved: 2 (p - stage - 1) + (v - 1) p + 1 chunks,
    at most the v m that there are.
    """
    if layout.chunks == 1:
        return min(layout.count, layout.pp - stage) * layers
    chunks = 2 * (layout.pp - stage - 1) + (layout.chunks - 1) * layout.pp + 1
    return min(chunks, layout.chunks * layout.count) * layers / layout.chunks


def memory(shape: Shape, weights: Weights, layout: RunLayout, stage: int = 0) -> Memory:
    """Peak of one rank of a stage.

    The peak is where the backward pass begins. Beside the saved activations there are then the
    logits (last stage) or the gradients within a layer; under full recomputation that layer's
    activations as well. They do not exist together, so the larger counts.
    """
    count = stage_parameters(shape, weights, layout, stage)
    share = layout.dp if layout.distributed else 1
    moments = 8 if layout.optimizer != "sgd" else 0
    tokens = layout.micro * layout.seq
    owned = layout.layers(shape.layers)[stage]
    saved = saved_layer_bytes(shape, layout) * tokens * in_flight(layout, stage, owned)
    backward = ((6 if shape.gated else 4) * shape.f / layout.tp + 4 * shape.h) * tokens
    if layout.recompute == "full":
        backward += layer_bytes(shape, layout.tp, layout.sequence_parallel) * tokens
    head = 0.0
    if stage == layout.pp - 1:
        vocab = padded_vocab(shape.vocab, VOCAB_MULTIPLE, layout.tp)
        around = 4 * shape.h / (layout.tp if layout.sequence_parallel else 1)
        head = (LOSS_BYTES * vocab / layout.tp + around) * tokens
    buffers = 4 * shape.h * tokens if layout.pp > 1 else 0.0
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp))
    parts = (
        2.0 * count, 4.0 * count, 4.0 * count / share, moments * count / share,
        saved, max(head, backward), buffers,
    )  # fmt: skip
    outside = CONTEXT + groups * COMMUNICATOR + SPARE * sum(parts)
    return Memory(*parts, outside)


def worst(shape: Shape, weights: Weights, layout: RunLayout) -> tuple[int, Memory]:
    """The stage that needs the most memory, and what it needs."""
    found = [(s, memory(shape, weights, layout, s)) for s in range(layout.pp)]
    return max(found, key=lambda pair: pair[1].total)


# --- time --------------------------------------------------------------------------------------


def flops(shape: Shape, weights: Weights, layout: RunLayout, layers: int, head: bool) -> float:
    """Operations of one micro-batch on a rank, forward and backward.

    6 per weight and token, 6 h s per layer for causal attention; full recomputation repeats the
    layers' forward pass, a third more.
    """
    tokens = layout.micro * layout.seq
    one = 6.0 * weights.layer + 6.0 * shape.q * layout.seq / layout.tp
    again = 4 / 3 if layout.recompute == "full" else 1.0
    return tokens * (layers * one * again + (6.0 * weights.head if head else 0.0))


def _passes(shape: Shape, weights: Weights, layout: RunLayout, layers: int, head: bool) -> float:
    """Bytes through the GPU's memory in one micro-batch, without those that matrix products hide.

    Activations are written, read, read again, and their gradients written and read; fp32
    gradients are read and written per weight, bf16 weights read three times.
    """
    tokens = layout.micro * layout.seq
    kept = layer_bytes(shape, layout.tp, layout.sequence_parallel) * tokens
    again = 7 if layout.recompute == "full" else 5
    count = layers * weights.layer + (weights.head if head else 0)
    return layers * kept * again + 14.0 * count


def _link(cluster: Cluster, ranks_within: int) -> tuple[str, float]:
    """Kind and reached speed of the links among that many neighbouring ranks."""
    if ranks_within > cluster.per_node:
        return "network", LINK * cluster.gpu.network_speed
    # on PCIe the ranks of a machine share the host bridge, so that less is reached
    share = LINK * (0.6 if cluster.gpu.link == PCIE else 1.0)
    return cluster.gpu.link, share * cluster.gpu.link_speed


def _tensor(
    shape: Shape, layout: RunLayout, cluster: Cluster, layers: int
) -> tuple[str, float, float]:
    """(link, bytes sent, seconds) of tensor parallelism in one micro-batch.

    Two all-reduces of 2 h bytes per token and layer in each direction; a ring sends 2 (t-1)/t of
    it. Sequence parallelism gathers the inputs once more for the weights' gradients: 5/4.
    """
    kind, speed = _link(cluster, layout.tp)
    if layout.tp == 1:
        return kind, 0.0, 0.0
    rounds_ = 4 + (2 if layout.recompute == "full" else 0) + layout.sequence_parallel
    size = 2.0 * shape.h * layout.micro * layout.seq * 2 * (layout.tp - 1) / layout.tp
    sent = layers * rounds_ * size
    return kind, sent, sent / speed + layers * rounds_ * LATENCY


def _stages(shape: Shape, layout: RunLayout, cluster: Cluster) -> tuple[str, float, float]:
    """The same between pipeline stages: a micro-batch's activations on, gradients back."""
    ranks = layout.tp * layout.dp * layout.pp
    kind, speed = _link(cluster, ranks)  # stages are the outermost ranks
    if layout.pp == 1:
        return kind, 0.0, 0.0
    size = (
        2.0 * shape.h * layout.micro * layout.seq / (layout.tp if layout.sequence_parallel else 1)
    )
    sent = 2 * layout.chunks * size
    return kind, sent, sent / speed + 2 * layout.chunks * LATENCY


def _replicas(layout: RunLayout, cluster: Cluster, count: int) -> tuple[str, float, float]:
    """The same among data-parallel ranks, once per step: ``count`` fp32 gradients.

    A ring's all-reduce sends 8 (d-1)/d bytes of each; the distributed optimizer scatters the
    gradients (4) and gathers bf16 weights (2). A machine's ranks share what crosses the network.
    """
    kind, speed = _link(cluster, layout.tp * layout.dp)
    if layout.dp == 1:
        return kind, 0.0, 0.0
    sent = (6.0 if layout.distributed else 8.0) * count * (layout.dp - 1) / layout.dp
    near = max(cluster.per_node // layout.tp, 1) if kind == "network" else 1
    return kind, sent / near, sent / near / speed + 2 * LATENCY


def time(shape: Shape, weights: Weights, layout: RunLayout, cluster: Cluster) -> Time:
    """A step: (m + (p - 1) / v) micro-batches of the slowest stage, reduction, optimizer.

    Communication counts as not overlapped, as train-ckpt runs it.
    """
    gpu, layers = cluster.gpu, layout.layers(shape.layers)
    volume: dict[str, float] = {}
    slowest, computing = 0.0, 0.0
    stage_kind, stage_bytes, stage_time = _stages(shape, layout, cluster)
    for stage, owned in enumerate(layers):
        head = stage == layout.pp - 1
        products = flops(shape, weights, layout, owned, head) / (MATMUL * gpu.peak)
        passes = _passes(shape, weights, layout, owned, head) / (MEMORY * gpu.hbm)
        tensor_kind, tensor_bytes, tensor_time = _tensor(shape, layout, cluster, owned)
        whole = products + passes + tensor_time + stage_time
        if whole > slowest:
            slowest, computing = whole, products + passes
            sent = {tensor_kind: tensor_bytes * layout.count}
    volume |= sent
    volume[stage_kind] = volume.get(stage_kind, 0.0) + stage_bytes * layout.count
    most = max(stage_parameters(shape, weights, layout, s) for s in {0, layout.pp - 1})
    kind, reduced, reducing = _replicas(layout, cluster, most)
    volume[kind] = volume.get(kind, 0.0) + reduced
    updated = most / (layout.dp if layout.distributed else 1)
    # gradients are cleared and read for their norm; the update reads and writes masters and moments
    stepping = (8.0 * most + 30.0 * updated) / (MEMORY * gpu.hbm)
    running = slowest * (layout.count + (layout.pp - 1) / layout.chunks)
    return Time(
        slowest, computing, reducing, stepping, running + reducing + stepping,
        bubble_share(layout.pp, layout.count, layout.chunks),
        {k: v for k, v in volume.items() if v},
    )  # fmt: skip
