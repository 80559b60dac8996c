"""The arguments of Accelerate's constructor, and what of them another engine would need."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import accelerate

from ..errors import TrainError

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_OTHER_ENGINES = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "parallelism_config"
)  # fmt: skip
_OTHER_FLAGS = (
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
)  # fmt: skip


def arguments_of(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name."""
    found = inspect.signature(accelerate.Accelerator.__init__).bind(None, *args, **kwargs)
    return {name: value for name, value in found.arguments.items() if name != "self"}


def check_engines(given: dict[str, Any]) -> None:
    """TrainError where another engine is asked for; torch's compiler is left out."""
    asked = [name for name in _OTHER_ENGINES if given.pop(name, None) is not None]
    asked += [name for name in _OTHER_FLAGS if is_true(os.environ.get(name, ""))]
    if asked:
        raise TrainError(f"{', '.join(asked)}: another engine is asked for; leave it out")
    given.pop("dynamo_backend", None)
    given.pop("dynamo_plugin", None)


def accumulation(given: dict[str, Any]) -> int:
    """Accumulation steps as Accelerate finds them: the plugin's, the environment's, or given."""
    plugin = given.get("gradient_accumulation_plugin")
    if plugin is not None:
        return int(plugin.num_steps)
    value = os.environ.get(_STEPS, given.get("gradient_accumulation_steps") or 1)
    if not str(value).isdigit() or int(value) < 1:
        raise TrainError(f"gradient_accumulation_steps {value!r}: must be a number of at least 1")
    return int(value)


def is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "y", "on", "t")
