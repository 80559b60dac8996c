"""The checkpoints that campaigns start from: of a model of a few hundred parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

from fixtures_safety import case, write_hf, write_native, write_split
from strategies import Case

from shardwright.ckpt import RunOptions, reshard

SMALL = {"layers": 2, "hidden": 6, "heads": (2, 2), "head_dim": 2, "ffn": 4, "vocab": 5}
STEP = 7
STATE = {
    "schedule": {"style": "cosine", "lr": 0.25, "min_lr": 0.0625, "warmup_steps": 3,
                 "decay_steps": 40, "num_steps": STEP},
    "param_groups": [{"step": STEP, "lr": 0.25, "weight_decay": decay, "betas": [0.9, 0.95],
                      "eps": 1e-8} for decay in (0.5, 0.0)],
    "data": {"consumed_samples": 56, "epoch": 0, "data": "a", "seed": 1, "seq_length": 8},
}  # fmt: skip
OPTIONS = {"multiple": 2, "step": STEP, "state": STATE}  # of native checkpoints
ONE = RunOptions(workers=1)


class BrokenPromise(AssertionError):
    """What came is neither the right bytes nor our error."""


def broken_unless(holds: bool, text: str) -> None:
    """Raise BrokenPromise with ``text`` where something does not hold."""
    if not holds:
        raise BrokenPromise(text)


def model_case() -> Case:
    """The model in memory."""
    return case(**SMALL)


def write_sources(home: Path) -> dict[str, Path]:
    """Every form of a checkpoint: the first by plain library calls, Megatron's by ourselves."""
    made = model_case()
    write_hf(home / "hf", **SMALL)
    write_split(home / "split", parts=2, made=made)
    write_native(home / "native", 2, 1, made=made, **OPTIONS)
    write_native(home / "native-bin", 1, 2, made=made, safe=False, **OPTIONS)
    write_native(home / "sharded", 1, 1, made=made, dp=2, sharded=True, **OPTIONS)
    reshard(home / "native", home / "classic", to="megatron", tp=1, pp=2, run=ONE)
    reshard(home / "sharded", home / "classic-distributed", to="megatron", dp=2,
            use_distributed_optimizer=True, run=ONE)  # fmt: skip
    reshard(home / "native", home / "torch_dist", to="torch_dist", tp=2, run=ONE)
    return {path.name: path for path in sorted(home.iterdir())}


def replaced(source: Path, copy: Path) -> Path:
    """A fresh copy of a source, in the place of an older one."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    return copy
