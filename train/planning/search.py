"""Which layouts of a run are valid, and which is best.

A layout is valid under the product's own rules: heads and vocabulary divide over tp, layers over
stages, the batch over data-parallel ranks and micro-batches, and tensor-parallel ranks share a
machine. Invalid layouts are left out; the reasons are kept for the case that no layout is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.ckpt.checkpoint.config import load_model, model_from
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.hub import model_path
from shardwright.ckpt.model.family import Model

from ..errors import TrainError
from . import estimate
from .estimate import GIB, Cluster, Memory, RunLayout, Shape, Time, Weights
from .pipeline import balanced
from .sizes import shape_of_size

MICRO = (1, 2, 4, 8, 16)  # micro-batch sizes that are tried
CHUNKS = (1, 2, 3, 4, 5, 6, 8)  # chunks of a stage that are tried
MOST = 1_000_000_000  # of GPUs, tokens or sequences: arithmetic with more is no estimate
ALIKE = 1.05  # the estimate's own error: prefer the simpler layout within 5 %


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for; None leaves a choice to the planner."""

    cluster: Cluster
    seq: int = 2048
    global_batch: int = 512
    recompute: str | None = None
    optimizer: str = "adamw"
    distributed: bool = True  # where there are data-parallel ranks
    tp: int | None = None
    pp: int | None = None
    micro: int | None = None
    sequence_parallel: bool | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A valid layout with its estimates."""

    layout: RunLayout
    stage: int  # that needs the most memory
    memory: Memory  # of that stage
    time: Time

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sorts equally fast layouts: less recomputation, fewer ways of splitting first."""
        p = self.layout
        return (p.recompute == "full", p.pp, p.tp, p.chunks, p.sequence_parallel)


@dataclass(frozen=True, slots=True)
class Result:
    """All valid layouts."""

    shape: Shape
    parameters: int
    request: Request
    fitting: tuple[Candidate, ...]  # the best first
    over: tuple[Candidate, ...]  # those that need more memory than there is, the least first

    @property
    def best(self) -> Candidate:
        """The first that fits."""
        return self.fitting[0]


def read_model(path: str | None, params: str | None) -> tuple[Model, str]:
    """The model and what it is called, from a folder or config.json, or for a size."""
    if (path is None) == (params is None):
        both = f"--model {path} and --params {params}: say one of them" if path else None
        raise TrainError(both or "say what is trained: --model HF_DIR_OR_CONFIG or --params 7B")
    if path is not None:
        file = Path(model_path(path))
        return load_model(file / "config.json" if file.is_dir() else file), path
    assert params is not None
    name, config = shape_of_size(params)
    return model_from(config, name), f"{params.upper()}, taken as {name}"


def check(request: Request, model: Model) -> None:
    """TrainError for numbers that no layout can satisfy."""
    cluster, batch = request.cluster, request.global_batch
    for flag, value in (
        ("--gpus", cluster.gpus), ("--gpus-per-node", cluster.per_node),
        ("--seq-length", request.seq), ("--global-batch-size", batch),
        ("--tp", request.tp), ("--pp", request.pp), ("--micro-batch-size", request.micro),
    ):  # fmt: skip
        if value is not None and not 1 <= value <= MOST:
            bound = "at least 1" if value < 1 else f"at most {MOST}"
            raise TrainError(f"{flag} {value if abs(value) <= MOST else '...'}: must be {bound}")
    if cluster.gpus > cluster.per_node and cluster.gpus % cluster.per_node:
        low = cluster.gpus // cluster.per_node * cluster.per_node
        raise TrainError(
            f"--gpus {cluster.gpus} does not divide over machines of --gpus-per-node "
            f"{cluster.per_node}; {low} or {low + cluster.per_node} would"
        )
    ranks = (request.tp or 1) * (request.pp or 1)
    if cluster.gpus % ranks:
        raise TrainError(
            f"--gpus {cluster.gpus} does not divide over tp x pp = {request.tp or 1} x "
            f"{request.pp or 1} = {ranks}; {max(cluster.gpus // ranks, 1) * ranks} would"
        )
    positions = model.sizes.get("pos") or model.config.get("max_position_embeddings")
    if isinstance(positions, int) and request.seq > positions:
        raise TrainError(
            f"--seq-length {request.seq} is longer than the model's {positions} positions"
        )
    if request.tp == 1 and request.sequence_parallel:
        raise TrainError("--sequence-parallel splits over tp ranks, but --tp is 1; drop one")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts(shape: Shape, weights: dict[int, Weights], request: Request) -> Iterator[RunLayout]:
    """Every valid layout; ``weights`` has the tp that can split the model."""
    cluster = request.cluster
    node = min(cluster.per_node, cluster.gpus)
    for tp in weights:
        if node % tp or cluster.gpus % tp:
            continue
        for pp in _divisors(cluster.gpus // tp):
            if pp > shape.layers or request.pp not in (None, pp):
                continue
            stages = _uneven(shape, weights[tp], pp)
            if shape.layers % pp and stages is None:
                continue
            dp = cluster.gpus // tp // pp
            base = RunLayout(
                tp, pp, dp, stages=stages, seq=request.seq, optimizer=request.optimizer,
                distributed=request.distributed and dp > 1 and request.optimizer != "sgd",
            )  # fmt: skip
            yield from _batches(shape, base, request)


def _uneven(shape: Shape, weights: Weights, pp: int) -> tuple[int, ...] | None:
    """Stages if layers do not divide: all equal but the last, as Accelerate's YAML can say it."""
    if shape.layers % pp == 0 or pp == 1:
        return None
    best = balanced(shape.layers, pp, weights.head / weights.layer)
    return best if len(set(best[:-1])) == 1 and best[-1] > 0 else None


def _batches(shape: Shape, base: RunLayout, request: Request) -> Iterator[RunLayout]:
    if request.global_batch % base.dp:
        return
    share = request.global_batch // base.dp
    modes = ("none", "full") if request.recompute is None else (request.recompute,)
    sequence: tuple[bool, ...] = (
        (False, True) if base.tp > 1 and request.seq % base.tp == 0 else (False,)
    )
    if request.sequence_parallel is not None:
        sequence = tuple(s for s in sequence if s == request.sequence_parallel or base.tp == 1)
    for micro in (request.micro,) if request.micro else MICRO:
        if share % micro:
            continue
        for chunks in CHUNKS:
            if chunks > 1 and not _interleaves(shape, base, share // micro, chunks):
                continue
            for parallel in sequence:
                for mode in modes:
                    yield replace(
                        base, micro=micro, count=share // micro, chunks=chunks,
                        sequence_parallel=parallel, recompute=mode,
                    )  # fmt: skip


def _interleaves(shape: Shape, base: RunLayout, count: int, chunks: int) -> bool:
    width = base.pp * chunks
    return base.pp > 1 and base.stages is None and shape.layers % width == 0 \
        and count % base.pp == 0  # fmt: skip


def search(model: Model, name: str, request: Request) -> Result:
    """Every valid layout with its estimates; TrainError if there is none."""
    check(request, model)
    shape = estimate.shape_of(model, name)
    node = min(request.cluster.per_node, request.cluster.gpus)
    weights: dict[int, Weights] = {}
    reasons = []
    for tp in [request.tp] if request.tp else _divisors(node):
        if node % tp:
            raise TrainError(
                f"--tp {tp} does not divide a machine's {node} GPUs; tensor parallelism may not "
                f"cross machines, choose {', '.join(map(str, _divisors(node)))}"
            )
        try:
            if shape.heads % tp:
                fit = ", ".join(str(n) for n in _divisors(node) if shape.heads % n == 0)
                raise CheckpointError(
                    f"{shape.heads} query heads do not divide over tp={tp}; tp can be {fit}"
                )
            weights[tp] = estimate.weights_of(model, tp)
        except CheckpointError as error:
            reasons.append(" ".join(str(error).split()))
    whole = estimate.parameters(
        shape, weights[1] if 1 in weights else estimate.weights_of(model, 1)
    )
    found = []
    for layout in layouts(shape, weights, request):
        stage, need = estimate.worst(shape, weights[layout.tp], layout)
        took = estimate.time(shape, weights[layout.tp], layout, request.cluster)
        found.append(Candidate(layout, stage, need, took))
    if not found:
        raise TrainError(_no_layout(shape, request, reasons))
    room = request.cluster.gpu.memory
    fitting = [c for c in found if c.memory.total <= room]
    over = sorted((c for c in found if c.memory.total > room), key=lambda c: c.memory.total)
    return Result(shape, whole, request, tuple(_ranked(fitting)), tuple(over))


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """By time; among those that are as fast as the fastest the simplest is first."""
    ordered = sorted(found, key=lambda c: (c.time.step, c.complexity))
    if not ordered:
        return []
    alike = [c for c in ordered if c.time.step <= ALIKE * ordered[0].time.step]
    first = min(alike, key=lambda c: (c.complexity, c.time.step))
    return [first, *(c for c in ordered if c is not first)]


def _no_layout(shape: Shape, request: Request, reasons: Sequence[str]) -> str:
    if reasons and request.tp:
        return f"no layout: {reasons[0]}"
    cluster = request.cluster
    if request.pp and (request.pp > shape.layers or shape.layers % request.pp):
        near = max((n for n in _divisors(shape.layers) if n <= request.pp), default=1)
        return f"no layout: {shape.layers} layers do not divide over --pp {request.pp}; " \
               f"{near} would"  # fmt: skip
    dp = cluster.gpus // ((request.tp or 1) * (request.pp or 1))
    unit = dp * (request.micro or 1)
    up = -(-request.global_batch // unit) * unit
    return (
        f"no layout: --global-batch-size {request.global_batch} does not divide over {dp} "
        f"data-parallel ranks x micro-batch {request.micro or 1} = {unit}; {up} would"
    )


def does_not_fit(result: Result, model: Model, name: str) -> str:
    """By how much the smallest layout is too large, and what would fit."""
    least, cluster = result.over[0], result.request.cluster
    need, room = least.memory.total, cluster.gpu.memory
    ways = []
    request = result.request
    if request.recompute != "full" and request.recompute is not None:
        ways.append("--recompute full")
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(cluster, gpus=cluster.gpus * factor,
                       per_node=max(cluster.per_node, min(cluster.gpus * factor, 8)))  # fmt: skip
        if request.global_batch % factor:
            break
        try:
            found = search(model, name, replace(request, cluster=more, tp=None, pp=None))
        except (TrainError, CheckpointError):
            continue
        if found.fitting:
            ways.append(f"{more.gpus} such GPUs ({found.best.layout.short})")
            break
    ways.append(f"GPUs of {-(-int(need) // GIB)} GiB")
    return (
        f"{result.shape.name} ({result.parameters / 1e9:.1f}B) does not fit on {cluster.gpus} x "
        f"{cluster.gpu.name}: the smallest layout, {least.layout.short}, needs {need / GIB:.1f} "
        f"GiB of each GPU's {room / GIB:.1f}, {(need - room) / GIB:.1f} too many; it would fit "
        f"with {', or '.join(ways)}"
    )
