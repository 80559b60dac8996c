"""Checkpoints of large models: read, plan, move, check. Imports neither torch nor NumPy.

    from shardwright.ckpt import open_checkpoint, reshard, merge, verify, plan

Names are imported when they are first used, so that a command's ``--help`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint.types import ReadOptions
    from .convert import merge, reshard
    from .errors import CheckpointError
    from .jobs import Report, RunOptions
    from .model.planner import Plan, plan, resolve
    from .reader import OpenCheckpoint, open_checkpoint
    from .verdict import Verdict
    from .verifier import verify

_HOMES = {
    "CheckpointError": "errors",
    "OpenCheckpoint": "reader",
    "Plan": "model.planner",
    "ReadOptions": "checkpoint.types",
    "Report": "jobs",
    "RunOptions": "jobs",
    "Verdict": "verdict",
    "merge": "convert",
    "open_checkpoint": "reader",
    "plan": "model.planner",
    "reshard": "convert",
    "resolve": "model.planner",
    "verify": "verifier",
}

__all__ = [
    "CheckpointError",
    "OpenCheckpoint",
    "Plan",
    "ReadOptions",
    "Report",
    "RunOptions",
    "Verdict",
    "merge",
    "open_checkpoint",
    "plan",
    "reshard",
    "resolve",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
