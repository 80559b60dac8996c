"""Whether tensor-parallel neighbours share a fast link."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import OK, PROBLEM, WARNING, Finding, divisor_below
from .topology import Topology


def links(topology: Topology, tp: int, nproc: int, visible: Sequence[int] | None = None) -> Finding:
    """Whether tensor-parallel neighbours share NVLink; ``visible`` maps local ranks to GPUs."""
    gpus = tuple(visible) if visible is not None else topology.gpus
    machine = topology.kind()
    if tp == 1:
        return Finding(OK, "links", f"{machine}; tp=1 needs no fast one")
    if nproc % tp:
        return Finding(
            WARNING, "links", f"tp={tp} crosses machines: {nproc} processes on each",
            (f"--tp {divisor_below(nproc, tp)} and more --pp or data parallelism: the network "
             "between machines is many times slower than NVLink",),
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
