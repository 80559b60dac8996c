"""Shardwright: reads, moves, merges and verifies checkpoints of large models, and trains them.

    import shardwright

    shardwright.reshard("Llama-3.1-8B", tp=4, pp=2)

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import ckpt, train
    from .ckpt import (
        CheckpointError,
        OpenCheckpoint,
        Plan,
        ReadOptions,
        Report,
        RunOptions,
        Verdict,
        merge,
        open_checkpoint,
        plan,
        reshard,
        resolve,
        verify,
    )
    from .train import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin, TrainError

__version__ = "0.1.0.dev0"  # the one place; pyproject.toml and `--version` read it

_PACKAGES = ("ckpt", "train")
_OF_TRAIN = ("Accelerator", "MegatronLMDummyScheduler", "MegatronLMPlugin", "TrainError")

__all__ = [
    "Accelerator",
    "CheckpointError",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "OpenCheckpoint",
    "Plan",
    "ReadOptions",
    "Report",
    "RunOptions",
    "TrainError",
    "Verdict",
    "__version__",
    "ckpt",
    "merge",
    "open_checkpoint",
    "plan",
    "reshard",
    "resolve",
    "train",
    "verify",
]

# In the repository ckpt/, tools/ and train/ lie beside this folder and not in it. With this line
# a clone, or an unpacked sdist, runs without being installed.
_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "ckpt")):
    __path__.append(os.path.dirname(_HERE))


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(".train" if name in _OF_TRAIN else ".ckpt", __name__)
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
