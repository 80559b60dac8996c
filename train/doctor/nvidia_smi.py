"""What ``nvidia-smi`` says about this machine: GPUs, their memory, their links.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import TrainConfig
from ..errors import TrainError
from .topology import Topology, parse

Runner = Callable[[Sequence[str]], "str | None"]  # a program's output, or None if it fails


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it; bytes."""

    index: int
    name: str
    total: int
    used: int
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What nvidia-smi says; both empty where there is none."""

    gpus: tuple[Gpu, ...] = ()
    topology: Topology | None = None

    def visible(self, config: TrainConfig) -> tuple[int, ...]:
        """The GPUs that local ranks get, in their order."""
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if config.launch.gpu_ids not in (None, "all"):
            named = config.launch.gpu_ids
        if config.launch.use_cpu:
            return ()
        known = tuple(g.index for g in self.gpus) or (self.topology.gpus if self.topology else ())
        if named is None:
            return known
        try:
            return tuple(int(word) for word in named.split(",") if word.strip())
        except ValueError:
            return known  # UUIDs


def run_program(command: Sequence[str]) -> str | None:
    """A program's output; None if it is absent, fails or takes longer than 30 s."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def look(topology_file: str | None = None, run: Runner = run_program) -> Machine:
    """Ask nvidia-smi; ``topology_file`` holds a recorded matrix, of another machine perhaps."""
    query = "index,name,memory.total,memory.used,driver_version"
    listed = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    gpus = parse_gpus(listed) if listed else ()
    if topology_file is not None:
        try:
            return Machine(gpus, parse(Path(topology_file).read_text(encoding="utf-8")))
        except OSError as error:
            raise TrainError(f"--topology {topology_file}: {error.strerror}") from None
    matrix = run(["nvidia-smi", "topo", "-m"]) if gpus else None
    return Machine(gpus, parse(matrix) if matrix else None)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Rows of ``nvidia-smi --query-gpu``; memory there is in MiB."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit():
            total, used = (int(c) * 2**20 if c.isdigit() else 0 for c in cells[2:4])
            found.append(Gpu(int(cells[0]), cells[1], total, used, cells[4]))
    return tuple(found)


def count_gpus(run: Runner = run_program) -> int:
    """How many GPUs a run would see; 0 without nvidia-smi."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return sum(bool(word.strip()) for word in named.split(","))
    listed = run(["nvidia-smi", "-L"])
    return sum(line.startswith("GPU ") for line in (listed or "").splitlines())
