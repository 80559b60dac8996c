"""``shardwright env``: versions and platform, to be pasted into a bug report.

Imports none of the packages that it names. Prints no environment variable, host or user name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from . import options

EXAMPLES = ("", "--json")
PACKAGES = (
    "numpy", "safetensors", "tqdm", "xxhash", "torch", "megatron-core", "transformers",
    "accelerate", "transformer-engine", "huggingface-hub", "fsspec", "pyyaml", "matplotlib",
    "tensorboard",
)  # fmt: skip


def parser(prog: str = "shardwright env") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def command(argv: Sequence[str], prog: str = "shardwright env") -> int:
    """Run with dashed arguments; the exit code."""
    args = parser(prog).parse_args(argv)
    found = facts()
    if args.json:
        print(json.dumps(found, indent=2))
        return options.DONE
    width = max(map(len, found))
    options.say(*(f"{name:<{width}}  {value}" for name, value in found.items()))
    return options.DONE


def facts() -> dict[str, str]:
    """What a bug report needs, in the order in which it is read."""
    from shardwright.ckpt.move.progress import human

    found = {
        "shardwright": options.version().split()[1],
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpus": str(len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count()),
    }
    if memory := _memory():
        found["memory"] = human(memory)
    found["gpus"] = _gpus()
    try:
        here = Path.cwd()
        found["file system"] = f"{file_system(here)}, {human(shutil.disk_usage(here).free)} free"
    except OSError as error:
        found["file system"] = f"the current folder: {error.strerror}"
    return found | {name: _version_of(name) for name in PACKAGES}


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> int:
    """Bytes of main memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _gpus() -> str:
    from shardwright.train.doctor.nvidia_smi import look

    names = [gpu.name for gpu in look().gpus]
    kinds = sorted(set(names))
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds) or "none found"


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds a folder, e.g. ext4 or nfs4."""
    best, kind = "", "unknown"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, where, found, *_ = line.split()
        where = where.encode().decode("unicode_escape")
        inside = folder == Path(where) or Path(where) in folder.parents
        if inside and len(where) >= len(best):
            best, kind = where, found
    return kind
