"""Pictures of a search: memory of the best layouts by part, and the best one's pipeline in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.ckpt.errors import install

from ..errors import TrainError
from .estimate import GIB, RunLayout
from .report import distinct
from .search import Result

# part -> (grey that differs from its neighbours', hatch)
_STYLE = {
    "weights": ("#1b3a5c", ""),
    "gradients": ("#9dbfe0", ""),
    "masters": ("#41719c", "//"),
    "moments": ("#c6d8ea", ".."),
    "activations": ("#d9691a", ""),
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
_BACKWARD_TIME = 2.0  # of a forward pass
PASSES = 48  # of a stage in each direction: the same for interleaved pipelines
# In grey every forward pass is lighter than every backward pass, in all chunks.
_FORWARD = ("#dbe9f6", "#84b0dc")  # of the first and of the last chunk
_BACKWARD = ("#c25a14", "#4f1f00")

WIDE, DOTS = 9.5, 130  # inches, and dots per inch

TimedPass = tuple[
    str, int, int, float, float
]  # forward or backward, micro-batch, chunk, start, end


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


def timeline(pp: int, count: int, chunks: int = 1) -> list[list[TimedPass]]:
    """When each stage runs which pass; the forward of a whole stage takes 1, its backward 2."""
    todo = [order(pp, stage, count, chunks) for stage in range(pp)]
    done: dict[tuple[str, int, int, int], float] = {}  # pass, stage -> its end
    passes_of: list[list[TimedPass]] = [[] for _ in range(pp)]
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
                end = start + (1.0 if kind == "F" else _BACKWARD_TIME) / chunks
                done[(kind, micro, chunk, stage)] = clock[stage] = end
                passes_of[stage].append((kind, micro, chunk, start, end))
                todo[stage].pop(0)
                moved = True
        assert moved, "the schedule can never end"
    return passes_of


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
    """Write both pictures as one file, in the form of its suffix; TrainError if it cannot be."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TrainError(f"--plot {path}: {install('matplotlib')}") from None
    try:
        _save(figure(result, top), path)
    except OSError as error:
        raise TrainError(f"--plot {path}: cannot be written: {error.strerror}") from None


def figure(result: Result, top: int = 8) -> Any:
    """Both pictures as a matplotlib Figure: the ``top`` layouts, the pipeline of the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = result.best.layout
    tall = 0.42 * len(distinct(result, top)) + 1.9
    low = 0.3 * layout.pp + (1.8 if layout.chunks == 1 else 2.0) if layout.pp > 1 else 0.0
    made = Figure(figsize=(WIDE, tall + low), layout="constrained")
    FigureCanvasAgg(made)
    if layout.pp > 1:
        # each with its own margins: the timeline has no legend at its side
        parts: Any = made.subfigures(2, 1, height_ratios=[tall, low])
        _timeline(parts[1], layout, result.best.time.bubble)
        _memory(parts[0].subplots(), result, top)
    else:
        _memory(made.subplots(), result, top)
    return made


def _save(figure: Any, path: Path) -> None:
    """As SVG, or as PNG with a palette, which takes a third of the bytes."""
    if path.suffix == ".svg":
        figure.savefig(path, metadata={"Date": None})  # the same search is the same file
        return
    from PIL import Image  # matplotlib needs it too

    figure.set_dpi(DOTS)
    figure.canvas.draw()
    drawn = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    drawn.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True, dpi=(DOTS, DOTS))


def _memory(axes: Any, result: Result, top: int) -> None:
    found = distinct(result, top)
    names = [f"{c.layout.short}\n{c.time.step:.3g} s" for c in found]
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
    axes.set_title(f"{result.shape.name} on {result.request.cluster.gpus} GPUs, the chosen first")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def shown(pp: int, count: int, chunks: int) -> int:
    """How many of ``count`` micro-batches the timeline shows: whole groups if interleaved."""
    if chunks == 1:
        return min(count, max(SHOWN, 2 * pp))
    groups = max(min(2, count // pp, PASSES // (pp * chunks)), 1)
    return groups * pp


def _timeline(figure: Any, layout: RunLayout, bubble: float) -> None:
    from matplotlib.patches import Patch

    pp, count, chunks = layout.pp, layout.count, layout.chunks
    axes = figure.subplots()
    some = shown(pp, count, chunks)
    passes_of = timeline(pp, some, chunks)
    end = max(row[-1][4] for row in passes_of)
    colours = {"F": _shades(_FORWARD, chunks), "B": _shades(_BACKWARD, chunks)}
    points = 0.85 * WIDE * 72 / end / chunks  # of paper per forward pass, margins taken off
    long = {"F": points, "B": points * _BACKWARD_TIME}
    numbered = [kind for kind in long if long[kind] > 4.2 * len(str(some)) + 1]
    for stage, row in enumerate(passes_of):
        for kind, micro, chunk, start, stop in row:
            # without lines where they would cover what they surround
            axes.barh(stage + 1, stop - start, left=start, color=colours[kind][chunk],
                      edgecolor="black" if long[kind] > 3 else "none", linewidth=0.4,
                      height=0.9)  # fmt: skip
            if kind in numbered:
                axes.text((start + stop) / 2, stage + 1, micro + 1, ha="center", va="center",
                          fontsize=7, color="white" if kind == "B" else "black")  # fmt: skip
    axes.set_xlim(0, end)
    axes.set_ylim(pp + 0.6, 0.4)
    axes.set_yticks(range(1, pp + 1))
    axes.set_xlabel("time [forward passes of a whole stage]")
    axes.set_ylabel("pipeline stage")
    of = f"{some} of {count}" if some < count else str(count)
    numbers = ", numbered" if numbered else ""
    axes.set_title(
        f"{layout.short}: {of} micro-batches{numbers}; white: waiting, {bubble:.1%} of all {count}"
    )
    of_chunk = [f" of chunk {chunk + 1}" for chunk in range(chunks)] if chunks > 1 else [""]
    handles = [
        Patch(facecolor=colours[kind][chunk], edgecolor="black", linewidth=0.4, label=label + of)
        for chunk, of in enumerate(of_chunk)
        for kind, label in (("F", "forward"), ("B", "backward"))
    ]  # pairs, since a legend fills its columns from above
    columns = {1: 2}.get(chunks, chunks if chunks <= 5 else -(-chunks // 2))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


def _shades(ends: tuple[str, str], count: int) -> list[tuple[float, float, float]]:
    """``count`` colours from the first to the second; one alone lies between them."""
    from matplotlib.colors import to_rgb

    first, last = to_rgb(ends[0]), to_rgb(ends[1])
    parts = [0.5] if count == 1 else [i / (count - 1) for i in range(count)]
    return [
        (
            first[0] + part * (last[0] - first[0]),
            first[1] + part * (last[1] - first[1]),
            first[2] + part * (last[2] - first[2]),
        )
        for part in parts
    ]
