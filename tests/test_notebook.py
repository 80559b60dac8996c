"""Python's side: short texts for long things, keywords that mirror options, arrays for NumPy."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from strategies import raw, write_hf

import shardwright
from shardwright.ckpt.move import progress
from shardwright.ckpt.screen import one_screen


@pytest.fixture
def hf(tmp_path) -> Path:
    write_hf(tmp_path / "hf", raw("llama", heads=(4, 4), head_dim=4, layers=4, vocab=24))
    return tmp_path / "hf"


class Printer:
    """As IPython's: collects what an object prints of itself."""

    def __init__(self) -> None:
        self.said = ""

    def text(self, text: str) -> None:
        self.said += text


def test_what_is_long_has_a_short_repr(hf, tmp_path):
    report = shardwright.reshard(hf, tmp_path / "out", tp=2, pp=2)
    verdict = shardwright.verify(hf, tmp_path / "out")
    opened = shardwright.open_checkpoint(tmp_path / "out")
    name = "model.norm.weight"
    shown = {
        repr(report): f"<Report: wrote {tmp_path / 'out'}, 4 files, ",
        repr(report.plan): "<Plan: ",
        repr(verdict): "<Verdict: equal: 39 tensors compared, ",
        repr(opened): "<OpenCheckpoint out: shards, llama, tp=2, pp=2, 41 tensors, ",
        repr(opened.checkpoint.manifest): "<Manifest: 41 tensors in ",
        repr(opened[name]): f"<LazyArray {name}: F32 [16]>",
    }
    for text, start in shown.items():
        assert text.startswith(start)
        assert text.endswith(">")
        assert len(text) < 200


def test_reports_print_on_one_screen_and_a_notebook_shows_them(hf, tmp_path):
    report = shardwright.reshard(hf, tmp_path / "out", tp=4, pp=4, dry_run=True)
    report.files.extend((f"file-{i}", 1) for i in range(500))
    assert len(report.lines()) > 500
    printer = Printer()
    report._repr_pretty_(printer, False)
    assert printer.said == str(report) == one_screen(report.lines())
    assert len(str(report).splitlines()) == 24
    assert "more lines; .lines() has them all" in str(report)
    assert str(report).startswith(report.lines()[0])
    assert str(report).endswith(report.lines()[-1])
    verdict = shardwright.verify(hf)
    verdict._repr_pretty_(printer := Printer(), False)
    assert printer.said == str(verdict)
    assert verdict.summary() in str(verdict)
    for count in (0, 23, 24, 25, 40):
        lines = [str(i) for i in range(count)]
        assert len(one_screen(lines).splitlines()) == min(count, 24)


def test_keywords_mirror_the_options(hf, tmp_path, capsys):
    out = tmp_path / "out"
    assert shardwright.reshard(hf, out, tp=2, dry_run=True).dry_run
    assert not out.exists()
    shardwright.reshard(hf, out, tp=2, workers=1, memory_budget="64KiB", checksum=True)
    with pytest.raises(shardwright.CheckpointError, match="exists"):
        shardwright.merge(out, hf)
    shardwright.merge(out, tmp_path / "back", max_shard_size="1MB")
    shardwright.merge(out, tmp_path / "back", overwrite=True, replicas="first")
    assert shardwright.verify(hf, tmp_path / "back", workers=1).same
    assert not shardwright.verify(hf, vocab_size=20).findings
    with pytest.raises(shardwright.CheckpointError, match="no-such"):
        shardwright.merge(out, tmp_path / "x", format="no-such")
    options = shardwright.RunOptions(workers=1)
    shardwright.reshard(out, tmp_path / "back", pp=2, run=options, overwrite=True)
    assert capsys.readouterr().err == "", "quiet, as the API is by default"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda hf: shardwright.reshard(hf, overwrit=True), "overwrit; did you mean overwrite?"),
        (lambda hf: shardwright.reshard(hf, tpp=2), "unexpected keyword tpp"),
        (lambda hf: shardwright.merge(hf, dtyp="bf16"), "dtyp; did you mean dtype?"),
        (lambda hf: shardwright.reshard(hf, tp=2, workers="2"), "workers='2': must be int"),
        (lambda hf: shardwright.reshard(hf, tp=2, workers=True), "workers=True: must be int"),
        (lambda hf: shardwright.reshard(hf, tp=2, overwrite=1), "overwrite=1: must be bool"),
        (lambda hf: shardwright.verify(hf, hf, vocab_size=20), "unexpected keyword vocab_size"),
    ],
)
def test_a_wrong_keyword_is_a_type_error_that_names_the_right_one(call, says, hf):
    with pytest.raises(TypeError, match=says.replace("?", r"\?")):
        call(hf)
    assert [path.name for path in hf.parent.iterdir()] == ["hf"]


def test_a_wrong_value_is_named_as_the_command_would(hf):
    with pytest.raises(shardwright.CheckpointError, match="must be 'compare' or 'first'"):
        shardwright.reshard(hf, tp=2, replicas="frist")
    with pytest.raises(shardwright.CheckpointError, match="not a size"):
        shardwright.reshard(hf, tp=2, memory_budget="lots")


def test_arrays_take_numpys_integers_and_become_arrays(hf):
    array = shardwright.open_checkpoint(hf)["model.layers.0.self_attn.q_proj.weight"]
    whole = np.asarray(array)
    assert whole.dtype == np.float32
    assert np.array_equal(array[np.int64(1) : np.uint8(3), np.int32(-1)], whole[1:3, -1])
    assert np.array_equal(np.stack([array, array])[1], whole)
    assert np.float64(np.mean(array)) == pytest.approx(whole.mean())


def test_names_complete_in_a_notebook(hf):
    opened = shardwright.open_checkpoint(hf)
    assert opened._ipython_key_completions_() == list(opened)
    assert {"merge", "reshard", "open_checkpoint"} <= set(dir(shardwright.ckpt))


def test_a_notebook_gets_the_bar_that_tqdm_has_for_it(hf, tmp_path, monkeypatch):
    made = []

    class Bar:
        def __init__(self, **options: object) -> None:
            self.done = 0
            made.append((self, options))

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    with progress.Progress(100, "moving", quiet=False) as bar:
        bar.add(60)
        bar.add(40)
    (widget, options), closed = made
    assert (widget.done, options["total"], closed) == (100, 100, "closed")
    made.clear()
    shardwright.reshard(hf, tmp_path / "out", tp=2)
    assert made == [], "quiet unless asked"
