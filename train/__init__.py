"""The trainer: Hugging Face Accelerate's Megatron API, and train-ckpt's loop.

    from shardwright.train import Accelerator, MegatronLMPlugin

Names are imported when they are first used, so that a command's ``--help`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accelerate.accelerator import Accelerator, MegatronLMDummyScheduler
    from .config.plugin import MegatronLMPlugin
    from .errors import TrainError

_HOMES = {
    "Accelerator": "accelerate.accelerator",
    "MegatronLMDummyScheduler": "accelerate.accelerator",
    "MegatronLMPlugin": "config.plugin",
    "TrainError": "errors",
}

__all__ = ["Accelerator", "MegatronLMDummyScheduler", "MegatronLMPlugin", "TrainError"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
