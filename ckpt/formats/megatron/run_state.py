"""The training state in Megatron-LM's files; both formats keep the same values.

Megatron-LM counts samples, `TrainingState` counts steps. Megatron-LM needs a scheduler if there is
an optimizer. A note says what its files cannot hold, and what was made up.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...checkpoint.state import TrainingState
from ...move.storage import StoragePath
from . import args_codec, progress

SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")
OPERATIONS = "num_floating_point_operations_so_far"
KNOWN = ("iteration", "total_iters", *SCHEDULERS, OPERATIONS, "checkpoint_version")  # top level
_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_OVERRIDE = "load with --override-opt_param-scheduler and the run's own options"


def read(
    root: Mapping[str, object],
    args: Mapping[str, object],
    folder: StoragePath,
    version: object,
    notes: list[str],
) -> TrainingState:
    """The state in a file's top level; param groups are added by whoever reads the optimizer."""
    step = progress.iteration(root, folder, notes)
    table: dict[str, object] = {"args": args, "checkpoint_version": version}
    for key in ("iteration", *SCHEDULERS, OPERATIONS):
        args_codec.keep_plain(key, root.get(key) or None, table, notes)
    return TrainingState(
        step=step,
        samples=progress.samples(args, folder),
        schedule=_in_steps(table, args, step or 0),
        megatron=table,
    )


def _in_steps(
    table: Mapping[str, object], args: Mapping[str, object], step: int
) -> dict[str, object] | None:
    """The learning rate's schedule in optimizer steps, as in the trainer's checkpoints.

    Megatron-LM counts samples; None where its batch does not divide them.
    """
    said = table.get("opt_param_scheduler", table.get("lr_scheduler"))
    batch = args.get("global_batch_size")
    if not isinstance(said, dict) or type(batch) is not int or batch <= 0:
        return None
    warmup, decay = said.get("lr_warmup_steps"), said.get("lr_decay_steps")
    if type(warmup) is not int or type(decay) is not int or warmup % batch or decay % batch:
        return None
    done = said.get("num_steps")  # behind the step where Megatron-LM left steps out
    return {
        "style": said.get("lr_decay_style"),
        "lr": said.get("max_lr"),
        "min_lr": said.get("min_lr"),
        "warmup_steps": warmup // batch,
        "decay_steps": decay // batch,
        "num_steps": done // batch if type(done) is int and done >= 0 else step,
    }


def schedulers(state: TrainingState, notes: list[str]) -> dict[str, object]:
    """The schedulers of a file with an optimizer: the source's, or made from its schedule in steps.

    Megatron-LM takes no optimizer without one.
    """
    saved = {
        key: args_codec.decode_plain(state.megatron[key], f"{state.origin}: megatron.{key}")
        for key in SCHEDULERS
        if key in state.megatron
    }
    made = _in_samples(state)
    if not saved and made is None:
        return {"opt_param_scheduler": _constant(state, notes)}
    found = saved or {"opt_param_scheduler": made}
    _say_changed(state, found, notes)
    return found


def _say_changed(state: TrainingState, found: Mapping[str, object], notes: list[str]) -> None:
    """Add notes on what a file's schedulers say otherwise than the source's schedule in steps."""
    again = _in_steps(found, {"global_batch_size": state.batch()}, state.step or 0)
    if isinstance(state.schedule, dict) and again is not None:
        notes += [
            f"{name}: {here!r:.80} in the source, {there!r:.80} in Megatron-LM's file"
            for name, here, there in TrainingState(schedule=state.schedule).differences(
                TrainingState(schedule=again)
            )
        ]


def _in_samples(state: TrainingState) -> dict[str, object] | None:
    """A schedule in steps as Megatron-LM's in samples; None if it has no counterpart."""
    said, batch = state.schedule, state.batch()
    if not isinstance(said, dict) or batch is None or said.get("style") not in _STYLES:
        return None
    numbers = {k: said.get(k) for k in ("lr", "min_lr", "warmup_steps", "decay_steps")}
    if not all(_is_number(value) for value in numbers.values()):
        return None
    done = said.get("num_steps")
    done = done if type(done) is int and done >= 0 else state.step or 0
    return _table(
        str(said["style"]), numbers["lr"], numbers["min_lr"],
        _samples(numbers["warmup_steps"], batch), _samples(numbers["decay_steps"], batch),
        _samples(done, batch), state,
    )  # fmt: skip


def _constant(state: TrainingState, notes: list[str]) -> dict[str, object]:
    """A constant rate, for a schedule that cannot be expressed."""
    rates = [group["lr"] for group in state.groups if _is_number(group.get("lr"))]
    why = "no schedule in the source"
    if isinstance(state.schedule, dict):
        style = state.schedule.get("style")
        why = f"its style is {style!r:.40}"
        if style in _STYLES:
            why = "Megatron-LM counts samples, and the source does not say how many a step has"
    elif state.schedule is not None:
        why = "the source's schedulers are a script's own"
    rate = max(rates, default=0.0)
    notes.append(
        f"schedule left out ({why}): a constant rate of {rate:g} stands there; {_OVERRIDE}"
    )
    return _table("constant", rate, rate, 0, 1, state.samples or state.step or 0, state)


def _table(
    style: str, lr: object, min_lr: object, warmup: object, decay: object, done: object,
    state: TrainingState,
) -> dict[str, object]:  # fmt: skip
    """The keys of megatron-core's OptimizerParamScheduler."""
    decays = [g["weight_decay"] for g in state.groups if _is_number(g.get("weight_decay"))]
    weight_decay = max(decays, default=0.0)
    return {
        "max_lr": lr,
        "lr_warmup_steps": warmup,
        "num_steps": done,
        "lr_decay_style": style,
        "lr_decay_steps": decay,
        "min_lr": min_lr,
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": decay,
    }


def _samples(steps: object, batch: int) -> int | float:
    assert isinstance(steps, (int, float))
    count = steps * batch
    return int(count) if float(count).is_integer() else count


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**62


def progress_args(state: TrainingState) -> dict[str, object]:
    """The args that say how far the run was; Megatron-LM starts its data loader from them."""
    found: dict[str, object] = {}
    if state.step is not None:
        found["iteration"] = state.step
    if state.samples is not None:
        found["consumed_train_samples"] = state.samples
    batch = state.batch()
    if batch is not None:
        found["global_batch_size"] = batch
    return found


def operations(state: TrainingState) -> dict[str, object]:
    """The counter of operations, which every file of Megatron-LM has."""
    said = args_codec.decode_plain(
        state.megatron.get(OPERATIONS, 0), f"{state.origin}: megatron.{OPERATIONS}"
    )
    return {OPERATIONS: said}


def say_what_is_lost(state: TrainingState, notes: list[str]) -> None:
    """Add a note on what these files have no place for."""
    if state.data is not None:
        where = "nothing in it says where"
        if state.samples is not None:
            where = f"consumed_train_samples is {state.samples}"
        notes.append(f"not copied: the cursor in the data ({where} Megatron-LM's loader goes on)")
