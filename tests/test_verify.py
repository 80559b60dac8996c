"""``verify-ckpt`` as a judge: what it counts, whom it believes, and what it compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from independent import load_tensors, poke, stored, write_foreign, write_native
from safetensors.torch import save_file
from strategies import raw, write_hf

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.verdict import Finding, Verdict
from shardwright.tools import verify_ckpt

QUIET = RunOptions(workers=1)


@pytest.fixture
def hf(tmp_path) -> Path:
    return write_hf(tmp_path / "hf", raw("llama", layers=4), sides=True)


@pytest.fixture
def pair(tmp_path):
    """The verdict on two bare files of the given tensors."""

    def compare(a, b, **options) -> Verdict:
        save_file(a, tmp_path / "a.safetensors")
        save_file(b, tmp_path / "b.safetensors")
        return verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **options)

    return compare


# --- what is counted ----------------------------------------------------------------------------


def test_an_element_that_every_replica_has_differently_counts_once(hf, tmp_path):
    reshard(hf, tmp_path / "a", tp=4, pp=1, run=QUIET)
    for rank in range(4):
        path = tmp_path / f"a/model_tp_{rank}_pp_0.safetensors"
        for at in (2, 7):
            poke(path, "decoder.layers.1.input_layernorm.weight", at, -3.0)
    for left, right in ((hf, tmp_path / "a"), (tmp_path / "a", hf)):
        (found,) = verify(left, right).findings
        assert found.name == "model.layers.1.input_layernorm.weight"
        assert (found.elements, found.numel, found.index) == (2, 16, (2,))


def test_elements_that_differ_in_one_replica_each_count_each(hf, tmp_path):
    reshard(hf, tmp_path / "a", tp=4, pp=1, run=QUIET)
    for rank in range(4):
        path = tmp_path / f"a/model_tp_{rank}_pp_0.safetensors"
        poke(path, "decoder.final_layernorm.weight", rank, -3.0)
    (found,) = verify(hf, tmp_path / "a").findings
    assert found.elements == 4


@pytest.mark.parametrize("budget", [1 << 20, 1 << 14])
def test_counts_do_not_depend_on_the_tiles(budget, tmp_path):
    """A changed row of a table of 64 KiB that two stages repeat, through tiles of 1 KiB."""
    case = raw("llama-tied", layers=4, vocab=1000)
    hf = write_hf(tmp_path / "hf", case)
    reshard(hf, tmp_path / "a", tp=2, pp=2, run=QUIET)
    case.state["model.embed_tokens.weight"][3] += 1
    case.state["model.embed_tokens.weight"][777] += 1
    other = write_hf(tmp_path / "other", case)
    run = RunOptions(workers=2, memory_budget=budget)
    for left, right in ((other, tmp_path / "a"), (tmp_path / "a", other)):
        (found,) = verify(left, right, run=run).findings
        assert (found.elements, found.numel, found.index) == (32, 16000, (3, 0))


def test_the_last_line_counts_the_tensors_that_differ_and_those_compared(hf, tmp_path, capsys):
    merge(hf, tmp_path / "b", run=QUIET)
    poke(tmp_path / "b/model.safetensors", "model.norm.weight", 2, 0.25)
    poke(tmp_path / "b/model.safetensors", "lm_head.weight", 2, 0.25)
    assert verify_ckpt.main([str(hf), str(tmp_path / "b")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("different: 2 tensors differ; 39 tensors compared, ")


# --- values -------------------------------------------------------------------------------------


def test_complex_values_are_compared_with_their_imaginary_part(pair):
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    y = x.clone()
    y[1] += 1j
    (found,) = pair({"x": x}, {"x": y}, atol=0.5).findings
    assert (found.elements, found.index, found.max_abs) == (1, (1,), 1.0)
    assert pair({"x": x}, {"x": y}, atol=1.0).same


FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


@pytest.mark.parametrize("kind", FLOAT8)
def test_codes_of_float8_are_compared_as_the_values_that_torch_gives_them(kind, tmp_path):
    codes = torch.arange(256, dtype=torch.uint8)
    for name, x in (("a", codes), ("b", codes.roll(1))):
        # torch's own save_file knows no e8m0 and fnuz: the header is made by hand
        named = {
            torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
            torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
            torch.float8_e8m0fnu: "F8_E8M0",
        }[kind]  # fmt: skip
        table = {"x": {"dtype": named, "shape": [256], "data_offsets": [0, 256]}}
        head = json.dumps(table).encode()
        data = len(head).to_bytes(8, "little") + head + x.numpy().tobytes()
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    a, b = (codes.view(kind).double(), codes.roll(1).view(kind).double())
    atol = 0.25
    wrong = ~torch.isclose(a, b, rtol=0, atol=atol, equal_nan=True)
    sides = [tmp_path / f"{n}.safetensors" for n in "ab"]
    (found,) = verify(*sides, atol=atol).findings
    assert found.elements == int(wrong.sum())
    gap = (a - b).abs()[wrong].nan_to_num(nan=0.0, posinf=float("inf"))
    assert found.max_abs == gap.max().item()
    (exact,) = verify(*sides).findings
    assert exact.elements == 256
    read = torch.from_numpy(open_checkpoint(sides[0])["x"][:])
    assert torch.equal(read.isnan(), a.isnan())
    assert torch.equal(read.nan_to_num(), a.float().nan_to_num())


def test_448_is_not_the_nan_beside_it(pair):
    x, y = (torch.tensor([n], dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (0x7E, 0x7F))
    (found,) = pair({"x": x}, {"x": y}, atol=1000.0).findings
    assert found.first == ("448.0", "nan")
    minus = torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert pair({"x": y}, {"x": minus}, atol=1.0).same  # both are NaN


def test_integers_beyond_the_precision_of_floats_are_told_apart(pair):
    x = torch.tensor([2**53, -(2**63), 5])
    for at, value, gap in ((0, 2**53 + 1, 1.0), (1, 2**63 - 1, float(2**64)), (2, 3, 2.0)):
        y = x.clone()
        y[at] = value
        (found,) = pair({"x": x}, {"x": y}, atol=0.5).findings
        assert (found.index, found.max_abs) == ((at,), gap)
        assert pair({"x": x}, {"x": y}, atol=float(2**64)).same


# --- whom an option is about --------------------------------------------------------------------


def test_an_option_about_one_side_does_not_change_how_the_other_is_read(tmp_path):
    """A scrambled copy whose own tags say otherwise was called equal, the right one different."""
    case = raw("llama", heads=(4, 4), layers=2)
    hf = write_hf(tmp_path / "hf", case)
    ranks = stored(case.config, case.state, 2, 1, qkv="per_rank")
    foreign = write_foreign(tmp_path / "foreign", ranks)
    named = ReadOptions(hf, {"qkv": "per_rank"})
    right = reshard(hf, tmp_path / "right", tp=2, run=QUIET).output
    tags = {"qkv": "per_group", "glu": "per_rank", "norm": "plain", "rotary": "half"}
    scrambled = write_native(tmp_path / "scrambled", case.config, ranks, layout=tags)
    for a, b, says in (
        (foreign, right, {"read": named}),
        (right, foreign, {"read_b": named}),
    ):
        assert verify(a, b, **says, weights_only=True).same
    found = verify(foreign, scrambled, read=named, weights_only=True).findings
    assert {f.kind for f in found} == {"values"}
    assert all("self_attn" in f.name for f in found)


def test_an_option_never_overrides_what_the_source_records(tmp_path):
    case = raw("llama", layers=4)
    tags = {"qkv": "per_group", "glu": "per_rank", "norm": "plain", "rotary": "half"}
    ranks = stored(case.config, case.state, 2, 1)
    made = write_native(tmp_path / "made", case.config, ranks, step=7, layout=tags, vocab_size=21)
    for read, both in (
        (ReadOptions(layout={"qkv": "per_rank"}), ("per_group", "per_rank", "--layout qkv")),
        (ReadOptions(vocab_size=20), ("21", "20", "--vocab-size")),
        (ReadOptions(iteration=8), ("7", "8", "--iteration")),
    ):
        with pytest.raises(CheckpointError) as error:
            verify(made, read=read)
        for part in both:
            assert part in str(error.value)
    agreed = ReadOptions(layout={"qkv": "per_group"}, vocab_size=21, iteration=7)
    assert verify(made, read=agreed).same


@pytest.mark.parametrize(
    ("read", "part"),
    [(ReadOptions(layout={"qkv": "flat"}), "--layout qkv=flat"),
     (ReadOptions(iteration=3), "--iteration 3")],
)  # fmt: skip
def test_an_option_that_a_hugging_face_folder_leaves_no_room_for_is_refused(read, part, hf):
    with pytest.raises(CheckpointError, match=part):
        verify(hf, read=read)


def test_iteration_picks_a_checkpoint_of_a_save_folder(tmp_path):
    for step in (3, 12):
        case = raw("llama", layers=1, start=step)
        ranks = stored(case.config, case.state, 1, 1)
        write_native(tmp_path / f"save/checkpoint-{step}", case.config, ranks, step=step)
    (tmp_path / "save/latest").write_text("checkpoint-12")
    save = tmp_path / "save"
    assert open_checkpoint(save).step == 12
    assert open_checkpoint(save, iteration=3).step == 3
    assert open_checkpoint(save / "checkpoint-3", iteration=3).step == 3
    with pytest.raises(
        CheckpointError, match="--iteration 4: it holds checkpoint-3, checkpoint-12"
    ):
        open_checkpoint(save, iteration=4)
    with pytest.raises(CheckpointError, match="step records 12, --iteration says 3"):
        open_checkpoint(save / "checkpoint-12", iteration=3)
    found = verify(save, save, read=ReadOptions(iteration=3), read_b=ReadOptions(iteration=12))
    assert {f.kind for f in found.findings} == {"values", "state"}


# --- what is printed ----------------------------------------------------------------------------


def test_the_worst_ten_are_shown_and_every_layer_is_summed_up(hf, tmp_path, capsys):
    merge(hf, tmp_path / "b", run=QUIET)
    path = tmp_path / "b/model.safetensors"
    names = [n for n in load_tensors(path) if "layers.1." in n or "layers.3." in n]
    names.append("model.norm.weight")
    for number, name in enumerate(names):
        was = load_tensors(path)[name].reshape(-1)[0].item()
        poke(path, name, 0, was + (1 << number % 20))
    sides = [str(hf), str(tmp_path / "b")]
    assert verify_ckpt.main(sides) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("differs: ")]
    assert len(shown) == 10
    assert "max abs difference 262144" in shown[0]
    assert f"these are the worst 10 of {len(names)} differences" in "\n".join(lines)
    sums = [line for line in lines if line.startswith(("layer ", "outside "))]
    assert [line.partition(":")[0] for line in sums] == [
        "outside the layers",
        "layer 1",
        "layer 3",
    ]
    assert "tensors that differ: 9, elements: 9" in sums[1]
    assert verify_ckpt.main([*sides, "--all"]) == 1
    every = [x for x in capsys.readouterr().out.splitlines() if x.startswith("differs: ")]
    assert len(every) == len(names)
    assert verify_ckpt.main([*sides, "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["differ"] == {"tensors": len(names), "elements": len(names)}
    assert table["compared"]["tensors"] == 39
    gap = max(float(1 << number % 20) for number, n in enumerate(names) if "layers.1." in n)
    assert table["layers"]["1"] == {"tensors": 9, "elements": 9, "max_abs": gap}
    assert {row["layer"] for row in table["differences"] if "layer" in row} == {1, 3}


def test_a_verdict_is_json_even_where_the_gap_is_infinite():
    verdict = Verdict(
        [Finding("values", "x", "x", 1, 2, float("inf"), (0,), ("inf", "1.0"), ("a", "b"))]
    )
    text = json.dumps(verdict.table(), allow_nan=False)
    assert '"max_abs": "inf"' in text
