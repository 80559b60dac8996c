"""What a script's saves and loads do, by Accelerate's calls, over two ranks of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_safety import names
from safetensors.torch import load_file
from train_helpers import launch

from shardwright.ckpt import verify

LAYOUTS = {"tp2": {"tp_degree": 2}, "pp2": {"pp_degree": 2}}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, list[Any]]]:
    """Where the scripts saved, and what each rank said, by layout."""
    place = tmp_path_factory.mktemp("scripts")
    ranks = launch("save_jobs:scripts", 2, place / "ranks", str(place), list(LAYOUTS.values()))
    return place, {name: [rank[i] for rank in ranks] for i, name in enumerate(LAYOUTS)}


@pytest.fixture(params=list(LAYOUTS))
def one(request, ran) -> tuple[Path, Any, Any]:
    """The folder of a layout, and what its two ranks said."""
    return ran[0] / str(list(LAYOUTS).index(request.param)), *ran[1][request.param]


def test_a_save_without_a_path_is_numbered_and_the_oldest_goes_when_the_new_one_is_there(one):
    place, first, second = one
    folder = place / "project/checkpoints"
    assert names(folder) == ["checkpoint_1", "checkpoint_3"]
    assert [verify(folder / name).differences for name in names(folder)] == [[], []]
    assert first["iteration"] == second["iteration"] == 4
    assert "set project_configuration.iteration" in first["taken"]
    assert "automatic_checkpoint_naming" in second["nowhere"]


def test_the_folder_may_be_listed_when_a_save_returns_and_hooks_find_it(one):
    _, first, second = one
    for rank in (first, second):
        assert len(rank["listed"]) == 2
        assert rank["hooked"] == [(1, ["lm_head.weight"], True)]
    assert "of_the_hook.txt" in first["listed"][0]


def test_a_save_into_a_users_folder_adds_the_guides_files(one):
    place, *_ = one
    there = [name for name in names(place / "own") if name.endswith(".bin")]
    assert {"pytorch_model_tp_0_pp_0.bin", "optimizer_tp_0_pp_0.bin"} <= set(there)
    assert len(there) == 4
    assert {"notes.txt", "of_rank_0", "of_rank_1", "checkpoint.json"} <= set(names(place / "own"))
    assert not [name for name in names(place / "own") if name.startswith(".")]
    assert "latest" not in names(place)


def test_unwrapped_models_state_dicts_and_saved_models_are_the_trained_weights(one):
    place, first, second = one
    for name in ("trained", "trained_too"):
        found = load_file(place / name / "model.safetensors")
        assert found.keys() == first["first"].keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, first["first"][key]), (name, key)
    assert all(torch.equal(tensor, second["first"][k]) for k, tensor in first["first"].items())
    for rank in (first, second):
        assert "unwrap_model" in rank["weights"]["before"]
        assert "unwrap_model" in rank["weights"]["after"]
        assert rank["weights"]["same"] == "True"
    assert not (place / "never/model.safetensors").exists()
    assert "unwrap_model: was called on rank 0, while rank 1 is at wait_for" in first["alone"]


def test_load_state_without_a_path_takes_the_newest_with_registered_objects(one):
    place, first, second = one
    newest = str(place / "project/checkpoints/checkpoint_3")
    for rank in (first, second):
        assert rank["loads"] == [newest]
        assert rank["counter"] == [[1.5, 2.5], 3, 0.25]
        assert any(bool(tensor.any()) for tensor in rank["end"].values())
        assert not torch.equal(rank["end"]["lm_head.weight"], rank["first"]["lm_head.weight"])
        assert "registered object 1.self is a save_jobs.Unsavable" in rank["unsavable"]
