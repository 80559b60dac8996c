"""What a training run keeps besides its tensors, the same for all formats.

All formats read into `TrainingState` and are written from it, and ``differences`` compares the
meaning of two states. Its ``table`` is JSON: the keys of checkpoint.json and of `Manifest.state`.
What only Megatron-LM's files have (args, its scheduler, its param groups) is under ``megatron`` as
it was read, so it can be written back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError

VERSION = 1  # of the table; newer ones are refused, because a state that is half read is wrong
KEYS = ("step", "samples", "schedule", "param_groups", "data", "megatron")
ABSENT = "absent"
# values of Megatron-LM about the layout and the run, or that repeat the step
_NOT_COMPARED = ("args", "checkpoint_version", "iteration")
# what the groups of one optimizer class have and those of another do not, and how all of them step
_OF_A_CLASS = {
    "bias_correction": True, "amsgrad": False, "maximize": False, "capturable": False,
    "differentiable": False, "foreach": None, "fused": None, "decoupled_weight_decay": True,
    "dampening": 0.0, "nesterov": False,
}  # fmt: skip
_SCHEDULE = ("style", "lr", "min_lr", "warmup_steps", "decay_steps", "num_steps")
Difference = tuple[str, object, object]  # what, here, there


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run between two steps. None or empty means that the format or the run does not say it."""

    step: int | None = None  # optimizer steps done
    samples: int | None = None  # of the training data, consumed
    schedule: object = None  # the trainer's, in steps (keys: ``_SCHEDULE``), or states of others
    groups: tuple[Mapping[str, Any], ...] = ()  # hyperparameters of each param group
    data: object = None  # cursor in the data
    megatron: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="state", compare=False)  # the file that says it, for messages

    @classmethod
    def of(cls, table: Mapping[str, object], origin: str = "state") -> TrainingState:
        """The state that a table says; CheckpointError for a newer version or another type."""
        version = table.get("state_version", 1)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise CheckpointError(
                f"{origin}: state_version {version!r}; {VERSION} is known here: a newer "
                "Shardwright wrote it"
            )
        groups, megatron = table.get("param_groups") or [], table.get("megatron") or {}
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{origin}: param_groups holds values that are not groups")
        if not isinstance(megatron, dict):
            raise CheckpointError(f"{origin}: megatron is a {type(megatron).__name__}, not a table")
        data, samples = table.get("data"), _count(table, "samples", origin)
        step, schedule = _count(table, "step", origin), table.get("schedule")
        optimizer = megatron.get("optimizer")
        if isinstance(optimizer, dict):
            _count(optimizer, "step", f"{origin}: megatron.optimizer")
        # Megatron-LM's optimizer keeps its step where its user sets the iteration back
        _check_steps(groups, schedule, step if optimizer is None else None, origin)
        return cls(
            step,
            _seen(data, megatron) if samples is None else samples,
            schedule,
            tuple(groups),
            data,
            megatron,
            origin,
        )

    def table(self) -> dict[str, object]:
        """The state as JSON, without empty keys."""
        repeated = _seen(self.data, self.megatron) == self.samples
        found: dict[str, object] = {
            "step": self.step,
            "samples": None if repeated else self.samples,
            "schedule": self.schedule,
            "param_groups": [dict(group) for group in self.groups] or None,
            "data": self.data,
            "megatron": dict(self.megatron) or None,
        }
        return {key: value for key, value in found.items() if value is not None}

    def batch(self) -> int | None:
        """Samples per step, if known and the same in all steps."""
        args = self.megatron.get("args")
        said = args.get("global_batch_size") if isinstance(args, dict) else None
        if type(said) is int and said > 0:
            return said
        if not self.step or not self.samples or self.samples % self.step:
            return None
        return self.samples // self.step

    def differences(self, other: TrainingState) -> list[Difference]:
        """What differs in meaning; spelling and the run's paths do not count."""
        found: list[Difference] = []
        if (self.step or None) != (other.step or None):  # at 0 nothing has been done
            found.append(("step", _or_absent(self.step), _or_absent(other.step)))
        if None not in (self.samples, other.samples) and self.samples != other.samples:
            found.append(("samples", self.samples, other.samples))
        found += _schedules(self, other)
        found += _groups(self.groups, other.groups)
        if self.data != other.data:
            found.append(first_apart("data", _or_absent(self.data), _or_absent(other.data)))
        if self.megatron and other.megatron:
            one, two = _kept(self.megatron), _kept(other.megatron)
            if one != two:
                found.append(first_apart("megatron", one, two))
        return found


def _count(table: Mapping[str, object], key: str, origin: str) -> int | None:
    value = table.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise CheckpointError(f"{origin}: {key} {value!r:.80}, not a whole number of at least 0")
    return value


def _check_steps(
    groups: Sequence[Mapping[str, object]], schedule: object, step: int | None, origin: str
) -> None:
    """Refuse counts of steps that no run reaches, or that go beyond the checkpoint's own.

    Fewer are right: a step whose gradients overflow is left out by the optimizer and the schedule.
    """
    if isinstance(schedule, dict):
        _count(schedule, "num_steps", f"{origin}: schedule")
    for i, group in enumerate(groups):
        done = _count(group, "step", f"{origin}: param_groups[{i}]")
        if done is not None and step is not None and done > step:
            raise CheckpointError(
                f"{origin}: param_groups[{i}].step is {done}, the checkpoint is of step {step}; "
                "one of them is wrong, correct it"
            )


def _seen(data: object, megatron: Mapping[str, Any]) -> int | None:
    """The samples according to a cursor (the trainer's, or a script's first loader), or to args."""
    rows = data.get("loaders", [data]) if isinstance(data, dict) else []
    first = rows[0] if isinstance(rows, list) and rows else None
    args = megatron.get("args")
    for table, key in (
        (first, "consumed_samples"),
        (first, "samples"),
        (args, "consumed_train_samples"),
    ):
        value = table.get(key) if isinstance(table, dict) else None
        if type(value) is int and 0 <= value < 2**63:
            return value
    return None


def _or_absent(value: object) -> object:
    return ABSENT if value is None else value


def _schedules(one: TrainingState, two: TrainingState) -> Iterator[Difference]:
    """Compare schedules in steps; if one side counts samples of an unknown batch, only the other
    values."""
    a, b = one.schedule, two.schedule
    if isinstance(a, Sequence) or isinstance(b, Sequence):  # states of a script's own schedulers
        if a is not None and b is not None and a != b:
            yield first_apart("schedule", a, b)
        elif (a is None) != (b is None):
            yield "schedule", _or_absent(a), _or_absent(b)
        return
    some = _SCHEDULE[:3] if a is None or b is None else ()
    a = _in_samples(one) if a is None else a
    b = _in_samples(two) if b is None else b
    if isinstance(a, dict) and isinstance(b, dict):
        for key in some or sorted({*a, *b}):
            if a.get(key) != b.get(key):
                yield f"schedule.{key}", _or_absent(a.get(key)), _or_absent(b.get(key))
    elif a != b:
        yield "schedule", _or_absent(a), _or_absent(b)


def _in_samples(state: TrainingState) -> dict[str, object] | None:
    said = state.megatron.get("opt_param_scheduler")
    if not isinstance(said, dict):
        return None
    names = {"style": "lr_decay_style", "lr": "max_lr", "min_lr": "min_lr"}
    return {key: said.get(name) for key, name in names.items()}


def _groups(
    one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """Compare groups in any order, by the hyperparameters that both sides have."""
    if not one or not two:
        if one or two:
            yield "param_groups", list(one) or ABSENT, list(two) or ABSENT
        return
    common = {key for group in one for key in group} & {key for group in two for key in group}
    sides = [
        sorted(({k: g[k] for k in sorted(common & g.keys())} for g in groups), key=repr)
        for groups in (one, two)
    ]
    left = [
        [g for i, g in enumerate(side) if g not in side[:i] and g not in other]
        for side, other in (sides, sides[::-1])
    ]
    if len(left[0]) == len(left[1]):  # what is the same on both sides is no part of a difference
        for a, b in zip(*left, strict=True):
            yield first_apart(f"param_groups[{sides[0].index(a)}]", a, b)
    else:
        yield first_apart("param_groups", *sides)


def _kept(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's values that mean something; a counter of 0 equals one that is absent."""
    found = {k: v for k, v in megatron.items() if k not in _NOT_COMPARED and v not in (0, None)}
    if isinstance(found.get("optimizer"), dict):
        found["optimizer"] = _of_any_class(found["optimizer"])
    return found


def _of_any_class(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The table without what tells optimizer classes apart and changes no step."""
    found, groups = dict(optimizer), optimizer.get("param_groups")
    placed: tuple[str, ...] = ()
    if "step" in found:  # read from wherever it stood
        found.pop("step_in", None)
        placed = ("step",)
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        found["param_groups"] = [
            {
                k: v
                for k, v in group.items()
                if k not in placed and (k not in _OF_A_CLASS or v != _OF_A_CLASS[k])
            }
            for group in groups
        ]
    return found


def first_apart(name: str, a: object, b: object) -> Difference:
    """The path of the first values in ``a`` and ``b`` that differ, and both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}, key=str):
            one, other = a.get(key, ABSENT), b.get(key, ABSENT)
            if one != other:
                return first_apart(f"{name}.{key}", one, other)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        at = next(i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
        return first_apart(f"{name}[{at}]", a[at], b[at])
    return name, a, b
