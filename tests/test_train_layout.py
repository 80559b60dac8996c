"""How ranks are numbered, who saves a tensor, and what the settings make of layout and engine."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.train.config.schema import Data, ModelSettings, Parallelism, Precision, TrainConfig
from shardwright.train.core import from_config
from shardwright.train.core.layout import Layout, Place
from shardwright.train.errors import TrainError

WORLDS = list(itertools.product((1, 2, 3), repeat=3))  # tp, pp, dp
LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def places(tp: int, pp: int, dp: int) -> list[Place]:
    """Every rank's place in the order of ranks, counted as megatron counts: tp, dp, pp."""
    return [
        Place(tp, pp, dp, tp_rank, pp_rank, dp_rank)
        for pp_rank in range(pp)
        for dp_rank in range(dp)
        for tp_rank in range(tp)
    ]


@pytest.mark.parametrize(("tp", "pp", "dp"), WORLDS)
def test_ranks_are_numbered_tp_first_then_dp_then_pp(tp: int, pp: int, dp: int) -> None:
    assert [place.rank for place in places(tp, pp, dp)] == list(range(tp * pp * dp))


@pytest.mark.parametrize(("tp", "pp", "dp"), WORLDS)
def test_every_tensor_of_a_rank_file_has_one_owner_which_holds_it(
    tp: int, pp: int, dp: int
) -> None:
    every = places(tp, pp, dp)
    for name in ("decoder.layers.0.mlp.linear_fc1.weight", "output_layer.weight"):
        owners = {}
        for place in every:
            owner = place.owner(name)
            assert every[owner].coord == place.coord
            assert owners.setdefault(place.coord, owner) == owner
            assert place.owns(name) == (owner == place.rank)
        assert len(set(owners.values())) == tp * pp


def test_the_ends_of_the_pipeline_are_its_first_and_last_ranks() -> None:
    ends = [(p.is_first_stage, p.is_last_stage) for p in places(1, 3, 1)]
    assert ends == [(True, False), (False, False), (False, True)]


def config(**changes: object) -> TrainConfig:
    return replace(TrainConfig(world_size=2), **changes)


def test_a_last_stage_of_its_own_length_is_known_once_the_model_is() -> None:
    said = config(parallelism=Parallelism(pp=2, last_stage_layers=2))
    settled = from_config.settle(said, model_from(LLAMA, "llama"), "llama")
    assert from_config.layout_of(settled) == Layout(pp=2, pp_layers=(3, 2))
    assert from_config.groups_of(settled) == from_config.layout_of(said) == Layout(pp=2)
    with pytest.raises(TrainError, match=r"llama.*sequences of 128 are longer"):
        from_config.settle(config(data=Data(seq_length=128)), model_from(LLAMA, "llama"), "llama")


def test_several_calls_in_a_step_exclude_overlapped_reduction() -> None:
    said = config(parallelism=Parallelism(distributed_optimizer=True, overlap=True))
    assert from_config.engine_options(said).overlap
    assert not from_config.engine_options(said, several_calls=True).overlap


def test_end_tokens_count_unless_the_settings_mask_them() -> None:
    assert from_config.engine_options(config(), eod_tokens=[5]).eod_tokens == ()
    masked = config(data=Data(eod_mask_loss=True))
    assert from_config.engine_options(masked, eod_tokens=[5, 6]).eod_tokens == (5, 6)


def test_the_fused_cross_entropy_is_for_bf16_alone() -> None:
    assert not from_config.model_options(config()).fused_cross_entropy
    made = from_config.model_options(
        config(precision=Precision("bf16"), model=ModelSettings(vocab_multiple=8))
    )
    assert (made.precision, made.fused_cross_entropy, made.vocab_multiple) == ("bf16", True, 8)


def test_layout_and_options_need_no_torch() -> None:
    script = (
        "import sys\n"
        "from shardwright.train.core import from_config, layout\n"
        "from shardwright.train.config.schema import TrainConfig\n"
        "from_config.model_options(TrainConfig())\n"
        "print([n for n in ('torch', 'transformers', 'megatron') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
