"""The Python API and the four commands: what they answer, how they are spelled, what they say."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import independent
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from independent import (
    assert_same,
    assert_same_ranks,
    files_of,
    load_hf,
    load_ranks,
    load_tensors,
    pack_states,
    poke,
    stored,
    write_native,
)
from safetensors.torch import save_file
from strategies import raw, write_hf

from shardwright.ckpt import (
    CheckpointError,
    OpenCheckpoint,
    ReadOptions,
    Report,
    RunOptions,
    Verdict,
    merge,
    open_checkpoint,
    plan,
    reshard,
    verify,
)
from shardwright.ckpt.checkpoint.state import first_apart
from shardwright.ckpt.move import progress
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_tool

QUIET = RunOptions(workers=1)
COMMANDS = {
    "merge-ckpt": merge_ckpt.main,
    "reshard": reshard_tool.main,
    "inspect-ckpt": inspect_ckpt.main,
    "verify-ckpt": verify_ckpt.main,
}
STATE = {"param_groups": [{"lr": 0.1}], "schedule": {"last": 7}, "data": {"cursor": 5}}


@dataclass
class Answer:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys) -> Callable[..., Answer]:
    """Call a command as its console script would, in this process."""

    def call(command: str, *args: object) -> Answer:
        capsys.readouterr()
        try:
            code = COMMANDS[command]([str(arg) for arg in args])
        except SystemExit as leave:
            code = leave.code
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return call


@pytest.fixture
def trained(tmp_path) -> Path:
    """A trainer's checkpoint: tp 2, pp 2, two moments, state, and files that travel along."""
    case = raw("llama", layers=4)
    values = {"exp_avg": case.numbered(100_000), "exp_avg_sq": case.numbered(200_000)}
    folder = write_native(
        tmp_path / "checkpoint-1000",
        case.config,
        stored(case.config, case.state, 2, 2, multiple=4),
        pack_states(case.config, values, 2, 2, multiple=4),
        multiple=4,
        state=STATE,
    )
    (folder / "tokenizer.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def hf(tmp_path) -> Path:
    return write_hf(tmp_path / "hf", raw("llama", layers=4), sides=True)


# --- open_checkpoint ----------------------------------------------------------------------------


def test_an_open_checkpoint_is_a_mapping_of_logical_names(trained):
    case = raw("llama", layers=4)
    opened = open_checkpoint(trained)
    assert isinstance(opened, OpenCheckpoint)
    weights = [name for name in opened if "/" not in name]
    assert sorted(weights) == sorted(case.state)
    assert len(opened) == len(list(opened)) == len(opened.keys())
    assert "lm_head.weight" in opened
    assert "exp_avg_sq/lm_head.weight" in opened
    assert "decoder.final_layernorm.weight" not in opened
    with pytest.raises(KeyError):
        opened["decoder.final_layernorm.weight"]
    assert opened.format == "shards"
    assert opened.mesh == {"tp": 2, "pp": 2}
    assert opened.step == 1000
    assert opened.state == {**STATE, "step": 1000}
    array = opened["model.layers.1.mlp.down_proj.weight"]
    assert (array.shape, array.dtype, array.nbytes) == ((16, 24), "F32", 16 * 24 * 4)


def test_a_hugging_face_folder_opens_as_the_same_mapping(hf, trained):
    of_hf, of_shards = open_checkpoint(hf), open_checkpoint(str(trained))
    assert of_hf.format == "hf"
    assert of_hf.mesh == {"tp": 1, "pp": 1}
    assert of_hf.step is None
    for name in of_hf:
        assert np.array_equal(of_hf[name][:], of_shards[name][:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_slices_read_what_numpy_would_give_from_the_whole(trained, data):
    """Packed q rows, gate rows cut over ranks, padded vocabulary, norms: any box of each."""
    case = raw("llama", layers=4)
    opened = open_checkpoint(trained)
    name = data.draw(
        st.sampled_from(sorted(n for n in case.state if "layers" not in n or ".2." in n))
    )
    whole = case.state[name].numpy()
    keys = []
    for size in whole.shape[: data.draw(st.integers(0, whole.ndim))]:
        bound = st.none() | st.integers(-size - 2, size + 2)
        one = st.integers(-size, size - 1)
        keys.append(data.draw(one | st.builds(slice, bound, bound)))
    kind = data.draw(st.sampled_from([int, np.int64, np.int8]))
    keys = [kind(key) if isinstance(key, int) else key for key in keys]
    if data.draw(st.booleans()):  # behind the indices, or anywhere among those of all dims
        first = len(keys) if len(keys) < whole.ndim else 0
        keys.insert(data.draw(st.integers(first, len(keys))), ...)
    key = tuple(keys) if len(keys) != 1 else keys[0]
    found = opened[name][key]
    assert found.dtype == whole.dtype
    assert found.shape == whole[key].shape
    assert np.array_equal(found, whole[key])


def test_steps_and_indices_that_cannot_be_are_refused(trained):
    array = open_checkpoint(trained)["model.layers.0.mlp.down_proj.weight"]
    for key in (slice(0, 8, 2), slice(None, None, -1), 16, -17, (0, 24), (0, 0, 0)):
        with pytest.raises(IndexError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
            array[key]


def test_a_lazy_array_is_an_array_to_numpy(trained):
    case = raw("llama", layers=4)
    name = "model.layers.0.mlp.down_proj.weight"
    array, whole = open_checkpoint(trained)[name], case.state[name].numpy()
    assert np.array_equal(np.asarray(array), whole)
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.stack([array, array]), np.stack([whole, whole]))
    assert len(array) == len(whole)
    for key in (True, None, 1.0, "x", [0, 1], (..., ...), (..., 0, 0, 0)):
        with pytest.raises(IndexError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
            array[key]


def test_arrays_of_every_dtype_come_as_torch_holds_them(tmp_path):
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    state = {
        str(kind).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds
    }
    state["scalar"] = torch.tensor(7.5)
    state["empty"] = torch.zeros(0, 4)
    save_file(state, tmp_path / "all.safetensors")
    opened = open_checkpoint(tmp_path / "all.safetensors")
    assert_same({name: array.torch() for name, array in opened.items()}, state)
    assert opened["scalar"][()] == 7.5
    assert opened["empty"][:].shape == (0, 4)
    wide = opened["bfloat16"][1]
    assert wide.dtype == np.float32
    assert wide.tolist() == [3, 4, 5]
    for name in ("float64", "float16", "int64", "int8", "uint8", "bool"):
        assert np.array_equal(opened[name][:], state[name].numpy())


def test_a_save_folder_stands_for_the_checkpoint_that_latest_names(trained, cli, tmp_path):
    (tmp_path / "latest").write_text("checkpoint-1000\n")
    assert open_checkpoint(tmp_path).step == 1000
    answer = cli("reshard", tmp_path, "--tp", 1, "--quiet")
    assert answer.code == 0
    assert (tmp_path / "checkpoint-1000-tp1-pp2").is_dir()
    for name in ("gone", "../checkpoint-1000", ""):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="latest"):
            open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_named_for_what_it_looks_like(tmp_path):
    cases = {
        "latest_checkpointed_iteration.txt": "says 'x', neither an iteration nor 'release'",
        "mp_rank_00": "it holds mp_rank_00",
        ".metadata": "a checkpoint of PyTorch's own",
        "notes.txt": "notes.txt",
    }
    for number, (name, says) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text("x")
        with pytest.raises(CheckpointError, match=re.escape(says)):
            open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "absent")


# --- plan, reports ------------------------------------------------------------------------------


def test_plan_takes_the_manifests_of_any_two_open_checkpoints(hf, trained):
    made = plan(open_checkpoint(hf).checkpoint.manifest, open_checkpoint(hf).checkpoint.manifest)
    case = raw("llama", layers=4)
    assert made.coverage.tensors == len(case.state)
    assert made.coverage.written_bytes == sum(x.nbytes for x in case.state.values())
    with pytest.raises(
        CheckpointError, match=r"exp_avg/model\.embed_tokens\.weight: unknown tensor"
    ):
        plan(open_checkpoint(trained).checkpoint.manifest, open_checkpoint(hf).checkpoint.manifest)


def test_the_report_counts_what_was_read_written_padded_tied_compared_and_dropped(tmp_path):
    """h 16, vocab 21 -> 24, 4 layers; tied; tp2 pp1 -> tp2 pp2."""
    case = raw("llama-tied", layers=4)
    ranks = stored(case.config, case.state, 2, 1, multiple=4)
    source = write_native(tmp_path / "a", case.config, ranks, multiple=4)
    weights = sum(x.nbytes for x in case.state.values())
    report = reshard(source, tmp_path / "b", tp=4, pp=2, run=QUIET)
    assert isinstance(report, Report)
    coverage = report.plan.coverage
    norms = sum(x.nbytes for k, x in case.state.items() if "norm" in k)
    table = 21 * 16 * 4
    pad = 3 * 16 * 4
    # Norms go to 4 ranks, the embedding to both stages, with the 3 padding rows that were there.
    assert coverage.written_bytes == weights + 3 * norms + table + 2 * pad
    assert coverage.read_bytes == coverage.written_bytes
    assert coverage.zero_bytes == 2 * 8 * 16 * 4  # 24 rows become 32, twice
    assert coverage.tied == 1
    assert coverage.replicas == 9  # norms of the second rank
    assert coverage.tensors == len(case.state) + 1
    assert [name for name, _ in report.files] == [
        f"model_tp_{t}_pp_{p}.safetensors" for t in range(4) for p in range(2)
    ]
    assert all((tmp_path / "b" / name).stat().st_size == size for name, size in report.files)
    said = "\n".join(report.lines())
    for part in (
        "8 files",
        f"{len(case.state) + 1} tensors",
        "rows filled with zeros: 1 KiB",
        "tied copies of the embedding: 1",
        "replicas: 9 chunks, compared, equal",
    ):
        assert part in said


def test_a_dry_run_of_the_api_predicts_the_files_and_writes_nothing(trained, tmp_path):
    before = files_of(tmp_path)
    would = reshard(trained, tmp_path / "b", tp=1, pp=1, run=replace(QUIET, dry_run=True))
    assert files_of(tmp_path) == before
    assert would.dry_run
    did = reshard(trained, tmp_path / "b", tp=1, pp=1, run=QUIET)
    assert would.files == did.files
    assert would.plan.coverage == did.plan.coverage
    assert would.peak_bytes == did.peak_bytes > 32 << 20


# --- verify: every kind of difference -----------------------------------------------------------


@pytest.fixture
def pair(tmp_path) -> Callable[..., Verdict]:
    """The verdict on two bare files of the given tensors."""

    def compare(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **options) -> Verdict:
        save_file(a, tmp_path / "a.safetensors")
        save_file(b, tmp_path / "b.safetensors")
        return verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **options)

    return compare


def test_equal_tensors_are_counted(pair):
    state = {"x": torch.arange(6.0), "y": torch.ones(2, 3, dtype=torch.int64)}
    verdict = pair(state, {k: state[k].clone() for k in ("y", "x")})
    assert verdict.same
    assert (verdict.tensors, verdict.nbytes) == (2, 6 * 4 + 6 * 8)


def test_missing_and_extra_tensors_are_listed_with_the_side_that_lacks_them(pair):
    one = torch.ones(2)
    verdict = pair({"x": one, "only_a": one.clone()}, {"x": one, "only_b": one.clone()})
    assert not verdict.same
    a, b = sorted(verdict.differences)
    assert re.fullmatch(r"only_a: missing in .*b\.safetensors", a)
    assert re.fullmatch(r"only_b: missing in .*a\.safetensors", b)


def test_dtypes_and_shapes_are_listed_with_both_values(pair):
    a = {"x": torch.ones(2), "y": torch.ones(2, 3), "z": torch.ones(4)}
    b = {"x": torch.ones(2, dtype=torch.bfloat16), "y": torch.ones(3, 2), "z": torch.ones(4)}
    x, y = sorted(pair(a, b).differences)
    assert x == "x: dtype F32 and BF16"
    assert "shape [2, 3] in" in y
    assert "[3, 2] in" in y


def test_the_first_differing_element_both_values_and_the_largest_gap_are_named(pair):
    a = {"x": torch.arange(12.0).reshape(3, 4), "y": torch.zeros(2)}
    b = {name: x.clone() for name, x in a.items()}
    b["x"][1, 2] += 0.5
    b["x"][1, 3] -= 4
    b["x"][2, 0] = 8.25
    (said,) = pair(a, b).differences
    assert said.startswith("x: 3 of 12 elements differ; first at [1, 2]: 6.0 (")
    assert "a.safetensors) and 6.5 (" in said
    assert said.endswith("max abs difference 4")


def test_every_difference_of_every_tensor_is_listed_in_order(pair):
    a = {f"t{i}": torch.full((3,), float(i)) for i in range(30)}
    b = {name: x + (1 if int(name[1:]) % 3 == 0 else 0) for name, x in a.items()}
    found = [line.partition(":")[0] for line in pair(a, b).differences]
    assert sorted(found, key=lambda name: int(name[1:])) == [f"t{i}" for i in range(0, 30, 3)]


def test_comparison_is_by_bits_unless_a_tolerance_is_given(pair):
    nan = float("nan")
    a = {"x": torch.tensor([0.0, nan, 1.0])}
    assert pair(a, {"x": a["x"].clone()}).same  # the same NaN
    (said,) = pair(a, {"x": torch.tensor([-0.0, nan, 1.0])}).differences
    assert "first at [0]: 0.0" in said
    assert pair(a, {"x": torch.tensor([-0.0, nan, 1.0])}, atol=1e-9).same
    other = a["x"].view(torch.int32).clone()
    other[1] += 1  # another NaN
    assert not pair(a, {"x": other.view(torch.float32)}).same


def test_tolerances_compare_values_across_dtypes(pair):
    x = torch.linspace(-3, 3, 101)
    a, b = {"x": x}, {"x": x.to(torch.bfloat16)}
    assert not pair(a, b).same
    assert pair(a, b, rtol=2**-8).same
    assert not pair(a, b, rtol=2**-12).same
    assert pair(a, b, atol=2**-7).same
    (said,) = pair(
        {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 2.5])}, atol=0.1
    ).differences
    assert "first at [1]: 2.0" in said
    infinite = {"x": torch.tensor([float("inf"), float("nan")])}
    assert pair(infinite, {"x": infinite["x"].clone()}, rtol=0.1).same
    assert not pair(infinite, {"x": -infinite["x"]}, rtol=0.1).same


def test_a_tolerance_does_not_make_integers_floats(pair):
    (said,) = pair(
        {"x": torch.ones(2, dtype=torch.int32)}, {"x": torch.ones(2)}, rtol=0.1
    ).differences
    assert said == "x: dtype I32 and F32"


def test_scalars_and_empty_tensors_are_compared(pair):
    a = {"s": torch.tensor(1.0), "e": torch.zeros(0, 3)}
    assert pair(a, {k: x.clone() for k, x in a.items()}).same
    (said,) = pair(a, {"s": torch.tensor(3.0), "e": torch.zeros(0, 3)}).differences
    assert said.startswith("s: 1 of 1 element differs; first at []: 1.0")


def test_any_two_formats_and_layouts_of_one_model_are_equal(hf, tmp_path):
    reshard(hf, tmp_path / "a", tp=2, pp=2, make_vocab_size_divisible_by=4, run=QUIET)
    reshard(hf, tmp_path / "b", tp=4, pp=1, safe_serialization=False, run=QUIET)
    merge(hf, tmp_path / "one.bin", run=QUIET)
    merge(hf, tmp_path / "split", max_shard_size=5000, run=QUIET)
    places = [hf, *(tmp_path / name for name in ("a", "b", "one.bin", "split"))]
    for left in places:
        for right in places:
            verdict = verify(left, right)
            assert verdict.same, (left, right, verdict.differences)
            assert verdict.tensors >= 39


def test_one_changed_element_is_found_through_any_layout_at_its_logical_place(hf, tmp_path):
    case = raw("llama", layers=4)
    name = "model.layers.3.self_attn.v_proj.weight"
    reshard(hf, tmp_path / "a", tp=4, pp=2, run=QUIET)
    stored_name = "decoder.layers.3.self_attention.linear_qkv.weight"
    # Row 7 of v is row 1 of KV head 1: 4 query, k, v blocks of 6 rows; ranks hold 12 of 48 rows.
    row = 24 + 12 + 6 + 1
    path = tmp_path / "a" / f"model_tp_{row // 12}_pp_1.safetensors"
    was = load_tensors(path)[stored_name][row % 12, 3]
    assert was == case.state[name][7, 3]
    poke(path, stored_name, row % 12 * 16 + 3, was + 1)
    (said,) = verify(hf, tmp_path / "a").differences
    assert said.startswith(f"{name}: 1 of 192 elements differs; first at [7, 3]: {was.item()} (")
    assert "max abs difference 1" in said


def test_a_replica_that_differs_is_a_difference_on_either_side(hf, tmp_path):
    reshard(hf, tmp_path / "a", tp=2, pp=1, run=QUIET)
    poke(tmp_path / "a" / "model_tp_1_pp_0.safetensors", "decoder.final_layernorm.weight", 5, 0.5)
    for pair in ((hf, tmp_path / "a"), (tmp_path / "a", hf)):
        verdict = verify(*pair)
        assert any(
            "model.norm.weight: 1 of 16 elements differs" in line for line in verdict.differences
        )
    verdict = verify(tmp_path / "a")
    assert any("model.norm.weight" in line for line in verdict.differences)
    first = replace(QUIET, compare_replicas=False)
    assert verify(hf, tmp_path / "a", run=first).same


def test_a_category_on_one_side_only_is_a_difference_unless_weights_only(trained, tmp_path):
    merge(trained, tmp_path / "out", run=QUIET)
    for pair in ((trained, tmp_path / "out"), (tmp_path / "out", trained)):
        said = "\n".join(verify(*pair).differences)
        for part in (
            "optimizer state exp_avg: only in",
            "optimizer state exp_avg_sq: only in",
            "state param_groups: only in",
            "state step: only in",
            "expected, the format hf has no place for it (--weights-only",
        ):
            assert part in said
        assert verify(*pair, weights_only=True).same


def test_state_that_differs_is_listed_by_key_with_both_values(trained, tmp_path):
    reshard(trained, tmp_path / "b", tp=1, run=QUIET)
    path = tmp_path / "b" / "checkpoint.json"
    table = json.loads(path.read_text())
    table["schedule"]["last"] = 8
    del table["data"]
    path.write_text(json.dumps(table))
    data, schedule = sorted(verify(trained, tmp_path / "b").differences)
    assert data.startswith("state data: only in")
    assert schedule == "state schedule.last: 7 and 8"


def test_a_state_tensor_that_one_side_lacks_is_a_difference(tmp_path):
    case = raw("llama", layers=4)
    weights = stored(case.config, case.state, 1, 1)
    some = {k: x for k, x in case.numbered(100_000).items() if "layers.2." not in k}
    for name, values in (("a", case.numbered(100_000)), ("b", some)):
        packed = pack_states(case.config, {"exp_avg": values}, 1, 1)
        write_native(tmp_path / name, case.config, weights, packed)
    found = verify(tmp_path / "a", tmp_path / "b").differences
    assert len(found) == 9
    assert all(line.startswith("exp_avg/model.layers.2.") for line in found)


def test_padding_rows_of_one_side_are_noted_and_no_difference(hf, trained):
    verdict = verify(hf, trained, weights_only=True)
    assert verdict.same
    assert any("padding rows of one side only" in line for line in verdict.notes)


def with_random_states(folder, tp=2, count=2):
    case = raw("llama", start=1, layers=4)
    ranks = stored(case.config, case.state, tp, 1, multiple=4)
    return write_native(folder, case.config, ranks, multiple=4, random_states=count)


def test_random_states_are_compared_byte_for_byte_where_the_layouts_are_one(tmp_path):
    a, b = with_random_states(tmp_path / "a"), with_random_states(tmp_path / "b")
    assert verify(a, b).same
    path = tmp_path / "b/random_states_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (line,) = verify(a, b).differences
    assert "random_states_1.safetensors" in line
    assert verify(a, b, weights_only=True).same
    path.unlink()
    assert verify(a, b).differences == [f"state {path.name}: only in {a}"]


def test_random_states_of_two_layouts_are_said_and_no_difference(tmp_path):
    a, b = with_random_states(tmp_path / "a"), with_random_states(tmp_path / "b", 1, 1)
    for pair in ((a, b), (b, a)):
        verdict = verify(*pair)
        assert verdict.same
        (line,) = [line for line in verdict.notes if line.startswith("random states")]
        assert f" in {a}" in line
        assert f" in {b}" in line
        assert "layouts differ" in line
        assert not any("random states" in n for n in verify(*pair, weights_only=True).notes)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_beyond_vocab_size_are_cut_from_a_hugging_face_folder(tied, tmp_path):
    case = raw("llama", start=1, layers=4, tie_word_embeddings=tied)
    write_hf(tmp_path / "hf", case)
    read = ReadOptions(vocab_size=17)
    report = merge(tmp_path / "hf", tmp_path / "cut", read=read, run=QUIET)
    assert any("padding rows" in line for line in report.lines())
    assert any("model.embed_tokens.weight: rows 17 to 20 are padding" in n for n in report.notes)
    want = {n: x[:17] if x.shape[0] == 21 else x for n, x in case.state.items()}
    assert_same(load_hf(tmp_path / "cut"), want)
    assert json.loads((tmp_path / "cut/config.json").read_text())["vocab_size"] == 17
    reshard(tmp_path / "hf", tmp_path / "s", tp=2, make_vocab_size_divisible_by=4, read=read,
            run=QUIET)  # fmt: skip
    assert json.loads((tmp_path / "s/config.json").read_text())["vocab_size"] == 17
    assert json.loads((tmp_path / "s/checkpoint.json").read_text())["vocab_size"] == 17
    merge(tmp_path / "s", tmp_path / "again", run=QUIET)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "cut")


def test_a_vocab_size_beyond_the_rows_is_refused(hf, tmp_path):
    with pytest.raises(CheckpointError, match=r"embed_tokens.*21.*--vocab-size 22.*22"):
        merge(hf, tmp_path / "x", read=ReadOptions(vocab_size=22), run=QUIET)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("tool", ["reshard", "inspect_ckpt", "verify_ckpt"])
def test_an_output_that_cannot_be_printed_is_named_without_a_traceback(tool, hf, tmp_path):
    more = ["--tp", "2", "--pp", "1", "--output", tmp_path / "out"] if tool == "reshard" else []
    code = f"import sys; from shardwright.tools import {tool}; sys.exit({tool}.main())"
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code, hf, *more], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == (2 if tool == "verify_ckpt" else 1)
    assert run.stderr.startswith("error: standard output: No space left on device")
    assert "Traceback" not in run.stderr
    if tool == "reshard":
        assert f"{tmp_path / 'out'} was published and is whole" in run.stderr


def test_a_run_goes_on_where_its_progress_cannot_be_printed(hf, tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress, "LINE_SECONDS", -1.0)
    monkeypatch.setattr(sys, "stderr", Full())
    reshard(hf, tmp_path / "full", tp=2, pp=1, run=RunOptions(quiet=False))
    monkeypatch.setattr(sys, "stderr", None)  # as in a process whose streams are closed
    reshard(hf, tmp_path / "closed", tp=2, pp=1, run=RunOptions(quiet=False))
    monkeypatch.undo()
    assert verify(tmp_path / "full", tmp_path / "closed").same


def test_a_current_folder_that_is_gone_is_said(hf, cli, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for argv in (["inspect-ckpt"], ["reshard", hf, "--tp", "2", "--output", "x"]):
        answer = cli(*argv)
        assert answer.code == 1
        assert answer.err.startswith("error: the current folder")


def test_one_checkpoint_is_checked_against_its_own_digests(hf, tmp_path):
    run = replace(QUIET, checksum=True)
    reshard(hf, tmp_path / "shards", tp=2, pp=2, run=run)
    merge(hf, tmp_path / "folder", max_shard_size=5000, run=run)
    for name in ("shards", "folder"):
        verdict = verify(tmp_path / name)
        assert verdict.same
        weights = list((tmp_path / name).glob("*.safetensors"))
        (said,) = [line for line in verdict.notes if "digests" in line]
        assert f"{len(weights)} of {len(weights)}" in said
        path = sorted(weights)[1]
        poke(path, next(iter(load_tensors(path))), 0, -1.0)
        found = [line for line in verify(tmp_path / name).differences if "is recorded" in line]
        assert len(found) == 1
        assert path.name in found[0]


def test_digests_are_xxh3_128_of_the_files(hf, tmp_path):
    xxhash = pytest.importorskip("xxhash")
    reshard(hf, tmp_path / "a", tp=2, run=replace(QUIET, checksum=True))
    table = json.loads((tmp_path / "a" / "checkpoint.json").read_text())["files"]
    assert sorted(table) == ["model_tp_0_pp_0.safetensors", "model_tp_1_pp_0.safetensors"]
    for name, row in table.items():
        data = (tmp_path / "a" / name).read_bytes()
        assert row == {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    report = merge(hf, tmp_path / "one.bin", run=replace(QUIET, checksum=True))
    data = (tmp_path / "one.bin").read_bytes()
    assert report.digests == {"one.bin": xxhash.xxh3_128_hexdigest(data)}


# --- commands: one after another ----------------------------------------------------------------


def test_the_whole_way_by_commands(hf, cli, tmp_path):
    assert cli("reshard", hf, "--tp", 2, "--pp", 2).code == 0
    shards = tmp_path / "hf-tp2-pp2"
    case = raw("llama", layers=4)
    assert_same_ranks(load_ranks(shards), stored(case.config, case.state, 2, 2))
    assert (
        cli("reshard", shards, "--tp", 4, "--pp-layers", "1,3", "--output", tmp_path / "b").code
        == 0
    )
    wanted = stored(case.config, case.state, 4, 2, pp_layers=(1, 3))
    assert_same_ranks(load_ranks(tmp_path / "b"), wanted)
    answer = cli("merge-ckpt", tmp_path / "b", "--verify")
    assert answer.code == 0
    assert "verified: 39 tensors equal" in answer.out
    assert sorted(p.name for p in (tmp_path / "b-hf").iterdir() if p.is_file()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_own.py",
        "tokenizer.json",
    ]
    assert_same(load_hf(tmp_path / "b-hf"), case.state)
    answer = cli("verify-ckpt", hf, tmp_path / "b-hf")
    assert answer.code == 0
    assert "equal: 39 tensors" in answer.out
    answer = cli("verify-ckpt", shards)
    assert answer.code == 0
    assert "sound" in answer.out


@pytest.mark.parametrize(
    "how", ["positional", "--checkpoint-dir", "--load-dir", "--load", "cwd", "dot", "link", "slash"]
)
def test_the_checkpoint_is_named_in_any_of_these_ways(how, trained, cli, monkeypatch, tmp_path):
    """A default output is a sibling of DIR, of a link where one was typed."""
    args: list[object] = ["--tp", 1, "--pp", 1, "--quiet"]
    if how == "cwd":
        monkeypatch.chdir(trained)
    elif how == "dot":
        monkeypatch.chdir(trained)
        args.append(".")
    elif how == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "link").symlink_to(trained)
        args.append(tmp_path / "elsewhere" / "link")
    elif how == "slash":
        args.append(f"{trained}/")
    else:
        args += [trained] if how == "positional" else [how, trained]
    assert cli("reshard", *args).code == 0
    beside = tmp_path / ("elsewhere/link" if how == "link" else "checkpoint-1000")
    made = beside.with_name(f"{beside.name}-tp1-pp1")
    assert (made / "model_tp_0_pp_0.safetensors").is_file()


def test_merging_inside_a_checkpoint_folder_writes_a_sibling(trained, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(trained)
    assert cli("merge-ckpt", "--quiet").code == 0
    assert (tmp_path / "checkpoint-1000-hf" / "model.safetensors").is_file()
    assert cli("inspect-ckpt").code == 0
    assert cli("verify-ckpt").code == 0


@pytest.mark.parametrize(
    "spelled",
    [
        ["--tp", "4", "--pp", "1"],
        ["--tp=4", "--pp=1"],
        ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "1"],
        ["--tensor_model_parallel_size", "4", "--pipeline_model_parallel_size", "1"],
        ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "1"],
        ["--target_tensor_parallel_size=4", "--target_pipeline_parallel_size=1"],
    ],
    ids=" ".join,
)
def test_mesh_sizes_have_their_aliases_with_dashes_and_underscores(spelled, trained, cli, tmp_path):
    assert cli("reshard", trained, *spelled, "--save_dir", tmp_path / "a_b", "--quiet").code == 0
    case = raw("llama", layers=4)
    wanted = stored(case.config, case.state, 4, 1, multiple=4)
    assert_same_ranks(load_ranks(tmp_path / "a_b"), wanted)


def test_underscores_of_values_are_left_alone(hf, cli, tmp_path):
    out = tmp_path / "my_out"
    answer = cli(
        "merge-ckpt", hf, f"--output={out}", "--max_shard_size=5KB", "--no_safe_serialization"
    )
    assert answer.code == 0
    assert (out / "pytorch_model.bin.index.json").is_file()


# --- commands: what they say --------------------------------------------------------------------


def test_exit_codes_are_0_done_1_refused_or_different_2_usage_or_for_verify_unreadable(
    trained, hf, cli, monkeypatch, tmp_path
):
    merge(hf, tmp_path / "same.safetensors", run=QUIET)
    merge(hf, tmp_path / "cast", dtype="bf16", run=QUIET)
    made = reshard(hf, tmp_path / "made", tp=2, run=QUIET).output
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    done = [
        ("verify-ckpt", hf, tmp_path / "same.safetensors"),
        ("verify-ckpt", hf, tmp_path / "cast", "--rtol", 0.01),
        ("verify-ckpt", trained, hf, "--weights-only"),
        ("inspect-ckpt", trained),
        ("reshard", trained, "--tp", 1, "--dry-run"),
    ]
    refused = [
        ("verify-ckpt", hf, tmp_path / "cast"),
        ("verify-ckpt", trained, hf),
        ("inspect-ckpt", empty),
        ("inspect-ckpt", trained, "--tensor", "lm_head.wait"),
        ("reshard", trained, "--tp", 3),
        ("reshard", trained, "--tp", 0),
        ("reshard", trained, "--pp", 3),
        ("reshard", trained, "--tp", 1, "--output", trained / "inside"),
        ("reshard", trained, "--tp", 1, "--output", hf),
        ("merge-ckpt", trained, "--from-master"),
        ("merge-ckpt", trained, "--max-shard-size", "many"),
        ("merge-ckpt", trained, "--dtype", "int4"),
        ("merge-ckpt", trained, "--layout", "qkv"),
        ("merge-ckpt", trained, "--workers", 0),
        ("merge-ckpt", trained, "--memory-budget", "-1"),
    ]
    unreadable = [
        ("verify-ckpt", tmp_path / "absent"),
        ("verify-ckpt", hf, empty),
        ("verify-ckpt", made, hf, "--layout-a", "qkv=flat"),
        ("verify-ckpt", hf, trained, "--iteration-b", 7),
    ]
    usage = [
        ("reshard", trained),  # no layout named
        ("reshard", "--tp", 1),  # no checkpoint here
        ("reshard", trained, "--load", trained, "--tp", 1),
        ("reshard", trained, "--tp", "two"),
        ("reshard", trained, "--pp-layers", "1;3"),
        ("reshard", trained, "--tensor-parallel", 2),
        ("reshard", trained, "--tens", 2),  # abbreviations are not guessed
        ("merge-ckpt",),
        ("merge-ckpt", trained, "--verify", "--dry-run"),
        ("inspect-ckpt",),
        ("verify-ckpt", hf, hf, "--rtol", "-1"),
        ("verify-ckpt", hf, hf, "--rtol", "nan"),
        ("verify-ckpt", hf, hf, hf),
        ("verify-ckpt", trained, hf, "--replicas", "last"),
        ("verify-ckpt", trained, hf, "--vocab-size", 21),
        ("verify-ckpt", trained, "--vocab-size-b", 21),
    ]
    before = files_of(tmp_path)
    for code, calls in enumerate((done, refused, usage)):
        for call in calls:
            answer = cli(*call)
            assert answer.code == code, (call, answer)
            assert "Traceback" not in answer.err
            if code == 1 and call[0] != "verify-ckpt":
                assert answer.err.startswith("error: ")
                assert not answer.out
            if code == 2:
                assert answer.err.startswith("usage: ")
    for call in unreadable:
        answer = cli(*call)
        assert answer.code == 2, (call, answer)
        assert answer.err.startswith("error: ")
    assert files_of(tmp_path) == before


def test_a_usage_error_is_short_and_names_the_option_that_was_meant(trained, cli):
    answer = cli("reshard", trained, "--tensor-paralel-size", 2, "--tp", 1)
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 2
    assert "--tensor-paralel-size: did you mean --" in answer.err
    assert "--help" in answer.err
    answer = cli("merge-ckpt", trained, "--max-shard-sise=5GB")
    assert "did you mean --max-shard-size?" in answer.err
    answer = cli("merge-ckpt", trained, "--xyzzyq", 1)
    assert "did you mean" not in answer.err


def test_an_error_is_one_line_that_names_file_and_values(trained, cli):
    (trained / "model_tp_1_pp_0.safetensors").unlink()
    answer = cli("merge-ckpt", trained)
    assert answer.code == 1
    assert answer.err.count("\n") == 1
    assert "model_tp_1_pp_0.safetensors: is missing" in answer.err
    assert "tp=2 pp=2" in answer.err


def test_an_existing_output_needs_overwrite(hf, cli, tmp_path):
    out = tmp_path / "out"
    assert cli("reshard", hf, "--tp", 2, "--output", out, "--quiet").code == 0
    before = files_of(out)
    answer = cli("reshard", hf, "--tp", 4, "--output", out)
    assert answer.code == 1
    assert "--overwrite" in answer.err
    assert files_of(out) == before
    assert cli("reshard", hf, "--tp", 4, "--output", out, "--overwrite", "--quiet").code == 0
    case = raw("llama", layers=4)
    assert_same_ranks(load_ranks(out), stored(case.config, case.state, 4, 1))


def test_a_dry_run_prints_files_bytes_and_memory_and_writes_nothing(trained, cli, tmp_path):
    before = files_of(tmp_path)
    for call in (
        ("reshard", trained, "--tp", 4, "--pp", 1, "--dp", 2, "--dry-run"),
        ("merge-ckpt", trained, "--max-shard-size", "8KB", "--dry-run"),
    ):
        answer = cli(*call)
        assert answer.code == 0
        assert files_of(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == [trained.name]
        for part in ("would write", "peak memory about", "read ", "written "):
            assert part in answer.out
        assert re.search(
            r"^ {2}\S+_tp_3_pp_0_dp_1\.safetensors {2}\d", answer.out, re.M
        ) or re.search(r"^ {2}model-00003-of-\d{5}\.safetensors {2}\d", answer.out, re.M)


def test_the_closing_report_says_what_became_of_everything(trained, cli, tmp_path):
    answer = cli("reshard", trained, "--tp", 4, "--pp", 1, "--output", tmp_path / "b")
    assert answer.code == 0
    for part in (
        f"wrote {tmp_path / 'b'}: 8 files",
        "read ",
        "written ",
        "rows filled with",
        "replicas: ",
        "compared, equal",
        "/s",
    ):
        assert part in answer.out
    answer = cli("merge-ckpt", trained, "--output", tmp_path / "c")
    assert "dropped 2 tensors" in answer.out
    assert "optimizer and training state left out" in answer.out
    answer = cli("reshard", trained, "--tp", 1, "--weights-only", "--replicas", "first")
    assert "left out (--weights-only)" in answer.out
    assert "not compared (--replicas first)" in answer.out


def test_quiet_prints_errors_only(trained, cli, tmp_path):
    for call in (
        ("reshard", trained, "--tp", 1, "--quiet"),
        ("merge-ckpt", trained, "--verify", "--quiet"),
        ("verify-ckpt", trained, trained, "--quiet"),
    ):
        assert cli(*call) == Answer(0, "", "")
    answer = cli("reshard", trained, "--tp", 3, "--quiet")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err


def test_verify_of_a_merge_sees_the_cast_and_the_masters(tmp_path, cli):
    case = raw("llama-tied", layers=4)
    values = {"master": case.numbered(300_000)}
    source = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 2, 2),
        pack_states(case.config, values, 2, 2),
    )
    for number, options in enumerate(
        (
            ["--dtype", "bf16"],
            ["--from-master"],
            ["--from-master", "--dtype", "fp16"],
            ["--max-shard-size", "5KB"],
            ["--no-safe-serialization"],
        )
    ):
        for name in (f"{number}", f"{number}.safetensors"):
            if name.endswith("s") and number > 2:
                continue
            answer = cli("merge-ckpt", source, *options, "--verify", "--output", tmp_path / name)
            assert answer.code == 0, answer
            assert "verified: " in answer.out


def test_verify_prints_each_difference_and_the_verdict(hf, cli, tmp_path):
    merge(hf, tmp_path / "other", run=QUIET)
    poke(tmp_path / "other" / "model.safetensors", "model.norm.weight", 2, 0.25)
    answer = cli("verify-ckpt", hf, tmp_path / "other")
    assert answer.code == 1
    first, *_, last = answer.out.splitlines()
    assert first.startswith("differs: model.norm.weight: 1 of 16 elements differs; first at [2]")
    assert last.startswith("different: 1 tensors differ; 39 tensors compared")
    answer = cli("verify-ckpt", hf, tmp_path / "other", "--json")
    table = json.loads(answer.out)
    assert answer.code == 1
    assert table["same"] is False
    (row,) = table["differences"]
    assert row["name"] == "model.norm.weight"
    assert (row["elements"], row["of"]) == (1, 16)
    assert row["first"]["index"] == [2]
    assert row["max_abs"] == abs(load_hf(hf)["model.norm.weight"][2].item() - 0.25)
    answer = cli("verify-ckpt", "--load", hf, tmp_path / "other")
    assert answer.code == 1


# --- inspect-ckpt -------------------------------------------------------------------------------


def test_inspect_says_format_family_mesh_step_sizes_and_layers(trained, cli):
    answer = cli("inspect-ckpt", trained, "--json")
    assert answer.code == 0
    table = json.loads(answer.out)
    case = raw("llama", layers=4)
    assert table["format"] == "shards"
    assert table["family"] == "llama"
    assert table["mesh"] == {"tp": 2, "pp": 2, "dp": 1}
    assert table["pp_layers"] == [2, 2]
    assert table["step"] == 1000
    assert table["parameters"] == sum(x.numel() for x in case.state.values())
    assert table["tensors"] == len(case.state)
    assert table["dtypes"] == {"F32": table["parameters"]}
    assert table["vocab_size"] == 21
    assert table["padded_vocab_size"] == 24
    assert table["optimizer_states"] == ["exp_avg", "exp_avg_sq"]
    assert table["state"] == ["data", "param_groups", "schedule", "step"]
    assert table["layout"]["qkv"] == "per_group"
    assert table["side_files"] == ["config.json", "tokenizer.json"]
    files = {row["name"]: row for row in table["files"]}
    assert len(files) == 8
    assert table["bytes"] == sum(row["bytes"] for row in files.values())
    row = files["model_tp_1_pp_1.safetensors"]
    assert row["rank"] == "tp 1 pp 1"
    assert row["layers"] == "2-3"
    assert row["bytes"] == (trained / row["name"]).stat().st_size
    assert row["tensors"] == len(load_tensors(trained / row["name"]))
    text = cli("inspect-ckpt", trained).out
    for part in (
        "llama",
        "tp=2 pp=2",
        "1000",
        "21, padded to 24",
        "exp_avg, exp_avg_sq",
        "model_tp_1_pp_0.safetensors",
        "0-1",
    ):
        assert part in text


def test_inspect_of_a_tensor_shows_its_boxes_and_statistics(trained, cli):
    case = raw("llama", layers=4)
    name = "model.layers.2.self_attn.k_proj.weight"
    x = case.state[name]
    table = json.loads(cli("inspect-ckpt", trained, "--tensor", name, "--json").out)
    assert (table["name"], table["shape"], table["dtype"]) == (name, [12, 16], "F32")
    boxes = table["boxes"]
    assert [box["file"] for box in boxes] == [f"model_tp_{t}_pp_1.safetensors" for t in (0, 1)]
    assert [(box["offsets"], box["sizes"]) for box in boxes] == [
        ([0, 0], [6, 16]),
        ([6, 0], [6, 16]),
    ]
    for box in boxes:
        data = (trained / box["file"]).read_bytes()[box["offset_bytes"] :]
        (rows, start) = (box["sizes"][0], box["offsets"][0])
        found = np.frombuffer(data[: rows * 64], "<f4").reshape(rows, 16)
        assert np.array_equal(found, x[start : start + rows].numpy())
    stats = table["statistics"]
    assert stats["min"] == x.min().item()
    assert stats["max"] == x.max().item()
    assert stats["mean"] == pytest.approx(x.double().mean().item())
    assert stats["std"] == pytest.approx(x.double().std(correction=0).item(), rel=1e-3)
    assert (stats["zeros"], stats["nan"], stats["inf"]) == (0, 0, 0)
    text = cli("inspect-ckpt", trained, "--tensor", name).out
    assert name in text
    assert "box at [6, 0] of size [6, 16]" in text


def test_statistics_count_what_is_not_a_number(tmp_path, cli):
    nan, inf = float("nan"), float("inf")
    state = {
        "x": torch.tensor([[nan, inf, -inf], [0.0, -0.0, 3.0]]),
        "all": torch.full((2,), nan),
        "none": torch.zeros(0),
        "one": torch.tensor(2.0, dtype=torch.bfloat16),
    }
    save_file(state, tmp_path / "x.safetensors")

    def stats(name: str) -> dict[str, float]:
        answer = cli("inspect-ckpt", tmp_path / "x.safetensors", "--tensor", name, "--json")
        return json.loads(answer.out)["statistics"]

    assert stats("x") == {
        "min": 0,
        "max": 3,
        "mean": 1,
        "std": 2**0.5,
        "zeros": 2,
        "nan": 1,
        "inf": 2,
    }
    assert stats("all") == {"zeros": 0, "nan": 2, "inf": 0}
    assert stats("none") == {"zeros": 0, "nan": 0, "inf": 0}
    assert stats("one")["max"] == 2


def test_a_misspelled_tensor_is_answered_with_near_names(trained, cli):
    answer = cli("inspect-ckpt", trained, "--tensor", "model.layers.2.self_attn.kproj.weight")
    assert answer.code == 1
    assert "model.layers.2.self_attn.k_proj.weight" in answer.err


def test_inspect_reads_every_format(hf, cli, tmp_path):
    reshard(hf, tmp_path / "bin", tp=2, pp=2, safe_serialization=False, run=QUIET)
    merge(hf, tmp_path / "one.bin", run=QUIET)
    case = raw("llama", layers=4)
    count = sum(x.numel() for x in case.state.values())
    for path in (hf, tmp_path / "bin", tmp_path / "one.bin"):
        table = json.loads(cli("inspect-ckpt", path, "--json").out)
        assert table["parameters"] == count
    foreign = independent.write_foreign(
        tmp_path / "foreign", stored(case.config, case.state, 2, 2, multiple=4)
    )
    answer = cli("inspect-ckpt", foreign, "--config", hf, "--layout", "qkv=per_rank")
    assert answer.code == 0
    assert "qkv=per_rank" in answer.out


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "merge-ckpt",
            "--checkpoint-dir --load-dir --load --output --dtype --max-shard-size "
            "--config --from-master --verify --dry-run --memory-budget --workers "
            "--overwrite --resume --replicas --checksum --quiet",
        ),
        (
            "reshard",
            "--checkpoint-dir --load-dir --load --tp --pp --dp --pp-layers --output --dtype "
            "--no-safe-serialization --weights-only --tensor-model-parallel-size "
            "--target-tensor-parallel-size --pipeline-model-parallel-size "
            "--target-pipeline-parallel-size --dry-run --memory-budget --workers "
            "--overwrite --resume --replicas --checksum --quiet --config --layout "
            "--vocab-size",
        ),
        ("inspect-ckpt", "--checkpoint-dir --tensor --json --config --layout --vocab-size"),
        (
            "verify-ckpt",
            "--checkpoint-dir --rtol --atol --weights-only --memory-budget --workers "
            "--replicas --quiet --json",
        ),
    ],
)
def test_help_names_every_option_of_a_command(command, options, cli):
    answer = cli(command, "--help")
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.startswith(f"usage: {command} ")
    found = set(re.findall(r"--[a-z-]+", answer.out))
    assert set(options.split()) <= found
    codes = "0 done, 1 refused or different, 2 usage"
    if command == "verify-ckpt":
        codes = "0 the same or sound, 1 different or damaged, 2 cannot be read, or usage"
    assert f"exit codes: {codes}" in " ".join(answer.out.split())


@pytest.mark.parametrize("budget", ["64KiB", "1MB", "40000"])
def test_any_memory_budget_and_number_of_workers_gives_the_same_bytes(
    budget, trained, tmp_path, cli
):
    usual = tmp_path / "usual"
    assert cli("reshard", trained, "--tp", 4, "--pp", 1, "--output", usual, "--quiet").code == 0
    for workers in (1, 3):
        out = tmp_path / f"{workers}"
        answer = cli(
            "reshard",
            trained,
            "--tp",
            4,
            "--pp",
            1,
            "--output",
            out,
            "--quiet",
            "--memory-budget",
            budget,
            "--workers",
            workers,
        )
        assert answer.code == 0
        assert files_of(out) == files_of(usual)


def test_tensors_larger_than_the_tiles_are_moved_whole(tmp_path):
    """2 MB tensors through 16 KiB tiles: rows, columns, a transpose and interleaved rows."""
    for variant in ("llama-bias", "gpt2"):
        case = raw(variant, heads=(8, 8), head_dim=32, hidden=256, ffn=384, layers=1, vocab=301)
        hf = write_hf(tmp_path / f"{variant}-hf", case)
        tight = replace(QUIET, memory_budget=1 << 16)
        reshard(hf, tmp_path / f"{variant}-a", tp=4, run=tight)
        wanted = stored(case.config, case.state, 4, 1)
        assert_same_ranks(load_ranks(tmp_path / f"{variant}-a"), wanted)
        reshard(tmp_path / f"{variant}-a", tmp_path / f"{variant}-b", tp=2, run=tight)
        merge(tmp_path / f"{variant}-b", tmp_path / f"{variant}.bin", run=tight)
        assert_same(load_hf(tmp_path / f"{variant}.bin"), case.state)


def test_the_options_of_a_foreign_source_reach_the_reader(hf, cli, tmp_path):
    case = raw("llama", layers=4)
    ranks = stored(case.config, case.state, 2, 2, multiple=4, qkv="per_rank", glu="flat")
    foreign = independent.write_foreign(tmp_path / "foreign", ranks)
    named = ["--config", hf, "--layout", "qkv=per_rank", "--layout", "glu=flat"]
    answer = cli("merge-ckpt", foreign, *named, "--output", tmp_path / "out", "--verify")
    assert answer.code == 0, answer
    assert_same(load_hf(tmp_path / "out"), case.state)
    assert "assumed layout qkv=per_rank, glu=flat" in answer.out
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    answer = cli("reshard", foreign, *named, "--tp", 4, "--pp", 1, "--output", tmp_path / "b")
    assert answer.code == 0
    about_b = [f"{word}-b" if str(word).startswith("--") else word for word in named]
    answer = cli("verify-ckpt", hf, foreign, *about_b, "--weights-only")
    assert answer.code == 0, answer
    answer = cli("verify-ckpt", hf, foreign, *named, "--weights-only")
    assert answer.code == 2
    assert "which of the two? use --config-a or --config-b" in answer.err


# --- progress -----------------------------------------------------------------------------------


def test_progress_is_a_bar_in_bytes_on_a_terminal(trained, tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    code = "import sys; from shardwright.tools.reshard import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-c", code, trained, "--tp", "1", "--pp", "1"],
        stdout=subprocess.PIPE,
        stderr=end,
        check=False,
        cwd=tmp_path,
    )
    os.close(end)
    said = os.read(main, 1 << 16).decode()
    os.close(main)
    assert run.returncode == 0
    assert "100%" in said
    assert "B/s" in said


def test_progress_is_plain_lines_elsewhere(trained, cli, monkeypatch):
    from shardwright.ckpt.move import progress

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    answer = cli("reshard", trained, "--tp", 1, "--pp", 1)
    assert answer.code == 0
    line = answer.err.splitlines()[-1]
    assert re.fullmatch(
        r"checkpoint-1000-tp1-pp1: \S+ \S+ of \S+ \S+ \(\S+ \S+/s, \d+ s left\)", line
    )
    assert "\r" not in answer.err


# --- what is imported ---------------------------------------------------------------------------

_HEAVY = ("torch", "transformers", "numpy", "safetensors", "tqdm", "hypothesis")


def imported(code: str, *args: object) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after ``code``."""
    tail = f"import sys; print('\\n', *[m for m in {_HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{tail}", *map(str, args)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def command(module: str) -> str:
    return f"import sys\nfrom shardwright.tools.{module} import main\nassert main() == 0"


def test_importing_ckpt_loads_no_heavy_module():
    assert imported("import shardwright.ckpt") == set()


@pytest.mark.parametrize("module", ["merge_ckpt", "reshard", "inspect_ckpt", "verify_ckpt"])
def test_help_loads_no_heavy_module(module):
    code = f"from shardwright.tools.{module} import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: pass"
    assert imported(code) == set()


_MEGATRON = ("megatron.classic.reader", "megatron.torch_dist.reader", "megatron.classic.writer",
             "megatron.torch_dist.writer")  # fmt: skip


@pytest.mark.parametrize("to", [[], ["--to", "megatron"]], ids=["shards", "megatron"])
def test_readers_and_writers_of_other_formats_are_not_imported(trained, to, tmp_path):
    code = (
        f"{command('reshard')}\n"
        f"print(*(n for n in {_MEGATRON!r} if 'shardwright.ckpt.formats.' + n in sys.modules))"
    )
    words = [trained, "--tp", "1", "--output", tmp_path / "x", "--dry-run", "--quiet", *to]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True
    )
    found = set(done.stdout.splitlines()[-1].split())
    assert found == ({"megatron.classic.writer"} if to else set())


def test_state_that_differs_is_named_down_to_its_value():
    a = {"groups": [{"lr": 0.1, "steps": [1, 3]}], "scale": 1.0}
    b = {"groups": [{"lr": 0.1, "steps": [1, 4]}]}
    assert first_apart("state", a, {**b, "scale": 1.0}) == ("state.groups[0].steps[1]", 3, 4)
    assert first_apart("state", a, {**a, "groups": []}) == ("state.groups", a["groups"], [])
    assert first_apart("state", {"scale": 1.0}, {}) == ("state.scale", 1.0, "absent")


@pytest.mark.parametrize(
    "module",
    ["merge_ckpt", "reshard", "inspect_ckpt", "verify_ckpt", "train_ckpt", "plan_layout"],
)
def test_a_command_runs_as_a_module_too(module):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"shardwright.tools.{module}", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_inspecting_loads_no_heavy_module(trained, hf, tmp_path):
    assert imported(command("inspect_ckpt"), trained) == set()
    assert imported(command("inspect_ckpt"), hf, "--json") == set()
    merge(hf, tmp_path / "one.bin", run=QUIET)
    assert imported(command("inspect_ckpt"), tmp_path / "one.bin") == set()


@pytest.mark.parametrize("safe", ["--safe-serialization", "--no-safe-serialization"])
def test_moving_and_comparing_load_neither_torch_nor_transformers(safe, trained, tmp_path):
    end = "safetensors" if safe.startswith("--safe") else "bin"
    first, second = tmp_path / "a", tmp_path / f"b.{end}"
    calls = [
        ("reshard", trained, "--tp", 1, "--pp", 1, safe, "--dtype", "bf16", "--output", first),
        ("merge_ckpt", first, "--verify", "--dtype", "fp32", "--output", second),
        ("verify_ckpt", first, second, "--weights-only", "--rtol", "0.1"),
    ]
    for module, *args in calls:
        assert imported(command(module), *args) <= {"numpy"}


def test_the_api_is_all_of_these_names():
    import shardwright.ckpt

    assert set(shardwright.ckpt.__all__) >= {
        "open_checkpoint",
        "reshard",
        "merge",
        "verify",
        "plan",
    }
    assert all(hasattr(shardwright.ckpt, name) for name in shardwright.ckpt.__all__)
    with pytest.raises(CheckpointError):
        open_checkpoint("/nowhere", config="/nowhere")
    assert issubclass(CheckpointError, ValueError)
    assert ReadOptions().layout == {}


@pytest.mark.parametrize(
    "words",
    [["reshard", "hf", "--tp", "2", "--output", "out"], ["merge-ckpt", "hf", "--output", "out"],
     ["inspect-ckpt", "hf"], ["inspect-ckpt", "hf", "--json"], ["verify-ckpt", "hf", "other"],
     ["verify-ckpt", "hf", "other", "--json"], ["verify-ckpt", "hf"]],
    ids=" ".join,
)  # fmt: skip
def test_a_reader_that_leaves_does_not_change_the_exit_code(words, hf, tmp_path):
    """`reshard ... | head -0` wrote its output and exited with 1."""
    shutil.copytree(hf, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    tool = words[0].replace("-", "_")
    script = f"from shardwright.tools.{tool} import main; raise SystemExit(main({words[1:]!r}))"
    got = []
    for closed in (False, True):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        reader, writer = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path
        )
        os.close(writer)
        if not closed:
            with os.fdopen(reader) as stream:
                assert stream.read()
        else:
            os.close(reader)
        _, err = child.communicate()
        assert b"Traceback" not in err
        got.append(child.returncode)
    assert got[0] == got[1] == (1 if "other" in words else 0)
