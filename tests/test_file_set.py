"""A set of files that is added to a folder of other files: the old set or the new one, whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from pathlib import Path

import failing_calls
import pytest
from file_set_runs import LAST, SETS, owned, save, whole
from fixtures_safety import content, names, refused, tree

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move import file_set
from shardwright.ckpt.move.file_set import LOCK, STAGE, FileSetTransaction
from shardwright.ckpt.move.lock import OutputLock
from shardwright.ckpt.move.staging import JOURNAL
from shardwright.ckpt.reader import follow


@pytest.fixture
def folder(tmp_path):
    """A folder with a user's files in it."""
    made = tmp_path / "out"
    (made / "sub").mkdir(parents=True)
    (made / "notes.txt").write_text("mine")
    (made / "sub/data.bin").write_bytes(b"mine too")
    (made / "link").symlink_to("notes.txt")
    (made / "empty").mkdir()
    os.chmod(made / "notes.txt", 0o640)
    return made


@pytest.fixture
def quick(monkeypatch):
    """No disk is waited for: a kill loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def users(folder: Path) -> dict[str, object]:
    """The user's own files, with mode and time."""
    found = tree(folder)
    ours = {f"out/{name}" for which in SETS for name in whole(which)} | {"out", "out/sub"}
    return {k: v for k, v in found.items() if k not in ours and not k.startswith("out/deep")}


def ours(folder: Path) -> dict[str, bytes]:
    """The files that are not the user's, hidden ones left out."""
    found = content(folder)
    mine = ("notes.txt", "sub/data.bin", "link")
    return {k: v for k, v in found.items() if k not in mine and not k.startswith(".")}


# --- what comes, goes and stays ---------------------------------------------------------------


def test_a_set_is_added_and_replaced_and_all_else_stays(folder):
    before = users(folder)
    save(folder, "old")
    assert ours(folder) == whole("old")
    save(folder, "new")
    assert ours(folder) == whole("new")
    assert users(folder) == before
    assert not [name for name in names(folder) if name.startswith(".")]


@pytest.mark.parametrize("when", ["before the files are durable", "after that"])
def test_a_file_that_a_script_writes_meanwhile_stays_where_ours_may_stay_out(
    when, folder, monkeypatch
):
    def came(*_: object) -> None:
        (folder / "added").write_text("mine")

    with FileSetTransaction(folder, LAST, owned) as made:
        for name, data in whole("new").items():
            (made.path / name).parent.mkdir(parents=True, exist_ok=True)
            (made.path / name).write_bytes(data)
        made.yielding = frozenset({"added"})
        if when == "after that":
            monkeypatch.setattr(made.lock, "check", came)
        else:
            came()
        made.publish()
        assert made.yielded == ["added"]
    expected = {name: data for name, data in whole("new").items() if name != "added"}
    assert ours(folder) == {**expected, "added": b"mine"}


def test_a_folder_that_is_not_there_is_made_and_goes_again_if_nothing_is_saved(tmp_path):
    with FileSetTransaction(tmp_path / "a/b", LAST, owned):
        assert (tmp_path / "a/b").is_dir()  # a script may list it and write into it
    assert names(tmp_path) == []
    with FileSetTransaction(tmp_path / "a/b", LAST, owned):
        (tmp_path / "a/b/mine").write_text("x")
    assert names(tmp_path / "a/b") == ["mine"]
    save(tmp_path / "a/b", "new")
    assert ours(tmp_path / "a/b") == {**whole("new"), "mine": b"x"}


@pytest.mark.parametrize("how", ["link", "here", "dotted"])
def test_a_folder_may_be_named_through_a_link_or_be_the_current_one(how, folder, monkeypatch):
    """Nothing outside is touched: the folder may be a mount point."""
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    named = {"link": folder.parent / "link", "here": Path(), "dotted": Path("../out/../out")}[how]
    outside: list[str] = []
    for call in ("rename", "replace", "mkdir", "unlink", "rmdir", "chmod"):
        real = getattr(os, call)

        def noted(path, *more, real=real, **kwargs):
            if folder not in [at := Path(os.path.realpath(path)), *at.parents]:
                outside.append(str(path))
            return real(path, *more, **kwargs)

        monkeypatch.setattr(os, call, noted)
    save(named, "old")
    save(named, "new")
    assert ours(folder) == whole("new")
    assert outside == []
    assert (folder.parent / "link").is_symlink()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("added", "added is there"),
        (LAST, f"{LAST} is there"),
        ("deep/er/added", "deep/er/added is there"),
        ("added/x", "added is a folder"),
        ("deep", "deep is no folder"),
    ],
)
def test_a_users_file_of_a_name_of_ours_is_refused_by_name_and_stays(path, said, folder):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text("[]" if path == LAST else "mine")
    before = tree(folder)
    refused(lambda: save(folder, "new"), said, "move it away")
    assert tree(folder).keys() == before.keys()
    assert {k: v for k, v in tree(folder).items() if k != "out"} == {
        k: v for k, v in before.items() if k != "out"
    }


def test_a_folder_that_is_a_link_is_not_written_through(folder):
    (folder.parent / "elsewhere").mkdir()
    (folder / "deep").symlink_to(folder.parent / "elsewhere")
    refused(lambda: save(folder, "new"), "deep is no folder")
    assert names(folder.parent / "elsewhere") == []


def test_what_a_user_put_in_the_place_of_an_old_file_is_not_removed(folder):
    save(folder, "old")
    (folder / "gone").unlink()
    (folder / "gone").mkdir()
    (folder / "gone/mine").write_text("x")
    save(folder, "new")
    assert (folder / "gone/mine").read_text() == "x"


def test_a_file_that_comes_in_the_middle_is_named_and_the_old_set_is_back(folder, monkeypatch):
    save(folder, "old")
    real = os.rename

    def rename(source, target):
        real(source, target)
        if str(target).endswith("new/both") or str(source).endswith(f"{STAGE}/both"):
            (folder / "deep").mkdir(exist_ok=True)
            (folder / "deep/er").write_text("mine")

    monkeypatch.setattr(os, "rename", rename)
    refused(lambda: save(folder, "new"), "er")
    assert ours(folder) == {**whole("old"), "deep/er": b"mine"}
    assert not [name for name in names(folder) if name.startswith(".")]


# --- SIGKILL ----------------------------------------------------------------------------------


def test_killed_at_any_moment_the_next_open_finds_one_set_whole(forge, folder, tmp_path, quick):
    save(folder, "old")
    before, copy = users(folder), tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    moments = forge.run("file_set_runs", folder, "--save", "new")["moments"]
    seen = []
    for at in range(moments):
        shutil.rmtree(folder)
        shutil.copytree(copy, folder, symlinks=True)
        assert forge.run("file_set_runs", folder, "--save", "new", at=at)["code"] == -9
        if at % 2:  # by a reader
            assert str(follow(folder)) == str(folder.resolve())
            found = ours(folder)
        else:  # by the next save, which is killed as soon as it begins to write
            assert forge.run("file_set_runs", folder, "--save", "new", at=1)["code"] == -9
            file_set.finish(folder)
            found = ours(folder)
        seen.append("new" if found == whole("new") else "old")
        assert found == whole(seen[-1]), at
        assert users(folder).keys() >= before.keys()
        save(folder, "new")
        assert ours(folder) == whole("new")
        assert users(folder) == before
        assert not [name for name in names(folder) if name.startswith(".")]
    assert seen == sorted(seen, reverse=True), "one moment decides"
    assert 0.2 < seen.count("new") / len(seen) < 0.8


def test_killed_again_while_it_is_finished_the_folder_still_ends_whole(
    forge, folder, tmp_path, quick
):
    save(folder, "old")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    moments = forge.run("file_set_runs", folder, "--save", "new")["moments"]
    killed = 0
    for at in range(moments // 3, moments, 5):
        for again in range(1, 14, 4):
            shutil.rmtree(folder)
            shutil.copytree(copy, folder, symlinks=True)
            assert forge.run("file_set_runs", folder, "--save", "new", at=at)["code"] == -9
            killed += forge.run("file_set_runs", folder, at=again)["code"] == -9
            assert forge.run("file_set_runs", folder)["code"] == 0
            assert ours(folder) in (whole("old"), whole("new")), (at, again)
    assert killed > 10


def test_a_reader_leaves_a_save_alone_that_has_not_begun_to_replace(folder):
    save(folder, "old")
    with FileSetTransaction(folder, LAST, owned) as transaction:
        (transaction.path / "both").write_text("half")
        file_set.finish(folder)
        assert ours(folder) == whole("old")
        assert (transaction.path / "both").read_text() == "half"


# --- calls that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["rename", "write", "fsync", "open", "mkdir", "scandir", "lstat", "unlink", "close"]
)
def test_a_call_that_fails_leaves_one_set_whole_and_the_next_save_works(
    call, folder, tmp_path, quick
):
    save(folder, "old")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    with failing_calls.watched() as counts:
        save(folder, "new")
    assert counts[call] > 0
    errors = 0
    for at in range(0, counts[call], 1 + counts[call] // 20):
        shutil.rmtree(folder)
        shutil.copytree(copy, folder, symlinks=True)
        failed = ""
        with failing_calls.watched(call, at, errno.ENOSPC):
            try:
                save(folder, "new")
            except (CheckpointError, OSError) as error:  # OSError: of this test's own writes
                failed = str(error)
        errors += bool(failed)
        file_set.finish(folder)
        assert ours(folder) in (whole("old"), whole("new")), (at, failed)
        assert failed or ours(folder) == whole("new"), at
        save(folder, "new")
        assert ours(folder) == whole("new")
        assert not [name for name in names(folder) if name.startswith(".")], at
    assert errors or call in ("unlink", "close")


def test_where_the_disk_fills_up_while_files_move_the_old_set_is_back(folder, quick):
    save(folder, "old")
    for at in range(9):
        with failing_calls.watched("rename", at, errno.ENOSPC), pytest.raises(CheckpointError):
            save(folder, "new")
        assert ours(folder) == whole("old"), at
        assert not [name for name in names(folder) if name.startswith(".")]


# --- what is durable when ---------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the names of open files")
def test_nothing_moves_before_it_is_durable_and_the_last_file_comes_last(folder, monkeypatch):
    save(folder, "old")
    late: set[int] = set()  # inodes of what was changed and not synced
    order: list[str] = []
    rename, fsync, write = os.rename, os.fsync, os.write

    def renamed(source, target):
        source, target = Path(source), Path(target)
        assert source.lstat().st_ino not in late, f"{source} moves before it is durable"
        if source.name == LAST and source.parent.name == STAGE:
            assert not late, "the last file comes before the others are durable"
        rename(source, target)
        late.update(path.parent.stat().st_ino for path in (source, target))
        order.append(str(source.relative_to(folder)))

    def written(fd, data):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith(JOURNAL):
            assert not late, "decided before all is durable"
            order.append("journal")
        done = write(fd, data)
        if not name.endswith(LOCK):
            late.add(os.fstat(fd).st_ino)
        return done

    def synced(fd):
        fsync(fd)
        late.discard(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(os, "fsync", synced)
    with FileSetTransaction(folder, LAST, owned) as transaction:
        for path, data in whole("new").items():
            at = transaction.path / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(data)
            late.add(at.stat().st_ino)
            late.update(
                parent.stat().st_ino for parent in at.parents if transaction.path in parent.parents
            )
        late.add(transaction.path.stat().st_ino)
        late.add(folder.stat().st_ino)
        transaction.publish()
        assert late == set()
    assert order[:2] == ["journal", LAST]
    assert order[-1] == f"{STAGE}/{LAST}"
    assert len(order) == 1 + len(whole("old")) + len(whole("new"))


# --- locks ------------------------------------------------------------------------------------


def test_of_two_saves_into_one_folder_the_second_is_refused(folder):
    with FileSetTransaction(folder, LAST, owned):
        refused(lambda: save(folder, "new"), "another run is writing it")
    save(folder, "new")


def test_a_reader_waits_for_the_run_that_exchanges_files(folder):
    save(folder, "old")
    lock = OutputLock(folder / LOCK, folder)
    lock.take()
    _leave_decided(folder, "new")
    ended = threading.Event()

    def read():
        file_set.finish(folder)
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert not ended.wait(0.2)
    assert ours(folder) == whole("old")
    lock.release()
    thread.join()
    assert ours(folder) == whole("new")


def _leave_decided(folder: Path, name: str, **said: object) -> None:
    """What a run leaves that is killed as soon as it has decided."""
    stage = folder / STAGE
    for path, data in whole(name).items():
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).write_bytes(data)
    line = {"leave": owned(folder), "come": [*SETS[name], LAST], **said}
    (stage / JOURNAL).write_text(json.dumps(line) + "\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_where_a_reader_may_not_finish_it_says_so(folder):
    save(folder, "old")
    _leave_decided(folder, "new")
    os.chmod(folder, 0o500)
    try:
        refused(lambda: file_set.finish(folder), "cannot be finished here")
    finally:
        os.chmod(folder, 0o700)


# --- folders from elsewhere -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "", ".", "a//b"])
@pytest.mark.parametrize("key", ["leave", "come"])
def test_a_journal_that_leads_out_of_the_folder_is_refused(key, name, folder):
    (folder.parent / "outside").write_text("mine")
    save(folder, "old")
    _leave_decided(folder, "new", **{key: [name, LAST]})
    before = tree(folder.parent)
    refused(lambda: file_set.finish(folder), "is damaged")
    assert tree(folder.parent).keys() == before.keys()


@pytest.mark.parametrize("where", ["", STAGE, f"{STAGE}/shardwright.replaced"])
def test_a_journal_whose_folders_are_links_moves_nothing(where, folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "x").write_text("mine")
    _leave_decided(folder, "new", come=["far/x", LAST], leave=["far/x"])
    (folder / where).mkdir(exist_ok=True)
    (folder / where / "far").symlink_to(outside)
    before = tree(outside)
    refused(lambda: file_set.finish(folder), "is a link")
    assert tree(outside) == before


def test_a_linked_private_folder_is_not_followed(folder):
    other = folder.parent / "other"
    other.mkdir()
    _leave_decided(other, "new")
    (folder / STAGE).symlink_to(other / STAGE)
    before = tree(other)
    file_set.finish(folder)
    assert ours(folder) == {}
    refused(lambda: save(folder, "new"), "not a folder")
    assert tree(other) == before


def test_what_is_saved_is_as_readable_as_new_files_are(folder):
    umask = os.umask(0o027)
    try:
        save(folder, "new")
    finally:
        os.umask(umask)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in whole("new")} == {0o640}
