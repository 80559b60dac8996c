"""The table of Accelerate's public members names each one of the installed release, no others."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping

import pytest
import torch

from shardwright.train.accelerate import members
from shardwright.train.config.fields import FIELDS


def _classes() -> Mapping[str, type]:
    import accelerate
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import MegatronLMPlugin

    return {
        "Accelerator": accelerate.Accelerator,
        "AcceleratorState": AcceleratorState,
        "PartialState": PartialState,
        "GradientState": GradientState,
        "MegatronLMPlugin, beside its fields": MegatronLMPlugin,
        "a prepared optimizer": AcceleratedOptimizer,
        "a prepared scheduler": AcceleratedScheduler,
        "a prepared loader": DataLoaderShard,
    }


def _public(kind: type) -> set[str]:
    """Methods, properties, and what is set on an instance."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    set_on_it = r"self\.([a-z]\w*)\s*(?::[^=\n]+)?=[^=]"
    names |= set(re.findall(set_on_it, inspect.getsource(kind)))
    if issubclass(kind, torch.optim.Optimizer):
        names -= {name for name in dir(torch.optim.Optimizer) if name not in vars(kind)}
    if dataclasses.is_dataclass(kind):
        names -= FIELDS.keys()
    return names


def _said(table: str) -> list[str]:
    return [name for row in members.TABLES[table] for name in row.names.split()]


@pytest.mark.parametrize("table", _classes())
def test_every_public_member_is_in_the_table(table: str) -> None:
    there, said = _public(_classes()[table]), set(_said(table))
    of_some = set(members.OF_SOME_RELEASES.get(table, "").split())
    assert there - said == set(), "say what becomes of these"
    assert said - there - of_some == set(), "no release has these"


@pytest.mark.parametrize("table", members.TABLES)
def test_no_member_is_in_the_table_twice_and_what_does_not_work_has_a_reason(table: str) -> None:
    said = _said(table)
    assert len(said) == len(set(said))
    assert all(row.what for row in members.TABLES[table] if row.use != members.WORKS)


def test_every_member_of_a_prepared_model_is_there() -> None:
    from shardwright.train.accelerate.model import PreparedModel

    for name in _said("a prepared model"):
        assert hasattr(PreparedModel, name) or name in ("config", "training"), name
