"""Learning-rate schedulers of a script, and the plugin's own schedule.

Accelerate's rule: a scheduler steps with the optimizer, as often as there are processes, which
here are data-parallel ranks. Checkpoints of releases before this rule go on by theirs: once for
each step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import MegatronLMDummyScheduler

from ..config import schema as settings_of
from ..core.schedule import schedule_of

__all__ = ["Annealing", "MegatronLMDummyScheduler", "PreparedScheduler", "plain"]

RULE = "steps_per_update"  # key of a saved state: how often the scheduler steps
_OF_OLD = "once"
_AS_PROCESSES = "once for each data-parallel rank"


class PreparedScheduler(AcceleratedScheduler):
    """Accelerate's, whose state is JSON."""

    of_old = False  # steps once with the optimizer
    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if gradients were synchronized and the optimizer's step was not skipped."""
        before, self.split_batches = self.split_batches, self.split_batches or self.of_old
        try:
            super().step(*args, **kwargs)
        finally:
            self.split_batches = before

    def state_dict(self) -> dict[str, Any]:
        """What of its state JSON can hold; the rest are its maker's arguments."""
        found = plain(self.scheduler.state_dict())
        assert isinstance(found, dict)
        return found | {RULE: _OF_OLD if self.of_old else _AS_PROCESSES}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = dict(state_dict)
        self.of_old = saved.pop(RULE, _OF_OLD) == _OF_OLD
        if self.of_old and isinstance(self.scheduler, Annealing):
            self.scheduler.by_old_rule()
        self.scheduler.load_state_dict(_updated(self.scheduler.state_dict(), saved))


_OPAQUE = object()


def plain(value: Any) -> Any:
    """``value`` as JSON has it, without dict entries that JSON cannot hold (functions, say)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = {key: plain(part) for key, part in value.items()}
        return {key: part for key, part in items.items() if part is not _OPAQUE}
    if isinstance(value, (list, tuple)):
        parts = [plain(part) for part in value]
        return _OPAQUE if any(part is _OPAQUE for part in parts) else parts
    return _OPAQUE


def _updated(now: Any, saved: Any) -> Any:
    """What ``plain`` gave put back into the state that it was taken from."""
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        return {**now, **{key: _updated(now.get(key), part) for key, part in saved.items()}}
    if isinstance(now, (list, tuple)) and isinstance(saved, list) and len(now) == len(saved):
        return type(now)(_updated(a, b) for a, b in zip(now, saved, strict=True))
    return saved


class Annealing:
    """megatron-core's schedule over the script's own groups, with a torch scheduler's methods."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        found: settings_of.Schedule,
        of_old: settings_of.Schedule | None = None,
    ) -> None:
        """``of_old`` is what an older release would have made of the same arguments."""
        usual = optimizer.defaults["weight_decay"]
        for group in optimizer.param_groups:
            own = group["weight_decay"]
            group.setdefault("max_lr", group["lr"])
            # a group keeps its ratio to the optimizer's weight decay, which the schedule changes
            group.setdefault("wd_mult", own / usual if usual else 1.0)
        self.optimizer, self.of_old = optimizer, of_old
        self.made = schedule_of(found, optimizer)

    def by_old_rule(self) -> None:
        """Be the schedule of an older release, at its beginning."""
        if self.of_old is not None:
            self.made = schedule_of(self.of_old, self.optimizer)

    def step(self) -> None:
        """One optimizer step on."""
        self.made.step(1)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.made.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made.step(int(state["num_steps"]) - self.made.num_steps)
