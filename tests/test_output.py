"""The staging folder, the lock and the rename of an output: whose they are, who may take them."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fixtures_safety import LONG_S, content, names, refused, untouched, write_hf

from shardwright.ckpt import RunOptions, merge, reshard
from shardwright.ckpt.move import executor, lock, publish, storage
from shardwright.ckpt.move.publish import OutputTransaction
from shardwright.ckpt.move.staging import JOURNAL, StagingFolder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the source ``hf``."""
    write_hf(tmp_path / "hf", sides=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(transaction, text="new"):
    (transaction.path / "file").write_text(text)
    transaction.begin()


DEAD = 4_000_000  # the number of a process that there is not


def leave(output, **facts):
    """The lock file that a run of this machine leaves when it is killed."""
    record = {
        "run": "dead", "host": socket.gethostname(), "boot": lock._here()[1],
        "space": lock._here()[2], "pid": DEAD, "started": "1", "staging": -1, "replaced": -1,
        "aside": "", **facts,
    }  # fmt: skip
    path = output.parent / f".{output.name}.partial.lock"
    path.write_text("\n" + json.dumps(record) + "\n")
    return path


def test_an_output_in_a_folder_that_is_named_through_a_link_is_published(home):
    """As on clusters, where a scratch folder is a link."""
    (home / "disk").mkdir()
    (home / "scratch").symlink_to("disk")
    reshard("hf", "scratch/out", tp=2)
    merge("scratch/out", "scratch/one.safetensors")
    assert names(home / "disk") == ["one.safetensors", "out"]


# --- whose is it ------------------------------------------------------------------------------


def test_a_users_folder_named_replaced_is_left_alone(home):
    """A5: with and without an output, with and without a call that swaps folders."""
    mine = home / ".out.replaced"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with untouched(mine):
        reshard("hf", "out", tp=2)
        reshard("hf", "out", tp=1, run=RunOptions(overwrite=True))
        shutil.rmtree("out")
        reshard("hf", "out", tp=2)


def test_a_users_folder_named_replaced_survives_without_the_swapping_call(home, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    mine = home / ".out.replaced"
    mine.mkdir()
    with untouched(mine):
        reshard("hf", "out", tp=2)
        reshard("hf", "out", tp=1, run=RunOptions(overwrite=True))
    assert names(home) == sorted([".out.replaced", "hf", "out"])


def test_a_checkpoint_of_the_users_in_the_place_of_the_stage_is_not_emptied(home):
    shutil.copytree("hf", ".out.partial")
    with untouched(home):
        refused(lambda: reshard("hf", "out", tp=2), "in the way")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away")
def test_a_stage_of_another_user_is_refused(home):
    """A4: what another user put there would be written through and published."""
    stage = home / ".out.partial"
    stage.mkdir()
    (stage / JOURNAL).write_text("")
    os.chown(stage, 12345, 12345)
    with untouched(home):
        refused(lambda: reshard("hf", "out", tp=2), ".out.partial", "another user")
        refused(lambda: reshard("hf", "out", tp=2, run=RunOptions(resume=True)), "another user")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_stage_into_which_others_may_write_is_refused(mode, home):
    stage = home / ".out.partial"
    stage.mkdir()
    (stage / JOURNAL).write_text("")
    stage.chmod(mode)
    refused(lambda: reshard("hf", "out", tp=2), "other users may write", f"{mode:o}")


def test_while_it_grows_an_output_is_closed_to_others(home):
    with OutputTransaction(home / "out") as transaction:
        assert stat.S_IMODE(transaction.path.stat().st_mode) == 0o700
        fill(transaction)
        transaction.publish()
    assert stat.S_IMODE((home / "out").stat().st_mode) == publish.folder_mode(0o666)


# --- locks ------------------------------------------------------------------------------------


def test_without_flock_two_runs_into_one_output_are_kept_apart(home, monkeypatch):
    """H2: flock succeeds for everybody, as on clients of a network file system."""
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: None)
    with OutputTransaction(home / "out") as first:
        fill(first)
        second = OutputTransaction(home / "out", overwrite=True)
        refused(second.open, "another run is writing it", f"process {os.getpid()}", "--break-lock")
        assert (first.path / "file").exists()
        first.publish()
    assert names(home) == ["hf", "out"]


def test_without_flock_the_lock_of_a_dead_process_is_taken_over(home, monkeypatch):
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: None)
    leave(home / "out")
    reshard("hf", "out", tp=2)
    assert names(home) == ["hf", "out"]


@pytest.mark.parametrize("look", ["_is_exclusive", "_started"])
def test_a_lock_that_its_holder_removes_while_it_is_looked_at_is_taken(look, home, monkeypatch):
    """H2: where flock has no effect, the second run reads the lock as the first one ends."""
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: None)
    path = leave(home / "out")
    real = getattr(lock, look)

    def remove(of):
        if of in (path, DEAD):
            path.unlink(missing_ok=True)
        return real(of)

    monkeypatch.setattr(lock, look, remove)
    with OutputTransaction(home / "out", overwrite=True) as transaction:
        transaction.lock.check()
    assert names(home) == ["hf"]


def test_a_lock_of_another_machine_holds_for_ten_minutes_after_its_last_touch(home):
    path = leave(home / "out", host="elsewhere", boot="other")
    with untouched(home):
        refused(lambda: reshard("hf", "out", tp=2), "on elsewhere", "--break-lock")
    old = time.time() - lock.STALE_SECONDS - 5
    os.utime(path, (old, old))
    reshard("hf", "out", tp=2)
    assert names(home) == ["hf", "out"]


def test_break_lock_takes_over_at_once(home):
    leave(home / "out", host="elsewhere", boot="other")
    reshard("hf", "out", tp=2, run=RunOptions(break_lock=True))
    assert names(home) == ["hf", "out"]


def test_a_run_touches_its_lock(home, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.01)
    with OutputTransaction(home / "out") as transaction:
        os.utime(transaction.lock.path, (1, 1))
        stop = time.monotonic() + LONG_S
        while transaction.lock.path.stat().st_mtime < 2:
            assert time.monotonic() < stop
            time.sleep(0.01)


def test_a_run_whose_lock_was_taken_publishes_nothing(home):
    with OutputTransaction(home / "out") as first:
        fill(first)
        os.unlink(first.lock.path)
        leave(home / "out", host="elsewhere")
        refused(first.publish, "another run has taken")
    assert not (home / "out").exists()
    assert (home / ".out.partial.lock").exists()  # the other's
    assert (home / ".out.partial/file").exists()


def test_a_lock_file_of_another_user_says_nothing_about_what_may_be_removed(home):
    if os.geteuid() != 0:
        pytest.skip("needs the right to give files away")
    mine = home / ".out.mine"
    mine.mkdir()
    path = leave(home / "out", aside=".out.mine", replaced=mine.stat().st_ino)
    os.chown(path, 12345, 12345)
    with untouched(home):
        refused(lambda: reshard("hf", "out", tp=2), "another user")


@pytest.mark.parametrize("exchange", [True, False])
def test_two_overwriting_processes_leave_one_of_the_two_outputs_whole(exchange, forge, home):
    """H1; without a call that swaps two folders as well."""
    wanted = {}
    for tp in (1, 2):
        reshard("hf", "out", tp=tp, pp=1)
        wanted[tp] = content(home / "out")
        shutil.rmtree(home / "out")
    argv = {tp: ("reshard", "hf", "--tp", tp, "--output", "out", "--overwrite") for tp in (1, 2)}
    ended = []
    for _ in range(20):
        runs = [forge.start(*argv[tp], exchange=exchange) for tp in (1, 2)]
        said = [forge.wait(pid) for pid in runs]
        ended.append([run["code"] for run in said])
        for run in said:
            assert run["code"] == 0 or "out: another run is writing it" in run["text"]
        assert 0 in ended[-1], said
        assert content(home / "out") in wanted.values()
        assert names(home) == ["hf", "out"]


def test_overwriting_runs_one_after_another_never_meet_in_the_stage(home):
    """H1: what was replaced has the staging folder's name for a moment, and is none."""
    faults: list[BaseException] = []
    whole = {"a" * 100, "b" * 100}

    def writer(text: str) -> None:
        done = 0
        while done < 25:
            try:
                with OutputTransaction(home / "out", overwrite=True) as transaction:
                    fill(transaction, text)
                    transaction.publish()
                done += 1
            except ValueError as error:
                if "another run is writing it" not in str(error):
                    faults.append(error)
                    return
                time.sleep(0.001)

    threads = [threading.Thread(target=writer, args=(text,)) for text in whole]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert content(home / "out")["file"].decode() in whole
    assert names(home) == ["hf", "out"]


# --- errors and interrupts --------------------------------------------------------------------


def test_an_error_while_the_stage_is_entered_leaves_nothing(home, monkeypatch):
    """G2."""

    def fails(self):
        raise OSError(5, "Input/output error")

    for owner, name in (
        (StagingFolder, "make"),
        (OutputTransaction, "_open_journal"),
        (OutputTransaction, "_check_output"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with untouched(home):
                refused(lambda: reshard("hf", "new/deep/out", tp=2), "Input/output error")


def test_a_second_ctrl_c_does_not_stop_the_tidying(home, monkeypatch):
    real, calls = publish.tree.remove, []

    def remove(path, keep=""):
        calls.append(path)
        if len(calls) < 3:
            raise KeyboardInterrupt
        real(path, keep)

    monkeypatch.setattr(publish.tree, "remove", remove)
    transaction = OutputTransaction(home / "out")
    transaction.open()
    fill(transaction)
    with pytest.raises(KeyboardInterrupt):
        transaction.close(failed=True)
    assert names(home) == ["hf"]


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_close_that_fails_is_our_error_and_nothing_is_published(which, home, monkeypatch):
    """G2: a quota of a network file system shows when a file is closed."""
    real = storage.LocalStorage.close
    calls: list[int] = []
    fails_at = -1

    def close(self, fd):
        real(self, fd)
        calls.append(fd)
        if len(calls) == fails_at:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(storage.LocalStorage, "close", close)
    reshard("hf", "out", tp=2, run=RunOptions(workers=1))
    shutil.rmtree("out")
    fails_at = {"first": 1, "middle": len(calls) // 2, "last": len(calls)}[which]
    calls.clear()
    with untouched(home):
        refused(lambda: reshard("hf", "out", tp=2, run=RunOptions(workers=1)), "quota exceeded")


def test_threads_are_waited_for_however_often_ctrl_c_is_pressed(monkeypatch):
    """What they write must not be taken from under them."""
    ended, begun = [], threading.Event()

    class Impatient(threading.Thread):
        presses = 3

        def join(self, timeout=None):
            assert begun.wait(LONG_S)
            if Impatient.presses:
                Impatient.presses -= 1
                raise KeyboardInterrupt
            super().join(timeout)

    def loop(todo, stop):
        begun.set()
        assert stop.wait(LONG_S)
        time.sleep(0.05)
        ended.append(1)

    monkeypatch.setattr(executor.threading, "Thread", Impatient)
    with pytest.raises(KeyboardInterrupt):
        executor.in_threads([1, 2], 2, loop)
    assert ended


def test_an_output_of_many_folders_inside_each_other_is_published_and_replaced(home):
    """G2: `os.walk` and `shutil.rmtree` call themselves for each level."""
    for text in ("old", "new"):
        with OutputTransaction(home / "out", overwrite=True) as transaction:
            deep = transaction.path
            for _ in range(1200):
                deep = deep / "d"
                os.mkdir(deep)
            fill(transaction, text)
            transaction.publish()
    assert (home / "out/file").read_text() == "new"
    assert names(home) == ["hf", "out"]
    publish.tree.remove(home / "out")


# --- what the trainer needs -------------------------------------------------------------------


def test_several_processes_write_into_one_stage(home):
    transaction = OutputTransaction(home / "out")
    transaction.open()
    assert publish.staging_folder(home / "out") == transaction.path
    pids = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            Path(transaction.path / f"rank{rank}").write_text(str(rank))
            os._exit(0)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    transaction.begin()
    transaction.publish()
    transaction.close()
    assert content(home / "out") == {f"rank{i}": str(i).encode() for i in range(3)}
    assert names(home) == ["hf", "out"]


def test_a_path_with_dots_makes_only_the_folders_that_it_ends_in(home):
    """a/./b/../c made b, and left it empty."""
    reshard("hf", "a/./b/../c", tp=2)
    merge("a/c", "a/x/../one.safetensors")
    assert names(home / "a") == ["c", "one.safetensors"]
    (home / "disk" / "deep").mkdir(parents=True)
    (home / "link").symlink_to("disk/deep")
    reshard("hf", "link/../out", tp=2)  # as the system takes it: beside what the link leads to
    assert names(home / "disk") == ["deep", "out"]


# --- other users, other machines -----------------------------------------------------------------

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
OWNER, OTHER = 23456, 34567


@pytest.fixture
def shared(monkeypatch):
    """A folder as /tmp is, in which everybody may write; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o1777)
        write_hf(home / "hf", sides=True)
        for path in (home / "hf", *(home / "hf").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        monkeypatch.chdir(home)
        yield home


def as_user(uid: int, work) -> None:
    """Do something as another user, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@ROOT
@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["new", "resumed"])
def test_what_another_user_prepared_is_never_written_through(resume, forge, shared):
    """A4: a stage, a lock and links in them, all made by somebody else in a folder like /tmp."""
    precious = shared / "precious"
    precious.write_text("of the owner")
    os.chown(precious, OWNER, OWNER)
    file = "model_tp_0_pp_0.safetensors"

    def plant_stage() -> None:
        (shared / ".out.partial").mkdir()
        (shared / ".out.partial").chmod(0o777)
        (shared / ".out.partial" / file).symlink_to(precious)
        (shared / ".out.partial" / JOURNAL).symlink_to(precious)

    def plant_lock() -> None:
        (shared / ".lock.partial.lock").symlink_to(precious)

    as_user(OTHER, plant_stage)
    as_user(OTHER, plant_lock)
    for output in ("out", "lock"):
        argv = ("reshard", "hf", "--tp", 1, "--pp", 1, "--output", output, *resume)
        ended = forge.run(*argv, uid=OWNER)
        assert ended["code"] == 1, ended["text"]
        assert "Traceback" not in ended["text"]
        assert f".{output}.partial" in ended["text"]
        assert not (shared / output).exists()
    assert precious.read_text() == "of the owner"
    assert (shared / ".out.partial" / file).is_symlink()


@ROOT
def test_a_user_who_races_for_the_stage_gets_nothing_written(forge, shared):
    """A4: 9 of 60 races wrote through a link that another user put into the stage in time."""
    precious = shared / "precious"
    precious.write_text("of the owner")
    os.chown(precious, OWNER, OWNER)
    reshard("hf", "wanted", tp=1, pp=1)
    wanted = content(shared / "wanted")
    stop = shared / "stop"
    racer = os.fork()
    if racer == 0:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        stage = shared / ".out.partial"
        while not stop.exists():
            try:
                stage.mkdir(mode=0o777)
                (stage / "model_tp_0_pp_0.safetensors").symlink_to(precious)
                (stage / JOURNAL).symlink_to(precious)
                shutil.rmtree(stage)
            except OSError:
                shutil.rmtree(stage, ignore_errors=True)
        os._exit(0)
    codes = []
    try:
        for _ in range(12):
            ended = forge.run(
                "reshard", "hf", "--tp", 1, "--pp", 1, "--output", "out", "--overwrite", uid=OWNER
            )
            codes.append(ended["code"])
            assert "Traceback" not in ended["text"], ended["text"]
            assert precious.read_text() == "of the owner"
            if ended["code"] == 0:
                assert content(shared / "out") == wanted
    finally:
        stop.touch()
        os.waitpid(racer, 0)
    assert set(codes) <= {0, 1}
    assert 0 in codes or "another user" in ended["text"]


@ROOT
@pytest.mark.parametrize("flock", [True, False], ids=["flock", "flock without effect"])
def test_runs_on_two_machines_that_share_a_folder_leave_one_output_whole(flock, forge, home):
    """H2: own mounts, own process numbers, and a lock that each client keeps to itself."""
    views = {tp: home.parent / f"view {home.name} {tp}" for tp in (1, 2)}
    for view in views.values():
        view.mkdir()
    probe = forge.run("reshard", "--version", view=str(views[1]))
    if "PermissionError" in probe["text"] or "OSError" in probe["text"]:
        pytest.skip("no namespaces here")
    wanted = {}
    for tp in (1, 2):
        reshard("hf", "out", tp=tp, pp=1)
        wanted[tp] = content(home / "out")
        shutil.rmtree(home / "out")
    for _ in range(12):
        runs = [
            forge.start("reshard", "hf", "--tp", tp, "--output", "out", "--overwrite",
                        flock=flock, view=str(view))
            for tp, view in views.items()
        ]  # fmt: skip
        said = [forge.wait(pid) for pid in runs]
        for run in said:
            assert run["code"] == 0 or "out: another run is writing it" in run["text"], run["text"]
        assert 0 in [run["code"] for run in said], said
        assert content(home / "out") in wanted.values()
        assert names(home) == ["hf", "out"]
