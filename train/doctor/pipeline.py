"""How long the stages of a pipeline wait for each other, and what lowers it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ..config.schema import TrainConfig
from ..planning.pipeline import balanced, bubble_share, heaviest
from .findings import OK, WARNING, Finding, divisor_below, listed

LARGE_BUBBLE = 0.2  # of a step: above it a fix gains more than a tenth
UNEVEN = 1.15  # the slowest stage over the mean


def bubble(
    config: TrainConfig, layers: int | None = None, measured: float | None = None
) -> Finding:
    """How long stages wait for each other; ``measured`` is the share that a run saw."""
    pp, m = config.parallelism.pp, config.batch.num_micro_batches
    expected = expected_bubble(config, layers)
    share = expected if measured is None else measured
    what = f"stages of pp={pp} wait {expected:.0%} of a step with {_times(m)}"
    if measured is not None:
        what = f"stages waited {measured:.0%} of the step; pp={pp} with {_times(m)} " \
               f"makes {expected:.0%} unavoidable"  # fmt: skip
    if share < LARGE_BUBBLE or pp == 1:
        return Finding(OK, "bubble", what)
    if expected < LARGE_BUBBLE:  # the layout's own bubble is small: the rest is something else
        return Finding(
            WARNING, "bubble", f"{what}; the rest is exchange between stages, or a slow rank",
            ("larger micro-batches, whose passes take longer than the exchange",
             "train-ckpt doctor on each machine tests the links"),
        )  # fmt: skip
    return Finding(WARNING, "bubble", what, tuple(_bubble_fixes(config, layers)))


def expected_bubble(config: TrainConfig, layers: int | None) -> float:
    """The share of a step in which a pipeline rank waits, as the layout gives it."""
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
        less = divisor_below(micro, micro)
        fixes.append(
            f"smaller ones: --micro-batch-size {less} at the same global batch makes "
            f"{micro * m // less} and lowers it to {bubble_share(pp, micro * m // less):.0%}"
        )
    if pp % 2 == 0 or pp == 3:
        half = pp // 2 if pp % 2 == 0 else 1
        fixes.append(f"less PP: --pp {half}, with more data or tensor parallelism, lowers it to "
                     f"{bubble_share(half, m):.0%}")  # fmt: skip
    per_stage = layers // pp if layers and layers % pp == 0 else 0
    even = layout.pp_layers is None and layout.last_stage_layers is None
    if layout.virtual_pp_layers is None and even and per_stage > 1 and m % pp == 0:
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
    gain = max(work) / heaviest(better, head)
    if excess < UNEVEN or gain < 1.05:
        return Finding(OK, "stages", what)
    return Finding(
        WARNING, "stages",
        f"{what}; stage {slowest + 1} makes the others wait, {excess - 1:.0%} over the mean",
        (f"--pp-layers {listed(better)} is {gain - 1:.0%} faster",),
    )  # fmt: skip
