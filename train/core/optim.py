"""The optimizer of a rank: megatron-core's, with param groups by our rule or the user's.

megatron-core chooses among its FP32, Float16 and distributed optimizers; all of them wrap one
torch optimizer. ``OptimizerView`` finds each parameter's master and moments in any of them, so that
saving and loading need not know which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config.schema import OptimizerSettings
from ..errors import TrainError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that share hyper-parameters."""

    names: frozenset[str]  # stored names; those of other ranks included
    options: Mapping[str, Any] = field(default_factory=dict)  # lr, weight_decay, betas, eps, ...


def default_groups(named: Mapping[str, torch.nn.Parameter]) -> list[ParamGroup]:
    """Megatron's rule: no weight decay on biases and on 1-D parameters."""
    flat = {n for n, p in named.items() if p.dim() == 1 or n.endswith(".bias")}
    return [
        ParamGroup(frozenset(set(named) - flat), {"wd_mult": 1.0}),
        ParamGroup(frozenset(flat), {"wd_mult": 0.0}),
    ]


def build(
    chunks: Sequence[torch.nn.Module],
    named: Mapping[str, torch.nn.Parameter],
    spec: OptimizerSettings,
    groups: Sequence[ParamGroup],
    *,
    bf16: bool = False,
    distributed: bool = False,
    overlap: bool = False,
) -> MegatronOptimizer:
    """megatron-core's optimizer over this rank's (DDP-wrapped) model chunks.

    With ``bf16`` the weights are bf16, and fp32 masters are kept. ``distributed`` cuts masters
    and moments over the data-parallel ranks; with ``overlap`` weights are gathered while the next
    forward pass computes. ``named`` maps stored names to this rank's parameters. Every rank must
    pass the same number of groups in the same order. Raises TrainError for a parameter in no
    group or in two.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    if spec.name not in ("adamw", "adam", "sgd"):
        raise TrainError(f"optimizer {spec.name!r}: choose adamw, adam or sgd")
    group_of = _membership(named, groups)
    where = {param: group_of[name] for name, param in named.items()}

    def in_group(index: int) -> ParamWithNamePredicate:
        return ParamWithNamePredicate(
            name=f"group-{index}", fn=lambda param, name: where.get(param) == index
        )

    overrides = {
        ParamKey(with_name_predicate=in_group(i)): {"group_index": i} for i in range(len(groups))
    }
    made = get_megatron_optimizer(
        _config(spec, bf16, distributed, overlap), list(chunks), config_overrides=overrides,
        use_gloo_process_groups=False,
    )  # fmt: skip
    for group in made.param_groups:
        options = groups[group["group_index"]].options
        group.update({"lr": spec.lr, "weight_decay": spec.weight_decay, **options})
        group["weight_decay"] *= group.get("wd_mult", 1.0)
        group["initial_lr"] = group["max_lr"] = group["lr"]
        group.pop("min_lr", None)  # the schedule's own counts
    _fuse(OptimizerView(made))
    return made


def _config(spec: OptimizerSettings, bf16: bool, distributed: bool, overlap: bool) -> Any:
    """megatron-core's OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="sgd" if spec.name == "sgd" else "adam",
        lr=spec.lr,
        min_lr=0.0,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        decoupled_weight_decay=spec.name == "adamw",
        sgd_momentum=spec.momentum,
        clip_grad=spec.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=distributed,
        overlap_param_gather=distributed and overlap,
    )


def _fuse(view: OptimizerView) -> None:
    """On a GPU: let torch's Adam step all tensors in one kernel."""
    for part in view.parts:
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in part.optimizer.param_groups:
                if all(param.is_cuda for param in group["params"]):
                    group.update(fused=True, foreach=False)


def _membership(
    named: Mapping[str, torch.nn.Parameter], groups: Sequence[ParamGroup]
) -> dict[str, int]:
    """Stored name -> the one group that it is in."""
    found = {}
    for name, param in named.items():
        inside = [i for i, group in enumerate(groups) if name in group.names]
        if not param.requires_grad:
            found[name] = -1
        elif len(inside) != 1:
            raise TrainError(f"{name}: is in {len(inside)} param groups, must be in exactly one")
        else:
            found[name] = inside[0]
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one state of one parameter lies on this rank."""

    state: str  # master, exp_avg, exp_avg_sq or momentum_buffer
    tensor: torch.Tensor  # fp32, contiguous
    start: int = 0  # the row-major range of the parameter that it covers
    stop: int = -1  # -1: all of it


class OptimizerView:
    """Masters and moments by parameter, for every optimizer that megatron-core may choose."""

    def __init__(self, made: MegatronOptimizer) -> None:
        self.made = made
        chained = getattr(made, "chained_optimizers", None)
        self.parts = list(chained) if chained is not None else [made]

    def init_state(self, *, to_load: bool = False) -> None:
        """Create zero moments where no step has made them yet, if that changes no step.

        SGD with dampening has no buffer before its first step, and a zero one would change that
        step. With ``to_load`` it gets one all the same, which a checkpoint is to fill.
        """
        for part in self.parts:
            inner = part.optimizer
            if inner is None:
                continue
            for group in inner.param_groups:
                for param in group["params"]:
                    _fill_state(inner, group, param, to_load=to_load)

    def slots(self, param: torch.nn.Parameter) -> Iterator[Slot]:
        """The states of a model parameter that this rank holds; none for a frozen one."""
        for part in self.parts:
            main, start, stop = _main_param(part, param)
            if main is None:
                continue
            if main is not param and param.dtype != torch.float32:
                yield Slot("master", main.data, start, stop)
            for state, tensor in part.optimizer.state.get(main, {}).items():
                if state in STATES and tensor is not None:
                    yield Slot(state, tensor, start, stop)

    def sizes(self, param: torch.nn.Parameter) -> list[int]:
        """Bytes of the states that ``slots`` yields once all are created, in no set order."""
        found = []
        for part in self.parts:
            main, _, _ = _main_param(part, param)
            if main is None:
                continue
            adam = isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
            momentum = any(group.get("momentum") for group in part.optimizer.param_groups)
            count = 2 if adam else int(momentum)
            count += main is not param and param.dtype != torch.float32
            found += [main.numel() * main.element_size()] * count
        return found

    def step(self) -> int:
        """Optimizer steps done; the same for every parameter."""
        found = [
            torch.as_tensor(state["step"])
            for part in self.parts
            if part.optimizer is not None
            for state in part.optimizer.state.values()
            if "step" in state
        ]
        steps = {int(step) for step in torch.stack(found).tolist()} if found else set()
        assert len(steps) <= 1, f"parameters differ in their step: {steps}"
        return steps.pop() if steps else 0

    def set_step(self, step: int) -> None:
        """Set every parameter's step count (Adam's bias correction depends on it)."""
        for part in self.parts:
            for state in part.optimizer.state.values() if part.optimizer is not None else ():
                if "step" in state:
                    state["step"].fill_(float(step))

    def refresh_masters(self) -> None:
        """Copy the model's weights into the masters, after weights were loaded without masters."""
        for part in self.parts:
            if part.optimizer is not None:
                part.reload_model_params()


def _fill_state(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor, *, to_load: bool
) -> None:
    """What torch's optimizers create in their first step."""
    state = inner.state[param]
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        where = param.device if group.get("fused") or group.get("capturable") else None
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=where))
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(param.data))
    elif group.get("momentum", 0.0) and state.get("momentum_buffer") is None:
        # torch's SGD begins its buffer with the first gradient, not with zeros: a zero buffer
        # gives the same sum unless dampening is used.
        if group.get("dampening", 0.0) and not to_load:
            return
        state["momentum_buffer"] = torch.zeros_like(param.data)


def _main_param(part: Any, param: torch.nn.Parameter) -> tuple[torch.Tensor | None, int, int]:
    """The tensor that the inner optimizer steps for ``param``, and its range in the parameter."""
    ranges = getattr(part, "model_param_gbuf_map", None)
    if ranges is None:
        main = getattr(param, "main_param", param)
        held = part.optimizer is not None and any(
            p is main for group in part.optimizer.param_groups for p in group["params"]
        )
        return (main if held else None), 0, -1
    if param not in ranges or param not in part.model_param_group_index_map:
        return None, 0, -1
    span = part._get_model_param_range_map(param)["param"]
    group, order = part.model_param_group_index_map[param]
    return part.optimizer.param_groups[group]["params"][order], span.start, span.end
