"""Optimizer state and everything else that a training run needs again rides along."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import independent
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import (
    GOLDEN_CONFIGS,
    GOLDEN_MULTIPLES,
    ORACLES,
    assert_same,
    assert_same_ranks,
    files_of,
    load_optimizer,
    load_ranks,
    load_tensors,
    megatron_optimizer,
    megatron_weights,
    numbered_globally,
    pack_states,
    rank_files,
    stored,
    write_native,
)
from strategies import raw, write_hf

from shardwright.ckpt import CheckpointError, RunOptions, merge, open_checkpoint, reshard, verify

QUIET = RunOptions(workers=1)
STATE = {
    "param_groups": [
        {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": ["a", "b"]},
        {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "params": []},
    ],
    "schedule": {"kind": "cosine", "warmup": 10, "last": 1000, "min_lr": 3e-5},
    "data": {"epoch": 2, "cursor": 123456789012, "files": ["a.bin", "\u2603"], "seed": None},
}
ALL = ("exp_avg", "exp_avg_sq", "momentum_buffer", "master")


def states_of(case: strategies.Case, *names: str) -> dict[str, dict[str, torch.Tensor]]:
    """Unique values for each named state of every parameter."""
    return {name: case.numbered(100_000 * (1 + ALL.index(name))) for name in names}


def native(
    folder: Path,
    tp: int,
    pp: int,
    *states: str,
    case: strategies.Case | None = None,
    **options,
) -> Path:
    """A trainer's checkpoint of the fixture with four layers."""
    case = case or raw("llama", layers=4)
    packed = pack_states(case.config, states_of(case, *states), tp, pp) if states else None
    options = {"state": STATE, **options}
    return write_native(
        folder, case.config, stored(case.config, case.state, tp, pp), packed, **options
    )


def table_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "checkpoint.json").read_text())


def flat(ranks: independent.Ranks) -> independent.Ranks:
    return {rank: {k: x.reshape(-1) for k, x in rows.items()} for rank, rows in ranks.items()}


# --- what is kept -------------------------------------------------------------------------------


def test_step_groups_schedule_and_data_are_the_same_values_after_two_reshards(tmp_path):
    source = native(tmp_path / "a", 2, 2, "exp_avg", "exp_avg_sq")
    reshard(source, tmp_path / "b", tp=4, pp=1, run=QUIET)
    reshard(tmp_path / "b", tmp_path / "c", tp=1, pp=4, dp=2, run=QUIET)
    for folder in ("b", "c"):
        found = table_of(tmp_path / folder)
        assert {key: found[key] for key in STATE} == STATE
        assert found["step"] == 1000
    opened = open_checkpoint(tmp_path / "c")
    assert opened.step == 1000
    assert opened.state == {**STATE, "step": 1000}


def test_all_four_states_are_carried_in_the_dtype_that_each_has(tmp_path):
    case = raw("qwen3", layers=4)
    values = states_of(case, *ALL)
    values["exp_avg"] = {k: x.to(torch.bfloat16) for k, x in values["exp_avg"].items()}
    values["exp_avg_sq"] = {k: x.to(torch.float64) for k, x in values["exp_avg_sq"].items()}
    weights = {k: x.to(torch.bfloat16) for k, x in case.state.items()}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, weights, 2, 1),
        pack_states(case.config, values, 2, 1),
    )
    reshard(source, tmp_path / "b", tp=4, pp=2, run=QUIET)
    assert_same_ranks(load_optimizer(tmp_path / "b"), flat(pack_states(case.config, values, 4, 2)))
    assert_same_ranks(load_ranks(tmp_path / "b"), stored(case.config, weights, 4, 2))


@pytest.mark.parametrize("dp", [None, 2])
def test_parameters_without_state_stay_without(dp, tmp_path):
    """Frozen embeddings, and a state that only matrices have (as Muon's momentum)."""
    case = raw("llama-bias", layers=4)
    frozen = {
        k: x for k, x in case.numbered(100_000).items() if "embed" not in k and "head" not in k
    }
    matrices = {k: x for k, x in case.numbered(300_000).items() if x.dim() == 2 and "layers" in k}
    values = {"exp_avg": frozen, "momentum_buffer": matrices}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 2, 1),
        pack_states(case.config, values, 2, 1),
    )
    reshard(source, tmp_path / "b", tp=4, pp=2, dp=dp, run=QUIET)
    found = load_optimizer(tmp_path / "b")
    assert_same_ranks(found, flat(pack_states(case.config, values, 4, 2)))
    assert not any("embeddings" in key for rows in found.values() for key in rows)


def test_the_tied_heads_state_is_repeated_on_the_last_stage_and_compared(tmp_path):
    case = raw("llama-tied", layers=4)
    source = native(tmp_path / "a", 2, 1, "exp_avg", case=case)
    reshard(source, tmp_path / "b", tp=2, pp=2, run=QUIET)
    found = load_optimizer(tmp_path / "b")
    for t in (0, 1):
        first = found[t, 0]["exp_avg/embedding.word_embeddings.weight"]
        assert torch.equal(found[t, 1]["exp_avg/output_layer.weight"], first)
    packed = pack_states(case.config, states_of(case, "exp_avg"), 2, 2)
    packed[0, 1]["exp_avg/output_layer.weight"][:21] += 1
    other = write_native(tmp_path / "c", case.config, stored(case.config, case.state, 2, 2), packed)
    with pytest.raises(
        CheckpointError, match=r"replicas differ: exp_avg/model\.embed_tokens\.weight"
    ):
        reshard(other, tmp_path / "d", pp=1, run=QUIET)


def test_moments_of_norms_that_differ_between_ranks_are_an_error(tmp_path):
    case = raw("llama", layers=4)
    packed = pack_states(case.config, states_of(case, "exp_avg"), 2, 1)
    key = "exp_avg/decoder.layers.3.pre_mlp_layernorm.weight"
    packed[1, 0][key] = packed[1, 0][key] * 2
    weights = stored(case.config, case.state, 2, 1)
    for sharded in (False, True):
        source = write_native(
            tmp_path / f"{sharded}", case.config, weights, packed, dp=2, sharded=sharded
        )
        with pytest.raises(
            CheckpointError, match=r"replicas differ: exp_avg/model\.layers\.3\.post_att"
        ):
            reshard(source, tmp_path / "out", tp=1, run=QUIET)


# --- data-parallel shares -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "asked", "made"),
    [
        ((1, False), None, (1, False)),
        ((4, False), None, (4, False)),  # a plain optimizer is whole on every dp rank
        ((4, True), None, (4, True)),
        ((4, True), 1, (1, False)),
        ((4, True), 3, (3, True)),
        ((1, False), 2, (2, True)),
    ],
)
def test_the_share_is_the_sources_unless_dp_asks_for_another(source, asked, made, tmp_path):
    dp, sharded = source
    folder = native(tmp_path / "a", 2, 1, "exp_avg", dp=dp, sharded=sharded)
    reshard(folder, tmp_path / "b", tp=1, pp=2, dp=asked, run=QUIET)
    assert table_of(tmp_path / "b")["mesh"] == {"tp": 1, "pp": 2, "dp": made[0]}
    ranks = rank_files(tmp_path / "b", "optimizer")
    assert {len(rank) for rank in ranks} == {3 if made[1] else 2}
    assert len(ranks) == 2 * (made[0] if made[1] else 1)


def test_shares_are_equal_to_one_element_and_end_to_end(tmp_path):
    case = raw("llama", layers=4)
    source = native(tmp_path / "a", 1, 1, "exp_avg", "master", case=case)
    reshard(source, tmp_path / "b", tp=2, pp=2, dp=3, run=QUIET)
    sizes: dict[tuple[int, ...], list[int]] = {}
    for rank, path in sorted(rank_files(tmp_path / "b", "optimizer").items()):
        tensors = load_tensors(path)
        ranges = json.loads(independent.load_metadata(path)["ranges"])
        assert all(x.dim() == 1 for x in tensors.values())
        assert {k: stop - start for k, (start, stop) in ranges.items()} == {
            k: x.numel() for k, x in tensors.items()
        }
        own = sum(x.numel() for k, x in tensors.items() if k.startswith("exp_avg/"))
        sizes.setdefault(rank[:2], []).append(own)
    assert all(max(row) - min(row) <= 1 for row in sizes.values())
    wanted = pack_states(case.config, states_of(case, "exp_avg", "master"), 2, 2)
    assert_same_ranks(load_optimizer(tmp_path / "b"), flat(wanted))


def test_more_dp_ranks_than_a_rank_has_elements_leave_some_shares_empty(tmp_path):
    case = raw("gpt2", heads=(1, 1), head_dim=2, ffn=2, layers=1, vocab=4)
    values = {"exp_avg": {k: x for k, x in case.numbered(1000).items() if "ln_f" in k}}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 1, 1),
        pack_states(case.config, values, 1, 1),
    )
    reshard(source, tmp_path / "b", dp=700, run=QUIET)
    assert len(rank_files(tmp_path / "b", "optimizer")) == 700
    reshard(tmp_path / "b", tmp_path / "c", dp=1, run=QUIET)
    found = load_optimizer(tmp_path / "c")
    assert_same_ranks(found, flat(pack_states(case.config, values, 1, 1)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ranges, key: ranges.pop(key), "gives the range None"),
        (lambda ranges, key: ranges.update({key: [0, 3]}), "shape"),
        (lambda ranges, key: ranges.update({key: [10**9, 10**9 + 384]}), "gives the range"),
        (lambda ranges, key: ranges.update({key: [-1, 383]}), "gives the range"),
        (lambda ranges, key: ranges.update({key: "all"}), "no readable ranges"),
        (lambda ranges, key: ranges.update({key: [0, float("inf")]}), "no pair of numbers"),
    ],
)
def test_a_share_whose_range_is_wrong_is_refused_with_file_and_tensor(change, says, tmp_path):
    source = native(tmp_path / "a", 1, 1, "exp_avg", dp=1, sharded=True)
    path = source / "optimizer_tp_0_pp_0_dp_0.safetensors"
    tensors, texts = load_tensors(path), independent.load_metadata(path)
    key = "exp_avg/decoder.layers.1.mlp.linear_fc2.weight"
    ranges = json.loads(texts["ranges"])
    assert ranges[key] == [0, 384]
    change(ranges, key)
    independent.save_file(tensors, path, {**texts, "ranges": json.dumps(ranges)})
    with pytest.raises(CheckpointError, match=re.escape(says)) as error:
        reshard(source, tmp_path / "b", tp=2, run=QUIET)
    assert path.name in str(error.value)


def test_a_gap_between_shares_is_a_hole_that_is_named(tmp_path):
    """Ranges that agree with their tensors, but leave elements to nobody."""
    source = native(tmp_path / "a", 1, 1, "exp_avg", dp=1, sharded=True)
    path = source / "optimizer_tp_0_pp_0_dp_0.safetensors"
    tensors, texts = load_tensors(path), independent.load_metadata(path)
    key = "exp_avg/decoder.layers.1.mlp.linear_fc2.weight"
    ranges = {**json.loads(texts["ranges"]), key: [0, 380]}
    tensors[key] = tensors[key][:380].clone()
    independent.save_file(tensors, path, {**texts, "ranges": json.dumps(ranges)})
    with pytest.raises(CheckpointError, match="holds 380 of 384 elements") as error:
        reshard(source, tmp_path / "b", tp=2, run=QUIET)
    assert "exp_avg/model.layers.1.mlp.down_proj.weight" in str(error.value)


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint's tensors lie."""

    tp: int
    pp: int
    dp: int
    safe: bool


LAYOUTS = st.builds(
    Layout, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)), st.integers(1, 4), st.booleans()
)


@settings(max_examples=20)
@given(
    st.sampled_from(["llama-bias", "qwen2-tied", "qwen3", "phi3", "gpt2"]),
    *[LAYOUTS] * 3,
    st.integers(0, 99),
)
def test_any_layout_to_any_other_keeps_every_element_by_any_way(
    tmp_path_factory, variant, a, b, c, seed
):
    """A as another writer cuts it: A -> B is the packing on B, and A -> B -> C equals A -> C."""
    root = tmp_path_factory.mktemp("any")
    case = raw(variant, heads=(4, 4) if variant == "gpt2" else (4, 2), layers=4)
    values = states_of(case, "exp_avg", "master")

    def packed(at: Layout) -> tuple[independent.Ranks, independent.Ranks]:
        weights = stored(case.config, case.state, at.tp, at.pp, multiple=4)
        return weights, pack_states(case.config, values, at.tp, at.pp, multiple=4)

    def moved(source: Path, name: str, to: Layout) -> Path:
        options = {"tp": to.tp, "pp": to.pp, "dp": to.dp, "safe_serialization": to.safe}
        return reshard(source, root / name, run=QUIET, **options).output

    source = write_native(
        root / "a", case.config, *packed(a), dp=a.dp, sharded=a.dp > 1, safe=a.safe, seed=seed,
        multiple=4, state=STATE,
    )  # fmt: skip
    on_b = moved(source, "ab", b)
    weights, states = packed(b)
    assert_same_ranks(load_ranks(on_b), weights)
    assert_same_ranks(load_optimizer(on_b), flat(states))
    assert files_of(moved(on_b, "abc", c)) == files_of(moved(source, "ac", c))
    assert_same(independent.load_hf(merge(on_b, root / "hf", run=QUIET).output), case.state)


# --- what is dropped, and said ------------------------------------------------------------------


def test_weights_only_drops_state_and_says_so(tmp_path):
    case = raw("llama", layers=4)
    source = native(tmp_path / "a", 2, 1, "exp_avg", "master", random_states=2)
    report = reshard(source, tmp_path / "b", tp=1, pp=2, weights_only=True, run=QUIET)
    assert any("--weights-only" in line and "left out" in line for line in report.lines())
    assert sorted(files_of(tmp_path / "b")) == [
        "checkpoint.json", "config.json",
        "model_tp_0_pp_0.safetensors", "model_tp_0_pp_1.safetensors",
    ]  # fmt: skip
    table = table_of(tmp_path / "b")
    assert not set(STATE) & set(table)
    assert table["step"] == 1000
    assert_same_ranks(load_ranks(tmp_path / "b"), stored(case.config, case.state, 1, 2))


def test_random_states_stay_where_the_layout_stays(tmp_path):
    source = native(tmp_path / "a", 2, 2, "exp_avg", random_states=4)
    report = reshard(source, tmp_path / "b", dp=1, dtype="bf16", run=QUIET)
    before, after = files_of(source), files_of(tmp_path / "b")
    names = [f"random_states_{rank}.safetensors" for rank in range(4)]
    assert {name: after.get(name) for name in names} == {name: before[name] for name in names}
    assert not any("random_states files" in line for line in report.lines())


@pytest.mark.parametrize(
    "change", [{"tp": 1}, {"pp": 4}, {"dp": 2}, {"pp_layers": (1, 3)}], ids=str
)
def test_random_states_of_another_layout_are_dropped_with_a_line(change, tmp_path):
    source = native(tmp_path / "a", 2, 2, "exp_avg", random_states=4)
    report = reshard(source, tmp_path / "b", run=QUIET, **change)
    assert not [name for name in files_of(tmp_path / "b") if "random" in name]
    (said,) = [line for line in report.lines() if "random_states files" in line]
    assert "dropped 4" in said


@pytest.mark.parametrize(
    "held",
    [
        {"states": ("exp_avg",), "state": STATE},
        {"states": ("exp_avg", "master"), "state": {}, "step": None},  # optimizer files alone
        {"states": (), "state": STATE},
        {"states": (), "state": {}, "step": None, "random_states": 2},
    ],
    ids=["all", "optimizer", "state", "random"],
)
def test_merging_drops_optimizer_and_training_state_and_says_so(held, tmp_path):
    case = raw("llama", layers=4)
    held = dict(held)
    source = native(tmp_path / "a", 2, 1, *held.pop("states"), **held)
    report = merge(source, tmp_path / "out", run=QUIET)
    assert any("left out" in line and "Hugging Face" in line for line in report.lines())
    assert sorted(files_of(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert_same(independent.load_hf(tmp_path / "out"), case.state)


def test_merging_weights_alone_says_nothing_of_state(tmp_path):
    source = write_hf(tmp_path / "hf", raw("llama", layers=4))
    reshard(source, tmp_path / "a", tp=2, run=QUIET)
    report = merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert not any("left out" in line for line in report.lines())


def test_exporting_masters_says_what_else_is_left_behind(tmp_path):
    source = native(tmp_path / "a", 2, 1, "exp_avg", "master")
    report = merge(source, tmp_path / "out", from_master=True, run=QUIET)
    assert any("Hugging Face files hold no optimizer state" in line for line in report.lines())


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["exp_odd/decoder.final_layernorm.weight", "exp_avg/decoder.layers.9.input.weight", "step"],
)
def test_an_optimizer_tensor_that_no_rule_places_is_refused_by_name(key, tmp_path):
    case = raw("llama", layers=4)
    packed = pack_states(case.config, states_of(case, "exp_avg"), 1, 1)
    packed[0, 0][key] = torch.ones(16)
    source = write_native(
        tmp_path / "a", case.config, stored(case.config, case.state, 1, 1), packed
    )
    with pytest.raises(CheckpointError, match=re.escape(key)):
        reshard(source, tmp_path / "b", tp=2, run=QUIET)
    reshard(source, tmp_path / "b", tp=2, weights_only=True, run=QUIET)


def test_a_missing_optimizer_file_is_named(tmp_path):
    source = native(tmp_path / "a", 2, 2, "exp_avg", dp=2, sharded=True)
    (source / "optimizer_tp_1_pp_0_dp_1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_tp_1_pp_0_dp_1\.safetensors: is missing"):
        reshard(source, tmp_path / "b", tp=1, run=QUIET)


def test_unknown_keys_of_checkpoint_json_are_ignored_and_a_newer_version_is_not(tmp_path):
    source = native(tmp_path / "a", 2, 1, "exp_avg", invented={"x": 1}, format_version="1.7")
    reshard(source, tmp_path / "b", tp=1, run=QUIET)
    newer = native(tmp_path / "c", 2, 1, format_version="2.0")
    with pytest.raises(CheckpointError, match=r"format_version 2\.0"):
        reshard(newer, tmp_path / "d", tp=1, run=QUIET)


def test_state_through_layouts_compares_equal_and_a_changed_moment_does_not(tmp_path):
    source = native(tmp_path / "a", 2, 2, "exp_avg", "exp_avg_sq", "master")
    reshard(source, tmp_path / "b", tp=4, pp=1, dp=3, run=QUIET)
    verdict = verify(source, tmp_path / "b")
    assert verdict.same, verdict.differences
    path = tmp_path / "b" / "optimizer_tp_2_pp_0_dp_1.safetensors"
    key = next(k for k in load_tensors(path) if k.startswith("exp_avg_sq/") and "fc2" in k)
    independent.poke(path, key, 0, load_tensors(path)[key][0] + 0.25)
    (line,) = verify(source, tmp_path / "b").differences
    assert line.startswith("exp_avg_sq/model.layers.")
    assert "1 of 384 elements differs" in line
    assert "max abs difference 0.25" in line
    assert verify(source, tmp_path / "b", weights_only=True).same


# --- Megatron's own moments -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ORACLES)
def test_moments_and_masters_become_what_megatron_itself_makes_of_them(name, golden, tmp_path):
    """A run of Megatron-LM in our native form, resharded: against Megatron's own reshard."""
    config, multiple = GOLDEN_CONFIGS[name.partition("_")[0]], GOLDEN_MULTIPLES[name]

    def ranks_of(folder: str) -> tuple[independent.Ranks, independent.Ranks]:
        weights = numbered_globally(megatron_weights(golden / folder), layers=4)
        return weights, numbered_globally(megatron_optimizer(golden / folder), layers=4)

    source = write_native(tmp_path / "a", config, *ranks_of(name), multiple=multiple)
    for (tp, pp), oracle in ORACLES[name].items():
        made = tmp_path / f"tp{tp}pp{pp}"
        reshard(source, made, tp=tp, pp=pp, dp=2, run=QUIET)
        weights, states = ranks_of(name + oracle)
        assert_same_ranks(load_ranks(made), weights)
        assert_same_ranks(load_optimizer(made), flat(states))
