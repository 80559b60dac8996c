"""What a run promises about its folder, its metrics, its launcher and its options."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from failing_calls import watched
from train_helpers import launch
from train_runs import Launch, Run, _config, make_place

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.box import Box
from shardwright.ckpt.model.manifest import Chunk, Manifest, TensorMeta, View
from shardwright.ckpt.model.planner import plan
from shardwright.ckpt.move import lock as output_lock
from shardwright.ckpt.move.lock import Record
from shardwright.ckpt.move.progress import parse_bytes
from shardwright.ckpt.move.publish import OutputTransaction
from shardwright.tools import train_ckpt
from shardwright.train.checkpoint import retention, save
from shardwright.train.config import from_options, questions
from shardwright.train.config.cli import OPTIONS
from shardwright.train.config.schema import BatchSizes, Parallelism, TrainConfig
from shardwright.train.doctor import memory, pipeline
from shardwright.train.errors import TrainError
from shardwright.train.run import metrics, save_dir, stopping, trainer
from shardwright.train.run.corpora import open_corpora
from shardwright.train.run.source import find_source
from shardwright.train.run.trainer import check

# --- SAVE_DIR ----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path / "place")


@pytest.mark.parametrize("left", ["checkpoint-2/", "metrics.jsonl", "latest"])
def test_a_folder_of_another_run_is_refused_with_the_ways_on(left, place):
    run = Run("used", world=1)
    save_dir.check_unused(_config(run.argv(place)))
    path = place / "used" / left.rstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if left.endswith("/") else path.write_text("{}\n")
    with pytest.raises(TrainError) as error:
        save_dir.check_unused(_config(run.argv(place)))
    for part in (str(place / "used"), path.name, "--resume", "another folder", "--overwrite"):
        assert part in str(error.value)
    save_dir.check_unused(_config([*run.argv(place), "--overwrite"]))


def test_a_run_may_go_on_in_its_own_folder_and_not_from_elsewhere_in_a_used_one(place):
    for name in ("own/checkpoint-2", "other/checkpoint-2"):
        (place / name).mkdir(parents=True)
        (place / name).parent.joinpath("latest").write_text("checkpoint-2\n")
    for resume in ("own", "own/checkpoint-2"):
        save_dir.check_unused(_config(Run("own", world=1, resume=resume).argv(place)))
    save_dir.check_unused(_config([*Run("own", world=1).argv(place), "--resume"]))
    with pytest.raises(TrainError, match="holds another run"):
        save_dir.check_unused(_config(Run("own", world=1, resume="other").argv(place)))


def test_files_of_a_user_do_not_make_a_folder_a_used_one(place):
    (place / "used").mkdir()
    (place / "used" / "notes.txt").write_text("mine")
    save_dir.check_unused(_config(Run("used", world=1).argv(place)))


def test_one_run_at_a_time_writes_to_a_folder(tmp_path):
    held = save_dir.lock(tmp_path)
    with pytest.raises(TrainError, match=r"another run is writing it .*another folder"):
        save_dir.lock(tmp_path)
    held.release()
    save_dir.lock(tmp_path).release()
    assert not (tmp_path / save_dir.LOCK).exists()


def test_a_run_on_another_machine_holds_its_folder_until_it_is_silent_or_declared_dead(
    tmp_path, monkeypatch
):
    record = dataclasses.asdict(Record("r", "elsewhere", "another boot", "pid:[1]", 7, "1"))
    monkeypatch.setattr(output_lock, "_is_exclusive", lambda path: False)  # as on a network
    path = tmp_path / save_dir.LOCK
    path.write_text("\n" + json.dumps(record) + "\n")
    with pytest.raises(TrainError, match=r"process 7 on elsewhere.*--break-lock"):
        save_dir.lock(tmp_path)
    save_dir.lock(tmp_path, break_it=True).release()
    path.write_text("\n" + json.dumps(record) + "\n")
    os.utime(path, (1, 1))
    save_dir.lock(tmp_path).release()


def test_a_used_folder_is_refused_before_a_rank_starts(place):
    (place / "used").mkdir()
    (place / "used" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(TrainError, match="holds another run"):
        check(_config(Run("used", world=1).argv(place)))


# --- metrics -----------------------------------------------------------------------------------

ROWS = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize("half", ["", '{"step": 3, "lo', "{", '{"loss": 1.0}', "\x00\x00"])
def test_half_a_last_line_of_metrics_is_dropped_and_the_rest_kept(half, tmp_path):
    path = tmp_path / metrics.METRICS
    path.write_text(ROWS + half)
    made = metrics.Metrics(tmp_path, writes=True, bar=False, steps=9, done=2)
    made.note({"step": 3, "loss": 0.5})
    made.close()
    assert path.read_text() == ROWS + '{"step": 3, "loss": 0.5}\n'


def test_a_damaged_line_in_the_middle_of_metrics_is_named(tmp_path):
    (tmp_path / metrics.METRICS).write_text("half\n" + ROWS)
    with pytest.raises(TrainError, match=r"metrics\.jsonl: line 1 is not a row"):
        metrics.Metrics(tmp_path, writes=True, bar=False, steps=9, done=2)


def test_tensorboard_events_need_no_save_dir(tmp_path):
    made = metrics.Metrics(
        None, writes=True, bar=False, steps=1, done=0, tensorboard_dir=str(tmp_path / "events")
    )
    made.note({"step": 1, "loss": 2.0})
    made.close()
    assert list((tmp_path / "events").glob("events.out.*"))


# --- a launcher that is gone -------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from shardwright.train.run import stopping
with stopping.alive(Path(sys.argv[1])) as found:
    print(found, flush=True)
    time.sleep(600)
"""


def test_a_rank_notices_that_its_launcher_was_killed(tmp_path, monkeypatch):
    path = tmp_path / "launcher"
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    with held.stdout:
        assert str(path) in held.stdout.readline()
    monkeypatch.setenv(stopping.LAUNCHER, str(path))
    assert not stopping.is_orphan()
    held.kill()
    held.wait()
    assert stopping.is_orphan()


def test_ranks_save_and_end_when_the_launchers_group_is_killed(place, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    run = Run("killed", world=1, options={"steps": 1_000_000, "save_interval": None})
    started = Launch(run, place)
    started.wait_for_steps(3)
    os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()
    lock = (place / "killed" / save_dir.LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of the rank, however long it takes
    lock.close()
    latest = (place / "killed" / "latest").read_text().strip()
    assert (place / "killed" / latest / "checkpoint.json").is_file()


def test_a_closed_terminal_asks_for_an_end_unless_nohup_said_otherwise():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stopping.signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in stopping.signals()
    finally:
        signal.signal(signal.SIGHUP, before)


# --- saves -------------------------------------------------------------------------------------


def _saver(**options: object) -> save.Saver:
    weight = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    return save.Saver(SimpleNamespace(named={"w": weight}, control=None), **options)  # type: ignore[arg-type]


def _prune(saver: save.Saver, newest: Path) -> None:
    saver._prune(retention.Numbered(newest.parent, save.NUMBERED), newest)


def _checkpoints(folder: Path, *steps: int) -> list[Path]:
    made = [folder / f"checkpoint-{step}" for step in steps]
    for path in made:
        path.mkdir()
        (path / "file").write_text("x")
    return made


def _steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("checkpoint-")) for p in folder.glob("checkpoint-*"))


def test_a_checkpoint_that_is_being_deleted_is_not_to_be_seen(tmp_path, monkeypatch):
    newest = _checkpoints(tmp_path, 1, 2, 3)[-1]
    saver = _saver(keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(retention.tree, "remove", lambda path: None)  # it is killed there
        _prune(saver, newest)
    assert _steps(tmp_path) == [3]
    _prune(saver, newest)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_what_a_killed_run_left_of_other_steps_goes_with_the_next_save(tmp_path):
    """I4: no later run saves at that step, so nobody would take it up."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from shardwright.ckpt.move.publish import OutputTransaction\n"
        "made = OutputTransaction(Path(sys.argv[1]), sys.argv[2], overwrite=True)\n"
        "made.open(); (made.path / 'model_tp_0_pp_0.safetensors').write_text('half')\n"
        "sys.argv[2] and made.begin()\n"
        "os._exit(9)"
    )
    for name, mark in (("checkpoint-7", ""), ("checkpoint-8", "resumable")):
        argv = [sys.executable, "-c", code, str(tmp_path / name), mark]
        assert subprocess.run(argv, check=False).returncode == 9
    mine = tmp_path / ".checkpoint-9.partial"  # no lock says whose it is
    mine.mkdir()
    with OutputTransaction(tmp_path / "checkpoint-6"):  # another run is at work
        (newest,) = _checkpoints(tmp_path, 4)
        _prune(_saver(), newest)
        assert (tmp_path / ".checkpoint-6.partial").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".checkpoint-8.partial", ".checkpoint-8.partial.lock", mine.name, "checkpoint-4",
    ]  # fmt: skip


def test_a_run_that_went_back_keeps_the_last_of_its_own_and_later_ones_of_before(tmp_path):
    newest = _checkpoints(tmp_path, 2, 4, 6, 8)[1]
    _prune(_saver(keep_last=1), newest)
    assert _steps(tmp_path) == [4, 6, 8]


def test_replaced_checkpoints_go_after_the_first_save_and_others_stay(tmp_path):
    old = _checkpoints(tmp_path, 5, 9)
    (tmp_path / "notes").write_text("mine")
    saver = _saver(replaced=old)
    assert _steps(tmp_path) == [5, 9]
    (newest,) = _checkpoints(tmp_path, 1)
    _prune(saver, newest)
    assert _steps(tmp_path) == [1]
    assert (tmp_path / "notes").read_text() == "mine"


def saved_in_order(folder: str) -> list[str]:
    """In one rank: what a save syncs and renames, in order, as names."""
    import torch
    from train_runs import CONFIGS

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.ckpt.model.manifest import SideFile
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions

    assert torch is not None
    layout = Layout()
    parallel = initialize(layout, seed=1)
    config = CONFIGS["shallow"]
    engine = Engine(model_from(config, "x"), parallel, layout, ModelOptions(), EngineOptions())
    engine.attach_optimizer(OptimizerSettings())
    saver = save.Saver(RankState.of(engine))
    seen: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(fd: int) -> None:
        seen.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def renamed(old: str, new: str, **more: object) -> None:
        seen.append(f"rename {Path(new).name}")
        rename(old, new, **more)

    def replaced(old: str, new: str, **more: object) -> None:
        seen.append(f"rename {Path(new).name}")
        replace(old, new, **more)

    os.fsync, os.rename, os.replace = synced, renamed, replaced
    try:
        sides = [SideFile("config.json", text=json.dumps(config))]
        saver.save(Path(folder) / "checkpoint-1", 1, {"data": {"best": math.inf}}, sides)
        saver.wait()
    finally:
        os.fsync, os.rename, os.replace = sync, rename, replace
    again = Path(folder) / "checkpoint-1"
    for name in ("notes.txt", "optimizer_tp_7_pp_0.safetensors"):
        (again / name).write_text("x")
    try:
        saver.save(again, 2, {"data": {"best": math.inf}}, sides)
    except TrainError as error:
        seen.append(str(error))
    said = json.loads((again / "checkpoint.json").read_text())
    said["files"]["optimizer_tp_7_pp_0.safetensors"] = {"size": 1}  # of another layout
    (again / "checkpoint.json").write_text(json.dumps(said))
    saver.save(again, 2, {"data": {"best": math.inf}}, sides)
    saver.wait()
    return seen


def test_everything_is_on_the_disk_before_latest_names_it(tmp_path):
    (seen,) = launch("test_train_safety:saved_in_order", 1, tmp_path / "r", str(tmp_path))
    assert isinstance(seen, list)
    published, pointed = seen.index("rename checkpoint-1"), seen.index("rename latest")
    files = {p.name for p in (tmp_path / "checkpoint-1").iterdir()} - {"notes.txt"}
    assert {"config.json", "checkpoint.json", "random_states_0.safetensors"} <= files
    for name in files:
        assert f"sync {name}" in seen[:published], name
    assert published < seen.index("sync .latest.partial") < pointed
    assert seen[-2] == f"sync {tmp_path.name}"
    assert not list(tmp_path.glob(".*partial"))


def test_a_save_into_a_folder_keeps_what_is_the_users_and_replaces_the_set_of_before(tmp_path):
    (seen,) = launch("test_train_safety:saved_in_order", 1, tmp_path / "r", str(tmp_path))
    assert "optimizer_tp_7_pp_0.safetensors, which the checkpoint there did not write" in seen[-1]
    made = tmp_path / "checkpoint-1"
    assert (made / "notes.txt").read_text() == "x"
    assert not (made / "optimizer_tp_7_pp_0.safetensors").exists()
    said = json.loads((made / "checkpoint.json").read_text())
    assert (said["step"], said["state_version"]) == (2, 1)
    assert said["side_files"] == ["config.json"]
    assert not list(made.glob(".*"))
    assert said["data"] == {"best": {"float": "inf"}}


def test_a_part_of_a_tensor_is_planned_only_from_what_the_same_process_holds():
    def of(file: str, *rows: tuple[int, int]) -> Manifest:
        chunks = [
            Chunk("x", Box((a, 0), (b - a, 2)), View(file, 8 * i, (b - a, 2), (2, 1), "F32"))
            for i, (a, b) in enumerate(rows)
        ]
        return Manifest({"x": TensorMeta((8, 2), "F32")}, {"x": chunks})

    made = plan(of("memory", (2, 5)), of("file", (2, 4), (4, 5)), share=True, part=True)
    assert [copy.box for copy in made.copies] == [Box((2, 0), (2, 2)), Box((4, 0), (1, 2))]
    with pytest.raises(CheckpointError, match="hole"):
        plan(of("memory", (2, 5)), of("file", (2, 6)), share=True, part=True)
    with pytest.raises(CheckpointError, match="hole"):
        plan(of("memory", (2, 5)), of("file", (2, 4)), share=True)


# --- data --------------------------------------------------------------------------------------


class Reached(Exception):
    """What comes after tokenising."""


def test_data_is_tokenised_before_ranks_start_and_before_they_have_a_group(place, monkeypatch):
    """So that no collective waits for it, however long it takes."""
    argv = Run("x", world=1, options={"eval_data": place / "eval.txt"}).argv(place)

    def cached() -> int:
        return len(list(cache.glob("*/data.json")))

    def reach(*args, **named):
        assert cached() == 2
        raise Reached

    for name in ("of the launcher", "of another launcher's rank"):
        cache = place / name
        monkeypatch.setenv("SHARDWRIGHT_CACHE", str(cache))
        assert cached() == 0
        if name == "of the launcher":
            monkeypatch.setattr("shardwright.train.run.launch.launch", reach)
            with pytest.raises(Reached):
                train_ckpt.command(argv)
        else:
            monkeypatch.setattr(trainer, "take_device", lambda: None)  # this process is no rank
            monkeypatch.setattr(trainer, "initialize", reach)
            with pytest.raises(Reached):
                trainer.Trainer(_config(argv))


# --- options that would do nothing -------------------------------------------------------------


# option -> (a command line where it would change nothing, what is said), or why there is none
USE: Mapping[str, tuple[str, str] | str] = {
    "model": "always the model, or the description of a resumed one",
    "data": "always",
    "seq_length": "always",
    "data_key": ("--data-key body", "no data file is JSONL"),
    "eval_data": "always",
    "eval_interval": ("--eval-interval 5", "there is no --eval-data"),
    "eval_iters": ("--eval-iters 5", "there is no --eval-data"),
    "tp": "always",
    "pp": "always",
    "pp_layers": ("--pp-layers 4", "pp is 1"),
    "virtual_pp_layers": ("--virtual-pp-layers 1", "needs a pipeline"),
    "sequence_parallel": ("--sequence-parallel", "no effect at tp=1"),
    "distributed_optimizer": ("--distributed-optimizer", "no effect on one data-parallel rank"),
    "recompute": "always",
    "nproc": "always; another launcher's number overrides it with a line",
    "num_machines": "always",
    "machine_rank": ("--machine-rank 0", "no effect"),
    "main_process_ip": ("--main-process-ip h", "needs several machines"),
    "main_process_port": ("--main-process-port 9", "needs several machines"),
    "rdzv_backend": ("--rdzv-backend c10d", "no effect on one machine"),
    "timeout_minutes": "always",
    "micro_batch_size": "always",
    "global_batch_size": "always",
    "steps": "always; a run that is there already says so",
    "optimizer": "always",
    "lr": "always",
    "lr_decay_style": "always",
    "lr_warmup_steps": "always",
    "min_lr": ("--lr-decay-style constant --min-lr 1e-5", "does not fall"),
    "weight_decay": "always",
    "adam_beta1": ("--optimizer sgd --adam-beta1 0.8", "is Adam's"),
    "adam_beta2": ("--optimizer sgd --adam-beta2 0.8", "is Adam's"),
    "adam_eps": ("--optimizer sgd --adam-eps 1e-6", "is Adam's"),
    "sgd_momentum": ("--sgd-momentum 0.9", "--optimizer sgd takes it"),
    "clip_grad": "always",
    "attention_dropout": "always",
    "hidden_dropout": "always",
    "precision": "always",
    "seed": "always; another one than the checkpoint's is refused",
    "save_dir": "always",
    "save_interval": ("--save-interval 3", "there is no --save-dir"),
    "keep_last": ("--keep-last 3", "there is no --save-dir"),
    "resume": "always",
    "overwrite": ("--overwrite", "there is no --save-dir"),
    "break_lock": ("--break-lock", "there is no --save-dir"),
    "verify_source": "a line says what was checked, or that weights are random",
    "tensorboard_dir": "needs no --save-dir; without TensorBoard it is refused",
}


def test_of_every_option_is_known_where_it_would_change_nothing():
    assert USE.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", [name for name, use in USE.items() if isinstance(use, tuple)])
def test_an_option_without_effect_is_refused_or_said(name, place):
    given, said = USE[name]
    argv = Run("x", world=1).argv(place)
    for flag in ("--save-dir", "--save-interval"):
        at = argv.index(flag)
        argv = [*argv[:at], *argv[at + 2 :]]
    try:
        config = _config([*argv, *given.split()])
        open_corpora(config, find_source(config), find_source(config).model())
        lines = "\n".join(config.notes)
    except TrainError as error:
        lines = str(error)
    assert said in lines
    flag = "--" + name.replace("_", "-")
    assert flag in lines or OPTIONS[name].field in lines or "sequence parallelism" in lines


@pytest.mark.parametrize("where", ["environment", "Accelerate's file"])
def test_what_several_programs_read_may_hold_more_than_a_run_uses(where, place, monkeypatch):
    argv = Run("x", world=1).argv(place)
    if where == "environment":
        monkeypatch.setenv("MEGATRON_LM_EVAL_ITERS", "5")
    else:
        file = place / "accelerate.yaml"
        file.write_text(
            "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_eval_iters: 5\n"
            "  megatron_lm_return_logits: true\n"
        )
        argv += ["--config", str(file)]
    notes = "\n".join(_config(argv).notes)
    assert "--eval-iters" in notes
    assert "there is no --eval-data" in notes
    assert ("return_logits" in notes) == (where != "environment")


def test_another_launchers_ranks_say_that_options_of_machines_do_nothing(place, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    argv = [*Run("x", world=1).argv(place), "--num-machines", "2", "--main-process-ip", "h"]
    line = "--num-machines, --main-process-ip: no effect, another launcher started the ranks"
    assert line in _config(argv).notes
    monkeypatch.setenv(from_options.OURS, "[]")
    assert line not in _config(argv).notes


def test_tensorboard_that_is_not_there_is_refused_where_it_is_asked_for(place, monkeypatch):
    config = _config([*Run("x", world=1).argv(place), "--tensorboard-dir", str(place / "t")])
    check(config)
    real = trainer.find_spec
    monkeypatch.setattr(
        trainer, "find_spec", lambda name: None if name == "tensorboard" else real(name)
    )
    with pytest.raises(TrainError, match="--tensorboard-dir: tensorboard is not installed"):
        check(config)


def test_options_that_belong_together_are_taken(place):
    argv = Run("x", world=1).argv(place)
    found = _config([*argv, "--eval-data", str(place / "eval.txt"), "--eval-interval", "5"])
    assert found.data.eval_interval == 5
    found = _config([*argv, "--optimizer", "sgd", "--sgd-momentum", "0.9"])
    assert found.optimizer.momentum == 0.9


SETTINGS = {
    "style": "linear", "lr": 1e-3, "min_lr": 0.0, "warmup_steps": 2, "decay_steps": 100,
    "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.9,
}  # fmt: skip


def _said_on_resume(saved):
    """What a run with SETTINGS says of a checkpoint whose run had others."""

    def parts(settings):
        inside = ("style", "lr", "min_lr", "warmup_steps", "decay_steps")
        schedule = {name: settings[name] for name in inside}
        return schedule, [{k: v for k, v in settings.items() if k not in inside}]

    schedule, groups = parts(SETTINGS)
    state = {"schedule": {**schedule, "num_steps": 7}, "param_groups": groups}
    said: list[str] = []
    run = SimpleNamespace(state=lambda: state, say=said.append)
    before, theirs = parts(json.loads(json.dumps(saved)))  # lists in place of tuples
    trainer.Trainer._say_what_changed(run, before, theirs)
    return said


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_says_which_settings_are_not_those_of_the_checkpoints_run(name):
    assert _said_on_resume(SETTINGS) == []
    other = [0.8, 0.99] if name == "betas" else "cosine" if name == "style" else 0.5
    (line,) = _said_on_resume({**SETTINGS, name: other})
    assert line == (
        f"other settings than the checkpoint's run: {name} {SETTINGS[name]} instead of {other}"
    )


# --- advice ------------------------------------------------------------------------------------


def test_advice_leaves_out_what_saves_nothing_or_is_refused():
    calm = TrainConfig(batch=BatchSizes(4, 4, 2), parallelism=Parallelism(pp=4))
    assert "--recompute selective" not in " ".join(memory.memory_fixes(calm))
    assert any("interleave" in fix for fix in pipeline.bubble(calm, 16).fixes)
    uneven = TrainConfig(
        batch=BatchSizes(4, 4, 2), parallelism=Parallelism(pp=4, pp_layers=(5, 5, 4, 2))
    )
    assert not any("interleave" in fix for fix in pipeline.bubble(uneven, 16).fixes)


def test_a_yaml_for_cpu_says_so(tmp_path, capsys, monkeypatch):
    from shardwright.tools import train_config
    from shardwright.train.doctor import nvidia_smi

    monkeypatch.setattr(nvidia_smi, "count_gpus", lambda: 0)
    assert train_config.main(["--yes", "--output", str(tmp_path / "a.yaml")]) == 0
    assert "use_cpu: true because no GPU was found" in capsys.readouterr().out
    said = ["--yes", "--use-cpu", "true", "--output", str(tmp_path / "b.yaml")]
    assert train_config.main(said) == 0
    assert "since no GPU" not in capsys.readouterr().out


# --- numbers, and packages that are absent -----------------------------------------------------


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + ".5GB", "1e400", "99999999TB"])
def test_a_size_beyond_any_machine_is_an_error(text):
    with pytest.raises(CheckpointError):
        parse_bytes(text)


@pytest.mark.parametrize("peak", ["nan", "inf", "0"])
def test_a_peak_that_is_no_number_is_an_error(peak, capsys):
    from shardwright.tools import plan_layout

    assert plan_layout.main(["--params", "7B", "--gpus", "8", "--gpu-peak", peak]) == 1
    assert "--gpu-peak" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--gpus", "--seq-length", "--global-batch-size"])
def test_a_count_beyond_any_cluster_is_an_error(flag, capsys):
    from shardwright.tools import plan_layout

    argv = ["--params", "7B", *(["--gpus", "8"] if flag != "--gpus" else []), flag, "1" + "0" * 400]
    assert plan_layout.main(argv) == 1
    assert f"{flag} ...: must be at most" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the list of open files")
def test_a_yaml_that_cannot_be_written_leaves_no_file(tmp_path):
    """Neither on disk nor open."""
    opened = len(os.listdir("/proc/self/fd"))
    with watched("fstat", 0), pytest.raises(OSError, match="Input/output error"):
        questions.write({"a": 1}, tmp_path / "x.yaml")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_yaml_without_pyyaml_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        TrainError, match=r"PyYAML is not installed; pip install .shardwright\[plan\]"
    ):
        questions.write({"a": 1}, tmp_path / "x.yaml")
    assert list(tmp_path.iterdir()) == []


# --- what a run says of itself ------------------------------------------------------------------


def test_without_a_terminal_steps_are_lines_of_a_log(monkeypatch, capsys):
    """The first, the last, and one every ten seconds; no carriage returns."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    made = metrics.Metrics(None, writes=False, bar=True, steps=40, done=2)
    for step in range(3, 41):
        now[0] += 3.0
        made.add({"step": step, "loss": 1.0}, {"loss": f"{step}.0", "lr": "1e-4"})
    made.close()
    said = capsys.readouterr().err
    assert "\r" not in said
    lines = said.splitlines()
    assert lines[0] == "step 3/40: loss=3.0, lr=1e-4, 111 s left"
    assert lines[-1] == "step 40/40: loss=40.0, lr=1e-4, 0 s left"
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == [3, *range(7, 40, 4), 40]


def test_a_run_says_at_once_what_it_starts_and_what_it_will_not_keep(tmp_path):
    words = ["--model", str(tmp_path), "--data", "x", "--steps", "1", "--tp", "2", "--pp", "2"]
    config = from_options.from_options(train_ckpt.parser().parse_args(words))
    assert train_ckpt.starting(config).splitlines() == [
        "starting 4 processes at tp=2 pp=2: importing torch and megatron-core",
        "no --save-dir: nothing of this run will be kept",
    ]
    words += ["--save-dir", "run"]
    config = from_options.from_options(train_ckpt.parser().parse_args(words))
    assert len(train_ckpt.starting(config).splitlines()) == 1
