"""A save as the trainer makes it, of tensors that no training made: for runs that are killed.

``main`` takes ``SAVE_DIR --step N``; it needs torch, and neither megatron-core nor ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.family import build_mesh
from shardwright.ckpt.model.manifest import SideFile
from shardwright.ckpt.model.mesh import named_axes
from shardwright.train.checkpoint.rank_state import RankState
from shardwright.train.checkpoint.save import Saver
from shardwright.train.core import rng
from shardwright.train.core.layout import Place
from shardwright.train.core.optim import Slot
from shardwright.train.errors import TrainError

CONFIG = {
    "model_type": "llama", "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 2, "intermediate_size": 4, "num_hidden_layers": 2, "vocab_size": 5,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
ERRORS = (CheckpointError, TrainError)


def save(folder: Path, step: int, keep_last: int | None = None, *, wait: bool = True) -> None:
    """Write ``folder/checkpoint-STEP`` and point ``folder/latest`` to it."""
    rng.capture = lambda stream=False: (
        {"torch": torch.arange(40, dtype=torch.uint8)},
        {"python": "[3]"},
    )
    sides = [SideFile("notes.txt", text="of this run\n")]
    state = {"schedule": {"lr": 0.25}, "param_groups": [{"lr": 0.25}], "data": {"cursor": step}}
    saver = Saver(_held(step), keep_last=keep_last)
    saver.save(folder / f"checkpoint-{step}", step, state, sides)
    if wait:
        saver.wait()


def _held(step: int) -> RankState:
    """One rank that has everything; the values differ from step to step."""
    model = model_from(CONFIG, "config")
    mesh = build_mesh(model, named_axes({"tp": 1, "pp": 1}), None)
    held = RankState(
        model=model, mesh=mesh, place=Place(1, 1, 1, 0, 0, 0), named={}, optimizer=None,
        sharded=False, vocab_multiple=2, control=None,
    )  # fmt: skip
    named, moments, start = {}, {}, 1000 * step
    for placed in held.placement.placed[held.coord]:
        size = torch.Size(placed.shape)
        values = torch.arange(start, start + size.numel(), dtype=torch.float32).reshape(size)
        named[placed.name] = torch.nn.Parameter(values)
        moments[named[placed.name]] = values + 0.5
        start += size.numel()
    held.named = named
    held.optimizer = SimpleNamespace(
        init_state=lambda: None,
        slots=lambda param: [Slot("exp_avg", moments[param], 0, -1)],
        sizes=lambda param: [],
    )
    return held


def main(argv: list[str]) -> int:
    """0, or 1 after an error line, as the commands do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--keep-last", type=int)
    args, _ = parser.parse_known_args(argv)
    try:
        save(args.output, args.step, args.keep_last)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
