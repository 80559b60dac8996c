"""What megatron-core's schedule calls for each micro-batch: a forward step, and its loss.

A loss is (sum, tokens, report). The sum runs over the tokens that count. megatron-core's schedule
multiplies it, and whatever a layer adds to it, by one factor (``config.grad_scale_func``) before
the backward pass: one over the tokens of the whole batch, on all ranks. Nothing else divides,
neither here nor at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import TrainError
from ..patches.megatron import import_megatron
from .entropy import cross_entropy

# A micro-batch: tokens, labels, loss_mask, position_ids [b, s]; labels are those to predict at
# each position. attention_mask (optional) [b, s]: 1 for a token, 0 for padding; or [b or 1, 1, s,
# s]: true where a key is hidden, as in Megatron.
MicroBatch = Mapping[str, torch.Tensor]
Reported = Mapping[str, torch.Tensor]
# (loss_mask [b, s], losses [b, s], or (losses, logits) where logits are collected) -> the loss of
# a micro-batch, and scalars to report; Accelerate's custom_loss_function.
LossFunction = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Reported]]
# (iterator over batches, chunk) -> (output, output -> (loss, scalars)); Megatron's forward step.
ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Any, Callable[[Any], Any]]]
# sum, tokens (int), and what to report: "sum", and "reported" sums of a user's scalars
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


@dataclass(slots=True)
class Run:
    """One call of the schedule."""

    per_token: bool  # mean over all tokens; else over the micro-batches' means
    loss_function: LossFunction | None
    collect: bool  # keep the logits
    graph: bool = False  # and their graph, for a backward pass of the caller's
    hands: bool = True  # give them to the loss function
    logits: list[torch.Tensor] = field(default_factory=list)


def forward_step(
    run: Run, batches: Iterator[Mapping[str, Any]], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """megatron's forward step: the output of a stage, and how to reduce it to a loss.

    A batch has its "portion" of the whole loss and the "attention_mask" that the model takes.
    """
    batch = next(batches)
    output = chunk(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=None if run.collect else batch["labels"],
    )
    return output, partial(_loss, run, batch)


def _loss(run: Run, batch: Mapping[str, Any], output: torch.Tensor) -> Loss:
    """The loss of a micro-batch.

    output: [b, s] losses, or [b, s, v] logits of this tp rank where they are collected.
    """
    losses, given = output, output
    if run.collect:
        run.logits.append(output if run.graph else output.detach())
    if run.collect and run.graph:
        losses = cross_entropy(output, batch["labels"])
        given = (losses, output) if run.hands else losses  # type: ignore[assignment]
    elif run.collect:
        entropy = import_megatron("tensor_parallel").vocab_parallel_cross_entropy
        labels = batch["labels"].transpose(0, 1).contiguous()
        losses = entropy(output.float().transpose(0, 1).contiguous(), labels).transpose(0, 1)
        given = (losses, output)  # type: ignore[assignment]
    mask, portion = batch["loss_mask"], batch["portion"]
    if run.loss_function is not None:
        return _custom_loss(run.loss_function, mask, portion, losses, given)
    total = (losses.float() * mask).sum()
    if not run.per_token:
        total = total / mask.sum().clamp_min(1e-6)
    return total, portion.int(), {"sum": total.detach()}


def _custom_loss(
    function: LossFunction,
    mask: torch.Tensor,
    portion: torch.Tensor,
    losses: torch.Tensor,
    given: Any,
) -> Loss:
    """The user's loss of a micro-batch, which counts as much as its portion says."""
    loss, reported = _two(function(mask, given), "custom_loss_function")
    if not bool(portion > 0):  # a mean over nothing
        loss, reported = losses.sum() * 0.0, {k: v * 0.0 for k, v in reported.items()}
    weighed = {k: v.detach() * portion for k, v in reported.items()}
    total = loss * portion.to(loss.dtype)
    return total, portion.int(), {"sum": total.detach(), "reported": weighed}


def custom_step(
    step: ForwardStep, batches: Iterator[Any], chunk: torch.nn.Module
) -> tuple[Any, Callable[[Any], Loss]]:
    """A user's forward step; each micro-batch counts once."""
    output, function = step(batches, chunk)

    def loss(output: Any) -> Loss:
        loss, reported = _two(function(output), "custom_train_step_class: its loss function")
        plain = {k: v.detach() for k, v in reported.items()}
        one = torch.ones((), dtype=torch.int, device=loss.device)
        return loss, one, {"sum": loss.detach(), "reported": plain}

    return output, loss


def described(value: object) -> str:
    """What a function returned instead of what it should, without the numbers."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    return f"a {type(value).__name__}"


def _two(returned: Any, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, scalars to report) of a user's function; TrainError for anything else."""
    ok = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    if not ok or not isinstance(returned[0], torch.Tensor) or returned[0].dim():
        raise TrainError(f"{name} must return (a scalar tensor, a dict), not {described(returned)}")
    reported = {k: torch.as_tensor(v) for k, v in returned[1].items() if k != "logits"}
    for key, value in reported.items():
        if value.dim():
            raise TrainError(
                f"{name} reports {key} of shape {tuple(value.shape)}; only scalars are reported "
                "(return_logits=True gives logits)"
            )
    return returned[0], reported
