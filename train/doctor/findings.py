"""What to do about memory, bubbles, slow links, uneven stages and hangs.

``train-ckpt doctor`` calls these functions before a run with what it can foresee, the training
loop with what it measured; both print the same fixes. Everything here is arithmetic over numbers
that the caller has. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from ..config.schema import TrainConfig
from ..errors import LOST_A_RANK, WAITED_IN_VAIN, LostRank
from .topology import Topology

GIB = 2**30
LARGE_BUBBLE = 0.2  # of a step: above it a fix gains more than a tenth
UNEVEN = 1.15  # the slowest stage over the mean
GAIN = 0.95  # of the slowest stage's time: a split that leaves more is not worth a change
SLOW_DATA = 0.1  # of a step
SLOW_SAVE = 0.05  # of the time between two saves
OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and what to do where it is bad."""

    level: str  # ok, note, warning (slow or risky) or problem (it will fail)
    subject: str  # a word or two
    what: str
    fixes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The text of a terminal."""
        head = f"{self.level:<8} {self.subject}: {self.what}"
        return [head, *(f"{'':<8}   fix: {fix}" for fix in self.fixes)]


# --- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory at the moment when it did not suffice; bytes, None where unknown."""

    total: int | None = None
    allocated: int | None = None  # held by tensors
    reserved: int | None = None  # taken from the device, tensors or not
    requested: int | None = None  # what could not be given

    def __str__(self) -> str:
        parts = []
        if self.allocated is not None and self.total is not None:
            parts.append(f"{_gib(self.allocated)} of {_gib(self.total)} in use")
        if self.requested is not None:
            parts.append(f"{_gib(self.requested)} more asked for")
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
    config: TrainConfig, memory: Memory | None = None, layers: int | None = None
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
                f"{_gib(waste)} are reserved but split into pieces: start with "
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
        fixes += _lighter_first_stage(layout.pp_layers or _even(layers, layout.pp))
    if config.recompute.granularity == "none":
        fixes.append("--recompute selective repeats the attention in the backward pass")
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
    half = _divisor(batch.micro_batch_size, batch.micro_batch_size)
    less = "halves" if 2 * half == batch.micro_batch_size else "lowers"
    held = ""
    if pp > 1:
        held = f" (the first of {pp} stages holds {min(pp, batch.num_micro_batches)} at a time)"
    return (
        f"more, smaller micro-batches: --micro-batch-size {half} in place of "
        f"{batch.micro_batch_size} at the same global batch {less} activations{held}"
    )


def _lighter_first_stage(held: Sequence[int]) -> list[str]:
    """The first stage holds the most micro-batches: each layer costs more there than later."""
    if held[0] == 1:
        return []
    last = len(held) - 1
    to = min(range(1, len(held)), key=lambda stage: (held[stage] + (stage == last), stage))
    counts = [n + (stage == to) - (stage == 0) for stage, n in enumerate(held)]
    return [f"--pp-layers {_listed(counts)} in place of {_listed(held)}: fewer layers on the stage "
            "that holds the most micro-batches"]  # fmt: skip


def _listed(counts: Iterable[int]) -> str:
    return ",".join(map(str, counts))


def out_of_memory(
    config: TrainConfig,
    memory: Memory,
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


# --- pipelines ---------------------------------------------------------------------------------


def bubble_share(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """The part of a step in which a stage of an even pipeline waits: (p-1) / (v m + p-1).

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2, there over the ideal time, here over the whole.
    """
    return (pp - 1) / (chunks * micro_batches + pp - 1)


def bubble(
    config: TrainConfig, layers: int | None = None, measured: float | None = None
) -> Finding:
    """How long stages wait for each other; ``measured`` is the share that a run saw."""
    pp, m = config.parallelism.pp, config.batch.num_micro_batches
    expected = _bubble_of(config, layers)
    share = expected if measured is None else measured
    what = f"stages of pp={pp} wait {expected:.0%} of a step with {_times(m)}"
    if measured is not None:
        what = f"stages waited {measured:.0%} of the step; pp={pp} with {_times(m)} " \
               f"makes {expected:.0%} unavoidable"  # fmt: skip
    if share < LARGE_BUBBLE or pp == 1:
        return Finding(OK, "bubble", what)
    if expected < LARGE_BUBBLE:  # what the layout makes of it is small: the rest is no bubble
        return Finding(
            WARNING, "bubble", f"{what}; the rest is exchange between stages, or a slow rank",
            ("larger micro-batches, whose passes outlast their exchange",
             "train-ckpt doctor on each machine tries the links"),
        )  # fmt: skip
    return Finding(WARNING, "bubble", what, tuple(_bubble_fixes(config, layers)))


def _bubble_of(config: TrainConfig, layers: int | None) -> float:
    layout, chunks = config.parallelism, 1
    if layout.virtual_pp_layers and layers:
        chunks = layers // (layout.pp * layout.virtual_pp_layers)
    return bubble_share(layout.pp, config.batch.num_micro_batches, chunks)


def _times(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch" + ("es" if micro_batches > 1 else "")


def _bubble_fixes(config: TrainConfig, layers: int | None) -> list[str]:
    layout, batch = config.parallelism, config.batch
    pp, m, micro = layout.pp, batch.num_micro_batches, batch.micro_batch_size
    enough = 9 * (pp - 1)  # a tenth of the step
    fixes = []
    if m < enough:
        after = bubble_share(pp, enough)
        rows = enough * micro * batch.data_parallel
        fixes.append(f"more micro-batches: {enough} (--global-batch-size {rows}) lower it to "
                     f"{after:.0%}")  # fmt: skip
    if micro > 1:
        less = _divisor(micro, micro)
        fixes.append(
            f"smaller ones: --micro-batch-size {less} at the same global batch makes "
            f"{micro * m // less} and lowers it to {bubble_share(pp, micro * m // less):.0%}"
        )
    if pp % 2 == 0 or pp == 3:
        half = pp // 2 if pp % 2 == 0 else 1
        fixes.append(f"less PP: --pp {half}, with more data or tensor parallelism, lowers it to "
                     f"{bubble_share(half, m):.0%}")  # fmt: skip
    per_stage = layers // pp if layers and layers % pp == 0 else 0
    if layout.virtual_pp_layers is None and per_stage > 1 and m % pp == 0:
        chunk = next(n for n in range(per_stage // 2, 0, -1) if per_stage % n == 0)
        fixes.append(f"interleave: --virtual-pp-layers {chunk} lowers it to "
                     f"{bubble_share(pp, m, per_stage // chunk):.0%}")  # fmt: skip
    return fixes


def stages(layers: Sequence[int], head: float) -> Finding:
    """Whether stages have even work; ``head`` is the output layer's, in layers.

    The last stage holds the output layer too: 2 V h multiplications per token against a layer's
    2 x its parameters, so that a large vocabulary over narrow layers weighs as several of them.
    """
    work = [float(n) for n in layers]
    work[-1] += head
    excess = max(work) / mean(work)
    slowest = work.index(max(work))
    shown = ", ".join(f"{w:.1f}" for w in work)
    what = f"work of the stages in layers: {shown} (the output layer counts {head:.1f})"
    better = balanced(sum(layers), len(layers), head)
    gain = max(work) / _heaviest(better, head)
    if excess < UNEVEN or gain < 1.05:
        return Finding(OK, "stages", what)
    return Finding(
        WARNING, "stages",
        f"{what}; stage {slowest + 1} makes the others wait, {excess - 1:.0%} over the mean",
        (f"--pp-layers {_listed(better)} is {gain - 1:.0%} faster",),
    )  # fmt: skip


def _heaviest(layers: Sequence[int], head: float) -> float:
    return max(*layers[:-1], layers[-1] + head)


def balanced(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of each stage such that the heaviest stage is as light as whole layers allow."""

    def split(last: int) -> tuple[int, ...]:
        each, more = divmod(layers - last, pp - 1)
        return (*(each + (i < more) for i in range(pp - 1)), last)

    return min(
        (split(last) for last in range(layers - pp + 1, 0, -1)),
        key=lambda found: _heaviest(found, head),
    )


# --- links -------------------------------------------------------------------------------------


def links(topology: Topology, tp: int, nproc: int, visible: Sequence[int] | None = None) -> Finding:
    """Whether tensor-parallel neighbours share NVLink; ``visible`` maps local ranks to GPUs."""
    gpus = tuple(visible) if visible is not None else topology.gpus
    machine = topology.kind()
    if tp == 1:
        return Finding(OK, "links", f"{machine}; tp=1 needs no fast one")
    if nproc % tp:
        return Finding(
            WARNING, "links", f"tp={tp} crosses machines: {nproc} processes on each",
            (f"--tp {_divisor(nproc, tp)} and more --pp or data parallelism: the network between "
             "machines is many times slower than NVLink",),
        )  # fmt: skip
    if len(gpus) < nproc:
        return Finding(
            PROBLEM, "links", f"{nproc} processes on {len(gpus)} GPUs",
            (f"--nproc {len(gpus)}, or more machines",),
        )  # fmt: skip
    groups = [gpus[at : at + tp] for at in range(0, nproc, tp)]
    slow = [found for group in groups if (found := topology.slowest(group))]
    a, b, link = max(slow, key=lambda found: found[2].slowness)
    if link.is_nvlink:
        return Finding(OK, "links", f"{machine}; tp={tp} stays on NVLink ({link.name} at least)")
    fixes = []
    order = topology.order(tp, nproc)
    if order is not None:
        fixes.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))} puts tp={tp} on NVLink")
    else:
        size = max(len(island) for island in topology.islands())
        if size == 1:
            fixes.append(f"no TP without NVLink: --tp 1 with --pp {tp}, or data parallelism with "
                         "--distributed-optimizer")  # fmt: skip
        else:
            fits = next(n for n in range(min(size, tp - 1), 0, -1) if nproc % n == 0)
            fixes.append(f"no TP without NVLink: --tp {fits}, which NVLink joins, and "
                         f"--pp {tp // fits if tp % fits == 0 else 2}")  # fmt: skip
    return Finding(
        WARNING, "links", f"tp={tp} crosses a slow link: GPU{a} - GPU{b} ({link}); {machine}",
        tuple(fixes),
    )  # fmt: skip


def _divisor(number: int, below: int) -> int:
    """The largest divisor of ``number`` that is less than ``below``."""
    return next(n for n in range(min(below - 1, number), 0, -1) if number % n == 0)


# --- the vocabulary ----------------------------------------------------------------------------


def vocabulary(vocab: int, tp: int, multiple: int) -> Finding:
    """What padding the vocabulary to a multiple of ``multiple`` x ``tp`` adds."""
    unit = multiple * tp
    padded = -(-vocab // unit) * unit
    if padded == vocab:
        return Finding(OK, "vocabulary", f"{vocab} rows divide over tp={tp}")
    extra = padded - vocab
    what = (
        f"{vocab} rows are no multiple of {multiple} x tp={tp}: padded to {padded}, "
        f"{extra / vocab:.1%} more; padded rows never count, and merged checkpoints lack them"
    )
    if extra / vocab < 0.1:
        return Finding(NOTE, "vocabulary", what)
    small = next(n for n in (64, 32, 16, 8, 4, 2, 1) if n < multiple) if multiple > 1 else 1
    return Finding(
        WARNING, "vocabulary", what,
        (f"a smaller multiple: make_vocab_size_divisible_by={small} in "
         "other_megatron_args, or a smaller tp",),
    )  # fmt: skip


# --- what a run measured -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step on one rank, or of a usual one: the medians of several."""

    rank: int
    stage: int  # pipeline stage, from 0
    step: float  # all of it
    data: float = 0.0  # waiting for the batch
    passes: float = 0.0  # forward and backward, with waiting and reducing gradients
    schedule: float = 0.0  # of that the pipeline's schedule
    compute: float = 0.0  # of that the passes of micro-batches themselves
    optimizer: float = 0.0
    saving: bool = False  # a checkpoint was being written beside it

    @property
    def other(self) -> float:
        """What is in no phase: Python between them."""
        return max(0.0, self.step - self.data - self.passes - self.optimizer)


def usual_times(steps: Sequence[StepTimes]) -> StepTimes:
    """The median of each phase over steps of one rank; at least one."""
    first = steps[0]
    names = ("step", "data", "passes", "schedule", "compute", "optimizer")
    middle = {name: median(getattr(t, name) for t in steps) for name in names}
    return StepTimes(first.rank, first.stage, **middle)


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a rank worked itself; the rest of a step it waited or exchanged."""

    data: float
    computing: float
    other: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.data + self.computing + self.other

    def most(self, before: Work) -> str:
        """Where it grew the most over ``before``."""
        grown = {
            "data": self.data - before.data,
            "computing": self.computing - before.computing,
            "Python between the phases": self.other - before.other,
        }
        return max(grown, key=lambda name: grown[name])


def work(times: Sequence[StepTimes], tp: int) -> list[Work]:
    """What each rank worked itself; ``times`` by rank, tensor-parallel ranks beside each other.

    Tensor-parallel ranks wait for each other inside every layer, which nothing measures. The rank
    that the others wait for waits least, so that what they have beyond its time counts as waiting.
    """
    least = [min(t.compute for t in times[at : at + tp]) for at in range(0, len(times), tp)]
    return [Work(t.data, least[i // tp], t.other) for i, t in enumerate(times)]


@dataclass(frozen=True, slots=True)
class Slow:
    """A step that took longer than those before it; seconds."""

    step: int
    usual: float  # median of those before
    ranks: Sequence[StepTimes]  # a usual step of each rank


@dataclass(frozen=True, slots=True)
class Report:
    """What the ranks measured in one step, and what it means."""

    step: int
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = field(default=())


def measured_bubble(times: Sequence[StepTimes]) -> float:
    """The part of the schedule in which the mean rank computes nothing."""
    whole = max(t.schedule for t in times)
    return 1 - mean(t.compute for t in times) / whole if whole > 0 else 0.0


def report(
    config: TrainConfig,
    step: int,
    times: Sequence[StepTimes],
    layers: int,
    slow: Slow | None,
    crowded: bool = False,
) -> Report:
    """Phases of a step over all ranks, in their order, and the advice that they call for.

    Without ``slow`` the times are those of usual steps until ``step``, and there are lines only
    where a fix is due. ``crowded``: ranks share CPU cores, so that a wait may be for a core. A slow
    step says nothing of bubbles and stages, which every step has.
    """
    if slow is not None:
        findings = [*_why_slow(config, times, slow)]
        head = f"step {step} took {_longest(times):.3g} s, usual are {slow.usual:.3g} s"
    else:
        findings = [*_measured(config, times, layers, crowded)]
        head = f"steps up to {step} took {_longest(times):.3g} s each"
    if slow is None and not findings:
        return Report(step, ())
    lines = [f"{head}: {_phases(times, slow, config.parallelism.pp)}"]
    for found in findings:
        lines += [f"  {line.strip()}" for line in found.lines()]
    return Report(step, tuple(lines), tuple(findings))


def _longest(times: Sequence[StepTimes]) -> float:
    return max(t.step for t in times)


def _phases(times: Sequence[StepTimes], slow: Slow | None, pp: int) -> str:
    parts = {
        "data": "data", "forward and backward": "passes", "optimizer": "optimizer",
        "rest": "other",
    }  # fmt: skip
    shown = []
    for name, key in parts.items():
        usual = f" (usually {max(getattr(t, key) for t in slow.ranks):.3g})" if slow else ""
        shown.append(f"{name} {max(getattr(t, key) for t in times):.3g} s{usual}")
    wait = f"; bubble {measured_bubble(times):.0%}" if pp > 1 else ""
    return ", ".join(shown) + wait


def _measured(
    config: TrainConfig, times: Sequence[StepTimes], layers: int, crowded: bool
) -> Iterable[Finding]:
    total = _longest(times)
    if config.parallelism.pp > 1:
        uneven = [*_uneven(config, times, layers)]
        found = bubble(config, layers, measured_bubble(times))
        # where stages differ and the layout's own bubble is small, their difference is the wait
        small = _bubble_of(config, layers) < LARGE_BUBBLE
        if found.level == WARNING and not (small and (uneven or crowded)):
            yield found
        yield from uneven
    slowest = max(times, key=lambda t: t.data)
    if slowest.data > SLOW_DATA * total:
        yield Finding(
            WARNING, "data", f"rank {slowest.rank} waited {slowest.data:.3g} s of {total:.3g} s "
            "for its batch", _FIXES["data"],
        )  # fmt: skip


def _uneven(config: TrainConfig, times: Sequence[StepTimes], layers: int) -> Iterable[Finding]:
    """Stages whose own computing differs."""
    pp = config.parallelism.pp
    by_stage = [mean(t.compute for t in times if t.stage == s) for s in range(pp)]
    slowest = max(by_stage)
    if not slowest or slowest / mean(by_stage) < UNEVEN:
        return
    at = by_stage.index(slowest)
    shown = ", ".join(f"{seconds:.3g}" for seconds in by_stage)
    held = config.parallelism.pp_layers or _even(layers, pp)
    if config.parallelism.virtual_pp_layers is not None:
        fix = (
            "interleaved stages are equal: --pp-layers in place of --virtual-pp-layers can even "
            "them out"
        )
    elif at == pp - 1:
        per_layer = mean(by_stage[:-1]) / mean(held[:-1])
        head = max(by_stage[-1] / per_layer - held[-1], 0.0)
        better = balanced(layers, pp, head)
        if _heaviest(better, head) > GAIN * _heaviest(held, head):
            return  # whole layers allow no better
        fix = (
            f"--pp-layers {_listed(better)} in place of {_listed(held)}: the output layer costs "
            f"{head:.1f} layers"
        )
    else:
        to = by_stage.index(min(by_stage))
        after, layer = list(by_stage), slowest / held[at]
        after[at], after[to] = after[at] - layer, after[to] + layer
        if held[at] == 1 or max(after) > GAIN * slowest:
            return
        counts = [n + (stage == to) - (stage == at) for stage, n in enumerate(held)]
        fix = f"--pp-layers {_listed(counts)} in place of {_listed(held)}"
    yield Finding(
        WARNING, "stages", f"seconds of computing per stage: {shown}; stage {at + 1} makes the "
        "others wait", (fix,),
    )  # fmt: skip


def _even(layers: int, pp: int) -> tuple[int, ...]:
    each, more = divmod(layers, pp)
    return tuple(each + (i < more) for i in range(pp))


_MACHINE = (
    "look at its machine: another process on its GPU, a GPU that is hot "
    "(nvidia-smi -q -d PERFORMANCE), a busy CPU",
)
_FIXES = {
    "data": ("put the indexed dataset on a local disk: SHARDWRIGHT_CACHE=DIR",),
    "computing": _MACHINE,
    "Python between the phases": _MACHINE,
}


def _why_slow(config: TrainConfig, times: Sequence[StepTimes], slow: Slow) -> Iterable[Finding]:
    """Which ranks, or the network, made a step slow."""
    tp = config.parallelism.tp
    now, before = work(times, tp), work(slow.ranks, tp)
    excess = _longest(times) - slow.usual
    if len(times) == 1:  # nobody to wait for
        yield _own_fault(times[0], slow)
        return
    late = [i for i in range(len(times)) if now[i].total - before[i].total > 0.5 * excess]
    if late:
        worst = max(late, key=lambda i: now[i].total - before[i].total)
        who, subject = f"rank {times[worst].rank}", "straggler"
        if len(late) > 1:
            subject = "ranks"
            who = f"each of ranks {_listed(times[i].rank for i in late)}"
            if len({i // tp for i in late}) == 1:
                subject = "straggler"
                who += f", which wait for each other in every layer (tp={tp}),"
        where = now[worst].most(before[worst])
        yield Finding(
            WARNING, subject, f"{who} worked {now[worst].total:.3g} s (usually "
            f"{before[worst].total:.3g}), most of it more in {where}", _FIXES[where],
        )  # fmt: skip
    else:
        most = max(w.total for w in now)
        yield Finding(
            WARNING, "network",
            f"no rank worked more than {most:.3g} s; the rest went into exchanging data",
            ("look for other traffic or lost links: NCCL_DEBUG=INFO, nvidia-smi nvlink -e, "
             "and train-ckpt doctor on each machine",),
        )  # fmt: skip
    if any(t.saving for t in times):
        yield Finding(NOTE, "saving", "a checkpoint was being written beside this step", _DISK)


def _own_fault(now: StepTimes, slow: Slow) -> Finding:
    """Where the only rank spent more time."""
    usual = slow.ranks[0]
    grown = {
        "data": now.data - usual.data,
        "computing": now.passes - usual.passes,
        "the optimizer": now.optimizer - usual.optimizer,
        "Python between the phases": now.other - usual.other,
    }
    where = max(grown, key=lambda name: grown[name])
    return Finding(
        WARNING, "step", f"{grown[where]:.3g} s of it more in {where}", _FIXES.get(where, _MACHINE)
    )


_DISK = (
    "a faster disk for checkpoints (train-ckpt doctor measures it), or fewer of them "
    "(--save-interval)",
)


def slow_save(step: int, waited: float, since: float, size: int, took: float) -> str:
    """What a save says that had to wait for the one before it; nothing where that is little.

    ``waited`` seconds of the ``since`` that have passed from the last save; that one wrote
    ``size`` bytes on this rank in ``took`` seconds.
    """
    if waited < 1.0 or waited < SLOW_SAVE * since:
        return ""
    found = Finding(
        WARNING, "disk", f"training waited {waited:.3g} s before step {step} could be saved: the "
        f"checkpoint before took {took:.3g} s ({size / 1e6 / max(took, 1e-9):.3g} MB/s on this "
        "rank)", _DISK,
    )  # fmt: skip
    return "\n".join(found.lines())


# --- ranks that do not come --------------------------------------------------------------------

# What gloo and NCCL say when the process at the other end is gone, and when it does not come.
_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")
_LATE = re.compile(r"Timed out waiting (\d+)ms|caught collective operation timeout")


def lost(error: BaseException, minutes: float, where: str = "") -> LostRank | None:
    """What an error of a collective means, where it means that another rank is missing.

    ``minutes`` is the time that a collective waits, ``where`` the step and phase of this rank.
    """
    text, at = str(error), f"{where}: " if where else ""
    late = _LATE.search(text)
    if late is not None:
        seconds = int(late[1]) / 1000 if late[1] else 60 * minutes
        waited = f"{seconds / 60:g} minutes" if seconds > 60 else f"{seconds:g} s"
        return LostRank(f"{at}waited {waited} for another rank ({late[0]})", WAITED_IN_VAIN)
    gone = _GONE.search(text)
    if gone is not None:
        return LostRank(f"{at}lost another rank ({gone[0]}), so it ends too", LOST_A_RANK)
    return None


def hang(minutes: float | None = None) -> str:
    """What to do where ranks waited for another one in vain; lines, each after a line break."""
    longer = f"--timeout-minutes {3 * minutes:g}" if minutes else "a larger --timeout-minutes"
    fixes = (
        "look for the first error above: one rank may have failed while the others waited",
        "a rank that says no such thing is the one that was waited for: py-spy dump --pid PID "
        "shows where it is",
        f"a first step or a save that takes longer needs {longer}",
        "on several machines check the network: train-ckpt doctor on each, NCCL_DEBUG=INFO, and "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME where a host has several interfaces",
    )
    return "".join(f"\n  - {fix}" for fix in fixes)


def not_finite(config: TrainConfig) -> str:
    """What to try after a loss or gradient that is not finite."""
    fixes = ["Lower the learning rate"]
    if config.schedule is not None and not config.schedule.warmup_steps:
        fixes.append("warm it up (--lr-warmup-steps)")
    if not config.optimizer.clip_grad:
        fixes.append("clip gradients (--clip-grad 1.0)")
    return ", ".join(fixes)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.005 * GIB else f"{size} bytes"


def by_level(findings: Iterable[Finding]) -> Mapping[str, int]:
    """How many findings there are of each level."""
    counts = dict.fromkeys((OK, NOTE, WARNING, PROBLEM), 0)
    for found in findings:
        counts[found.level] += 1
    return counts
