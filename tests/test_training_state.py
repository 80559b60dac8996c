"""The training state means the same in every format that holds it, and what one lacks is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_megatron import CONFIG, _edit, _llama, _small

from shardwright.ckpt import CheckpointError, reshard, verify
from shardwright.ckpt.checkpoint.state import TrainingState
from shardwright.ckpt.reader import read_checkpoint

SCHEDULE = {"style": "cosine", "lr": 0.25, "min_lr": 0.0625, "warmup_steps": 3, "decay_steps": 40,
            "num_steps": 7}  # fmt: skip
DATA = {"consumed_samples": 56, "epoch": 0, "data": "a", "seed": 1, "seq_length": 8}
GROUPS = [{"step": 7, "lr": 0.25, "weight_decay": wd, "betas": [0.9, 0.95], "eps": 1e-8}
          for wd in (0.5, 0.0)]  # fmt: skip
FULL: dict[str, object] = {"schedule": SCHEDULE, "param_groups": GROUPS, "data": DATA}


def _native(folder: Path, state: dict[str, object], step: int = 7) -> Path:
    """Shards of a run at a step, with moments; checkpoint.json as the trainer writes it."""
    from safetensors.torch import save_file

    source = folder.with_name(folder.name + "-hf")
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(_llama(), source / "model.safetensors")
    reshard(source, folder, to="shards", tp=1, pp=1)
    from safetensors.torch import load_file

    weights = load_file(folder / "model_tp_0_pp_0.safetensors")
    moments = {f"{s}/{n}": x.abs() for s in ("exp_avg", "exp_avg_sq") for n, x in weights.items()}
    file = folder / "checkpoint.json"
    table = json.loads(file.read_text())
    about = {"format": "pt", "tp": "0", "pp": "0", "step": str(step),
             "mesh": json.dumps(table["mesh"])}  # fmt: skip
    save_file(moments, folder / "optimizer_tp_0_pp_0.safetensors", about)
    save_file(weights, folder / "model_tp_0_pp_0.safetensors", about)
    table["files"] = {}
    file.write_text(json.dumps({**table, "step": step, **state}))
    return folder


def _classic(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def _common(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("iter_*/common.pt")
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_a_run_arrives_in_megatrons_files(to: str, tmp_path: Path) -> None:
    """Schedule in samples of 8 a step, progress, and the step of the optimizer."""
    source = _native(tmp_path / "native", FULL)
    report = reshard(source, tmp_path / "made", to=to, tp=1, pp=1)
    found = (_classic if to == "megatron" else _common)(tmp_path / "made")
    assert found["opt_param_scheduler"] == {
        "max_lr": 0.25, "min_lr": 0.0625, "lr_warmup_steps": 24, "lr_decay_steps": 320,
        "num_steps": 56, "lr_decay_style": "cosine", "start_wd": 0.5, "end_wd": 0.5,
        "wd_incr_style": "constant", "wd_incr_steps": 320,
    }  # fmt: skip
    args = found["args"]
    assert (args.iteration, args.consumed_train_samples, args.global_batch_size) == (7, 56, 8)
    assert found["iteration"] == 7
    assert {group["step"] for group in found["optimizer"]["param_groups"]} == {7}
    (lost,) = [note for note in report.notes if "cursor" in note]
    assert "consumed_train_samples is 56" in lost
    again = read_checkpoint(tmp_path / "made")
    assert (again.step, again.manifest.state["schedule"]) == (7, SCHEDULE)
    differences = verify(source, tmp_path / "made").differences
    assert [line.partition(":")[0] for line in differences] == ["state data"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of its import
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_megatron_cores_own_scheduler_takes_it(to: str, tmp_path: Path) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    reshard(_native(tmp_path / "native", FULL), tmp_path / "made", to=to, tp=1, pp=1)
    found = (_classic if to == "megatron" else _common)(tmp_path / "made")
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "wd_mult": 1.0, "lr_mult": 1.0}], 1.0)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=1, lr_decay_steps=2,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=1,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )  # fmt: skip
    scheduler.load_state_dict(found["opt_param_scheduler"])
    (group,) = optimizer.param_groups
    wanted = 0.0625 + (0.25 - 0.0625) * 0.5 * (1 + math.cos(math.pi * (7 - 3) / (40 - 3)))
    assert group["lr"] == pytest.approx(wanted, rel=1e-12)
    scheduler.step(0)  # loading sets the rate with the class's own decay
    assert group["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"param_groups": GROUPS}, "no schedule in the source"),
        ({"param_groups": GROUPS, "schedule": [{"last_epoch": 7}]}, "a script's own"),
        ({"param_groups": GROUPS, "schedule": SCHEDULE}, "does not say how many a step has"),
        ({"param_groups": GROUPS, "schedule": {**SCHEDULE, "style": "x"}, "data": DATA},
         "its style is 'x'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_an_optimizer_never_comes_without_a_scheduler(to, state, says, tmp_path) -> None:
    """Megatron-LM's load_checkpoint fails otherwise; what had to be made up is said."""
    report = reshard(_native(tmp_path / "native", state), tmp_path / "made", to=to, tp=1, pp=1)
    found = (_classic if to == "megatron" else _common)(tmp_path / "made")
    assert found["opt_param_scheduler"]["lr_decay_style"] == "constant"
    assert found["opt_param_scheduler"]["max_lr"] == 0.25
    (note,) = [note for note in report.notes if "schedule left out" in note]
    assert says in note
    assert "--override-opt_param-scheduler" in note


def test_a_run_survives_every_format_in_turn(golden: Path, tmp_path: Path) -> None:
    source = golden / "llama_bf16_tp2pp2_torch"
    at = source
    for i, to in enumerate(("shards", "torch_dist", "shards", "megatron")):
        reshard(at, tmp_path / str(i), to=to, tp=1, pp=1)
        at = tmp_path / str(i)
        assert verify(source, at).same
    one, two = (TrainingState.of(read_checkpoint(path).manifest.state) for path in (source, at))
    assert one.differences(two) == []
    assert (
        (one.step, one.samples, one.batch()) == (two.step, two.samples, two.batch()) == (3, 12, 4)
    )


CHANGES = [
    ("step", {"step": 8}),
    ("schedule.lr", {"schedule": {**SCHEDULE, "lr": 0.5}}),
    ("schedule.style", {"schedule": None}),
    ("param_groups[0].lr", {"param_groups": [{**g, "lr": 1.0} for g in GROUPS]}),
    ("param_groups", {"param_groups": []}),
    ("samples", {"data": {**DATA, "consumed_samples": 64}}),
    ("data.seed", {"data": {**DATA, "seed": 2}}),
    ("data", {"data": None}),
    ("megatron.opt_param_scheduler.max_lr", {"megatron": {"opt_param_scheduler": {"max_lr": 2}}}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_state_that_means_another_thing_is_named(name: str, change: dict[str, object]) -> None:
    table = {"step": 7, **FULL, "megatron": {"opt_param_scheduler": {"max_lr": 1}}}
    one, two = TrainingState.of(table), TrainingState.of({**table, **change})
    assert name in [found for found, _, _ in one.differences(two)]
    assert name in [found for found, _, _ in two.differences(one)]
    assert one.differences(one) == []


def test_spelling_is_no_difference() -> None:
    one = TrainingState.of({"step": 7, **FULL})
    groups = [{**group, "lr_mult": 1.0} for group in reversed(GROUPS)]
    schedule = {**dict(reversed(SCHEDULE.items())), "lr": 0.25, "decay_steps": 40.0}
    two = TrainingState.of({"step": 7, **FULL, "param_groups": groups, "schedule": schedule})
    assert one.differences(two) == two.differences(one) == []


def test_tables_of_today_and_of_before_are_read_and_newer_ones_refused(tmp_path: Path) -> None:
    source = _native(tmp_path / "native", FULL)  # no state_version, as older ones
    reshard(source, tmp_path / "again", tp=1, pp=1)
    file = tmp_path / "again" / "checkpoint.json"
    table = json.loads(file.read_text())
    assert table["state_version"] == 1
    assert verify(source, tmp_path / "again").same
    file.write_text(json.dumps({**table, "state_version": 2}))
    with pytest.raises(CheckpointError, match="state_version 2; 1 is known here"):
        read_checkpoint(tmp_path / "again")


@pytest.mark.parametrize("step", [math.nan, math.inf, 2.0**70, 10**2000, -1])
def test_a_step_that_no_run_reaches_is_none(step: float, tmp_path: Path) -> None:
    groups = [{"params": [], "step": step, "wd_mult": 1.0}]
    source = _small(tmp_path / "in", 1, 1)
    state = {"optimizer": {"state": {}, "param_groups": groups}}
    _edit(source, "mp_rank_00", lambda file: file.update(state))
    reshard(source, tmp_path / "out", to="torch_dist", weights_only=True)
    try:
        found = read_checkpoint(source)
    except CheckpointError:
        return
    assert "step" not in found.manifest.state.get("megatron", {}).get("optimizer", {})


# --- nothing is changed without a word ----------------------------------------------------------

FORMS: list[dict[str, Any]] = [
    {"to": to, "tp": 1, "pp": 1, "use_distributed_optimizer": flat}
    for to in ("megatron", "torch_dist")
    for flat in (False, True)
]


def _without(group: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def _written(made: Path, form: dict[str, Any]) -> dict[str, Any]:
    found = (_classic if form["to"] == "megatron" else _common)(made)
    optimizer = found["optimizer"]
    return {**found, "groups": optimizer.get("optimizer", optimizer)["param_groups"]}


@pytest.mark.parametrize("form", FORMS)
def test_one_group_that_decays_everything_arrives_as_two_that_decay(form, tmp_path: Path) -> None:
    source = _native(tmp_path / "native", {**FULL, "param_groups": GROUPS[:1]})
    report = reshard(source, tmp_path / "made", **form)
    groups = _written(tmp_path / "made", form)["groups"]
    assert [(g["wd_mult"], g["weight_decay"]) for g in groups] == [(1.0, 0.5), (0.0, 0.5)]
    (note,) = [note for note in report.notes if "param_groups" in note]
    assert "weight_decay 0.5" in note
    assert "next steps have 0.0" in note
    differences = verify(source, tmp_path / "made").differences
    assert [line.partition(":")[0] for line in differences] == ["state data"]


HARMED: list[tuple[list[dict[str, Any]], list[float], str]] = [
    ([GROUPS[0], _without(GROUPS[1], "weight_decay")], [0.5, 0.0],
     "param_groups[1] has no weight_decay: 0.0"),
    ([_without(GROUPS[0], "weight_decay")], [0.0, 0.0],
     "param_groups[0] has no weight_decay: 0.0"),
    ([GROUPS[0], {**GROUPS[1], "weight_decay": 0.125}], [0.5, 0.0], "0.125 in the source, 0.0 in"),
    ([*GROUPS, {**GROUPS[1], "lr": 0.75}], [0.5, 0.0], "'lr': 0.75"),
    ([*GROUPS, {**GROUPS[1], "betas": [0.5, 0.75]}], [0.5, 0.0], "'betas': [0.5, 0.75]"),
    ([GROUPS[0], {**GROUPS[1], "step": 3}], [0.5, 0.0],
     "].step: 3 in the source, 7 in"),
    ([{**GROUPS[0], "lr_mult": 2.0}, {**GROUPS[1], "lr_mult": 1.0}], [0.5, 0.0],
     "].lr_mult: 2.0 in the source, 1.0 in"),
    ([{**GROUPS[0], "maximize": True}, GROUPS[1]], [0.5, 0.0],
     "param_groups[0].maximize: True in the source, False in"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "decay", "says"), HARMED)
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_what_two_groups_cannot_hold_is_said(to, groups, decay, says, tmp_path: Path) -> None:
    source = _native(tmp_path / "native", {**FULL, "param_groups": groups})
    report = reshard(source, tmp_path / "made", **(form := {"to": to, "tp": 1, "pp": 1}))
    assert [g["weight_decay"] for g in _written(tmp_path / "made", form)["groups"]] == decay
    assert [note for note in report.notes if says in note], report.notes


@pytest.mark.parametrize("form", FORMS)
def test_what_two_groups_hold_needs_no_word(form, tmp_path: Path) -> None:
    """In any order, each with its own rate."""
    groups = [{**GROUPS[1], "lr": 0.125, "eps": 1e-5}, GROUPS[0]]
    report = reshard(_native(tmp_path / "in", {**FULL, "param_groups": groups}),
                     tmp_path / "made", **form)  # fmt: skip
    written = _written(tmp_path / "made", form)["groups"]
    assert [(g["lr"], g["eps"], g["weight_decay"]) for g in written] == [
        (0.25, 1e-8, 0.5), (0.125, 1e-5, 0.0)
    ]  # fmt: skip
    assert not [note for note in report.notes if "param_groups" in note or "schedule" in note]


@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_behind_the_step_stays_behind_both_ways(form, tmp_path: Path) -> None:
    """Steps whose gradients overflow do not move it."""
    source = _native(tmp_path / "native", {**FULL, "schedule": {**SCHEDULE, "num_steps": 3}})
    reshard(source, tmp_path / "made", **form)
    found = _written(tmp_path / "made", form)["opt_param_scheduler"]
    assert found["num_steps"] == 24  # samples
    reshard(tmp_path / "made", tmp_path / "back", to="shards", tp=1, pp=1)
    table = json.loads((tmp_path / "back" / "checkpoint.json").read_text())
    assert table["schedule"]["num_steps"] == 3


def test_a_schedule_that_megatrons_own_contradicts_is_said(tmp_path: Path) -> None:
    """Shards that came from Megatron-LM have both."""
    reshard(_native(tmp_path / "in", FULL), tmp_path / "megatron", to="megatron", tp=1, pp=1)
    reshard(tmp_path / "megatron", tmp_path / "shards", to="shards", tp=1, pp=1)
    file = tmp_path / "shards" / "checkpoint.json"
    table = json.loads(file.read_text())
    table["schedule"]["lr"] = 0.75
    table["param_groups"][0]["lr"] = 0.75
    file.write_text(json.dumps(table))
    notes = reshard(tmp_path / "shards", tmp_path / "made", to="megatron", tp=1, pp=1).notes
    assert [n for n in notes if "schedule.lr: 0.75 in the source, 0.25" in n]
    assert [n for n in notes if "].lr: 0.75 in the source, 0.25" in n]


def test_groups_of_different_steps_in_megatrons_files_are_said(tmp_path: Path) -> None:
    form = {"to": "megatron", "tp": 1, "pp": 1}
    reshard(_native(tmp_path / "in", FULL), tmp_path / "made", **form)
    (file,) = (tmp_path / "made").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    found = torch.load(file, weights_only=False)
    optimizer = found["optimizer"]
    optimizer.get("optimizer", optimizer)["param_groups"][1]["step"] = 3
    torch.save(found, file)
    for sums in (tmp_path / "made").glob("*.sha256"):
        sums.unlink()
    report = reshard(tmp_path / "made", tmp_path / "back", to="shards", tp=1, pp=1)
    assert [n for n in report.notes if "have done [3, 7] steps; 7, the first's" in n]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"param_groups": [{"step": -1}]}, r"param_groups\[0\]: step -1, not a whole number"),
    ({"param_groups": [{"step": 7}, {"step": "7"}]}, r"param_groups\[1\]: step '7'"),
    ({"param_groups": [{"step": 8}]}, r"param_groups\[0\].step is 8, .* of step 7"),
    ({"schedule": {**SCHEDULE, "num_steps": -1}}, "schedule: num_steps -1"),
    ({"megatron": {"optimizer": {"step": -1}}}, "megatron.optimizer: step -1"),
]


@pytest.mark.parametrize(("change", "says"), IMPOSSIBLE)
def test_steps_that_no_run_reaches_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        TrainingState.of({"step": 7, **FULL, **change}, "checkpoint.json")


def test_megatrons_optimizer_may_be_ahead_of_its_iteration() -> None:
    """A run whose iteration was set back; both counts are written back as they were."""
    made = TrainingState.of({"step": 5, **FULL, "megatron": {"optimizer": {"step": 7}}})
    assert (made.step, made.groups[0]["step"]) == (5, 7)


def test_an_optimizer_that_left_steps_out_is_right() -> None:
    groups = ({**GROUPS[0], "step": 6},)
    assert TrainingState.of({"step": 7, "param_groups": list(groups)}).groups == groups
