"""Whether a layout suits the model and the machine: links, bubbles, even stages, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.placement import shapes_of

from ..config.schema import TrainConfig
from ..errors import TrainError
from ..planning.hardware import GIB
from . import links, pipeline
from . import memory as device_memory
from .findings import NOTE, OK, PROBLEM, WARNING, Finding
from .nvidia_smi import Machine
from .topology import Topology


def vocabulary(vocab: int, tp: int, multiple: int) -> Finding:
    """What padding the vocabulary to a multiple of ``multiple`` x ``tp`` adds."""
    unit = multiple * tp
    padded = -(-vocab // unit) * unit
    if padded == vocab:
        return Finding(OK, "vocabulary", f"{vocab} rows divide over tp={tp}")
    extra = padded - vocab
    what = (
        f"{vocab} rows are not a multiple of {multiple} x tp={tp}: padded to {padded}, "
        f"{extra / vocab:.1%} more; padding rows never count, and merged checkpoints have none"
    )
    if extra / vocab < 0.1:
        return Finding(NOTE, "vocabulary", what)
    small = next(n for n in (64, 32, 16, 8, 4, 2, 1) if n < multiple) if multiple > 1 else 1
    return Finding(
        WARNING, "vocabulary", what,
        (f"a smaller multiple: make_vocab_size_divisible_by={small} in "
         "other_megatron_args, or a smaller tp",),
    )  # fmt: skip


def local_ranks(config: TrainConfig) -> int:
    """Ranks on this machine."""
    return config.launch.nproc or max(1, config.world_size // config.launch.num_machines)


def layout(config: TrainConfig, model: Model | None, machine: Machine) -> list[Finding]:
    """The layout's links, and whether the layout suits the model."""
    p = config.parallelism
    findings = []
    if machine.topology is not None:
        visible = machine.visible(config) if machine.gpus else None
        findings.append(links.links(machine.topology, p.tp, local_ranks(config), visible))
    elif local_ranks(config) % p.tp:
        findings.append(links.links(Topology((), (), ()), p.tp, local_ranks(config)))
    layers = model.sizes["layer"] if model is not None else None
    if p.pp > 1:
        findings.append(pipeline.bubble(config, layers))
    if model is None:
        return findings
    return [*findings, *_of_model(config, model)]


def _of_model(config: TrainConfig, model: Model) -> Iterable[Finding]:
    from ..core.from_config import layout_of, settle
    from ..core.layout import check_layout

    p = config.parallelism
    try:
        config = settle(config, model, config.model.path or "model")
        check_layout(model, layout_of(config), config.model.vocab_multiple)
    except (CheckpointError, TrainError) as error:
        yield Finding(PROBLEM, "layout", " ".join(str(error).split()),
                      ("another --tp or --pp: plan-layout lists those that divide",))  # fmt: skip
        return
    yield vocabulary(model.sizes["vocab"], p.tp, config.model.vocab_multiple)
    if p.pp > 1 and p.virtual_pp_layers is None:
        counts = tuple(len(owned) for owned in layout_of(config).owned(model.sizes["layer"]))
        yield pipeline.stages(counts, head_in_layers(model))


def fits(config: TrainConfig, model: Model, available: int) -> Iterable[Finding]:
    """Whether the fullest stage's estimated memory is within ``available`` bytes of a GPU."""
    from ..planning import estimate

    p, b = config.parallelism, config.batch
    layers = model.sizes["layer"]
    chunks = layers // (p.pp * p.virtual_pp_layers) if p.virtual_pp_layers else 1
    planned = estimate.RunLayout(
        p.tp, p.pp, b.data_parallel, max(chunks, 1), p.stages(layers), b.micro_batch_size,
        b.num_micro_batches, config.data.seq_length or 1024, p.sequence_parallel,
        p.distributed_optimizer, config.recompute.granularity, config.optimizer.name,
    )  # fmt: skip
    if p.stages(layers) is None and layers % p.pp:
        return  # check_layout says so
    weights = estimate.weights_of(model, p.tp)
    stage, memory = estimate.worst(estimate.shape_of(model, "model"), weights, planned)
    need, precision = memory.total, config.precision.name
    what = f"stage {stage + 1} needs about {need / GIB:.1f} of {available / GIB:.1f} GiB"
    if precision != "bf16":
        what += f", estimated for bf16; {precision} takes more"
    if need <= available:
        yield Finding(OK, "memory", what)
    else:
        yield Finding(PROBLEM, "memory", what, tuple(device_memory.memory_fixes(config)))


def head_in_layers(model: Model) -> float:
    """Work of the output layer over that of a mean layer: parameters that multiply a token."""
    shapes = shapes_of(model)
    vocab, hidden = model.sizes["vocab"], model.sizes["h"]
    rows = [shape for shape in shapes.values() if shape[0] != vocab]
    weights = sum(_count(shape) for shape in rows) - model.sizes.get("pos", 0) * hidden
    return vocab * hidden * model.sizes["layer"] / weights


def checkpoint_bytes(config: TrainConfig, model: Model) -> int:
    """Size of a checkpoint: weights, and per weight two fp32 moments, and a master under bf16."""
    shapes = shapes_of(model)
    count = sum(_count(shape) for shape in shapes.values())
    bf16, adam = config.precision.name == "bf16", config.optimizer.name != "sgd"
    each = 2 + 4 if bf16 else 4
    moments = 8 if adam else 4 if config.optimizer.momentum else 0
    return count * (each + moments if config.saving.save_optimizer else 2 if bf16 else 4)


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
