"""What megatron-core's optimizers ask for beside moments is in the files that are written."""

from __future__ import annotations

from pathlib import Path

import torch
from test_megatron_dist_out import _by_torch

from shardwright.ckpt import reshard


def test_the_distributed_optimizer_of_an_fp32_model_finds_its_masters(
    golden: Path, tmp_path: Path
) -> None:
    """They repeat the weights; megatron-core asks for one of each weight, whatever its dtype."""
    source = golden / "gpt2_fp32_tp2pp2_torch_dist"
    reshard(source, tmp_path / "made", to="torch_dist", use_distributed_optimizer=True)
    stored = _by_torch(tmp_path / "made" / "iter_0000003")
    weights = {name: x for name, x in stored.items() if not name.startswith("optimizer.")}
    assert len(weights) > 10
    for name, weight in weights.items():
        assert torch.equal(stored[f"optimizer.state.param.{name}"], weight), name
