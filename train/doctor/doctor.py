"""What ``train-ckpt doctor`` finds out about this machine and a planned run.

Each check returns findings: what is, whether it is bad, and what to do. Checks of the machine ask
nvidia-smi and try things out (ranks that exchange data, a bounded write to the disk); checks of
the run (layout.py) are arithmetic over its configuration and its model's sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from shardwright.ckpt.model.family import Model

from ..config.schema import TrainConfig
from ..planning.hardware import GIB
from .findings import NOTE, OK, PROBLEM, WARNING, Finding
from .layout import checkpoint_bytes, fits, layout, local_ranks
from .nvidia_smi import Machine, look

WRITE_BYTES, WRITE_SECONDS = 256 * 2**20, 5.0  # limits of the disk's trial
SLOW_DISK = 200e6  # bytes per second
TESTED = {"torch": ((2, 6), None), "megatron-core": ((0, 16), (0, 17))}  # from, below


def versions() -> list[Finding]:
    """Packages, and whether the trainer works with their versions."""
    names = ("torch", "megatron-core", "transformers", "accelerate", "numpy", "safetensors")
    found = {name: _version(name) for name in names}
    shown = ", ".join(f"{name} {version or 'absent'}" for name, version in found.items())
    findings = [Finding(OK, "versions", f"Python {sys.version.split()[0]}, {shown}")]
    for name, (least, below) in TESTED.items():
        version = found[name]
        if version is None:
            findings.append(Finding(PROBLEM, "versions", f"{name} is not installed",
                                    ("pip install 'shardwright[train]'",)))  # fmt: skip
        elif _numbers(version) < least or (below and _numbers(version) >= below):
            wanted = f"at least {_dotted(least)}" + (
                f" and below {_dotted(below)}" if below else ""
            )
            findings.append(Finding(PROBLEM, "versions", f"{name} {version}, {wanted} is needed",
                                    ("pip install --upgrade 'shardwright[train]'",)))  # fmt: skip
    return findings


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in head)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def devices(machine: Machine, config: TrainConfig) -> list[Finding]:
    """GPUs, their memory, and whether every local rank has one."""
    import torch

    nproc = local_ranks(config)
    if not machine.gpus:
        cores, memory = os.cpu_count() or 1, _host_memory()
        findings = [Finding(NOTE, "devices", f"no GPU (nvidia-smi does not answer); {cores} CPU "
                            f"cores, {memory / GIB:.0f} GiB of memory")]  # fmt: skip
        if nproc > cores:
            one = config.parallelism.model_ranks
            fix = f"--nproc {cores // one * one}" if one <= cores else "a smaller --tp or --pp"
            findings.append(Finding(WARNING, "devices", f"{nproc} ranks share {cores} CPU cores",
                                    (fix,)))  # fmt: skip
        return findings
    shown = "; ".join(f"{g.index} {g.name} {g.total / GIB:.0f} GiB" for g in machine.gpus)
    findings = [Finding(OK, "devices", f"{shown}; driver {machine.gpus[0].driver}")]
    visible = machine.visible(config)
    if nproc > len(visible) and not config.launch.use_cpu:
        findings.append(Finding(PROBLEM, "devices", f"{nproc} ranks, {len(visible)} visible GPUs",
                                (f"--nproc {len(visible)}, or free more GPUs in "
                                 "CUDA_VISIBLE_DEVICES",)))  # fmt: skip
    for gpu in machine.gpus:
        if gpu.index in visible and gpu.used > 0.05 * gpu.total:
            findings.append(Finding(WARNING, "devices", f"GPU{gpu.index}: {gpu.used / GIB:.1f} of "
                                    f"{gpu.total / GIB:.0f} GiB are used by another process",
                                    ("end it (nvidia-smi lists them), or leave that GPU out of "
                                     "CUDA_VISIBLE_DEVICES",)))  # fmt: skip
    if not config.launch.use_cpu and not torch.cuda.is_available():
        build = torch.version.cuda
        why = f"torch {torch.__version__} is built for CUDA {build}" if build else "a CPU build"
        findings.append(Finding(PROBLEM, "devices", f"torch sees no GPU: {why}",
                                ("install a torch build that the driver supports: "
                                 "https://pytorch.org/get-started",)))  # fmt: skip
    return findings


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def backends() -> list[Finding]:
    """NCCL and gloo, and what both need of the host."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    nccl = "absent"
    if dist.is_nccl_available():
        nccl = _dotted(torch.cuda.nccl.version()) if gpu else "there, without a GPU to use"
    gloo = "there" if dist.is_gloo_available() else "absent"
    findings = [Finding(OK, "backends", f"NCCL {nccl}; gloo {gloo}")]
    if gpu and not dist.is_nccl_available():
        findings.append(Finding(PROBLEM, "backends", "torch is built without NCCL",
                                ("install the Linux CUDA build of torch",)))  # fmt: skip
    if not dist.is_gloo_available():
        findings.append(Finding(PROBLEM, "backends", "torch is built without gloo",
                                ("install a build with USE_GLOO",)))  # fmt: skip
    shared = Path("/dev/shm")
    if gpu and shared.is_dir() and shutil.disk_usage(shared).total < GIB:
        size = shutil.disk_usage(shared).total // 2**20
        findings.append(Finding(WARNING, "backends", f"/dev/shm has {size} MiB, too little for "
                                "NCCL between processes",
                                ("docker run --shm-size=8g, or --ipc=host",)))  # fmt: skip
    return findings


def exchange(nproc: int) -> Finding:
    """Start ``nproc`` ranks here that sum a buffer, as every step does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={nproc}",
               "-m", "shardwright.train.doctor.trial_rank"]  # fmt: skip
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env, check=False
        )
        said, lines = done.stderr, [x for x in done.stdout.splitlines() if x.startswith("{")]
    except subprocess.TimeoutExpired:
        said, lines = "no end after 120 s", []
    if not lines:
        why = next((x.strip() for x in said.splitlines() if "Error: " in x), said.strip()[-200:])
        return Finding(
            PROBLEM, "exchange", f"{nproc} ranks could not exchange data: {why}",
            ("NCCL_DEBUG=INFO says where NCCL stops, NCCL_P2P_DISABLE=1 leaves out links "
             "between GPUs that the machine reports but does not have", "where a host has several "
             "interfaces or its name does not resolve: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"),
        )  # fmt: skip
    found = json.loads(lines[-1])
    if found["ranks"] == 1:
        return Finding(OK, "exchange", f"1 rank over {found['backend']}: it sends nothing")
    moved = 2 * (found["ranks"] - 1) / found["ranks"] * found["bytes"]  # of a ring, per rank
    speed = moved / found["seconds"]
    return Finding(OK, "exchange", f"{found['ranks']} ranks over {found['backend']}: all-reduce of "
                   f"{found['bytes'] // 2**20} MiB at {speed / 1e9:.3g} GB/s per rank")  # fmt: skip


def disk(folder: Path, checkpoint: int | None, kept: int | None) -> list[Finding]:
    """How fast ``folder`` takes a checkpoint, and whether it has room for one; bytes.

    Writes at most ``WRITE_BYTES`` or for ``WRITE_SECONDS`` into a file, and removes it.
    """
    there = folder
    while not there.is_dir():  # a folder to be made lies on its parent's disk
        there = there.parent
    free = shutil.disk_usage(there).free
    bound = min(WRITE_BYTES, free // 10)
    try:
        speed = _write_speed(there, bound)
    except OSError as error:
        return [Finding(PROBLEM, "disk", f"{there} cannot be written: {error.strerror}",
                        ("another --save-dir",))]  # fmt: skip
    what = f"{there}: {speed / 1e6:.0f} MB/s written and synced, {free / GIB:.0f} GiB free"
    level, fixes = OK, []
    if speed < SLOW_DISK:
        level = WARNING
        fixes.append("a local disk or a parallel file system for --save-dir; saves run while "
                     "training continues, so a longer --save-interval helps too")  # fmt: skip
    if checkpoint is not None:
        what += f"; a checkpoint of {checkpoint / GIB:.1f} GiB takes {checkpoint / speed:.0f} s"
        need = checkpoint * ((kept or 1) + 1)  # the newest is written before the oldest goes
        if free < need:
            level = PROBLEM
            fixes.append(f"room for {need / GIB:.0f} GiB, or a smaller --keep-last")
    return [Finding(level, "disk", what, tuple(fixes))]


def _write_speed(folder: Path, most: int) -> float:
    block = os.urandom(4 * 2**20)  # nothing that a file system could compress
    with tempfile.TemporaryFile(dir=folder, prefix=".shardwright-doctor-") as file:
        started, written = time.perf_counter(), 0
        while written < most and time.perf_counter() - started < WRITE_SECONDS:
            written += file.write(block[: most - written])
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - started)


def examine(
    config: TrainConfig,
    find_model: Callable[[TrainConfig], Model],
    *,
    topology_file: str | None = None,
    try_exchange: bool = True,
) -> Iterable[Finding]:
    """Every check, in the order in which they are read; ``find_model`` is asked for a named one."""
    yield from versions()
    machine = look(topology_file)
    yield from devices(machine, config)
    yield from backends()
    if try_exchange:
        most = len(machine.visible(config)) or os.cpu_count() or 1
        yield exchange(max(1, min(local_ranks(config), most)))
    model = None
    if config.model.path is not None:
        model = find_model(config)
    yield from layout(config, model, machine)
    if model is not None and machine.gpus:
        yield from fits(config, model, min(gpu.total for gpu in machine.gpus))
    size = checkpoint_bytes(config, model) if model is not None else None
    yield from disk(Path(config.saving.save_dir or "."), size, config.saving.keep_last)
