"""What a rank that ran out of memory says: the numbers, and what lowers them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..config.schema import TrainConfig
from ..planning.pipeline import even_split
from .findings import divisor_below, gib, listed


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at the moment when it ran out; bytes, None if unknown."""

    total: int | None = None
    allocated: int | None = None  # held by tensors
    reserved: int | None = None  # taken from the device, tensors or not
    requested: int | None = None  # what could not be given

    def __str__(self) -> str:
        parts = []
        if self.allocated is not None and self.total is not None:
            parts.append(f"{gib(self.allocated)} of {gib(self.total)} in use")
        if self.requested is not None:
            parts.append(f"{gib(self.requested)} more asked for")
        return ", ".join(parts) or "the allocator gave no numbers"


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate, on a GPU or in host memory."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def requested_bytes(message: str) -> int | None:
    """What torch's message says was asked for."""
    found = _ASKED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def memory_fixes(
    config: TrainConfig, memory: DeviceMemory | None = None, layers: int | None = None
) -> list[str]:
    """What lowers a rank's memory in this configuration, the cheapest in speed first.

    ``layers`` are those of the model, where the rank is on the first of several stages.
    """
    layout, batch = config.parallelism, config.batch
    fixes = []
    if memory and memory.allocated and memory.reserved and memory.total:
        waste = memory.reserved - memory.allocated
        if waste > 0.1 * memory.total:
            fixes.append(
                f"{gib(waste)} are reserved but split into pieces: start with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
    if layout.tp > 1 and not layout.sequence_parallel:
        fixes.append(f"--sequence-parallel keeps 1/{layout.tp} of what norms and dropout save")
    if (
        batch.data_parallel > 1
        and not layout.distributed_optimizer
        and config.optimizer.name != "sgd"
    ):
        fixes.append(
            f"--distributed-optimizer keeps 1/{batch.data_parallel} of masters and moments, "
            "12 bytes of each parameter, on a rank"
        )
    if batch.micro_batch_size > 1:
        fixes.append(_smaller_micro_batch(config))
    held = min(layout.pp, batch.num_micro_batches)  # micro-batches, by the first stage
    if layers is not None and held > 1 and layout.virtual_pp_layers is None:
        fixes += _lighter_first_stage(layout.pp_layers or even_split(layers, layout.pp))
    if config.recompute.granularity != "full":
        fixes.append("--recompute full keeps one input per layer, for a third more work")
    if config.precision.name == "fp32":
        fixes.append("--precision bf16 halves activations")
    ranks = max(2 * layout.model_ranks, 2)
    fixes.append(
        f"spread the model over more ranks: tp x pp of {ranks} instead of {layout.model_ranks} "
        "halves weights and optimizer state; plan-layout lists what fits"
    )
    return fixes


def _smaller_micro_batch(config: TrainConfig) -> str:
    batch, pp = config.batch, config.parallelism.pp
    half = divisor_below(batch.micro_batch_size, batch.micro_batch_size)
    less = "halves" if 2 * half == batch.micro_batch_size else "lowers"
    held = ""
    if pp > 1:
        held = f" (the first of {pp} stages holds {min(pp, batch.num_micro_batches)} at a time)"
    return (
        f"more, smaller micro-batches: --micro-batch-size {half} instead of "
        f"{batch.micro_batch_size} at the same global batch {less} activations{held}"
    )


def _lighter_first_stage(held: Sequence[int]) -> list[str]:
    """The first stage holds the most micro-batches: each layer costs more there than later."""
    if held[0] == 1:
        return []
    last = len(held) - 1
    to = min(range(1, len(held)), key=lambda stage: (held[stage] + (stage == last), stage))
    counts = [n + (stage == to) - (stage == 0) for stage, n in enumerate(held)]
    return [f"--pp-layers {listed(counts)} instead of {listed(held)}: fewer layers on the stage "
            "that holds the most micro-batches"]  # fmt: skip


def out_of_memory(
    config: TrainConfig,
    memory: DeviceMemory,
    *,
    rank: int,
    stage: int,
    step: int,
    where: str,
    layers: int | None = None,
) -> str:
    """The error of a rank that ran out of memory: what was measured, then a line per fix.

    ``stage`` counts from 0; ``layers`` are those of the model.
    """
    layout, batch = config.parallelism, config.batch
    at = f"rank {rank} (stage {stage + 1} of {layout.pp})" if layout.pp > 1 else f"rank {rank}"
    shape = (
        f"micro-batch {batch.micro_batch_size} x {batch.num_micro_batches}, sequences of "
        f"{config.data.seq_length}, tp={layout.tp} pp={layout.pp} dp={batch.data_parallel}, "
        f"recompute {config.recompute.granularity}"
    )
    head = f"step {step}: {at} is out of memory in the {where}: {memory}; {shape}. Any of these:"
    fixes = memory_fixes(config, memory, layers if stage == 0 else None)
    return head + "".join(f"\n  - {fix}" for fix in fixes)
