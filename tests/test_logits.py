"""``merge-ckpt --test-logits``: the result computes what its source's model does, or fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from independent import stored, write_native
from safetensors.torch import load_file, save_file
from strategies import tiny_model

from shardwright.ckpt import convert, logits
from shardwright.tools import merge_ckpt

GAP = re.compile(r"logits of (\d+) tokens: largest difference ([\d.e+-]+)")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=40)


@pytest.fixture
def run(model, tmp_path) -> Path:
    """The model cut over tp 2, pp 2."""
    config = model.config.to_dict()
    write_native(tmp_path / "run", config, stored(config, model.state_dict(), 2, 2))
    return tmp_path / "run"


def merged(capsys, run: Path, *words: str, code: int = 0) -> str:
    """What a merge with these options prints."""
    capsys.readouterr()
    assert merge_ckpt.main([str(run), "--output", str(run.parent / "out"), *words]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def alter(monkeypatch, name: str, change) -> None:
    """Change a tensor of the merged file after the merge and before the logits."""
    compare = convert.output_logits

    def altered(source, output, *rest):
        state = load_file(output / "model.safetensors")
        change(state[name])
        save_file(state, output / "model.safetensors", {"format": "pt"})
        return compare(source, output, *rest)

    monkeypatch.setattr(convert, "output_logits", altered)


def test_the_merge_of_a_cut_model_has_the_logits_of_its_source(model, run, capsys):
    said = merged(capsys, run, "--test-logits", "1 2 3")
    assert GAP.search(said).groups() == ("3", "0")
    with torch.no_grad():
        top = int(model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
    assert f"top token: {top} in the result, {top} in the source's model" in said


def test_a_cast_is_no_difference(run, capsys):
    said = merged(capsys, run, "--dtype", "bf16", "--test-logits", "1 2 3")
    assert GAP.search(said).groups() == ("3", "0")


def test_a_result_with_another_weight_is_refused(run, capsys, monkeypatch):
    alter(monkeypatch, "model.layers.2.self_attn.k_proj.weight", lambda x: x[:4].mul_(2))
    said = merged(capsys, run, "--test-logits", "1 2 3", code=1)
    assert "its logits differ from those of the source's model by up to" in said
    assert said.count("\n") == 1


def test_a_result_with_a_nan_is_refused(run, capsys, monkeypatch):
    alter(monkeypatch, "model.norm.weight", lambda x: x[0].fill_(float("nan")))
    assert "differ" in merged(capsys, run, "--test-logits", "1 2 3", code=1)


def test_a_text_needs_a_tokenizer_and_a_token_a_row_of_the_vocabulary(run, capsys):
    said = merged(capsys, run, "--test-logits", "Hello world", code=1)
    assert 'there is no tokenizer here; give token ids, e.g. --test-logits "1 2 3"' in said
    said = merged(capsys, run, "--overwrite", "--test-logits", "1 40", code=1)
    assert "token 40 of the prompt, and a vocabulary of 40" in said
    assert "no tokens" in merged(capsys, run, "--overwrite", "--test-logits", "", code=1)


def test_a_text_is_read_with_the_tokenizer_of_the_output(run, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 5, "world": 7}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(run)
    said = merged(capsys, run, "--test-logits", "hello world hello hello")
    assert GAP.search(said).groups() == ("4", "0")


def test_what_cannot_be_tested_is_refused_before_anything_is_written(run, capsys, monkeypatch):
    file = run.parent / "one.safetensors"
    said = merged(capsys, run, "--output", str(file), "--test-logits", "1", code=1)
    assert "needs a folder" in said
    with pytest.raises(SystemExit):
        merge_ckpt.main([str(run), "--dry-run", "--test-logits", "1"])
    monkeypatch.setattr(logits, "find_spec", lambda name: None)
    said = merged(capsys, run, "--test-logits", "1", code=1)
    assert said == (
        "error: --test-logits: torch is not installed; pip install 'shardwright[train]'\n"
    )
    assert [path.name for path in run.parent.iterdir()] == ["run"]
