"""Campaigns ``folder.kills`` and ``folder.calls``: saves into a folder that holds other files too.

A save is killed at a random moment, once or more often, or one of its system calls fails. The next
open then finds the old set or the new one, byte for byte, and the user's files as they were; the
next save leaves nothing hidden behind, and no file stays open.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from bounded import Cost, measured
from failing_calls import CALLS, ROUNDS, watched
from file_set_runs import SETS, save, whole
from fixtures_safety import Forge, content, names, tree
from torture_sources import broken_unless

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move import file_set

KILLED = -9
USERS = {"notes.txt": b"mine", "sub/data.bin": b"mine too", "link": b"mine"}
OURS = {path for name in SETS for path in whole(name)}
SHARED = {"out", "out/sub", "out/deep", "out/deep/er"}  # folders that a save may change or make


class _Folder:
    """A user's folder with an older set in it, and what must hold of it."""

    def __init__(self, home: Path) -> None:
        self.room = home / "work"
        self.folder = self.room / "out"
        self._first = home / "first"
        (self._first / "sub").mkdir(parents=True)
        (self._first / "notes.txt").write_bytes(USERS["notes.txt"])
        (self._first / "sub/data.bin").write_bytes(USERS["sub/data.bin"])
        (self._first / "link").symlink_to("notes.txt")
        (self._first / "empty").mkdir()
        os.chmod(self._first / "notes.txt", 0o640)
        save(self._first, "old")
        self.start()

    def start(self) -> None:
        """The folder as it was."""
        shutil.rmtree(self.room, ignore_errors=True)
        self.room.mkdir(parents=True)
        shutil.copytree(self._first, self.folder, symlinks=True)

    def users(self) -> dict[str, object]:
        """The user's files and folders, with mode and time; hidden names are not theirs."""
        return {
            path: found
            for path, found in tree(self.folder).items()
            if path.removeprefix("out/") not in OURS
            and path not in SHARED
            and not path.startswith("out/.")
        }

    def check(self, where: str) -> str:
        """The set that an open found, whole: ``old`` or ``new``."""
        found = {k: v for k, v in content(self.folder).items() if not k.startswith(".")}
        mine = {path: found.pop(path, None) for path in USERS}
        broken_unless(mine == USERS, f"{where}: a user's file was changed")
        seen = [name for name in SETS if found == whole(name)]
        broken_unless(bool(seen), f"{where}: a torn set: {sorted(found)}")
        return seen[0]

    def check_end(self, before: dict[str, object], where: str) -> None:
        """After a save that nothing disturbed."""
        broken_unless(self.check(where) == "new", f"{where}: the next save is not there")
        broken_unless(self.users() == before, f"{where}: what is the user's was changed")
        left = [name for name in names(self.folder) if name.startswith(".")]
        broken_unless(not left, f"{where}: left behind {left}")
        broken_unless(names(self.room) == ["out"], f"{where}: left {names(self.room)}")


class FolderKills:
    """A process whose forks are killed in a save, and in the opens that finish it."""

    total = 1_000
    step = 25

    def __init__(self, home: Path) -> None:
        self.at = _Folder(home)
        self.room = self.at.room
        self.forge = Forge()
        self.moments = self._run("--save", "new")["moments"]

    def close(self) -> None:
        """End the process."""
        self.forge.__exit__()

    def _run(self, *words: str, at: int = -1) -> dict:
        return self.forge.run("file_set_runs", self.at.folder, *words, at=at)

    def run(self, seed: int) -> tuple[str, Cost]:
        self.at.start()
        before, rng = self.at.users(), random.Random(seed)
        kills, where = 0, f"seed {seed}"
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            ended = self._run("--save", "new", at=rng.randrange(self.moments))
            kills += ended["code"] == KILLED
            broken_unless(ended["code"] in (KILLED, 0), ended["text"])
            if rng.random() < 0.5:  # the open that would finish it is killed as well
                self._run(at=rng.randrange(1, 14))
            if rng.random() < 0.5:
                self._open(where)
        self._open(where)
        ended = self._run("--save", "new")
        broken_unless(ended["code"] == 0, ended["text"])
        self.at.check_end(before, where)
        return "killed" if kills else "came through", Cost()

    def _open(self, where: str) -> None:
        ended = self._run()
        broken_unless(ended["code"] == 0, ended["text"])
        self.at.check(where)


class FolderCalls:
    """The calls of one save, and one of them to fail by each seed."""

    step = 50

    def __init__(self, home: Path) -> None:
        self.at = _Folder(home)
        self.room = self.at.room
        save(self.at.folder, "new")  # once before, so that modules and caches are in place
        self.at.start()
        with watched() as counts:
            save(self.at.folder, "new")
        self.plan = [(name, at) for name in CALLS for at in range(counts[name])]
        self.total = ROUNDS * len(self.plan)

    def run(self, seed: int) -> tuple[str, Cost]:
        name, at = self.plan[seed % len(self.plan)]
        number = CALLS[name][2][seed // len(self.plan)]
        where = f"{name} number {at}, {os.strerror(number)}"
        self.at.start()
        before, opened, outcome = self.at.users(), _open_files(), "done"
        with measured() as cost, watched(name, at, number) as counts:
            try:
                save(self.at.folder, "new")
            except (CheckpointError, OSError):  # OSError: of the writes of this campaign itself
                outcome = "refused"
        if counts[name] <= at:
            outcome = "not reached"
        broken_unless(_open_files() == opened, f"{where}: a file stays open")
        left = [one for one in names(self.at.folder) if one.startswith(".")]
        file_set.finish(self.at.folder)
        seen = self.at.check(where)
        broken_unless(outcome == "refused" or seen == "new", f"{where}: not done")
        save(self.at.folder, "new")
        self.at.check_end(before, where)
        broken_unless(_open_files() == opened, f"{where}: a file stays open after the next save")
        return f"{outcome}{' with leftovers' if left else ''}: {name}", cost


def _open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
