"""A search's result in words: why the best layout is best, tables, commands, the guide's sizes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .estimate import GIB, Cluster
from .hardware import find
from .search import ALIKE, Candidate, Request, Result, read_model, search


def explain(result: Result) -> str:
    """Three sentences: what fits, what it costs, and what is worse about the next best."""
    best, cluster = result.best, result.request.cluster
    p, t = best.layout, best.time
    room = cluster.gpu.memory
    parts = sorted(best.memory.parts().items(), key=lambda part: -part[1])
    most = " and ".join(f"{name} {value / GIB:.1f}" for name, value in parts[:2])
    first = (
        f"{p.short} needs {best.memory.total / GIB:.1f} of {room / GIB:.1f} GiB on its fullest "
        f"GPU (stage {best.stage + 1} of {p.pp}), mostly {most} GiB."
    )
    moved = ", ".join(f"{_size(v)} over {k}" for k, v in t.volume.items())
    bubble = (
        f"stages wait {t.bubble:.1%} of the time" if p.pp > 1 else "there is no pipeline bubble"
    )
    second = (
        f"A step takes about {_seconds(t.step)} s: {p.count} micro-batches of {p.micro}, {bubble}, "
        f"and each GPU sends {moved or 'nothing'}."
    )
    return f"{first} {second} {_against(result)}"


def _against(result: Result) -> str:
    best = result.best.layout
    other = next(
        (c for c in result.fitting if (c.layout.tp, c.layout.pp) != (best.tp, best.pp)), None
    )
    fits = {(c.layout.tp, c.layout.pp) for c in result.fitting if c.layout.recompute != "full"}
    simpler = next(
        (
            c
            for c in result.over
            if c.layout.tp * c.layout.pp < best.tp * best.pp
            and c.layout.recompute == best.recompute
            and (c.layout.tp, c.layout.pp) not in fits
        ),
        None,
    )
    said = []
    if simpler is not None:
        over = simpler.memory.total - result.request.cluster.gpu.memory
        said.append(
            f"with less splitting {simpler.layout.short} comes nearest to fitting, "
            f"{over / GIB:.1f} GiB too large"
        )
    if other is not None:
        ratio = other.time.step / result.best.time.step - 1
        slower = "as fast" if abs(ratio) < 0.005 else f"{abs(ratio):.0%} " + (
            "slower" if ratio > 0 else "faster but more complicated"
        )  # fmt: skip
        said.append(f"the next split, {other.layout.short}, is {slower}")
    text = ", and ".join(said) or "no other split fits"
    return text[0].upper() + text[1:] + "."


def table(result: Result, count: int, width: int = 100) -> list[str]:
    """The best layouts, one a line; the best of each (tp, pp) with the same recomputation.

    What is sent is left out where a line would be longer than ``width``.
    """
    found = distinct(result, count)
    names = [c.layout.short for c in found]
    wide = max(map(len, ["layout", *names]))
    rows = [f"  {'layout':<{wide}} {'GiB':>6} {'alloc.':>6} {'bubble':>6} {'step s':>8}"]
    sent = ["sent per GPU"]
    for c, name in zip(found, names, strict=True):
        mark = "*" if c is result.best else " "
        rows.append(
            f"{mark} {name:<{wide}} {c.memory.total / GIB:>6.1f} {c.memory.allocated / GIB:>6.1f} "
            f"{c.time.bubble:>6.1%} {_seconds(c.time.step):>8}"
        )
        sent.append(", ".join(f"{_size(v)} {k}" for k, v in c.time.volume.items()) or "-")
    lines = [f"{row}  {more}" for row, more in zip(rows, sent, strict=True)]
    return lines if max(map(len, lines)) <= width else rows


def _seconds(time: float) -> str:
    return f"{time:,.0f}" if time >= 1000 else f"{time:.3g}"


def _size(count: float) -> str:
    """Bytes with three digits and no exponent."""
    unit, name = (1e12, "TB") if count >= 1e12 else (1e9, "GB")
    return f"{count / unit:,.0f} {name}" if count >= 100 * unit else f"{count / unit:.3g} {name}"


def legend(result: Result, count: int) -> str:
    """What the signs of the table mean that stand in it, and why the first row is the first."""
    layouts = [c.layout for c in distinct(result, count)]
    codes = ["tp, pp, dp: tensor-, pipeline- and data-parallel ranks"]
    if any(p.chunks > 1 for p in layouts):
        codes.append("vpp: virtual stages of each pipeline stage")
    if any(p.sequence_parallel for p in layouts):
        codes.append("sp: sequence parallelism")
    codes.append("mbs: sequences in a micro-batch")
    if any(p.recompute == "full" for p in layouts):
        codes.append("full: the backward pass computes all activations again")
    codes += [
        "GiB: memory of the fullest GPU",
        "alloc.: the part of it that PyTorch allocates",
        "bubble: share of the step in which pipeline stages wait",
    ]
    return f"{'; '.join(codes)}. {_why_first(result)}"


def _why_first(result: Result) -> str:
    best = result.best
    fastest = min(result.fitting, key=lambda c: c.time.step)
    if fastest is best:
        return "*: the fastest."
    share = best.time.step / fastest.time.step - 1
    return (
        f"*: the simplest of those within {ALIKE - 1:.0%} of the fastest, which is as far as the "
        f"estimate can be trusted ({fastest.layout.short} is {share:.1%} faster)."
    )


def distinct(result: Result, count: int) -> list[Candidate]:
    """The best of each split, so that micro-batch sizes do not crowd out other layouts."""
    seen: dict[tuple[int, int, str], Candidate] = {}
    for c in result.fitting:
        seen.setdefault((c.layout.tp, c.layout.pp, c.layout.recompute), c)
    return list(seen.values())[:count]


def commands(result: Result, path: str | None) -> list[str]:
    """The ``train-ckpt`` line of the best layout, and the ``reshard`` line to get there."""
    p, cluster = result.best.layout, result.request.cluster
    source = shlex.quote(path or "MODEL")
    words = ["train-ckpt", "--model", source, "--data", "DATA.txt"]
    words += ["--tp", str(p.tp), "--pp", str(p.pp)]
    if p.stages:
        words += ["--pp-layers", ",".join(map(str, p.stages))]
    if p.chunks > 1:
        words += ["--virtual-pp-layers", str(result.shape.layers // p.pp // p.chunks)]
    words += ["--sequence-parallel"] * p.sequence_parallel
    words += ["--distributed-optimizer"] * p.distributed
    words += ["--recompute", p.recompute] if p.recompute != "none" else []
    words += ["--optimizer", p.optimizer] if p.optimizer != "adamw" else []
    words += ["--nproc", str(cluster.gpus // cluster.nodes)]
    if cluster.nodes > 1:
        words += ["--num-machines", str(cluster.nodes), "--machine-rank", "RANK",
                  "--main-process-ip", "ADDRESS", "--main-process-port", "29500"]  # fmt: skip
    words += [
        "--seq-length", str(p.seq), "--micro-batch-size", str(p.micro), "--global-batch-size",
        str(result.request.global_batch), "--precision", "bf16", *_REST,
    ]  # fmt: skip
    shard = ["reshard", source, "--tp", str(p.tp), "--pp", str(p.pp)]
    shard += ["--pp-layers", ",".join(map(str, p.stages))] if p.stages else []
    return [" ".join(words), " ".join(shard)]


_REST = ("--steps", "1000", "--save-dir", "run")  # what a layout does not say


def folded(command: str, width: int) -> str:
    """A command as lines of at most ``width`` that a shell joins again; options keep values."""
    parts: list[str] = []
    for word in shlex.split(command):
        if word.startswith("--") or not parts:
            parts.append(shlex.quote(word))
        else:
            parts[-1] += f" {shlex.quote(word)}"
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return " \\\n".join(lines)


def beside_file(result: Result, path: str | None, file: str) -> list[str]:
    """How to use the YAML in ``file``, which has no key for the micro-batch size; lines."""
    p = result.best.layout
    words = ["train-ckpt", "--config", shlex.quote(file), "--model", shlex.quote(path or "MODEL"),
             "--data", "DATA.txt", "--micro-batch-size", str(p.micro)]  # fmt: skip
    words += ["--machine-rank", "RANK"] if result.request.cluster.nodes > 1 else []
    words += ["--optimizer", p.optimizer] if p.optimizer != "adamw" else []
    return [
        "Accelerate's YAML cannot store the micro-batch size; also pass --micro-batch-size "
        f"{p.micro}:",
        "  " + " ".join([*words, *_REST]),
        f"or in a script as DataLoader(..., batch_size={p.micro}).",
    ]


def answers(result: Result) -> dict[str, Any]:
    """The best layout as answers of ``train-ckpt config``; see ``questions.py``."""
    p, cluster = result.best.layout, result.request.cluster
    found: dict[str, Any] = {
        "num_machines": cluster.nodes,
        "num_processes": cluster.gpus,
        "tp_degree": p.tp,
        "pp_degree": p.pp,
        "num_micro_batches": p.count,
        "recompute": p.recompute,
        "use_distributed_optimizer": p.distributed,
        "mixed_precision": "bf16",
        "seq_length": p.seq,
    }
    if p.tp > 1:
        found["sequence_parallelism"] = p.sequence_parallel
    if p.recompute == "full":
        found |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if p.stages:
        found["decoder_last_pipeline_num_layers"] = p.stages[-1]
    if p.chunks > 1:
        found["num_layers_per_virtual_pipeline_stage"] = result.shape.layers // p.pp // p.chunks
    if cluster.nodes > 1:
        found |= {"main_process_ip": "ADDRESS", "main_process_port": 29500, "machine_rank": 0}
    return found


def as_json(result: Result, path: str | None, count: int) -> dict[str, Any]:
    """The result as plain values; bytes, seconds, shares."""
    return {
        "model": {"name": result.shape.name, "parameters": result.parameters},
        "gpu": result.request.cluster.gpu.name,
        "gpu_memory": result.request.cluster.gpu.memory,
        "explanation": explain(result),
        "commands": commands(result, path),
        "layouts": [_row(c) for c in distinct(result, count)],
        "fitting": len(result.fitting),
        "too_large": len(result.over),
    }


def _row(c: Candidate) -> dict[str, Any]:
    p = c.layout
    return {
        "tp": p.tp, "pp": p.pp, "vpp": p.chunks, "ep": 1, "dp": p.dp, "pp_layers": p.stages,
        "micro_batch_size": p.micro, "num_micro_batches": p.count,
        "sequence_parallel": p.sequence_parallel, "distributed_optimizer": p.distributed,
        "recompute": p.recompute, "fullest_stage": c.stage, "memory": c.memory.parts(),
        "memory_allocated": c.memory.allocated, "memory_total": c.memory.total,
        "bubble": c.time.bubble, "step_seconds": c.time.step, "sent_bytes": dict(c.time.volume),
    }  # fmt: skip


# size, GPUs, (tp, pp, dp): bf16, sequences of 2048, A100 of 80 GB, machines of 8
GUIDE: tuple[tuple[str, int, tuple[int, int, int]], ...] = (
    ("7B", 8, (1, 1, 8)),
    ("13B", 8, (2, 1, 4)),
    ("20B", 16, (4, 1, 4)),
    ("40B", 32, (4, 2, 4)),
    ("70B", 64, (8, 2, 4)),
    ("175B", 128, (8, 4, 4)),
)


@dataclass(frozen=True, slots=True)
class GuideRow:
    """A line of the guide's table, and what is found here."""

    size: str
    gpus: int
    guide: Candidate  # the guide's split with the best micro-batch
    fits: bool
    best: Candidate


def guide(global_batch: int = 512, seq: int = 2048) -> list[GuideRow]:
    """The guide's table: its layouts with their best micro-batch, and the planner's own."""
    rows = []
    for size, gpus, (tp, pp, dp) in GUIDE:
        model, name = read_model(None, size)
        assert tp * pp * dp == gpus
        request = Request(Cluster(find("A100-80GB"), gpus), seq, global_batch)
        free = search(model, name, request)
        fixed = search(model, name, replace(request, tp=tp, pp=pp))
        chosen = fixed.fitting or fixed.over
        rows.append(GuideRow(size, gpus, chosen[0], bool(fixed.fitting), free.best))
    return rows


def guide_lines(rows: Sequence[GuideRow]) -> list[str]:
    """The table as Markdown."""
    lines = [
        "| model | GPUs | the guide's layout | GiB | step s | found here | GiB | step s | gain |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        a, b = row.guide, row.best
        fits = "" if row.fits else " (too large)"
        lines.append(
            f"| {row.size} | {row.gpus} | {a.layout.short}{fits} | {a.memory.total / GIB:.1f} "
            f"| {a.time.step:.3g} | {b.layout.short} | {b.memory.total / GIB:.1f} "
            f"| {b.time.step:.3g} | {a.time.step / b.time.step - 1:.0%} |"
        )
    return lines
