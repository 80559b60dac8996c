"""Weights through every layout: equal to an independent packing, and back to the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import independent
import pytest
import strategies
import torch
from hypothesis import given, settings
from independent import (
    assert_same,
    assert_same_ranks,
    files_of,
    load_hf,
    load_optimizer,
    load_ranks,
    pack_states,
    same_bytes,
    stored,
    write_foreign,
    write_native,
)
from strategies import MESHES, VARIANTS, heads24, raw, valid_head_counts, write_hf

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
)

QUIET = RunOptions(workers=1)
STATES = ("exp_avg", "exp_avg_sq", "master")
Layout = tuple[int, int]  # tp, pp


def shard(source: Path, output: Path, tp: int, pp: int | None = None, **options) -> Path:
    """``reshard`` to a mesh, with the vocabulary padded to a multiple of 4 x tp."""
    options.setdefault("make_vocab_size_divisible_by", 4)
    reshard(source, output, tp=tp, pp=pp, run=QUIET, **options)
    return output


def unshard(source: Path, output: Path, **options) -> dict[str, torch.Tensor]:
    """What ``merge`` makes of a checkpoint."""
    merge(source, output, run=QUIET, **options)
    return load_hf(output)


@pytest.fixture(scope="module")
def direct(tmp_path_factory) -> Callable[[str, Layout], Path]:
    """Shards of a variant on a mesh, made from its Hugging Face folder once."""
    root = tmp_path_factory.mktemp("direct")
    made: dict[tuple[str, Layout], Path] = {}

    def get(variant: str, mesh: Layout) -> Path:
        if (variant, mesh) not in made:
            hf = root / f"{variant}-hf"
            if not hf.exists():
                write_hf(hf, heads24(variant))
            made[variant, mesh] = shard(hf, root / f"{variant}-{mesh[0]}-{mesh[1]}", *mesh)
        return made[variant, mesh]

    return get


@pytest.fixture(scope="module")
def models() -> dict[str, strategies.Case]:
    return {variant: heads24(variant) for variant in VARIANTS}


# --- all families, all pairs of meshes ---------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_of_every_mesh_equal_an_independent_packing(variant, direct, models):
    case = models[variant]
    for tp, pp in MESHES:
        wanted = stored(case.config, case.state, tp, pp, multiple=4)
        assert_same_ranks(load_ranks(direct(variant, (tp, pp))), wanted)


@pytest.mark.parametrize("first", MESHES, ids="tp{0[0]}pp{0[1]}".format)
def test_any_mesh_to_any_other_gives_the_direct_bytes_and_merges_to_the_start(
    first, direct, models, tmp_path
):
    """HF -> A -> B equals HF -> B in every file, and HF -> A -> B -> HF is the start.

    All 256 pairs of meshes; the families take turns, so that each meets every first mesh.
    """
    names = list(VARIANTS)
    for number, second in enumerate(MESHES):
        variant = names[(16 * MESHES.index(first) + number) % len(names)]
        made = shard(direct(variant, first), tmp_path / f"{number}", *second)
        assert files_of(made) == files_of(direct(variant, second))
        back = unshard(made, tmp_path / f"{number}.safetensors")
        assert_same(back, models[variant].state)


def test_the_pairs_above_show_every_family_every_first_mesh():
    names = list(VARIANTS)
    for first in range(16):
        turns = {names[(16 * first + second) % len(names)] for second in range(16)}
        assert turns == set(names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_optimizer_state_is_packed_and_moved_like_the_weights(variant, models, tmp_path):
    """States written by plain calls on mesh A: A -> B equals the packing on B, and A -> B -> C
    equals A -> C in every file, masters and both moments included."""
    case = models[variant]
    values = {state: case.numbered(100_000 * (1 + i)) for i, state in enumerate(STATES)}
    numbers = list(VARIANTS).index(variant)
    a, b, c = (MESHES[(5 * numbers + step) % 16] for step in (3, 10, 12))

    def packed(mesh: Layout) -> tuple[independent.Ranks, independent.Ranks]:
        weights = stored(case.config, case.state, *mesh, multiple=4)
        return weights, pack_states(case.config, values, *mesh, multiple=4)

    source = write_native(tmp_path / "a", case.config, *packed(a), multiple=4)
    on_b = shard(source, tmp_path / "b", *b)
    weights, states = packed(b)
    assert_same_ranks(load_ranks(on_b), weights)
    flat = {rank: {k: x.reshape(-1) for k, x in rows.items()} for rank, rows in states.items()}
    assert_same_ranks(load_optimizer(on_b), flat)
    shapes = independent.load_tensors(independent.rank_files(on_b, "optimizer")[0, 0])
    assert {k: x.shape for k, x in shapes.items()} == {k: x.shape for k, x in states[0, 0].items()}
    shard(on_b, tmp_path / "abc", *c)
    shard(source, tmp_path / "ac", *c)
    assert files_of(tmp_path / "abc") == files_of(tmp_path / "ac")
    assert_same(unshard(tmp_path / "abc", tmp_path / "hf"), case.state)
    masters = unshard(tmp_path / "abc", tmp_path / "masters.safetensors", from_master=True)
    assert_same(masters, values["master"])


def test_sharding_the_optimizer_over_1_2_3_1_dp_ranks_changes_no_element(tmp_path):
    case = raw("llama")
    values = {state: case.numbered(100_000 * (1 + i)) for i, state in enumerate(STATES)}
    weights = stored(case.config, case.state, 2, 1, multiple=4)
    states = pack_states(case.config, values, 2, 1, multiple=4)
    flat = {rank: {k: x.reshape(-1) for k, x in rows.items()} for rank, rows in states.items()}
    start = write_native(tmp_path / "dp1", case.config, weights, states, multiple=4)
    first = shard(start, tmp_path / "same", 2, 1)
    at = start
    for step, dp in enumerate((2, 3, 1)):
        at = shard(at, tmp_path / f"{step}-dp{dp}", 2, 1, dp=dp)
        assert_same_ranks(load_optimizer(at), flat)
        files = independent.rank_files(at, "optimizer")
        assert len(files) == 2 * dp
        assert {len(rank) for rank in files} == {2 if dp == 1 else 3}
        assert json.loads((at / "checkpoint.json").read_text())["mesh"]["dp"] == dp
    assert files_of(at) == files_of(first)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("variant", ["llama-bias", "gpt2", "qwen2-tied"])
def test_dp_shares_cut_anywhere_are_read_and_moved_to_another_mesh(variant, safe, tmp_path):
    """Another writer may cut ranges in the middle of a row, of a head or of a gate."""
    case = raw(variant, heads=(4, 4) if variant == "gpt2" else (4, 2), layers=4)
    values = {state: case.numbered(100_000 * (1 + i)) for i, state in enumerate(STATES)}
    for seed in range(3):
        source = write_native(
            tmp_path / f"{seed}",
            case.config,
            stored(case.config, case.state, 2, 2, multiple=4),
            pack_states(case.config, values, 2, 2, multiple=4),
            dp=3,
            sharded=True,
            safe=safe,
            multiple=4,
            seed=seed,
        )
        made = shard(source, tmp_path / f"{seed}-out", 4, 1, dp=2)
        wanted = pack_states(case.config, values, 4, 1, multiple=4)
        flat = {r: {k: x.reshape(-1) for k, x in rows.items()} for r, rows in wanted.items()}
        assert_same_ranks(load_optimizer(made), flat)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("variant", ["llama-bias", "qwen3", "phi3", "gpt2", "gemma2"])
def test_no_element_of_an_output_is_left_as_its_file_was_created(
    variant, safe, monkeypatch, tmp_path
):
    """Files that begin as NaN instead of zeros hold none at the end: all of it was written."""
    from shardwright.ckpt.move import files

    create = files.create

    def create_nan(path: str, layout, *storage) -> None:
        create(path, layout, *storage)
        with open(path, "r+b") as file:
            file.write(b"\xff" * layout.size_bytes)
            for offset, data in layout.fixed:
                file.seek(offset)
                file.write(data)

    monkeypatch.setattr(files, "create", create_nan)
    case = raw(variant, heads=(4, 4), layers=4, vocab=24)  # no padding rows, which stay zero
    values = {"exp_avg": case.numbered(100_000), "master": case.numbered(200_000)}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 1, 1, multiple=4),
        pack_states(case.config, values, 1, 1, multiple=4),
        multiple=4,
    )
    made = shard(source, tmp_path / "b", 2, 2, dp=3, safe_serialization=safe)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 2, 2, multiple=4))
    wanted = pack_states(case.config, values, 2, 2, multiple=4)
    flat = {rank: {k: x.reshape(-1) for k, x in rows.items()} for rank, rows in wanted.items()}
    assert_same_ranks(load_optimizer(made), flat)
    assert_same(unshard(made, tmp_path / "c.bin"), case.state)


# --- head counts -------------------------------------------------------------------------------


@settings(max_examples=25)
@given(valid_head_counts())
def test_any_valid_head_counts_pack_as_stated_and_come_back(tmp_path_factory, counts):
    n, g, d, tp = counts
    case = raw("qwen2", heads=(n, g), head_dim=d, hidden=2, ffn=tp, layers=2)
    root = tmp_path_factory.mktemp("heads")
    hf = write_hf(root / "hf", case)
    made = shard(hf, root / "shards", tp, 2)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, tp, 2, multiple=4))
    again = shard(made, root / "again", 1, 1)
    assert_same(unshard(again, root / "out.safetensors"), case.state)


@pytest.mark.parametrize(
    ("heads", "head_dim", "tps"),
    [
        ((4, 1), 2, (4, 2, 1)),  # one KV head, cut in the middle: some ranks hold no k or v
        ((4, 2), 6, (4, 1, 2)),  # more ranks than KV heads
        ((8, 2), 6, (8, 4, 2)),
        ((9, 3), 6, (9, 3, 1)),  # SmolLM2's heads
        ((16, 2), 8, (16, 4, 8)),
    ],
)
@pytest.mark.parametrize("variant", ["llama-bias", "phi3"])
def test_tp_beyond_the_kv_heads_straddles_groups_as_megatron_does(
    variant, heads, head_dim, tps, tmp_path
):
    case = raw(variant, heads=heads, head_dim=head_dim, ffn=144, layers=2)
    at = write_hf(tmp_path / "hf", case)
    for tp in tps:
        at = shard(at, tmp_path / f"tp{tp}", tp, 1)
        assert_same_ranks(load_ranks(at), stored(case.config, case.state, tp, 1, multiple=4))
    assert_same(unshard(at, tmp_path / "back.safetensors"), case.state)


def test_a_tp_that_the_heads_forbid_is_refused_with_the_rule_and_writes_nothing(tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama", heads=(9, 3)))
    with pytest.raises(CheckpointError, match="9 query heads do not divide over tp=2"):
        shard(hf, tmp_path / "out", 2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# --- pipeline stages ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gemma2"])
def test_uneven_stages_are_written_read_and_carried(variant, tmp_path):
    case = raw(variant)
    hf = write_hf(tmp_path / "hf", case)
    at = hf
    for number, counts in enumerate([(2, 3), (3, 1, 1), (1, 2, 2), (0, 4, 1), (5,), (1,) * 5]):
        at = shard(at, tmp_path / f"{number}", 2, pp_layers=counts)
        wanted = stored(case.config, case.state, 2, len(counts), pp_layers=counts, multiple=4)
        assert_same_ranks(load_ranks(at), wanted)
        assert json.loads((at / "checkpoint.json").read_text())["pp_layers"] == list(counts)
    assert_same(unshard(at, tmp_path / "back.safetensors"), case.state)


def test_a_new_tp_keeps_the_sources_uneven_stages(tmp_path):
    case = raw("llama")
    first = shard(write_hf(tmp_path / "hf", case), tmp_path / "a", 1, pp_layers=(1, 3, 1))
    made = shard(first, tmp_path / "b", 2)
    wanted = stored(case.config, case.state, 2, 3, pp_layers=(1, 3, 1), multiple=4)
    assert_same_ranks(load_ranks(made), wanted)


def test_layers_that_do_not_divide_are_refused_with_the_way_out(tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama"))
    with pytest.raises(
        CheckpointError, match=r"5 layers do not divide over pp=2.*--pp-layers.* 3,2"
    ):
        shard(hf, tmp_path / "out", 1, 2)


@pytest.mark.parametrize(
    ("counts", "pp", "says"),
    [((2, 2), None, "names 4 layers, the model has 5"), ((2, 3), 3, "names 2 stages, --pp says 3"),
     ((6, -1), None, "--pp-layers 6,-1")],
)  # fmt: skip
def test_stage_lists_that_do_not_fit_are_refused(counts, pp, says, tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama"))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        shard(hf, tmp_path / "out", 1, pp, pp_layers=counts)


# --- spellings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-bias", "gpt2", "phi3"])
def test_bin_files_hold_the_same_tensors_and_lead_back_to_the_same_bytes(variant, tmp_path):
    case = raw(variant, heads=(4, 4), layers=4)
    values = {"exp_avg": case.numbered(100_000), "momentum_buffer": case.numbered(200_000)}
    source = write_native(
        tmp_path / "source",
        case.config,
        stored(case.config, case.state, 1, 2, multiple=4),
        pack_states(case.config, values, 1, 2, multiple=4),
        multiple=4,
        safe=False,
    )
    safe = shard(source, tmp_path / "safe", 2, 2, safe_serialization=True)
    binary = shard(source, tmp_path / "binary", 2, 2)  # stays as the source is
    assert {path.suffix for path in independent.rank_files(safe, "model").values()} == {
        ".safetensors"
    }
    names = [path.name for path in sorted(independent.rank_files(binary, "model").values())]
    assert names == [f"pytorch_model_tp_{t}_pp_{p}.bin" for t in (0, 1) for p in (0, 1)]
    wanted = stored(case.config, case.state, 2, 2, multiple=4)
    assert_same_ranks(load_ranks(safe), wanted)
    assert_same_ranks(load_ranks(binary), wanted)
    assert_same_ranks(load_optimizer(binary), load_optimizer(safe))
    again = shard(binary, tmp_path / "again", 2, 2, safe_serialization=True)
    assert files_of(again) == files_of(safe)
    assert_same(unshard(binary, tmp_path / "out.bin"), case.state)


@pytest.mark.parametrize("safe", [True, False])
def test_every_file_says_its_ranks_mesh_and_step(safe, tmp_path):
    case = raw("llama", layers=4)
    source = write_native(
        tmp_path / "source",
        case.config,
        stored(case.config, case.state, 1, 1),
        pack_states(case.config, {"exp_avg": case.numbered(100_000)}, 1, 1),
        step=77,
    )
    made = shard(source, tmp_path / "made", 2, 2, dp=2, safe_serialization=safe)
    files = independent.rank_files(made, "model") | independent.rank_files(made, "optimizer")
    assert len(files) == 12
    for rank, path in files.items():
        texts = independent.load_metadata(path)
        assert json.loads(texts["ranks"]) == dict(zip(("tp", "pp", "dp"), rank, strict=False))
        assert json.loads(texts["mesh"]) == {"tp": 2, "pp": 2, "dp": 2}
        assert json.loads(texts["step"]) == 77
        assert not safe or texts["format"] == "pt"


def test_ranks_of_two_digits_are_ordered_as_numbers(tmp_path):
    case = raw("llama", heads=(12, 12), layers=12)
    made = shard(write_hf(tmp_path / "hf", case), tmp_path / "shards", 12, 12)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 12, 12, multiple=4))
    assert_same(unshard(made, tmp_path / "back.safetensors"), case.state)


@pytest.mark.parametrize("binary", [True, False])
def test_every_bit_pattern_of_bf16_survives(binary, tmp_path):
    """NaN payloads, infinities, denormals and -0.0 are bits like any other."""
    case = raw("llama-bias", heads=(8, 4), hidden=32, ffn=96, layers=8, vocab=40)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    at, state = 0, {}
    for name, x in case.state.items():
        state[name] = every.roll(-at)[: x.numel()].reshape(x.shape).clone()
        at += x.numel()
    assert at > 2**16
    case = replace(case, state=state)
    hf = write_hf(tmp_path / "hf", case)
    made = shard(hf, tmp_path / "shards", 4, 2, safe_serialization=not binary)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 4, 2, multiple=4))
    again = shard(made, tmp_path / "again", 1, 1)
    assert_same(unshard(again, tmp_path / "back.safetensors"), case.state)


# --- vocabulary --------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "rows"), [(1, 24), (2, 24), (3, 24), (4, 32)])
def test_a_vocabulary_of_21_is_padded_with_zeros_to_the_multiple(tp, rows, tmp_path):
    case = raw("llama", heads=(12, 12))
    made = shard(write_hf(tmp_path / "hf", case), tmp_path / "shards", tp, 1)
    table = json.loads((made / "checkpoint.json").read_text())
    assert (table["vocab_size"], table["padded_vocab_size"]) == (21, rows)
    ranks = load_ranks(made)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        joined = torch.cat([ranks[t, 0][name] for t in range(tp)])
        assert joined.shape[0] == rows
        assert not joined[21:].any()
    assert_same(unshard(made, tmp_path / "back.safetensors"), case.state)


def trained_padding(case: strategies.Case, rows: int, start: int) -> dict[str, torch.Tensor]:
    """Rows that training has moved, for each vocabulary tensor."""
    names = [k for k in case.state if k in ("model.embed_tokens.weight", "lm_head.weight")]
    return strategies.number(dict.fromkeys(names, (rows, case.sizes["H"])), start)


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_trained_padding_rows_travel_with_their_moments_as_far_as_there_is_place(variant, tmp_path):
    """vocab 21: 3 padding rows on tp2, 3 on tp3, 3 trained and 8 new ones on tp4."""
    case = raw(variant, heads=(12, 12), layers=4)
    values = {state: case.numbered(100_000 * (1 + i)) for i, state in enumerate(STATES)}
    extra = trained_padding(case, 3, 900_000)
    extras = {state: trained_padding(case, 3, 910_000 + 1000 * i) for i, state in enumerate(STATES)}

    def packed(tp: int, pp: int) -> tuple[independent.Ranks, independent.Ranks]:
        return (
            stored(case.config, case.state, tp, pp, multiple=4, padding=extra),
            pack_states(case.config, values, tp, pp, multiple=4, padding=extras),
        )

    at = write_native(tmp_path / "tp2", case.config, *packed(2, 2), multiple=4)
    for tp, pp in ((3, 1), (4, 2), (2, 4), (1, 2), (4, 1)):
        at = shard(at, tmp_path / f"tp{tp}pp{pp}", tp, pp)
        weights, states = packed(tp, pp)
        assert_same_ranks(load_ranks(at), weights)
        flat = {r: {k: x.reshape(-1) for k, x in rows.items()} for r, rows in states.items()}
        assert_same_ranks(load_optimizer(at), flat)
    assert_same(unshard(at, tmp_path / "back.safetensors"), case.state)


def test_padding_rows_dropped_toward_hugging_face_are_counted(tmp_path):
    case = raw("llama")
    ranks = stored(
        case.config, case.state, 2, 1, multiple=4, padding=trained_padding(case, 3, 900_000)
    )
    source = write_native(tmp_path / "tp2", case.config, ranks, multiple=4)
    report = merge(source, tmp_path / "hf", run=QUIET)
    ((reason, (tensors, nbytes)),) = report.plan.coverage.dropped.items()
    assert "padding rows" in reason
    assert (tensors, nbytes) == (2, 2 * 3 * 16 * 4)
    assert any(f"dropped 2 tensors, 384 B: {reason}" in line for line in report.lines())


def test_padding_rows_without_a_place_in_smaller_shards_are_counted(tmp_path):
    case = raw("llama", heads=(12, 12))
    extra = trained_padding(case, 11, 900_000)
    ranks = stored(case.config, case.state, 4, 1, multiple=4, padding=extra)
    source = write_native(tmp_path / "tp4", case.config, ranks, multiple=4)
    report = reshard(source, tmp_path / "tp2", tp=2, run=QUIET)
    ((reason, (_, nbytes)),) = report.plan.coverage.dropped.items()
    assert "padding rows" in reason
    assert nbytes == 2 * 8 * 16 * 4
    wanted = stored(case.config, case.state, 2, 1, multiple=4, padding=extra)
    assert_same_ranks(load_ranks(tmp_path / "tp2"), wanted)


def test_the_true_vocabulary_can_be_named_where_the_config_has_another(tmp_path):
    """``vocab_size`` cuts rows that the config counts, and the config written says so."""
    case = raw("llama", vocab=24)
    ranks = stored(case.config, case.state, 2, 1, multiple=4)
    source = write_foreign(tmp_path / "foreign", ranks)
    write_hf(tmp_path / "hf", case)
    read = ReadOptions(tmp_path / "hf", vocab_size=21)
    shards = shard(source, tmp_path / "shards", 1, 1, read=read)
    table = json.loads((shards / "checkpoint.json").read_text())
    assert (table["vocab_size"], table["padded_vocab_size"]) == (21, 24)
    wanted = {
        k: x[:21] if x.shape[0] == 24 and "mlp" not in k and "attn" not in k else x
        for k, x in case.state.items()
    }
    for folder, source_, options in (("a", source, {"read": read}), ("b", shards, {})):
        assert_same(unshard(source_, tmp_path / folder, **options), wanted)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config == {**case.config, "vocab_size": 21}
        assert open_checkpoint(tmp_path / folder)["lm_head.weight"].shape == (21, 16)


# --- tied heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2-tied", "gemma", "gemma2", "gpt2"])
def test_a_tied_head_is_repeated_on_the_last_of_several_stages_only(variant, tmp_path):
    case = raw(variant, heads=(4, 4), layers=4)
    hf = write_hf(tmp_path / "hf", case)
    two = reshard(hf, tmp_path / "pp2", tp=2, pp=2, make_vocab_size_divisible_by=4, run=QUIET)
    ranks = load_ranks(two.output)
    for t in (0, 1):
        head = ranks[t, 1]["output_layer.weight"]
        assert same_bytes(head, ranks[t, 0]["embedding.word_embeddings.weight"])
    assert any(line == "tied copies of the embedding: 1" for line in two.lines())
    one = shard(two.output, tmp_path / "pp1", 2, 1)
    assert not [k for rank in load_ranks(one).values() for k in rank if "output_layer" in k]
    again = shard(one, tmp_path / "again", 2, 2)
    assert files_of(again) == files_of(two.output)
    assert_same(unshard(again, tmp_path / "back.safetensors"), case.state)


def test_tied_copies_that_differ_are_an_error_unless_the_first_is_asked_for(tmp_path):
    case = raw("llama-tied", layers=4)
    ranks = stored(case.config, case.state, 1, 2, multiple=4)
    head = ranks[0, 1]["output_layer.weight"].clone()
    head[3, 5] += 0.5
    ranks[0, 1]["output_layer.weight"] = head
    source = write_native(tmp_path / "source", case.config, ranks, multiple=4)
    with pytest.raises(
        CheckpointError, match=r"replicas differ: model\.embed_tokens\.weight"
    ) as error:
        shard(source, tmp_path / "out", 1, 1)
    assert "first at [3, 5]" in str(error.value)
    assert "max abs difference 0.5" in str(error.value)
    assert "--replicas first" in str(error.value)
    assert not (tmp_path / "out").exists()
    reshard(source, tmp_path / "out", pp=1, run=replace(QUIET, compare_replicas=False))
    assert_same(unshard(tmp_path / "out", tmp_path / "hf"), case.state)


def test_norms_that_differ_between_tp_ranks_are_an_error(tmp_path):
    case = raw("llama", layers=4)
    ranks = stored(case.config, case.state, 2, 1, multiple=4)
    ranks[1, 0]["decoder.layers.2.input_layernorm.weight"] = (
        ranks[1, 0]["decoder.layers.2.input_layernorm.weight"] + 1
    )
    source = write_native(tmp_path / "source", case.config, ranks, multiple=4)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.2\.input_layernorm\.weight"
    ) as error:
        merge(source, tmp_path / "hf", run=QUIET)
    assert "model_tp_0_pp_0" in str(error.value)
    assert "model_tp_1_pp_0" in str(error.value)


def test_a_head_in_the_files_of_a_tied_model_must_equal_the_embedding(tmp_path):
    case = raw("llama-tied", layers=4)
    head = case.state["model.embed_tokens.weight"].clone()
    same = write_hf(tmp_path / "same", replace(case, state={**case.state, "lm_head.weight": head}))
    assert_same(unshard(same, tmp_path / "out.safetensors"), case.state)
    shards = shard(same, tmp_path / "shards", 2, 2)
    assert_same_ranks(load_ranks(shards), stored(case.config, case.state, 2, 2, multiple=4))
    other = write_hf(
        tmp_path / "other", replace(case, state={**case.state, "lm_head.weight": head + 1})
    )
    with pytest.raises(CheckpointError, match="replicas differ"):
        shard(other, tmp_path / "out", 2, 2)


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    case = raw("llama", layers=4)
    del case.state["lm_head.weight"]
    hf = write_hf(tmp_path / "hf", case)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: missing"):
        shard(hf, tmp_path / "out", 2, 2)


# --- layout tags and foreign folders -----------------------------------------------------------

TAGS = [("per_group", "per_rank"), ("per_rank", "per_rank"), ("flat", "flat"), ("per_row", "flat")]


@pytest.mark.parametrize(("qkv", "glu"), TAGS)
@pytest.mark.parametrize("variant", ["llama-bias", "phi3", "gpt2"])
def test_every_packing_reads_back_to_the_same_logical_tensors(variant, qkv, glu, tmp_path):
    heads = (4, 4) if qkv == "per_row" or variant == "gpt2" else (4, 2)
    case = raw(variant, heads=heads, layers=4)
    hf = write_hf(tmp_path / "hf", case)
    for tp, pp in ((2, 2), (1, 1), (2, 1)):
        ranks = stored(case.config, case.state, tp, pp, multiple=4, qkv=qkv, glu=glu)
        foreign = write_foreign(tmp_path / f"tp{tp}pp{pp}", ranks)
        found = open_checkpoint(foreign, config=hf, layout={"qkv": qkv, "glu": glu})
        assert_same({k: x.torch() for k, x in found.items() if "padding/" not in k}, case.state)
        read = ReadOptions(hf, {"qkv": qkv, "glu": glu})
        ours = shard(foreign, tmp_path / f"ours{tp}{pp}", 2, 2, read=read)
        assert_same_ranks(load_ranks(ours), stored(case.config, case.state, 2, 2, multiple=4))


def test_the_packings_differ_so_that_a_wrong_tag_is_a_wrong_model():
    case = raw("llama", heads=(4, 4), layers=1)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    packed = [
        stored(case.config, case.state, 2, 1, qkv=tag)[0, 0][name]
        for tag in ("per_group", "per_rank", "flat", "per_row")
    ]
    assert not any(same_bytes(a, b) for a in packed for b in packed if a is not b)


def test_tags_in_checkpoint_json_are_obeyed_and_rewritten_to_what_is_written(tmp_path):
    case = raw("llama", layers=4)
    ranks = stored(case.config, case.state, 2, 2, multiple=4, qkv="per_rank", glu="flat")
    tags = {"qkv": "per_rank", "glu": "flat", "norm": "plain", "rotary": "half"}
    source = write_native(tmp_path / "source", case.config, ranks, multiple=4, layout=tags)
    made = shard(source, tmp_path / "made", 2, 2)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 2, 2, multiple=4))
    table = json.loads((made / "checkpoint.json").read_text())
    assert table["layout"] == {**tags, "qkv": "per_group", "glu": "per_rank"}


@pytest.mark.parametrize(
    "tags",
    [{"qkv": "per_head"}, {"glu": "interleaved"}, {"moe": "grouped"}, {"rotary": "interleaved"},
     {"norm": "zero_centered"}],
)  # fmt: skip
def test_unknown_or_unfit_tags_are_refused_by_name(tags, tmp_path):
    case = raw("llama", layers=4)
    ranks = stored(case.config, case.state, 1, 1)
    source = write_native(tmp_path / "source", case.config, ranks, layout=tags)
    ((tag, value),) = tags.items()
    with pytest.raises(CheckpointError, match=tag):
        merge(source, tmp_path / "out", run=QUIET)
    foreign = write_foreign(tmp_path / "foreign", ranks)
    hf = write_hf(tmp_path / "hf", case)
    with pytest.raises(CheckpointError, match=tag) as error:
        open_checkpoint(foreign, config=hf, layout=tags)
    assert value in str(error.value) or "unknown layout tag" in str(error.value)


@pytest.mark.parametrize("variant", ["llama", "gemma"])
def test_norms_are_recorded_as_plain_or_zero_centred_and_pass_unchanged(variant, tmp_path):
    made = shard(write_hf(tmp_path / "hf", raw(variant)), tmp_path / "out", 1, 1)
    tags = json.loads((made / "checkpoint.json").read_text())["layout"]
    assert tags["norm"] == {"llama": "plain", "gemma": "zero_centered"}[variant]


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("names", ["global", "local", "engine", "local-engine"])
@pytest.mark.parametrize("variant", ["llama-tied", "gpt2"])
def test_foreign_folders_are_read_whatever_their_numbering_and_names(
    variant, names, wrap, tmp_path
):
    case = raw(variant, heads=(4, 4), layers=5)
    ranks = stored(case.config, case.state, 2, 2, pp_layers=(2, 3), multiple=4)
    if "engine" in names:
        ranks = independent.engine_names(ranks)
    if "local" in names:
        ranks = independent.renumbered(ranks)
    foreign = write_foreign(tmp_path / "foreign", ranks, wrap=wrap)
    hf = write_hf(tmp_path / "hf", case)
    assert_same(unshard(foreign, tmp_path / "out.safetensors", read=ReadOptions(hf)), case.state)
    made = shard(foreign, tmp_path / "made", 1, 1, read=ReadOptions(hf))
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 1, 1, multiple=4))


def test_a_foreign_folder_with_its_own_config_needs_no_option(tmp_path):
    case = raw("llama", layers=4)
    foreign = write_foreign(tmp_path / "foreign", stored(case.config, case.state, 2, 2, multiple=4))
    (foreign / "config.json").write_text(json.dumps(case.config))
    assert_same(unshard(foreign, tmp_path / "out.safetensors"), case.state)


def test_what_is_made_with_a_named_config_holds_it_and_needs_no_option(tmp_path):
    case = raw("llama", layers=4)
    hf = write_hf(tmp_path / "hf", case, sides=True)
    foreign = write_foreign(tmp_path / "foreign", stored(case.config, case.state, 2, 2, multiple=4))
    shards = shard(foreign, tmp_path / "shards", 4, 1, read=ReadOptions(hf))
    unshard(foreign, tmp_path / "merged", read=ReadOptions(hf / "config.json"))
    assert (shards / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    for folder in (shards, tmp_path / "merged"):
        assert json.loads((folder / "config.json").read_text()) == case.config
        assert_same(unshard(folder, folder.with_suffix(".safetensors")), case.state)
        assert open_checkpoint(folder).checkpoint.model is not None


def test_a_foreign_folder_without_a_config_says_which_option_names_one(tmp_path):
    case = raw("llama", layers=4)
    foreign = write_foreign(tmp_path / "foreign", stored(case.config, case.state, 1, 1))
    with pytest.raises(CheckpointError, match=r"no config\.json.*--config"):
        merge(foreign, tmp_path / "out", run=QUIET)


def test_what_is_assumed_of_a_foreign_folder_is_said(tmp_path):
    case = raw("llama")
    hf = write_hf(tmp_path / "hf", case)
    for numbering in ("global", "local"):
        ranks = stored(case.config, case.state, 2, 2, pp_layers=(2, 3), multiple=4)
        ranks = independent.renumbered(ranks) if numbering == "local" else ranks
        foreign = write_foreign(tmp_path / numbering[0], ranks)
        out = tmp_path / f"{numbering[0]}-out"
        report = reshard(foreign, out, tp=1, pp=1, read=ReadOptions(hf), run=QUIET)
        (said,) = [line for line in report.lines() if "no checkpoint.json" in line]
        for part in ("qkv=per_group", "glu=per_rank", "norm=plain", "--layout", "2,3"):
            assert part in said
        assert f"numbered {numbering}ly" in said


def test_extra_state_is_left_out_and_counted(tmp_path):
    case = raw("llama", layers=4)
    ranks = independent.engine_names(stored(case.config, case.state, 2, 1, multiple=4))
    foreign = write_foreign(tmp_path / "foreign", ranks)
    hf = write_hf(tmp_path / "hf", case)
    report = merge(foreign, tmp_path / "out", read=ReadOptions(hf), run=QUIET)
    dropped = report.plan.coverage.dropped
    (count,) = [row[0] for reason, row in dropped.items() if "_extra_state" in reason]
    assert count == 8  # 4 layers on 2 ranks


def test_an_unknown_tensor_of_a_foreign_folder_is_an_error_that_names_it(tmp_path):
    case = raw("llama", layers=4)
    ranks = stored(case.config, case.state, 1, 1)
    ranks[0, 0]["decoder.layers.1.self_attention.q_layernorm.weight"] = torch.ones(6)
    foreign = write_foreign(tmp_path / "foreign", ranks)
    hf = write_hf(tmp_path / "hf", case)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attention\.q_layernorm\.weight"):
        merge(foreign, tmp_path / "out", read=ReadOptions(hf), run=QUIET)


def test_foreign_optimizer_files_are_not_skipped_in_silence(tmp_path):
    case = raw("llama", layers=4)
    hf = write_hf(tmp_path / "hf", case)
    foreign = write_foreign(tmp_path / "foreign", stored(case.config, case.state, 1, 1))
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, foreign / "optimizer_tp_0_pp_0.bin")
    with pytest.raises(CheckpointError, match=r"optimizer_tp_0_pp_0\.bin.*--weights-only"):
        shard(foreign, tmp_path / "out", 2, 1, read=ReadOptions(hf))
    made = shard(foreign, tmp_path / "out", 2, 1, read=ReadOptions(hf), weights_only=True)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 2, 1, multiple=4))


# --- reading Hugging Face files by their families -----------------------------------------------


def test_gpt2_files_without_the_prefix_and_with_masks_are_read(tmp_path):
    """The original gpt2 repository: no ``transformer.``, and the causal mask as a buffer."""
    case = raw("gpt2", heads=(4, 4), layers=4)
    state = {name.removeprefix("transformer."): x for name, x in case.state.items()}
    for i in range(4):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, 7, 7, dtype=torch.uint8)
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    hf = write_hf(tmp_path / "hf", replace(case, state=state))
    report = reshard(hf, tmp_path / "out", tp=2, pp=2, make_vocab_size_divisible_by=4, run=QUIET)
    wanted = stored(case.config, case.state, 2, 2, multiple=4)
    assert_same_ranks(load_ranks(tmp_path / "out"), wanted)
    assert report.plan.coverage.dropped["the causal mask, not a weight"][0] == 8
    assert_same(unshard(tmp_path / "out", tmp_path / "hf2"), case.state)


def test_gpt2_takes_four_times_hidden_where_n_inner_is_null(tmp_path):
    case = raw("gpt2", heads=(4, 4), ffn=96, layers=4, n_inner=None)
    made = shard(write_hf(tmp_path / "hf", case), tmp_path / "out", 2, 2)
    assert_same_ranks(load_ranks(made), stored(case.config, case.state, 2, 2, multiple=4))


def test_inverse_frequency_buffers_of_old_files_are_left_out_and_counted(tmp_path):
    case = raw("llama", layers=4)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(4)}
    hf = write_hf(tmp_path / "hf", replace(case, state={**case.state, **extra}))
    report = reshard(hf, tmp_path / "out", tp=2, run=QUIET)
    ((reason, row),) = report.plan.coverage.dropped.items()
    assert "rotary" in reason
    assert row == [4, 48]


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_config_keys_that_are_absent_or_null_take_the_models_default(key, tmp_path):
    case = raw("llama", heads=(4, 4), head_dim=4, layers=4)  # both follow from the other keys
    wanted = stored(case.config, case.state, 2, 2, multiple=4)
    for number, config in enumerate([{k: v for k, v in case.config.items() if k != key},
                                     {**case.config, key: None}]):  # fmt: skip
        hf = write_hf(tmp_path / f"hf{number}", replace(case, config=config))
        assert_same_ranks(load_ranks(shard(hf, tmp_path / f"{number}", 2, 2)), wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"intermediate_size": 25}, "gate_proj.weight: shape [24, 16], the config says [25, 16]"),
        ({"num_hidden_layers": 6}, "model.layers.5.input_layernorm.weight: missing"),
        ({"num_hidden_layers": 4}, "model.layers.4.input_layernorm.weight: unknown tensor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_describe_the_weights_is_refused(change, says, tmp_path):
    case = raw("llama")
    hf = write_hf(tmp_path / "hf", replace(case, config={**case.config, **change}))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        shard(hf, tmp_path / "out", 2, 1)
    assert not (tmp_path / "out").exists()
