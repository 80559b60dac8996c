"""A script's optimizer, carried out by megatron-core's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..core.engine import Engine, StepResult
from ..errors import TrainError
from .param_groups import HANDED_ON


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, whose ``step`` and ``zero_grad`` are the engine's.

    ``optimizer`` is the script's own. Its param groups count, its state stays empty: masters and
    moments lie in megatron's optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        before: Callable[[], None],
        after: Callable[[StepResult], None],
        clear: Callable[[], None],
    ) -> None:
        """``before`` and ``after`` a step; ``clear`` forgets gradients."""
        super().__init__(optimizer, device_placement=False)
        self.engine, self._before, self._after, self._clear = engine, before, after, clear
        self.last: StepResult | None = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient overflowed."""
        return self.last is not None and self.last.skipped

    def step(self, closure: object = None) -> None:
        """Step, if this call ends an accumulation."""
        if closure is not None:
            raise TrainError("optimizer.step(closure): closures cannot be run in a pipeline")
        if not self.gradient_state.sync_gradients:
            return
        self.copy_options()
        self._before()
        self.last = self.engine.step()
        # torch's schedulers ask the optimizer that they were made with whether it has stepped
        self.optimizer._opt_called = True
        self._after(self.last)

    def copy_options(self) -> None:
        """Hand learning rates and the like, which schedulers set, to megatron's groups."""
        assert self.engine.optimizer is not None
        for group in self.engine.optimizer.param_groups:
            theirs = self.optimizer.param_groups[group["source"]]
            group.update({key: theirs[key] for key in HANDED_ON if key in theirs})
            group["lr"] = group["lr"] * group["lr_mult"]
            group["weight_decay"] = group["weight_decay"] * group["wd_mult"]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget gradients, if this call ends an accumulation."""
        if self.gradient_state.sync_gradients:
            self._clear()

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters only: masters and moments are saved by ``save_state``."""
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": {}, "param_groups": options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise TrainError("the optimizer's state is loaded by accelerator.load_state")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TrainError("add the param group to the optimizer before prepare()")
