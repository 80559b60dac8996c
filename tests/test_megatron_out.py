"""Classic Megatron-LM checkpoints are written as Megatron-LM itself writes them.

The oracles are Megatron-LM's own conversions of the same training run. Both sides are read by
an unpickler of the tests' own; nothing here trusts the reader.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from independent import megatron_files
from safetensors.torch import save_file
from test_megatron import CONFIG, GPT2, TRUE_ROWS, _gpt2, _llama

from shardwright.ckpt import ReadOptions, merge, reshard, verify
from shardwright.tools import reshard as command

LLAMA, DP = "llama_bf16_tp2pp2_torch", "llama_bf16_tp1pp2dp2_distopt_"
# source -> oracle, and the layout that is asked for
PAIRS = [
    (source, f"{model}_torch_dist__to_{to}_torch", options)
    for model, to, options in (
        ("llama_bf16_tp2pp2", "tp1pp1", {"tp": 1, "pp": 1}),
        ("llama_bf16_tp2pp2", "tp4pp1", {"tp": 4, "pp": 1}),
        ("llama_bf16_tp2pp2", "tp1pp4", {"tp": 1, "pp": 4}),
        ("llama8_fp32_tp2pp2vpp2", "tp1pp1", {"tp": 1, "pp": 1}),
        ("gpt2_fp32_tp2pp2", "tp1pp1", {"tp": 1, "pp": 1}),
        ("gpt2_fp32_tp2pp2", "tp4pp1", {"tp": 4, "pp": 1}),
    )
    for source in (f"{model}_torch", f"{model}_torch_dist")
]
FLAT = {"use_distributed_optimizer": True}
PAIRS += [
    (
        f"{DP}fullyreshard_torch_dist",
        f"{DP}fullyreshard_torch_dist__to_tp1pp1dp1_torch",
        {"tp": 1, "pp": 1, "dp": 1, **FLAT},
    ),
    (
        f"{DP}fullyreshard_torch_dist",
        f"{DP}fullyreshard_torch_dist__to_tp2pp1dp2_torch",
        {"tp": 2, "pp": 1, "dp": 2},
    ),
    (
        f"{DP}v013_torch_dist",
        f"{DP}v013_torch_dist__to_tp2pp1dp1_torch",
        {"tp": 2, "pp": 1, "dp": 1, **FLAT},
    ),
    (
        f"{DP}dpreshard_torch_dist",
        f"{DP}dpreshard_torch_dist__to_tp1pp2dp1_torch",
        {"dp": 1, **FLAT},
    ),
    (
        "llama8_fp32_tp2pp2vpp2_torch_dist__to_tp1pp1_torch",
        "llama8_fp32_tp2pp2vpp2_torch",
        {"tp": 2, "pp": 2, "vpp": 2},
    ),
    ("llama_bf16_tp2pp2_fusedadam_torch", "llama_bf16_tp2pp2_fusedadam_torch", {}),
    ("llama_bf16_tp2pp1dp2_distopt_torch", "llama_bf16_tp2pp1dp2_distopt_torch", {}),
]
PARALLEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size",
    "num_layers", "hidden_size", "num_attention_heads", "virtual_pipeline_model_parallel_size",
    "use_distributed_optimizer", "data_parallel_size", "world_size",
    "make_vocab_size_divisible_by", "add_position_embedding", "max_position_embeddings",
    "swiglu", "normalization", "untie_embeddings_and_output_weights",
)  # fmt: skip


def _same(ours: object, theirs: object, at: str) -> Iterator[str]:
    """Where two trees of values and tensors differ."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.dtype != theirs.dtype:
            yield f"{at}: {ours!r:.60} for a tensor"
        elif ours.shape != theirs.shape or not torch.equal(ours, theirs):
            yield f"{at}: {tuple(ours.shape)} and {tuple(theirs.shape)}, or other values"
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict), at
        ordered = ".model" in at  # registration order; elsewhere order says nothing
        if (list(ours) if ordered else set(ours)) != (list(theirs) if ordered else set(theirs)):
            yield f"{at}: keys {list(ours)[:40]} and {list(theirs)[:40]}"
            return
        for key, value in theirs.items():
            yield from _same(ours[key], value, f"{at}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert isinstance(ours, (list, tuple)), at
        if len(ours) != len(theirs):
            yield f"{at}: {len(ours)} and {len(theirs)} items"
            return
        for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            yield from _same(one, two, f"{at}.{i}")
    elif ours != theirs:
        yield f"{at}: {ours!r} and {theirs!r}"


def _flat_spans(file: dict, flat_dtype: torch.dtype) -> list[tuple[int, int]]:
    """The elements of a flat buffer that are parameters: reversed, at multiples of 64."""
    spans, at = [], 0
    for value in reversed([v for v in file["model"].values() if isinstance(v, torch.Tensor)]):
        assert value.dtype == flat_dtype
        at = -(-at // 64) * 64
        spans.append((at, at + value.numel()))
        at += value.numel()
    return spans


def _flat_groups(file: dict) -> list[dict]:
    """The groups beside flat buffers, which Apex's and TransformerEngine's Adam alone can load.

    Those of the oracles are the source's, of torch's AdamW: with them no fused one makes a step.
    """
    optimizer = file.get("optimizer", {})
    flat = "state" not in optimizer.get("optimizer", {"state": ()})
    return optimizer["optimizer"]["param_groups"] if flat else []


def _differences(made: Path, oracle: Path) -> list[str]:
    """All that differs in the files of all ranks, gaps of flat buffers and the run's own aside."""
    ours, theirs = megatron_files(made), megatron_files(oracle)
    assert ours.keys() == theirs.keys()
    found: list[str] = []
    for rank, file in theirs.items():
        mine = ours[rank]
        for group in _flat_groups(file):
            group.setdefault("bias_correction", True)
        for key in (k for k in file if k.startswith("model") or k == "optimizer"):
            found += _same(mine[key], file[key], f"{rank}.{key}")
        for key in ("checkpoint_version", "iteration", "opt_param_scheduler"):
            found += _same(mine[key], file[key], f"{rank}.{key}")
        said, wanted = vars(mine["args"]), vars(file["args"])
        for key in PARALLEL:
            if said.get(key) != wanted.get(key):
                found.append(f"{rank}.args.{key}: {said.get(key)!r} and {wanted.get(key)!r}")
    return found


@pytest.mark.parametrize(("source", "oracle", "options"), PAIRS)
def test_every_oracle_is_met_bit_for_bit(source, oracle, options, golden, tmp_path) -> None:
    """Weights, padding rows, moments, masters, steps, param groups and their numbers."""
    made = tmp_path / "made"
    reshard(golden / source, made, to="megatron", **options)
    found = _differences(made, golden / oracle)
    # the distributed optimizer's oracles keep the step as an int where the source has a float
    same_step = (".step: 3.0 and 3", ".step: 3 and 3.0")
    assert [line for line in found if not line.endswith(same_step)] == []
    assert (made / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize(("source", "oracle", "options"), [p for p in PAIRS if "distopt" in p[0]])
def test_flat_buffers_are_those_of_the_oracle(source, oracle, options, golden, tmp_path) -> None:
    """But for the gaps between parameters, which Megatron-LM leaves uninitialized."""
    made = tmp_path / "made"
    reshard(golden / source, made, to="megatron", **options)
    ours, theirs = megatron_files(made), megatron_files(golden / oracle)
    folders = {d.name: d for d in (golden / oracle / "iter_0000003").iterdir()}
    assert folders
    for name, folder in folders.items():
        mine = torch.load(made / "iter_0000003" / name / "distrib_optim.pt", weights_only=True)
        wanted = torch.load(folder / "distrib_optim.pt", weights_only=True)
        assert list(mine) == list(wanted)
        numbers = [int(n) for n in name.removeprefix("mp_rank_").split("_")]
        rank = (numbers[0], numbers[1] if len(numbers) > 1 else 0)
        spans = _flat_spans(theirs[rank], torch.bfloat16)
        assert spans == _flat_spans(ours[rank], torch.bfloat16)
        for pair, values in wanted[0].items():
            assert mine[0][pair]["numel_unpadded"] == values["numel_unpadded"]
            for key in ("param", "exp_avg", "exp_avg_sq"):
                assert mine[0][pair][key].dtype == values[key].dtype == torch.float32
                for start, stop in spans:
                    assert torch.equal(mine[0][pair][key][start:stop], values[key][start:stop])


# golden source -> Megatron-LM's own classic files of the same training run
CLASSIC = {
    name: name
    for name in (
        "gpt2_fp32_tp2pp2_torch",
        "llama8_fp32_tp2pp2vpp2_torch",
        LLAMA,
        "llama_bf16_tp1pp1_torch",
        "llama_bf16_tp2pp2_fusedadam_torch",
        "llama_bf16_tp2pp1dp2_distopt_torch",
    )
}
CLASSIC |= {f"{name}_dist": name for name in list(CLASSIC)[:3]}
CLASSIC |= {
    f"{DP}dpreshard_torch_dist": f"{DP}dpreshard_torch_dist__to_tp1pp2dp1_torch",
    f"{DP}fullyreshard_torch_dist": f"{DP}fullyreshard_torch_dist__to_tp2pp1dp2_torch",
    f"{DP}v013_torch_dist": f"{DP}v013_torch_dist__to_tp2pp1dp1_torch",
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _layout_of(name: str) -> dict[str, int]:
    """The options for the layout that ends a golden name."""
    (tp, pp), vpp = re.findall(r"tp(\d)pp(\d)", name)[-1], re.search(r"vpp(\d)", name)
    found = {"tp": int(tp), "pp": int(pp), **({"vpp": int(vpp[1])} if vpp else {})}
    return {**found, "make_vocab_size_divisible_by": 8 if name.startswith("gpt2") else 16}


@pytest.mark.parametrize(("source", "twin"), CLASSIC.items())
def test_a_round_trip_over_hugging_face_keeps_every_true_row(
    source, twin, golden, tmp_path
) -> None:
    rows = TRUE_ROWS[source.partition("_")[0]]
    merge(golden / source, tmp_path / "hf", read=ReadOptions(vocab_size=rows))
    reshard(tmp_path / "hf", tmp_path / "back", to="megatron", **_layout_of(twin))
    ours, theirs = megatron_files(tmp_path / "back"), megatron_files(golden / twin)
    assert ours.keys() == theirs.keys()
    count = 0
    for (t, p), file in theirs.items():
        for head in (k for k in file if k.startswith("model")):
            assert list(ours[t, p][head]) == list(file[head])
            for name, value in file[head].items():
                if not isinstance(value, torch.Tensor):
                    continue
                mine = ours[t, p][head][name]
                assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
                if name in VOCABULARY:
                    true = max(0, min(value.shape[0], rows - t * value.shape[0]))
                    assert torch.equal(mine[:true], value[:true])
                    assert not mine[true:].any()
                else:
                    assert torch.equal(mine, value)
                count += 1
    assert count >= 27  # 4 layers of 6, two tables and a norm


@pytest.mark.parametrize("source", [LLAMA, f"{DP}fullyreshard_torch_dist"])
def test_the_optimizers_form_changes_both_ways(source, golden, tmp_path) -> None:
    flat, plain = tmp_path / "flat", tmp_path / "plain"
    reshard(golden / source, flat, to="megatron", tp=2, pp=1, dp=2, use_distributed_optimizer=True)
    assert (flat / "iter_0000003" / "mp_rank_01" / "distrib_optim.pt").is_file()
    reshard(flat, plain, tp=1, pp=2, dp=1, use_distributed_optimizer=False)
    assert not list(plain.rglob("distrib_optim.pt"))
    for folder in (flat, plain):
        verdict = verify(golden / source, folder)
        assert [d for d in verdict.differences if "state" not in d] == []


def test_native_shards_and_back_keep_args_and_optimizer(golden, tmp_path) -> None:
    reshard(golden / LLAMA, tmp_path / "native", to="shards", tp=4, pp=1)
    reshard(tmp_path / "native", tmp_path / "back", to="megatron", tp=2, pp=2)
    assert _differences(tmp_path / "back", golden / LLAMA) == []


def test_files_load_as_plain_data_and_their_archives_are_sound(golden, tmp_path) -> None:
    reshard(golden / LLAMA, tmp_path / "made", to="megatron", tp=2, pp=1)
    files = sorted((tmp_path / "made").rglob("*.pt"))
    assert len(files) == 2
    for file in files:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        with torch.serialization.safe_globals([argparse.Namespace]):
            assert torch.load(file, weights_only=True)["iteration"] == 3


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_hugging_face_weights_become_a_release(config, tmp_path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(_gpt2() if config is GPT2 else _llama(), source / "model.safetensors")
    reshard(source, tmp_path / "made", to="megatron", tp=2, pp=2)
    assert (tmp_path / "made" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "made" / "release" / "mp_rank_01_001" / "model_optim_rng.pt").is_file()
    assert verify(source, tmp_path / "made", weights_only=True).same
    merge(tmp_path / "made", tmp_path / "again")
    assert verify(source, tmp_path / "again").same


def test_uneven_stages_are_said_by_the_simplest_args(golden, tmp_path) -> None:
    source = golden / "llama8_fp32_tp2pp2vpp2_torch"
    for number, (counts, layout) in enumerate({(1, 3, 3, 1): None,
                                               (1, 2, 4, 1): "Et|tt|tttt|tL"}.items()):  # fmt: skip
        made = tmp_path / f"{number}"
        reshard(source, made, to="megatron", tp=1, pp_layers=counts)
        assert verify(source, made).same
        args = vars(next(iter(megatron_files(made).values()))["args"])
        assert args["pipeline_model_parallel_layout"] == layout
        assert args["decoder_first_pipeline_num_layers"] == (None if layout else 1)


def test_the_command_says_what_it_wrote_and_how_to_load_it(golden, tmp_path, capsys) -> None:
    argv = [str(golden / LLAMA), "--to", "megatron", "--tp", "1", "--pp", "1", "--output",
            str(tmp_path / "made")]  # fmt: skip
    assert command.main(argv) == 0
    said = capsys.readouterr()
    assert "load with --no-load-rng" in said.out + said.err
