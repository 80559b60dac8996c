"""Checkpoints of large models: read, plan, move, check. Imports neither torch nor NumPy.

from shardwright.ckpt import open_checkpoint, reshard, merge, verify, plan
"""

from __future__ import annotations

from .checkpoint import ReadOptions
from .convert import merge, reshard
from .errors import CheckpointError
from .jobs import Report, RunOptions
from .planner import Plan, plan
from .reader import OpenCheckpoint, open_checkpoint
from .verify import Verdict, verify

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
    "verify",
]
