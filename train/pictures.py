"""Pictures of a plan: memory of the best layouts by part, and the best one's pipeline in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import TrainError
from .estimate import GIB
from .planning import Result, distinct

# part -> (grey that differs from its neighbours', hatch)
_STYLE = {
    "weights": ("#1b3a5c", ""),
    "gradients": ("#7fa8d1", ""),
    "masters": ("#41719c", "//"),
    "moments": ("#c6d8ea", ".."),
    "activations": ("#e8893b", ""),
    "logits": ("#f7d3b0", "xx"),
    "buffers": ("#8a4a14", ""),
    "outside": ("#f2f2f2", "\\\\"),
}
_LABELS = {
    "weights": "weights, bf16", "gradients": "gradients, fp32", "masters": "master weights, fp32",
    "moments": "moments, fp32", "activations": "activations", "logits": "logits or layer backward",
    "buffers": "stage buffers", "outside": "CUDA, NCCL, gaps",
}  # fmt: skip
SHOWN = 8  # micro-batches of the timeline: more are too thin to see

Span = tuple[str, int, int, float, float]  # forward or backward, micro-batch, chunk, start, end


# --- schedules ---------------------------------------------------------------------------------


def order(pp: int, stage: int, count: int, chunks: int = 1) -> list[tuple[str, int, int]]:
    """The passes of a stage as (F or B, micro-batch, chunk), as megatron-core runs them.

    One forward, one backward after a warm-up; Narayanan et al. 2021, figures 3 and 4.
    """
    total = count * chunks
    if chunks == 1:
        warm = min(pp - stage - 1, total)
    else:
        warm = min(2 * (pp - stage - 1) + (chunks - 1) * pp, total)

    def unit(i: int, backward: bool) -> tuple[str, int, int]:
        group, at = divmod(i, pp * chunks)
        chunk, micro = divmod(at, pp) if chunks > 1 else (0, 0)
        number = group * pp + micro if chunks > 1 else i
        if backward:
            return "B", number, chunks - 1 - chunk
        return "F", number, chunk

    forward = [unit(i, False) for i in range(total)]
    backward = [unit(i, True) for i in range(total)]
    steady = [u for i in range(total - warm) for u in (forward[warm + i], backward[i])]
    return forward[:warm] + steady + backward[total - warm :]


def timeline(pp: int, count: int, chunks: int = 1, backward: float = 2.0) -> list[list[Span]]:
    """When each stage runs which pass; the forward of a whole stage takes 1, its backward 2."""
    todo = [order(pp, stage, count, chunks) for stage in range(pp)]
    done: dict[tuple[str, int, int, int], float] = {}  # pass, stage -> its end
    spans: list[list[Span]] = [[] for _ in range(pp)]
    clock = [0.0] * pp
    while any(todo):
        moved = False
        for stage in range(pp):
            while todo[stage]:
                kind, micro, chunk = todo[stage][0]
                before = _before(kind, micro, chunk, stage, pp, chunks)
                if before is not None and before not in done:
                    break
                start = max(clock[stage], done[before] if before else 0.0)
                end = start + (1.0 if kind == "F" else backward) / chunks
                done[(kind, micro, chunk, stage)] = clock[stage] = end
                spans[stage].append((kind, micro, chunk, start, end))
                todo[stage].pop(0)
                moved = True
        assert moved, "the schedule waits for itself"
    return spans


def _before(
    kind: str, micro: int, chunk: int, stage: int, pp: int, chunks: int
) -> tuple[str, int, int, int] | None:
    """The pass whose result this one needs."""
    if kind == "F":
        if stage > 0:
            return "F", micro, chunk, stage - 1
        return ("F", micro, chunk - 1, pp - 1) if chunk > 0 else None
    if stage < pp - 1:
        return "B", micro, chunk, stage + 1
    if chunk < chunks - 1:
        return "B", micro, chunk + 1, 0
    return "F", micro, chunk, stage


# --- drawing -----------------------------------------------------------------------------------


def draw(result: Result, path: Path, top: int = 8) -> None:
    """Write both pictures as one file, in the form of its suffix."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise TrainError(
            f"--plot {path}: pictures need matplotlib; pip install matplotlib"
        ) from None
    plan = result.best.plan
    rows = min(top, len(distinct(result, top)))
    tall = 0.42 * rows + 1.9
    low = 0.3 * plan.pp + 1.5 if plan.pp > 1 else 0.0
    figure = Figure(figsize=(9.5, tall + low), layout="constrained")
    FigureCanvasAgg(figure)
    if plan.pp > 1:
        above, below = figure.subplots(2, 1, height_ratios=[tall, low])
        _timeline(below, plan.pp, plan.count, plan.chunks)
    else:
        above = figure.subplots()
    _memory(above, result, top)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise TrainError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _memory(axes: Any, result: Result, top: int) -> None:
    found = distinct(result, top)
    names = [f"{c.plan.short}\n{c.time.step:.3g} s" for c in found]
    left = [0.0] * len(found)
    for part, (colour, hatch) in _STYLE.items():
        sizes = [c.memory.parts()[part] / GIB for c in found]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=colour, hatch=hatch, edgecolor="black",
                      linewidth=0.5, label=_LABELS[part])  # fmt: skip
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    gpu = result.request.cluster.gpu
    axes.axvline(gpu.memory / GIB, color="black", linestyle="--",
                 label=f"{gpu.name}: {gpu.memory / GIB:.1f} GiB")  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("memory of the fullest GPU [GiB]")
    axes.set_ylabel("layout and its time of a step")
    axes.set_title(f"{result.shape.name} on {result.request.cluster.gpus} GPUs, best first")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _timeline(axes: Any, pp: int, count: int, chunks: int) -> None:
    shown = min(count, max(SHOWN, 2 * pp))
    if chunks > 1:
        shown = max(shown // pp, 1) * pp
    spans = timeline(pp, shown, chunks)
    styles = {"F": ("#9fc3e6", "forward"), "B": ("#e8893b", "backward")}
    for stage, row in enumerate(spans):
        for kind, micro, chunk, start, end in row:
            colour, label = styles[kind]
            first = stage == 0 and micro == 0 and chunk == 0
            axes.barh(stage + 1, end - start, left=start, color=colour, edgecolor="black",
                      hatch="//" if chunk % 2 else "", linewidth=0.5, height=0.9,
                      label=label if first else None)  # fmt: skip
            if chunks == 1 and shown * pp <= 200:
                axes.text((start + end) / 2, stage + 1, micro + 1, ha="center", va="center",
                          fontsize=7)  # fmt: skip
    axes.invert_yaxis()
    axes.set_yticks(range(1, pp + 1))
    axes.set_xlabel("time [forward passes of a stage]")
    axes.set_ylabel("pipeline stage")
    more = "" if shown == count else f" (the step has {count})"
    hatched = ", every second chunk hatched" if chunks > 1 else ""
    axes.set_title(f"Pipeline with {shown} micro-batches{more}{hatched}; white: waiting")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
