"""Accelerate's ``MegatronLMPlugin`` as ours: which of its fields a script has given."""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import MegatronLMPlugin as Theirs

from ..config.fields import FIELDS
from ..config.plugin import MegatronLMPlugin
from ..errors import TrainError


def translated(plugin: Any) -> MegatronLMPlugin:
    """Our plugin of any; None asks the environment and the YAML alone.

    Accelerate's plugin fills every field in. What differs from a fresh one's, which has the same
    environment, was given. TrainError for another type.
    """
    if plugin is None:
        return MegatronLMPlugin()
    if isinstance(plugin, MegatronLMPlugin):
        return plugin
    if not isinstance(plugin, Theirs):
        raise TrainError(
            f"megatron_lm_plugin is a {type(plugin).__name__}; give it a MegatronLMPlugin of "
            "shardwright.train or accelerate.utils"
        )
    fresh = Theirs()
    given = {
        field.name: getattr(plugin, field.name)
        for field in dataclasses.fields(Theirs)
        if field.name in FIELDS and getattr(plugin, field.name) != getattr(fresh, field.name)
    }
    return MegatronLMPlugin(**given)
