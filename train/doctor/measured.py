"""What a running job measured says: uneven stages, slow steps, slow data, slow saves.

``watch`` gathers the numbers; everything here is arithmetic over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from ..config.schema import TrainConfig
from ..planning.pipeline import balanced, even_split, heaviest
from .findings import NOTE, WARNING, Finding, listed
from .pipeline import LARGE_BUBBLE, UNEVEN, bubble, expected_bubble

GAIN = 0.95  # of the slowest stage's time: a split that leaves more is not worth a change
SLOW_DATA = 0.1  # of a step
SLOW_SAVE = 0.05  # of the time between two saves


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
    saving: bool = False  # a checkpoint was being written at the same time

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
class StepReport:
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
) -> StepReport:
    """The phases of a step over all ranks, in their order, and advice.

    Without ``slow`` the times are those of usual steps until ``step``, and there are lines only
    where a fix is due. ``crowded``: ranks share CPU cores, so that a wait may be for a core. A slow
    step says nothing about bubbles and stages, which every step has.
    """
    if slow is not None:
        findings = [*_why_slow(config, times, slow)]
        head = f"step {step} took {_longest(times):.3g} s, usual are {slow.usual:.3g} s"
    else:
        findings = [*_measured(config, times, layers, crowded)]
        head = f"steps up to {step} took {_longest(times):.3g} s each"
    if slow is None and not findings:
        return StepReport(step, ())
    lines = [f"{head}: {_phases(times, slow, config.parallelism.pp)}"]
    for found in findings:
        lines += [f"  {line.strip()}" for line in found.lines()]
    return StepReport(step, tuple(lines), tuple(findings))


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
        small = expected_bubble(config, layers) < LARGE_BUBBLE
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
    held = config.parallelism.pp_layers or even_split(layers, pp)
    if config.parallelism.virtual_pp_layers is not None:
        fix = (
            "interleaved stages are equal: --pp-layers instead of --virtual-pp-layers can even "
            "them out"
        )
    elif at == pp - 1:
        per_layer = mean(by_stage[:-1]) / mean(held[:-1])
        head = max(by_stage[-1] / per_layer - held[-1], 0.0)
        better = balanced(layers, pp, head)
        if heaviest(better, head) > GAIN * heaviest(held, head):
            return  # whole layers allow no better
        fix = (
            f"--pp-layers {listed(better)} instead of {listed(held)}: the output layer costs "
            f"{head:.1f} layers"
        )
    else:
        to = by_stage.index(min(by_stage))
        after, layer = list(by_stage), slowest / held[at]
        after[at], after[to] = after[at] - layer, after[to] + layer
        if held[at] == 1 or max(after) > GAIN * slowest:
            return
        counts = [n + (stage == to) - (stage == at) for stage, n in enumerate(held)]
        fix = f"--pp-layers {listed(counts)} instead of {listed(held)}"
    yield Finding(
        WARNING, "stages", f"seconds of computing per stage: {shown}; stage {at + 1} makes the "
        "others wait", (fix,),
    )  # fmt: skip


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
            who = f"each of ranks {listed(times[i].rank for i in late)}"
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
        yield Finding(NOTE, "saving", "a checkpoint was being written during this step", _DISK)


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


def not_finite(config: TrainConfig) -> str:
    """What to try after a loss or gradient that is not finite."""
    fixes = ["Lower the learning rate"]
    if config.schedule is not None and not config.schedule.warmup_steps:
        fixes.append("warm it up (--lr-warmup-steps)")
    if not config.optimizer.clip_grad:
        fixes.append("clip gradients (--clip-grad 1.0)")
    return ", ".join(fixes)
