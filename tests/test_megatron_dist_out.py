"""torch_dist checkpoints are written so that torch itself loads them.

That megatron-core does, in other layouts, is test_megatron_loads.py's.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_megatron import CONFIG, GPT2, TRUE_ROWS, _gpt2, _llama
from test_megatron_dist import _loaded
from test_megatron_out import CLASSIC, PAIRS, VOCABULARY, _layout_of

from shardwright.ckpt import ReadOptions, merge, reshard, verify

SOURCES = sorted({source for source, _, _ in PAIRS})


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_written_is_the_source(source, golden, tmp_path) -> None:
    """Weights, padding rows, optimizer and hyperparameters."""
    reshard(golden / source, tmp_path / "made", to="torch_dist")
    verdict = verify(golden / source, tmp_path / "made")
    assert verdict.differences == []


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s.endswith("_torch_dist") and "v013" not in s]
)
def test_torchs_own_reader_sees_what_megatron_wrote(source, golden, tmp_path) -> None:
    """Every weight, by the name and in the shape that Megatron-LM's own folder has."""
    made = tmp_path / "made"
    reshard(golden / source, made, to="torch_dist")
    ours, theirs = (_by_torch(f / "iter_0000003") for f in (made, golden / source))
    weights = [k for k in theirs if not k.startswith("optimizer.")]
    assert weights == [k for k in theirs if k in ours and not k.startswith("optimizer.")]
    for name in weights:
        assert torch.equal(ours[name], theirs[name]), name
    if "dpreshard" not in source:  # whose optimizer is written in the form that can be resharded
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


def _by_torch(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(folder)
    table = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(meta.size, dtype=meta.properties.dtype)
        for name, meta in sorted(table.items())
        if hasattr(meta, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


# golden source -> Megatron-LM's own torch_dist save of the same training run
DIST = {name: name for name in CLASSIC if name.endswith("_torch_dist")}
DIST |= {name.removesuffix("_dist"): name for name in DIST if name.removesuffix("_dist") in CLASSIC}


@pytest.mark.parametrize(("source", "twin"), DIST.items())
def test_a_round_trip_over_hugging_face_keeps_every_true_row(
    source, twin, golden, tmp_path
) -> None:
    """What torch itself reads of both: each stored weight, whole."""
    rows = TRUE_ROWS[source.partition("_")[0]]
    merge(golden / source, tmp_path / "hf", read=ReadOptions(vocab_size=rows))
    reshard(tmp_path / "hf", tmp_path / "back", to="torch_dist", **_layout_of(twin))
    ours = _by_torch(tmp_path / "back" / "release")
    theirs = {n: x for n, x in _loaded(golden / twin).items() if "optimizer" not in n}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        mine = ours[name]
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
        if name in VOCABULARY:
            assert not mine[rows:].any()
            mine, value = mine[:rows], value[:rows]
        assert torch.equal(mine, value), name


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_hugging_face_weights_there_and_back(config, tmp_path) -> None:
    import json

    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(_gpt2() if config is GPT2 else _llama(), source / "model.safetensors")
    reshard(source, tmp_path / "made", to="torch_dist")
    merge(tmp_path / "made", tmp_path / "again")
    assert verify(source, tmp_path / "again").same


def test_blobs_are_sound_archives(golden, tmp_path) -> None:
    made = tmp_path / "made"
    reshard(golden / "llama_bf16_tp2pp2_torch", made, to="torch_dist")
    folder = made / "iter_0000003"
    table = dcp.FileSystemReader(folder).read_metadata().storage_data
    raw = (folder / "__0_0.distcp").read_bytes()
    assert sum(info.length for info in table.values()) == len(raw)
    for info in list(table.values())[::7]:
        blob = tmp_path / "blob.pt"
        blob.write_bytes(raw[info.offset : info.offset + info.length])
        with zipfile.ZipFile(blob) as archive:
            assert archive.testzip() is None
        torch.load(blob, weights_only=True)
