"""The learning-rate schedule of both front ends: megatron-core's, over optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config.schema import Schedule
from ..patches.megatron import import_megatron

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def schedule_of(said: Schedule, optimizer: Any) -> OptimizerParamScheduler:
    """A schedule that sets learning rate and weight decay in the optimizer's param groups.

    ``optimizer`` is anything with ``param_groups``. A group's ``max_lr``, ``lr_mult`` and
    ``wd_mult`` count; its learning rate is set at once to that of step 0.
    """
    made = import_megatron("optimizer_param_scheduler").OptimizerParamScheduler
    return made(
        optimizer, init_lr=0.0, max_lr=said.lr, min_lr=said.min_lr,
        lr_warmup_steps=said.warmup_steps, lr_decay_steps=said.decay_steps,
        lr_decay_style=said.style, start_wd=said.wd_start, end_wd=said.wd_end,
        wd_incr_steps=said.wd_steps, wd_incr_style=said.wd_style,
    )  # fmt: skip
