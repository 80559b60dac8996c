"""The long campaign with counts of a few: that it runs, goes on, adds up, and sees what it must."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torture
import torture_whole
from bounded import CPU_SECONDS, Cost, TooLong, measured
from failing_calls import watched
from torture_sources import BrokenPromise, write_sources

SCRIPT = Path(torture.__file__)


def run(folder, *words):
    """The script in a process of its own, as its workers limit their memory."""
    argv = [sys.executable, SCRIPT, "--kept", folder / "kept", "--dir", folder, *words]
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)


def test_a_campaign_runs_in_parts_goes_on_and_adds_up(tmp_path, capsys):
    state = tmp_path / "first.jsonl"
    done = run(tmp_path, "--seeds", "0:1", "--workers", 1, "--state", state)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left" not in done.stdout
    rows = torture.read_state([state])
    assert {row.campaign for row in rows} == set(torture.CAMPAIGNS)
    assert {sum(row.counts.values()) for row in rows} == {1}
    again = ["--seeds", "0:1", "--only", "reader,whole", "--kept", tmp_path / "kept"]
    assert torture.main([str(word) for word in [*again, "--state", state]]) == 0
    assert capsys.readouterr().out.startswith("0 inputs in 0 ranges")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{torture.MARKS[0]}\nold\n{torture.MARKS[1]}\nafter\n")
    assert torture.main(["--report", str(state), str(state), "--into", str(page)]) == 0
    made = capsys.readouterr().out
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")
    assert made in page.read_text()
    assert "| mutated JSON files, configs and indexes through the reader | 1 |" in made


def test_ranges_cover_every_seed_once_in_parts_and_after_a_stop():
    totals = {"whole": (103, 25), "kills": (10, 4)}
    done = [torture.Range("whole", 30, 41), torture.Range("whole", 90, 200)]
    found = [row for k in (1, 2, 3) for row in torture.pending(totals, (5, None), (k, 3), done)]
    for name, total in (("whole", 103), ("kills", 10)):
        seeds = [s for row in found if row.campaign == name for s in range(row.start, row.stop)]
        held = {s for row in done if row.campaign == name for s in range(row.start, row.stop)}
        assert sorted(seeds) == [s for s in range(5, total) if s not in held]


def test_a_broken_promise_is_told_with_the_command_that_repeats_it(tmp_path, capsys):
    class Breaks:
        room = tmp_path / "room"

        def run(self, seed):
            if seed == 3:
                raise BrokenPromise("other bytes")
            if seed == 4:
                raise TooLong("for ever")
            return "read", Cost(cpu_s=2 * CPU_SECONDS if seed == 5 else 0.0)

    Breaks.room.mkdir()
    (Breaks.room / "x").write_text("the input")
    runner = torture.Runner(tmp_path, tmp_path / "kept")
    runner.made["whole"] = Breaks()
    done = runner.run(torture.Range("whole", 0, 7))
    assert done.counts == {"read": 4, "broken": 3}
    assert [row["seed"] for row in done.failures] == [3, 4, 5]
    assert (tmp_path / "kept/whole-3/x").read_text() == "the input"
    torture._tell("whole", done.failures[0], tmp_path / "kept")
    assert "--only whole --seeds 3:4" in capsys.readouterr().out
    state = tmp_path / "state"
    state.write_text(json.dumps(torture.asdict(done)) + "\nhalf a li")
    assert torture.main(["--report", str(state)]) == 1
    assert "| 7 | read 4 | 3 |" in capsys.readouterr().out


def test_the_judge_takes_sound_checkpoints_and_sees_other_bytes(tmp_path, monkeypatch):
    sources = write_sources(tmp_path / "sources")
    for name, source in sources.items():
        made, _ = torture_whole.judge(source, tmp_path / "outputs", random.Random(0))
        assert made == set(torture_whole.FORMATS), name

    def wrong(source, output, **how):
        """An output of another checkpoint."""
        report = reshard(tmp_path / "other", output, **how)
        report.notes.clear()
        return report

    reshard = torture_whole.reshard
    torture_whole.replaced(sources["hf"], tmp_path / "other")
    weights = tmp_path / "other/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    monkeypatch.setattr(torture_whole, "reshard", wrong)
    with pytest.raises(BrokenPromise, match="differ"):
        torture_whole.judge(sources["hf"], tmp_path / "outputs", random.Random(0))


def test_what_takes_too_much_memory_or_time_is_seen():
    with measured() as cost:
        held = bytearray(300 << 20)
        held[::4096] = b"x" * len(held[::4096])
    assert "MiB are allowed" in cost.complaint()
    del held

    def forever():
        while True:
            pass

    with pytest.raises(TooLong), measured(stop_after_s=0.05):
        forever()


def test_calls_are_counted_and_one_fails(tmp_path):
    def write():
        (tmp_path / "x").write_text("text")
        return (tmp_path / "x").read_text()

    with watched() as counts:
        assert write() == "text"
    assert counts["open"] == counts["close"] == 2
    for name in ("open", "write", "close", "read"):
        for at in range(counts[name]):
            with watched(name, at), pytest.raises(OSError, match="Input/output error"):
                write()
    assert write() == "text"


def test_the_page_names_tests_that_exist_and_has_a_place_for_the_counts():
    page = (SCRIPT.parents[1] / "docs/reliability.md").read_text()
    assert all(page.count(mark) == 1 for mark in torture.MARKS)
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 40
    absent = [row for row in named if f"def {row[1]}(" not in (SCRIPT.parent / row[0]).read_text()]
    assert not absent
