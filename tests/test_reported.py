"""What users of other tools reported, kind by kind, does not happen here.

The kinds are those of test_hostile.py: C, a run that goes on from another state; H, a config that
is missing or wrong; I, names, order and unfinished saves of files; J, optimizer state that cannot
be loaded; K, names of tensors; L, pickles and dependencies. Public issues are cited where they
explain a case. What other files show is not repeated.

Checkpoints are made here by torch.save, or were written by Megatron-LM itself; what is compared is
read by torch.load and safetensors alone wherever the reader is what is tested.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import json
import pickle
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from independent import (
    GOLDEN_CONFIGS,
    Ranks,
    Tensors,
    load_hf,
    load_optimizer,
    load_ranks,
    load_tensors,
    megatron_files,
    megatron_optimizer,
    megatron_weights,
    numbered_globally,
    pack_states,
    stored,
    write_native,
)
from safetensors.torch import load_file, save_file
from test_megatron import (
    CONFIG,
    GPT2,
    TRUE_ROWS,
    _args,
    _check,
    _edit,
    _gpt2,
    _legacy,
    _llama,
    _models,
    _save,
    _small,
)
from test_megatron_dist import FULL, SHIFTED
from test_megatron_dist import _copy as copy_of_dist
from test_megatron_dist import _edit as edit_metadata
from test_megatron_dist import _replaced as replaced
from test_megatron_loads import _by_name, _flat_file
from train_runs import Run, Setup, in_ranks, job, losses, make_place, rows

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.formats.megatron import args as megatron_args
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import inspect_ckpt

QUIET = RunOptions(quiet=True, workers=1)
LLAMA = "llama_bf16_tp2pp2"
FLAT = "llama_bf16_tp2pp1dp2_distopt_torch"
TRACKER = "latest_checkpointed_iteration.txt"
RANKS = ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001")


def _refused(path: Path, *says: str, **options: Any) -> str:
    """The text of the error, which holds all of ``says``."""
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, ReadOptions(**options))
    text = str(caught.value)
    assert [part for part in says if part not in text] == [], text
    return text


def _whole(root: Path, **args: object) -> Path:
    """One rank's checkpoint at iteration 5, as Megatron-LM saves it without parallelism."""
    return _save(root, _models(stored(CONFIG, _llama(), 1, 1, multiple=8)), _args(1, 1, **args))


def _config_of(root: Path) -> dict[str, Any]:
    """The config.json that args alone make."""
    (side,) = [s for s in read_checkpoint(root).manifest.side_files if s.name == "config.json"]
    return json.loads(side.text)


def _args_of(root: Path) -> argparse.Namespace:
    """The args that were written for the first rank."""
    file = next(iter(sorted(root.glob("*/mp_rank_*/model_optim_rng.pt"))))
    return torch.load(file, weights_only=False)["args"]


# --- C: a run that goes on from another state ---------------------------------------------------

PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _without_megatron(
    source: Path, root: Path, change: Callable[[dict], object], iteration: int = 3
) -> Path:
    """A golden checkpoint again, changed, whose values no class of Megatron-LM is needed for."""
    for (t, p), content in megatron_files(source).items():
        kept = {k: content[k] for k in ("checkpoint_version", "model", "optimizer")}
        args = {k: v for k, v in vars(content["args"]).items() if isinstance(v, PLAIN)}
        kept |= {"args": argparse.Namespace(**args), "iteration": iteration}
        change(kept)
        pipelined = args["pipeline_model_parallel_size"] > 1
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipelined else "")
        folder = root / f"iter_{iteration:07d}" / name
        folder.mkdir(parents=True)
        torch.save(kept, folder / "model_optim_rng.pt")
    (root / TRACKER).write_text(str(iteration))
    return root


def _before_the_first_step(content: dict) -> None:
    """Steps were skipped in search of a loss scale: masters are there, Adam has no state."""
    inner = content["optimizer"]["optimizer"]
    inner["state"] = {}
    for group in inner["param_groups"]:
        group.pop("step", None)


ON = {  # in bf16, as the golden runs were; golden batches were other text
    "precision": "bf16", "save_interval": None, "lr": 1e-3, "weight_decay": 0.01,
    "adam_beta2": 0.95, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
DECAY = {"lr_decay_style": "cosine", "lr_warmup_steps": 1, "min_lr": 1e-3}
WD = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.6}


@dataclass(frozen=True)
class Runs:
    """Where the runs of this file saved, and what each of its ranks returned."""

    place: Path
    returned: Mapping[str, list[Any]]

    def __truediv__(self, name: str) -> Path:
        return self.place / name


def _runs(place: Path, golden: Path | None) -> list[Run]:
    files = {"wd": WD, "wd-weights": {**WD, "no_load_optim": True}}
    for name, fields in files.items():
        table = {f"megatron_lm_{k}": v for k, v in fields.items()}
        text = {"distributed_type": "MEGATRON_LM", "num_processes": 1, "megatron_lm_config": table}
        (place / f"{name}.yaml").write_text(json.dumps(text))
    wd = {**DECAY, "config": place / "wd.yaml"}
    runs = [
        Run("wd", world=1, options=wd),
        Run("wd-resumed", world=1, options=wd, resume="wd/checkpoint-2", stop_at=2),
        Run(
            "wd-weights",
            world=1,
            options={**DECAY, "config": place / "wd-weights.yaml"},
            resume="wd/checkpoint-2",
            stop_at=2,
        ),
    ]
    if golden is None:
        return runs
    tp2pp2 = {**ON, "tp": 2, "pp": 2, "steps": 5, "model": None}
    one = {**ON, "steps": 5, "model": place / "golden-llama.json"}
    flat = {**ON, "tp": 2, "steps": 5, "distributed_optimizer": True, "model": None}
    fresh = {**ON, "steps": 7, "model": None}
    source = golden / f"{LLAMA}_torch"
    (place / "golden-llama.json").write_text(json.dumps(GOLDEN_CONFIGS["llama"]))
    _without_megatron(golden / "llama_bf16_tp1pp1_torch", place / "fresh", _before_the_first_step)
    return [
        *runs,
        *(
            Run(f"on-{form}{name}", world=4, options=tp2pp2, resume=f"{source}{form}", stop_at=at)
            for form in ("", "_dist")
            for name, at in (("-stopped", 3), ("", None))
        ),
        Run("on-one", world=1, options=one, resume=f"{source}_dist", stop_at=3),
        Run("on-flat", world=4, options=flat, resume=str(golden / FLAT), stop_at=3),
        Run("on-dist-flat", world=4, options=flat, resume=str(golden / FULL), stop_at=3),
        Run("from", world=2, options={**ON, "tp": 2, "model": source}, stop_at=0),
        Run("on-fresh", world=1, options=fresh, resume="fresh", stop_at=3),
        Run("on-fresh-step", world=1, options={**fresh, "steps": 4}, resume="fresh"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """All of them, by one set of ranks; those from golden files only where these are."""
    from conftest import GOLDEN

    place = make_place(tmp_path_factory.mktemp("runs"))
    made = _runs(place, GOLDEN if GOLDEN.is_dir() else None)
    jobs = {run.name: job(run, place) for run in made}
    if GOLDEN.is_dir():
        merge(GOLDEN / f"{LLAMA}_torch", place / "hf", run=QUIET, read=ReadOptions(vocab_size=251))
        setup = dataclasses.asdict(Setup(str(place / "hf"), tp=2, precision="bf16"))
        source = str(GOLDEN / f"{LLAMA}_torch_dist")
        jobs["script"] = (2, "loaded", {"setup": setup, "source": source})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
        found = in_ranks(place / "ranks", list(jobs.values()))
    returned = dict(zip(jobs, found, strict=True))
    assert {run.name: returned[run.name] for run in made if any(returned[run.name])} == {}
    return Runs(place, returned)


def _table(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "checkpoint.json").read_text())


def _flattened(ranks: Ranks) -> Ranks:
    return {
        rank: {name: x.reshape(-1) for name, x in tensors.items()}
        for rank, tensors in ranks.items()
    }


def _assert_equal(found: Ranks, wanted: Ranks) -> None:
    assert sorted(found) == sorted(wanted)
    for rank, tensors in wanted.items():
        assert sorted(found[rank]) == sorted(tensors)
        different = [n for n, x in tensors.items() if not torch.equal(found[rank][n], x)]
        assert different == [], rank


ORACLES = {  # run -> Megatron-LM's own files in its layout
    "on--stopped": f"{LLAMA}_torch",
    "on-_dist-stopped": f"{LLAMA}_torch",
    "on-one": f"{LLAMA}_torch_dist__to_tp1pp1_torch",
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_run_goes_on_from_the_optimizer_that_megatron_saved(
    golden: Path, runs: Runs, name: str
) -> None:
    """Weights, masters and moments of each rank, classic and torch_dist, in any layout."""
    made, oracle = runs / name / "checkpoint-3", golden / ORACLES[name]
    _assert_equal(load_ranks(made), numbered_globally(megatron_weights(oracle), 4))
    wanted = numbered_globally(megatron_optimizer(oracle), 4)
    _assert_equal(_flattened(load_optimizer(made)), _flattened(wanted))
    table = _table(made)
    assert [group["step"] for group in table["param_groups"]] == [3, 3]
    assert (table["step"], table["schedule"]["num_steps"]) == (3, 3)


@pytest.mark.parametrize(
    ("name", "oracle"), [("on-flat", FLAT), ("on-dist-flat", f"{FULL}__to_tp2pp1dp2_torch")]
)
def test_a_run_goes_on_from_a_distributed_optimizer_of_megatron(
    golden: Path, runs: Runs, name: str, oracle: str
) -> None:
    made = runs / name / "checkpoint-3"
    files = megatron_files(golden / oracle)
    wanted = {
        (t, p): dict(_by_name(_flat_file(golden / oracle, t, p), file))
        for (t, p), file in files.items()
    }
    _assert_equal(load_optimizer(made), _flattened(wanted))
    _assert_equal(load_ranks(made), numbered_globally(megatron_weights(golden / oracle), 4))
    assert {group["step"] for group in _table(made)["param_groups"]} == {3}


def test_a_script_loads_what_megatron_saved_into_its_own_model(golden: Path, runs: Runs) -> None:
    """Args count the padded rows of the vocabulary; the script's model knows the real ones."""
    source = golden / f"{LLAMA}_torch_dist"
    reshard(source, runs / "script-wanted", to="megatron", tp=2, pp=1, run=QUIET)
    weights = megatron_weights(runs / "script-wanted")
    optimizer = megatron_optimizer(runs / "script-wanted")
    for t, said in enumerate(runs.returned["script"]):
        assert (said["step"], said["optimizer"]) == (3, True)
        wanted = numbered_globally({(0, 0): {**weights[t, 0], **optimizer[t, 0]}}, 4)
        _assert_equal({(0, 0): said["tensors"]}, wanted)


def test_weights_of_megatron_alone_come_with_masters_of_their_own(golden: Path, runs: Runs) -> None:
    """As the model of another run: NovaSky-AI/SkyRL#2149, NVIDIA/apex#42."""
    made = runs / "from" / "checkpoint-0"
    oracle = golden / f"{LLAMA}_torch__convertpy_to_tp2pp1_torch"
    _assert_equal(load_ranks(made), numbered_globally(megatron_weights(oracle), 4))
    found = load_optimizer(made)
    for rank, weights in load_ranks(made).items():
        for name, weight in weights.items():
            assert torch.equal(found[rank][f"master/{name}"].bfloat16(), weight.reshape(-1))
            assert not found[rank][f"exp_avg/{name}"].any()


def test_steps_after_a_resume_from_megatron_do_not_depend_on_its_format(
    golden: Path, runs: Runs
) -> None:
    said = rows(runs / "on-")
    assert [row["step"] for row in said] == [4, 5]
    assert said == rows(runs / "on-_dist")
    assert max(losses(runs / "on-")) < 6.5  # log 256 is 5.5, which the golden runs began with
    assert verify(runs / "on-", runs / "on-_dist", run=QUIET).same
    assert not verify(runs / "on-", runs / "on--stopped", run=QUIET).same
    last = _table(runs / "on-" / "checkpoint-5")
    assert {group["step"] for group in last["param_groups"]} == {5}


@pytest.mark.parametrize("name", ["on-", "on-_dist", "on-flat", "on-fresh"])
def test_what_megatron_saved_does_not_travel_into_the_runs_own_checkpoints(
    golden: Path, runs: Runs, name: str
) -> None:
    """Its files lie below the folder whose tokenizer and texts travel."""
    for checkpoint in (runs / name).glob("checkpoint-*"):
        names = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*")}
        weights = {n for n in names if re.fullmatch(r"(model|optimizer|random_states)_.*", n)}
        assert names - weights == {"checkpoint.json", "config.json"}
        assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] == 256


def test_a_resume_says_why_a_model_is_unknown(golden: Path, tmp_path: Path) -> None:
    from train_runs import _config, command_line

    from shardwright.train.errors import TrainError
    from shardwright.train.run.source import find_source

    silent = _save(tmp_path / "in", _models(stored(CONFIG, _llama(), 1, 1, multiple=8)), None)
    for source, says in (
        (silent, "holds no args.*here --model names a config"),
        (tmp_path, "has no config.json; name the model with --model"),
    ):
        argv = command_line(tmp_path, "out", resume=str(source), options={"model": None})
        with pytest.raises(TrainError, match=says):
            find_source(_config(argv))


def test_a_checkpoint_saved_before_the_first_step_says_that_it_has_no_state(
    golden: Path, tmp_path: Path
) -> None:
    """NVIDIA/Megatron-LM#602."""
    whole = golden / "llama_bf16_tp1pp1_torch"
    root = _without_megatron(whole, tmp_path / "in", _before_the_first_step)
    ckpt = read_checkpoint(root)
    assert ckpt.has_optimizer
    assert not ckpt.optimizer_fault()
    assert [n for n in ckpt.notes if "saved before its first step" in n]
    assert {n.partition("/")[0] for n in ckpt.manifest.tensors if "/" in n} == {"master"}
    report = reshard(root, tmp_path / "out", tp=2, pp=1, run=QUIET)
    assert [line for line in report.lines() if "no moments yet: load with --no-load-optim" in line]
    (masters,) = _masters(whole).values()
    found = open_checkpoint(tmp_path / "out")
    name = "model.layers.2.mlp.down_proj.weight"
    wanted = masters["master/decoder.layers.2.mlp.linear_fc2.weight"]
    assert torch.equal(found[f"master/{name}"].torch(), wanted)


def _masters(folder: Path) -> Ranks:
    """Masters alone, which a save before the first step has."""
    return {
        rank: {name: x for name, x in tensors.items() if name.startswith("master/")}
        for rank, tensors in megatron_optimizer(folder).items()
    }


def test_a_run_begins_its_moments_where_megatron_had_not_begun_them(
    golden: Path, runs: Runs
) -> None:
    made = runs / "on-fresh" / "checkpoint-3"
    wanted = _masters(golden / "llama_bf16_tp1pp1_torch")
    (found,) = load_optimizer(made).values()
    kept = {name: x for name, x in found.items() if name.startswith("master/")}
    _assert_equal({(0, 0): kept}, _flattened(numbered_globally(wanted, 4)))
    moments = {name: x for name, x in found.items() if name not in kept}
    assert len(moments) == 2 * len(kept)
    assert not any(x.any() for x in moments.values())
    assert {group["step"] for group in _table(made)["param_groups"]} == {0}
    stepped = _table(runs / "on-fresh-step" / "checkpoint-4")
    assert stepped["step"] == 4
    assert {group["step"] for group in stepped["param_groups"]} == {1}


def test_weight_decay_and_rate_are_the_schedules_as_soon_as_a_run_is_resumed(runs: Runs) -> None:
    """NVIDIA/Megatron-LM#7468; the schedule moves to its place once, whatever is loaded."""
    whole = _table(runs / "wd" / "checkpoint-2")
    low, high = 1e-3, 1e-2
    rate = low + (high - low) / 2 * (1 + np.cos(np.pi * 1 / 5))  # a step after the warmup
    for group, wd_mult in zip(whole["param_groups"], (1.0, 0.0), strict=True):
        assert group["lr"] == pytest.approx(rate)
        assert group["weight_decay"] == pytest.approx(0.6 * 2 / 6 * wd_mult)
    for name in ("wd-resumed", "wd-weights"):
        resumed = _table(runs / name / "checkpoint-2")
        assert resumed["schedule"] == whole["schedule"]
        assert resumed["schedule"]["num_steps"] == 2
        for mine, theirs in zip(resumed["param_groups"], whole["param_groups"], strict=True):
            assert {**mine, "step": 2} == theirs
    assert {g["step"] for g in _table(runs / "wd-resumed" / "checkpoint-2")["param_groups"]} == {2}


def test_random_states_are_tensors_and_text(runs: Runs) -> None:
    """NumPy's too: nothing that a loader of plain tensors would refuse."""
    (file,) = (runs / "wd" / "checkpoint-2").glob("random_states_*")
    found = load_file(file)
    assert {"python", "numpy", "torch"} < set(found)
    assert found["numpy"].shape == (624,)


def _adam(
    ranks: Ranks, groups: tuple[bool, ...] = (True, False), **more: object
) -> dict[str, object]:
    """Megatron-LM's plain optimizer of one rank: moments that are 1 and 2 above the weight."""
    (weights,) = ranks.values()
    members = [[n for n, x in weights.items() if (x.dim() > 1) == decays] for decays in groups]
    flat = [name for group in members for name in group]
    state = {i: {"exp_avg": weights[n] + 1, "exp_avg_sq": weights[n] + 2}
             for i, n in enumerate(flat)}  # fmt: skip
    rest = {"lr_mult": 1.0, "lr": 0.5, "betas": (0.9, 0.95), "step": 7, **more}
    table = [
        {"wd_mult": float(decays), "weight_decay": 0.1 * decays, **rest,
         "params": [flat.index(n) for n in group]}
        for decays, group in zip(groups, members, strict=True)
    ]  # fmt: skip
    return {"state": state, "param_groups": table}


def _with_adam(root: Path, optimizer: object = None, **args: object) -> Path:
    ranks = stored(CONFIG, _llama(), 1, 1, multiple=8)
    return _save(root, _models(ranks), _args(1, 1, **args), optimizer=optimizer or _adam(ranks))


def _with_moments() -> Tensors:
    found = dict(_llama())
    for name, x in _llama().items():
        found |= {f"exp_avg/{name}": x + 1, f"exp_avg_sq/{name}": x + 2}
    return found


@pytest.mark.parametrize("groups", [(True, False), (False, True)])
def test_moments_go_by_parameter_and_not_by_number(
    tmp_path: Path, groups: tuple[bool, ...]
) -> None:
    """Groups may stand in any order, and the numbers follow them: NVIDIA/Megatron-LM#761."""
    ranks = stored(CONFIG, _llama(), 1, 1, multiple=8)
    root = _with_adam(tmp_path / "in", _adam(ranks, groups))
    _check(root, _with_moments())
    reshard(root, tmp_path / "out", tp=2, pp=2, run=QUIET)
    _check(tmp_path / "out", _with_moments())


def test_state_of_no_parameter_is_named(golden: Path, tmp_path: Path) -> None:
    """Orphans of a copy that an optimizer of its own stepped: NVIDIA/Megatron-LM#4641."""
    adam = _adam(stored(CONFIG, _llama(), 1, 1, multiple=8))
    adam["state"][99] = {"exp_avg": torch.ones(3)}  # type: ignore[index]
    root = _with_adam(tmp_path / "classic", adam)
    _refused(
        root, "model_optim_rng.pt: optimizer.state.99.exp_avg: unknown optimizer tensor", "[3]"
    )
    dist = copy_of_dist(golden, tmp_path)
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    orphan = name.replace("final_layernorm", "odd")

    def rename(content: Any) -> None:
        content.state_dict_metadata[orphan] = content.state_dict_metadata.pop(name)
        for index in [i for i in content.storage_data if i.fqn == name]:
            moved = dataclasses.replace(index, fqn=orphan)
            content.storage_data[moved] = content.storage_data.pop(index)

    edit_metadata(dist, rename)
    _refused(dist, f".metadata: {orphan}: unknown tensor of shape [32]")


def test_a_chain_without_param_groups_is_refused_and_weights_alone_are_not(tmp_path: Path) -> None:
    root = _with_adam(tmp_path, [{}, {}])
    assert "optimizer.0 has no param_groups" in read_checkpoint(root).optimizer_fault()
    with pytest.raises(CheckpointError, match=r"no param_groups.*--weights-only"):
        reshard(root, tmp_path / "out", tp=2, pp=1, run=QUIET)
    _check_weights(root)


def _check_weights(root: Path) -> None:
    found = read_checkpoint(root, ReadOptions(weights_only=True)).manifest.tensors
    assert {n for n in found if not n.startswith("padding/")} == set(_llama())


# --- H: a config that is missing or wrong -------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_the_base_of_rotary_positions_is_there_for_older_and_newer_readers(
    tmp_path: Path, scaled: bool
) -> None:
    """Each reads keys of its own, and falls back to 10000 in silence: huggingface/nanotron#188."""
    transformers = pytest.importorskip("transformers")
    args = {"rotary_base": 500000, "use_rope_scaling": scaled, "rope_scaling_factor": 32.0}
    config = _config_of(_small(tmp_path / "in", **args))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    merge(tmp_path / "in", tmp_path / "hf", run=QUIET)
    read = transformers.AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    rope = read.get("rope_parameters") or {**(read["rope_scaling"] or {}), **read}
    assert rope["rope_theta"] == 500000.0
    if scaled:
        assert config["rope_scaling"]["factor"] == rope["factor"] == 32.0
        assert rope["rope_type"] == "llama3"
        assert config["rope_scaling"]["original_max_position_embeddings"] == 8192
    else:
        assert config["rope_scaling"] is None
        assert rope["rope_type"] == "default"


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def _hf(folder: Path, **more: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    save_file(_llama(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
    ],
)
def test_args_say_the_rotary_positions_of_every_form_of_config(
    tmp_path: Path, said: dict[str, object]
) -> None:
    reshard(_hf(tmp_path / "hf", **said), tmp_path / "out", to="megatron", tp=1, pp=1, run=QUIET)
    args = _args_of(tmp_path / "out")
    assert (args.rotary_base, args.use_rope_scaling, args.rope_scaling_factor) == (500000, True, 8)
    (tmp_path / "out" / "config.json").unlink()  # args alone
    config = _config_of(tmp_path / "out")
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == LLAMA3


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope scaling {'rope_type': 'yarn'"),
        ({**LLAMA3, "low_freq_factor": 2.0}, "'low_freq_factor': 2.0"),
    ],
)
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_a_scaling_that_args_cannot_say_is_refused(
    tmp_path: Path, rope: dict[str, object], says: str, to: str
) -> None:
    source = _hf(tmp_path / "hf", rope_scaling=rope)
    with pytest.raises(CheckpointError) as caught:
        reshard(source, tmp_path / "out", to=to, tp=1, pp=1, run=QUIET)
    for part in (str(source), says, "--allow-incomplete-args"):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()
    reshard(source, tmp_path / "out", to=to, tp=1, pp=1, allow_incomplete_args=True, run=QUIET)


def test_other_settings_of_a_config_are_said_in_args(tmp_path: Path) -> None:
    more = {"model_type": "mistral", "sliding_window": 4}
    reshard(_hf(tmp_path / "hf", **more), tmp_path / "out", to="megatron", tp=1, pp=1, run=QUIET)
    args = _args_of(tmp_path / "out")
    assert args.window_size == (3, 0)  # looks back at three tokens beside its own
    assert args.rotary_percent == 1.0


def test_a_part_of_rotated_heads_that_the_family_has_not_is_refused(tmp_path: Path) -> None:
    """Mistral's own code turns whole heads, whatever the key says."""
    source = _hf(tmp_path / "hf", model_type="mistral", partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError, match=r"rotated part of a head 0\.5, which mis"):
        reshard(source, tmp_path / "out", to="megatron", tp=1, pp=1, run=QUIET)


NULLED = {
    "rotary_base": ("rope_theta", 10000.0), "norm_epsilon": ("rms_norm_eps", 1e-5),
    "init_method_std": ("initializer_range", 0.02), "rotary_percent": ("head_dim", 4),
    "attention_dropout": ("attention_dropout", 0.0), "seq_length": ("max_position_embeddings", 8),
    "kv_channels": ("head_dim", 4), "num_query_groups": ("num_key_value_heads", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", NULLED)
def test_a_null_arg_is_the_default_and_no_null_in_the_config(tmp_path: Path, name: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2509."""
    key, wanted = NULLED[name]
    assert _config_of(_small(tmp_path, **{name: None}))[key] == wanted


def test_run_time_arguments_are_not_copied_from_the_source(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#414; nor does any rule here ask for a world size: all is offline."""
    theirs = {
        "world_size": 1024, "rank": 77, "local_rank": 5, "data_parallel_size": 256,
        "context_parallel_size": 4, "expert_model_parallel_size": 8,
        "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True,
        "transformer_pipeline_model_parallel_size": 2, "use_distributed_optimizer": True,
    }  # fmt: skip
    root = _small(tmp_path / "in", **theirs)
    wanted = {
        "world_size": 4, "rank": 0, "local_rank": 0, "data_parallel_size": 1,
        "context_parallel_size": 1, "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False,
        "transformer_pipeline_model_parallel_size": 4, "use_distributed_optimizer": False,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4,
    }  # fmt: skip
    for to in ("megatron", "torch_dist"):
        reshard(root, tmp_path / to, to=to, tp=1, pp=4, dp=1, run=QUIET)
    common = torch.load(tmp_path / "torch_dist" / "iter_0000005" / "common.pt", weights_only=False)
    for args in (_args_of(tmp_path / "megatron"), common["args"]):
        assert {key: getattr(args, key) for key in wanted} == wanted


def test_an_option_outranks_a_named_config_and_that_outranks_args(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#2616."""
    root = _small(tmp_path / "in")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "vocab_size": 30, "rope_theta": 7.0}))

    def of(**options: Any) -> tuple[int, object]:
        model = read_checkpoint(root, ReadOptions(**options)).need_model()
        return model.sizes["vocab"], model.config["rope_theta"]

    assert of() == (32, 10000.0)
    assert of(config=config) == (30, 7.0)
    assert of(config=config, vocab_size=29) == (29, 7.0)
    assert of(vocab_size=29) == (29, 10000.0)
    (root / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 31, "rope_theta": 8.0}))
    assert of() == (31, 8.0)  # the folder's own config, before args
    assert of(config=config) == (30, 7.0)


def _plain_common(root: Path, change: Callable[[dict], object]) -> None:
    """common.pt again, changed, and without classes of Megatron-LM."""
    from independent import _Unpickler

    path = root / "iter_0000003" / "common.pt"
    stubs = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    content = torch.load(path, pickle_module=stubs, weights_only=False)
    args = {k: v for k, v in vars(content["args"]).items() if isinstance(v, PLAIN)}
    content["args"] = argparse.Namespace(**args)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("null", [False, True])
def test_what_older_saves_lack_beside_the_tensors_is_not_asked_for(
    golden: Path, tmp_path: Path, null: bool
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4828: content_metadata and others are of newer versions."""
    root = copy_of_dist(golden, tmp_path)
    kept = ("args", "iteration", "optimizer")

    def change(content: dict) -> None:
        for key in [k for k in content if k not in kept]:
            content[key] = None
            if not null:
                del content[key]

    _plain_common(root, change)
    verdict = verify(root, golden / FULL, run=QUIET)
    states = ("state opt_param", "state megatron", "state schedule")
    assert [d for d in verdict.differences if not d.startswith(states)] == []
    reshard(root, tmp_path / "out", tp=2, pp=1, to="megatron", run=QUIET)


def test_a_model_inside_another_is_refused_by_name_where_the_larger_one_is_there(
    tmp_path: Path,
) -> None:
    """A text model's config nested in that of a larger one says nothing of the larger one."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": CONFIG}))
    tower = {"vision_tower.patch.weight": torch.ones(2, 2)}
    save_file({**_llama(), **tower}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"vision_tower.*--drop-vision"):
        reshard(folder, tmp_path / "out", to="megatron", tp=1, pp=1, run=QUIET)


@pytest.mark.parametrize(
    ("args", "name", "have", "need"),
    [
        ({"ffn_hidden_size": 32}, "linear_fc1.weight", [24, 16], [32, 16]),
        ({"kv_channels": 8}, "linear_qkv.weight", [24, 16], [48, 16]),
        ({"num_query_groups": 2, "group_query_attention": True}, "linear_qkv.weight", [24, 16],
         [16, 16]),
    ],
)  # fmt: skip
def test_sizes_in_args_are_held_against_the_tensors(
    tmp_path: Path, args: dict[str, object], name: str, have: list[int], need: list[int]
) -> None:
    """EleutherAI/gpt-neox#1319."""
    root = _small(tmp_path, **args)
    text = _refused(root, "mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt")
    assert re.search(rf"{name}: shape {re.escape(str(have))}.*{re.escape(str(need))}", text)


# --- I: names, order and unfinished saves of files ----------------------------------------------


def _tall(heads: int, layers: int) -> tuple[dict[str, Any], Tensors]:
    """A model with a row for each of many ranks; every element is another."""
    config = {**CONFIG, "hidden_size": 4, "num_attention_heads": heads, "head_dim": 1,
              "num_key_value_heads": heads, "intermediate_size": heads,
              "num_hidden_layers": layers, "vocab_size": heads}  # fmt: skip
    shapes = {"model.embed_tokens.weight": (heads, 4), "model.norm.weight": (4,),
              "lm_head.weight": (heads, 4)}  # fmt: skip
    for i in range(layers):
        m = f"model.layers.{i}."
        shapes |= {m + f"self_attn.{k}_proj.weight": (heads, 4) for k in "qkv"}
        shapes |= {m + f"mlp.{k}_proj.weight": (heads, 4) for k in ("gate", "up")}
        shapes |= {m + k: (4, heads) for k in ("self_attn.o_proj.weight", "mlp.down_proj.weight")}
        shapes |= {m + f"{k}_layernorm.weight": (4,) for k in ("input", "post_attention")}
    tensors, at = {}, 0
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = torch.arange(at, at + count, dtype=torch.float32).reshape(shape)
        at += count
    return config, tensors


def _tall_args(config: Mapping[str, Any], tp: int, pp: int) -> argparse.Namespace:
    return _args(
        tp, pp, num_layers=config["num_hidden_layers"], hidden_size=4, kv_channels=1,
        num_attention_heads=config["num_attention_heads"], make_vocab_size_divisible_by=1,
        ffn_hidden_size=config["intermediate_size"], padded_vocab_size=config["vocab_size"],
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "pp"), [(12, 1), (102, 1), (1, 12), (1, 102)])
def test_ranks_are_ordered_as_numbers_beyond_ninety_nine(tmp_path: Path, tp: int, pp: int) -> None:
    """mp_rank_100 after mp_rank_99, and mp_rank_11 after mp_rank_2: deepspeedai/DeepSpeed#1381."""
    config, wanted = _tall(tp, pp)
    root = _save(
        tmp_path / "in", _models(stored(config, wanted, tp, pp, multiple=1)),
        _tall_args(config, tp, pp),
    )  # fmt: skip
    last = f"mp_rank_{tp - 1:02d}" + (f"_{pp - 1:03d}" if pp > 1 else "")
    assert (root / "iter_0000005" / last).is_dir()
    _check(root, wanted)
    reshard(root, tmp_path / "one", tp=1, pp=1, run=QUIET)
    _check(tmp_path / "one", wanted)
    reshard(tmp_path / "one", tmp_path / "many", tp=tp, pp=pp, run=QUIET)
    for file in root.glob("*/*/model_optim_rng.pt"):
        made = torch.load(tmp_path / "many" / file.relative_to(root), weights_only=False)["model"]
        theirs = torch.load(file, weights_only=False)["model"]
        assert all(torch.equal(made[name], x) for name, x in theirs.items())


def test_shares_of_the_optimizer_are_ordered_as_numbers(tmp_path: Path) -> None:
    """The tenth share comes after the ninth: deepspeedai/DeepSpeed#5342."""
    ranks = stored(CONFIG, _llama(), 1, 1, multiple=8)
    states = {s: {n: x + i for n, x in _llama().items()} for i, s in enumerate(MOMENTS, 1)}
    moments = pack_states(CONFIG, states, 1, 1, multiple=8)
    folder = tmp_path / "in"
    write_native(folder, CONFIG, ranks, moments, dp=12, sharded=True, multiple=8)
    assert (folder / "optimizer_tp_0_pp_0_dp_11.safetensors").is_file()
    _check(folder, _with_moments())
    reshard(folder, tmp_path / "out", tp=2, pp=1, dp=101, run=QUIET)
    assert (tmp_path / "out" / "optimizer_tp_1_pp_0_dp_100.safetensors").is_file()
    _check(tmp_path / "out", _with_moments())
    wanted = pack_states(CONFIG, states, 2, 1, multiple=8)
    _assert_equal(load_optimizer(tmp_path / "out"), _flattened(wanted))


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_parts_of_a_hugging_face_model_may_stand_in_any_order(tmp_path: Path) -> None:
    """huggingface/transformers#32023: the index says which part holds what."""
    tensors = list(_llama().items())
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    where = {}
    for i in reversed(range(12)):
        part = dict(tensors[i::12])
        name = f"model-{i + 1}-of-12.safetensors"
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _check(folder, _llama())


def test_a_tracker_wins_over_the_highest_iteration(tmp_path: Path) -> None:
    """Of an unfinished save and of a finished one: NVIDIA-NeMo/Megatron-Bridge#5964."""
    root = _small(tmp_path)
    (root / "iter_0000020").mkdir()
    other = {name: x + 1 for name, x in _llama().items()}
    _save(root, _models(stored(CONFIG, other, 1, 1, multiple=8)), _args(1, 1), iteration=30)
    (root / TRACKER).write_text("5")
    _check(root, _llama())
    assert read_checkpoint(root).step == 5


def _dist_save(root: Path) -> None:
    """What an asynchronous save has written before its descriptions."""
    (root / "iter_0000020").mkdir()
    for name in ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp"):
        (root / "iter_0000020" / name).write_bytes(b"PK")


@pytest.mark.parametrize("save", [lambda r: (r / "iter_0000020").mkdir(), _dist_save])
@pytest.mark.parametrize("form", ["classic", "torch_dist"])
def test_a_tracker_that_names_an_unfinished_save_says_what_else_is_there(
    golden: Path, tmp_path: Path, form: str, save: Callable[[Path], object]
) -> None:
    """intelligent-machine-learning/dlrover#990, THUDM/slime#279."""
    root = _small(tmp_path / "in") if form == "classic" else copy_of_dist(golden, tmp_path)
    whole = "iter_0000005" if form == "classic" else "iter_0000003"
    save(root)
    (root / TRACKER).write_text("20")
    _refused(root, str(root / "iter_0000020"), "an unfinished save", whole, "--iteration N")
    _refused(root / "iter_0000020")
    assert read_checkpoint(root, ReadOptions(iteration=int(whole[-1]))).step == int(whole[-1])


def test_a_run_may_have_changed_its_format(golden: Path, tmp_path: Path) -> None:
    """Iterations of both formats in one folder: each is read as what it is."""
    root = tmp_path / "in"
    reshard(golden / f"{LLAMA}_torch", root, to="megatron", tp=1, pp=1, run=QUIET)
    (root / "iter_0000003").rename(root / "iter_0000002")
    shutil.copytree(golden / f"{LLAMA}_torch_dist" / "iter_0000003", root / "iter_0000003")
    found = {n: read_checkpoint(root, ReadOptions(iteration=n)).format for n in (2, 3)}
    assert found == {2: "megatron", 3: "torch_dist"}
    for text, number in (("2", None), ("3", None), ("3", 2)):
        (root / TRACKER).write_text(text)
        other, read = golden / f"{LLAMA}_torch_dist__to_tp1pp1_torch", ReadOptions(iteration=number)
        assert verify(root, other, read=read, read_b=ReadOptions(), run=QUIET).same


@pytest.mark.parametrize("text", ["4160813071", "1e3", "-3", "7\n8", "", "iter_0000005", "9" * 40])
def test_a_tracker_beyond_reason_names_itself_and_the_iterations(tmp_path: Path, text: str) -> None:
    """intelligent-machine-learning/dlrover#1233."""
    root = _small(tmp_path)
    (root / TRACKER).write_text(text)
    _refused(root, TRACKER, "iter_0000005")


@pytest.mark.parametrize("name", ["mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"])
def test_every_spelling_of_the_first_rank_is_read(tmp_path: Path, name: str) -> None:
    """Megatron-LM's own loader tries all three: intelligent-machine-learning/dlrover#1398."""
    root = _whole(tmp_path)
    (root / "iter_0000005" / "mp_rank_00").rename(root / "iter_0000005" / name)
    _check(root, _llama())


def test_every_spelling_of_several_ranks_is_read(tmp_path: Path) -> None:
    root = _small(tmp_path)
    for rank in RANKS:
        folder = root / "iter_0000005" / rank
        folder.rename(folder.with_name(f"{rank}_000"))
    _check(root, _llama())
    (root / "iter_0000005" / "mp_rank_01_001_000").rename(
        root / "iter_0000005" / "mp_rank_01_001_001"
    )
    _refused(root, "mp_rank_01_001_001: its third number is an expert-parallel rank")


@pytest.mark.parametrize(
    ("folder", "more"),
    [
        (".", {}),
        ("global_step5", {"latest": "global_step5"}),
        ("global_step5_universal", {"latest_universal": "global_step5_universal"}),
        ("global_step5", {TRACKER: "5", "latest": "global_step5"}),
        ("global_step5", {TRACKER: "5"}),
    ],
)
def test_a_deepspeed_folder_is_named_whatever_trackers_it_has(
    tmp_path: Path, folder: str, more: Mapping[str, str]
) -> None:
    """NVIDIA/Megatron-LM#185; Megatron-DeepSpeed writes Megatron-LM's tracker too."""
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "mp_rank_00_model_states.pt").write_bytes(b"")
    for name, text in more.items():
        (tmp_path / name).write_text(text)
    _refused(tmp_path, "a DeepSpeed or GPT-NeoX checkpoint", "zero_to_fp32.py")


@pytest.mark.parametrize("cut", [0, 1, 5000, -1, -400])
def test_a_torn_rank_file_is_named(tmp_path: Path, cut: int) -> None:
    """facebookresearch/metaseq#53."""
    root = _small(tmp_path)
    file = root / "iter_0000005" / "mp_rank_01_000" / "model_optim_rng.pt"
    data = file.read_bytes()
    file.write_bytes(data[:cut])
    _refused(root, str(file))
    file.with_name("model_optim_rng.pt.tmp").write_bytes(data[:cut])
    file.write_bytes(data)
    _check(root, _llama())  # what a failed save left beside it is no file of the checkpoint


def test_every_rank_without_weights_is_listed(tmp_path: Path) -> None:
    """A rank folder with an optimizer alone: RLinf/RLinf#322."""
    root = _small(tmp_path)
    for rank in ("mp_rank_00_001", "mp_rank_01_000"):
        file = root / "iter_0000005" / rank / "model_optim_rng.pt"
        file.rename(file.with_name("distrib_optim.pt"))
    text = _refused(root, "2 faults", "the folder holds distrib_optim.pt")
    for rank in RANKS:
        missing = f"{rank}/model_optim_rng.pt: is missing"
        assert (missing in text) == (rank in ("mp_rank_00_001", "mp_rank_01_000"))
    for rank in ("mp_rank_00_001", "mp_rank_01_000"):
        shutil.rmtree(root / "iter_0000005" / rank)
    _refused(root, "mp_rank_00_001: is missing", "mp_rank_01_000: is missing")


def test_a_file_named_model_rng_pt_is_read(tmp_path: Path) -> None:
    """And what is written has the name that loaders look for: alibaba/Pai-Megatron-Patch#124."""
    root = _small(tmp_path / "in")
    for file in root.glob("*/*/model_optim_rng.pt"):
        file.rename(file.with_name("model_rng.pt"))
    _check(root, _llama())
    reshard(root, tmp_path / "out", tp=1, pp=2, run=QUIET)
    assert {f.name for f in (tmp_path / "out").rglob("*.pt")} == {"model_optim_rng.pt"}


def test_names_of_distcp_files_say_nothing(golden: Path, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1737: .metadata alone says what lies where."""
    root = copy_of_dist(golden, tmp_path)
    files = sorted((root / "iter_0000003").glob("*.distcp"))
    new = {f.name: f"__{90 - i}_7.distcp" for i, f in enumerate(files)}
    new[files[-1].name] = "weights of all ranks.distcp"
    for file in files:
        file.rename(file.with_name(new[file.name]))

    def rename(content: Any) -> None:
        for index, info in content.storage_data.items():
            content.storage_data[index] = dataclasses.replace(
                info, relative_path=new[info.relative_path]
            )

    edit_metadata(root, rename)
    assert verify(root, golden / FULL, run=QUIET).same


def test_the_folder_of_one_step_is_whole_by_itself(golden: Path, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Speech#7707; written ones as well."""
    reshard(golden / f"{LLAMA}_torch", tmp_path / "classic", to="megatron", tp=1, run=QUIET)
    reshard(golden / f"{LLAMA}_torch", tmp_path / "dist", to="torch_dist", run=QUIET)
    for name in ("classic", "dist"):
        step = shutil.move(tmp_path / name / "iter_0000003", tmp_path / f"{name}-step")
        read = ReadOptions(vocab_size=TRUE_ROWS["llama"])
        assert verify(golden / f"{LLAMA}_torch", step, read=read, read_b=read, run=QUIET).same


def test_the_tracker_that_is_written_names_the_iteration(golden: Path, tmp_path: Path) -> None:
    for to in ("megatron", "torch_dist"):
        reshard(golden / FLAT, tmp_path / to, to=to, tp=1, pp=1, dp=1, run=QUIET)
        assert (tmp_path / to / TRACKER).read_text() == "3"
        assert [f.name for f in (tmp_path / to).iterdir() if f.is_dir()] == ["iter_0000003"]


def test_a_folder_per_tensor_is_named_with_its_backend(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Speech#8753: zarr, as older NeMo saved."""
    folder = tmp_path / "model_weights"
    (folder / "module.decoder.final_layernorm.weight").mkdir(parents=True)
    (folder / "module.decoder.final_layernorm.weight" / ".zarray").write_text("{}")
    (folder / "common.pt").write_bytes(b"")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    _refused(folder, "metadata.json: sharded_backend is 'zarr'", "--ckpt-format torch_dist")


# --- J: optimizer state that cannot be loaded ---------------------------------------------------


@pytest.mark.parametrize("dp", [1, 3, 5])
def test_a_distributed_optimizer_goes_to_any_number_of_ranks(
    golden: Path, tmp_path: Path, dp: int
) -> None:
    """NVIDIA/Megatron-LM#659: 2 ranks become 3."""
    source = golden / FLAT
    flat = {"use_distributed_optimizer": True, "dp": dp}
    reshard(source, tmp_path / "classic", tp=2, pp=1, run=QUIET, **flat)
    assert _args_of(tmp_path / "classic").data_parallel_size == dp
    for (t, p), file in megatron_files(source).items():
        wanted = dict(_by_name(_flat_file(source, t, p), file))
        found = dict(_by_name(_flat_file(tmp_path / "classic", t, p), file))
        _assert_equal({(t, p): found}, {(t, p): wanted})
    reshard(source, tmp_path / "dist", to="torch_dist", run=QUIET, **flat)
    reshard(tmp_path / "dist", tmp_path / "native", to="shards", tp=2, pp=1, dp=dp, run=QUIET)
    wanted = {
        (t, p): dict(_by_name(_flat_file(source, t, p), file))
        for (t, p), file in megatron_files(source).items()
    }
    _assert_equal(load_optimizer(tmp_path / "native"), _flattened(wanted))


STEPS: dict[str, dict[str, object]] = {
    "int": {"step": 7},
    "float": {"step": 7.0},
    "scalar": {"step": torch.tensor(7.0)},
    "integer scalar": {"step": torch.tensor(7)},
    "one element": {"step": torch.tensor([7.0])},
}


IN_STATE = ("scalar", "integer scalar", "one element")  # where torch's own optimizers keep it


@pytest.mark.parametrize(
    ("kind", "place"), [*((k, "group") for k in STEPS), *((k, "state") for k in IN_STATE)]
)
def test_a_step_is_read_in_every_form(tmp_path: Path, kind: str, place: str) -> None:
    """huggingface/nanotron#106."""
    adam: Any = _adam(stored(CONFIG, _llama(), 1, 1, multiple=8), **STEPS[kind])
    if place == "state":
        for group in adam["param_groups"]:
            value = group.pop("step")
        for state in adam["state"].values():
            state["step"] = value
    root = _with_adam(tmp_path / "in", adam)
    state = open_checkpoint(root).state
    assert state["megatron"]["optimizer"]["step"] == 7  # type: ignore[index]
    assert [group["step"] for group in state["param_groups"]] == [7, 7]  # type: ignore[index,attr-defined]
    _check(root, _with_moments())
    reshard(root, tmp_path / "out", tp=2, pp=1, to="shards", run=QUIET)
    assert [group["step"] for group in _table(tmp_path / "out")["param_groups"]] == [7, 7]


def test_torch_dist_is_written_in_the_form_that_any_layout_loads(
    golden: Path, tmp_path: Path
) -> None:
    """verl-project/verl#5154: fully reshardable, whatever the source's form."""
    for name in (FLAT, "llama_bf16_tp1pp2dp2_distopt_dpreshard_torch_dist"):
        reshard(golden / name, tmp_path / name, to="torch_dist", run=QUIET)
        common = torch.load(tmp_path / name / "iter_0000003" / "common.pt", weights_only=False)
        assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
        form = common["content_metadata"]["distrib_optim_sharding_type"]
        assert form == "fully_reshardable"


IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
@pytest.mark.parametrize("sharded", [False, True])
def test_groups_of_older_versions_get_all_by_which_newer_ones_tell_them_apart(
    tmp_path: Path, to: str, sharded: bool
) -> None:
    """modelscope/ms-swift#9517: a key that an upgrade added is no reason to lose the state."""
    adam: Any = _adam(stored(CONFIG, _llama(), 1, 1, multiple=8))
    for group in adam["param_groups"]:
        for key in IDENTITY:
            group.pop(key, None)
    root = _with_adam(tmp_path / "in", adam)
    _check(root, _with_moments())
    more = {"use_distributed_optimizer": sharded}
    reshard(root, tmp_path / "out", to=to, tp=1, pp=1, run=QUIET, **more)
    name = "mp_rank_00/model_optim_rng.pt" if to == "megatron" else "common.pt"
    made = torch.load(tmp_path / "out" / "iter_0000005" / name, weights_only=False)["optimizer"]
    groups = made.get("optimizer", made)["param_groups"]
    assert [[group[key] for key in IDENTITY] for group in groups] == [
        [1.0, 1.0, False, False], [0.0, 1.0, False, False],
    ]  # fmt: skip


def _no_groups(adam: dict) -> None:
    del adam["param_groups"]


def _groups_unwrapped(adam: dict) -> None:
    adam["param_groups"] = adam["param_groups"][0]


def _a_number_less(adam: dict) -> None:
    adam["param_groups"][0]["params"].pop()


def _no_state(adam: dict) -> None:
    del adam["state"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_no_groups, "optimizer has no param_groups"),
        (_groups_unwrapped, "optimizer has no param_groups"),
        (_a_number_less, "fit no known rule for the 27 of this rank"),
        (_no_state, "optimizer holds no state"),
    ],
)
def test_an_optimizer_of_another_form_says_which_part_is_missing(
    tmp_path: Path, change: Callable[[dict], object], says: str
) -> None:
    """NVIDIA/Megatron-LM#4791, modelscope/ms-swift#8240."""
    adam = _adam(stored(CONFIG, _llama(), 1, 1, multiple=8))
    change(adam)
    root = _with_adam(tmp_path / "in", adam)
    fault = read_checkpoint(root).optimizer_fault()
    assert says in fault
    assert "model_optim_rng.pt" in fault
    with pytest.raises(CheckpointError, match="--weights-only"):
        reshard(root, tmp_path / "out", tp=2, pp=1, run=QUIET)
    assert not (tmp_path / "out").exists()
    _check_weights(root)


# --- K: names of tensors ------------------------------------------------------------------------


def _engine(root: Path, keep: Callable[[str], bool] = lambda rank: True) -> Path:
    """TransformerEngine's names, with extra states on the ranks that ``keep`` names."""
    from independent import engine_names

    models = _models(engine_names(stored(CONFIG, _llama(), 2, 2, multiple=8)))
    for rank, model in models.items():
        tensors: Any = model["model"]
        for name in [n for n in tensors if n.endswith("_extra_state")]:
            tensors[name] = io.BytesIO(b"fp8")
            if not keep(rank):
                del tensors[name]
    return _save(root, models, _args(2, 2, transformer_impl="transformer_engine"))


@pytest.mark.parametrize("of", ["all", "one", "none"])
def test_extra_state_may_be_there_or_not(tmp_path: Path, of: str) -> None:
    """NVIDIA/Megatron-LM#900: it holds no weights."""
    root = _engine(tmp_path, lambda rank: of == "all" or (of == "one" and rank == RANKS[0]))
    _check(root, _llama())


def test_extra_state_is_counted_apart_from_what_is_missing(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2892: what is harmless does not hide what is not."""
    root = _engine(tmp_path / "in", lambda rank: rank == RANKS[0])
    report = merge(root, tmp_path / "hf", run=QUIET)
    said = [line for line in report.lines() if line.startswith("dropped")]
    assert said == ["dropped 2 tensors, 0 B: _extra_state holds no weights"]
    lost = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    _edit(root, RANKS[0], lambda content: content["model"].pop(lost))
    text = _refused(root, RANKS[0], "pre_mlp_layernorm.weight: missing")
    assert "_extra_state" not in text.replace(str(tmp_path), "")
    assert "faults" not in text  # the one that is missing, and nothing else


@pytest.mark.parametrize("lost", ["all", "one"])
def test_objects_of_extra_state_may_be_missing_from_torch_dist(
    golden: Path, tmp_path: Path, lost: str
) -> None:
    """NVIDIA-NeMo/Speech#12298."""
    root = copy_of_dist(golden, tmp_path)

    def drop(content: Any) -> None:
        names = [n for n in content.state_dict_metadata if "_extra_state" in n]
        assert len(names) >= 16
        for name in names if lost == "all" else names[:1]:
            del content.state_dict_metadata[name]
            for index in [i for i in content.storage_data if i.fqn == name]:
                del content.storage_data[index]

    edit_metadata(root, drop)
    assert verify(root, golden / FULL, run=QUIET).same
    reshard(root, tmp_path / "out", to="torch_dist", run=QUIET)
    from test_megatron_dist_out import _by_torch  # and they are there for a loader that asks

    raw = (tmp_path / "out" / "iter_0000003" / ".metadata").read_bytes()
    made = pickle.loads(raw).state_dict_metadata
    assert sum("_extra_state" in name for name in made) == 16
    assert _by_torch(tmp_path / "out" / "iter_0000003")


def test_a_file_without_args_takes_the_model_from_a_config(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#838: files of 2020 hold no args, and names of that time."""
    models = _models(stored(GPT2, _gpt2(), 2, 1, multiple=8, qkv="per_rank"))
    old = {rank: {"model": _legacy(m["model"], "transformer")} for rank, m in models.items()}
    root = _save(tmp_path / "in", old, None, version=None)
    _refused(root, "mp_rank_00/model_optim_rng.pt: holds no args", "--config")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GPT2))
    _check(root, _gpt2(), config=config)
    merge(root, tmp_path / "hf", read=ReadOptions(config=config), run=QUIET)
    found = load_hf(tmp_path / "hf")
    assert all(torch.equal(found[name], x) for name, x in _gpt2().items())


OLDER = {  # names of norms and attention by version, for one of ours
    "input_layernorm.weight": ("input_layernorm.weight", "input_norm.weight"),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "self_attention.linear_qkv.weight": ("attention.query_key_value.weight",
                                         "self_attention.query_key_value.weight"),
    "self_attention.linear_proj.weight": ("attention.dense.weight", "self_attention.dense.weight"),
    "mlp.linear_fc1.weight": ("mlp.dense_h_to_4h.weight",) * 2,
    "mlp.linear_fc2.weight": ("mlp.dense_4h_to_h.weight",) * 2,
}  # fmt: skip


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("final", ["final_layernorm", "final_norm"])
@pytest.mark.parametrize("body", ["encoder", "transformer"])
def test_older_names_of_a_rotary_model_are_read(
    tmp_path: Path, body: str, final: str, at: int
) -> None:
    """NVIDIA/Megatron-LM#1602; it has no table of positions, and one of frequencies at most."""
    ((_, tensors),) = stored(CONFIG, _llama(), 1, 1, multiple=8).items()
    language: dict[str, dict] = {body: {}, "embedding": {}, "output_layer": {}}
    for name, x in tensors.items():
        if name == "embedding.word_embeddings.weight":
            language["embedding"]["word_embeddings"] = {"weight": x}
        elif name == "output_layer.weight":
            language["output_layer"]["weight"] = x
        elif name.startswith("decoder.final_layernorm."):
            language[body][f"{final}.weight"] = x
        else:
            _, _, number, rest = name.split(".", 3)
            language[body][f"layers.{number}.{OLDER[rest][at]}"] = x
    language["rotary_pos_emb.inv_freq"] = torch.ones(2)  # type: ignore[assignment]
    root = _save(tmp_path, {"mp_rank_00": {"model": {"language_model": language}}}, _args(1, 1))
    _check(root, _llama())
    reasons = [reason for reason, _ in read_checkpoint(root).left_out]
    assert reasons == ["a rotary table, computed from the config"]


def test_norms_fused_into_layers_are_those_that_stand_alone(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#1821, both ways."""
    fused, alone = _engine(tmp_path / "fused"), _small(tmp_path / "alone")
    assert verify(fused, alone, weights_only=True, run=QUIET).same
    norms = ("input_layernorm.weight", "linear_qkv.layer_norm_weight")
    for source, there, absent in ((fused, *reversed(norms)), (alone, *norms)):
        made = tmp_path / f"{source.name}-again"
        reshard(source, made, tp=1, pp=2, run=QUIET)
        file = made / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt"
        names = list(torch.load(file, weights_only=False)["model"])
        assert sum(name.endswith(there) for name in names) == 2
        assert not any(name.endswith(absent) for name in names)
        _check(made, _llama())


def test_layers_that_predict_more_tokens_are_refused_where_args_or_files_lack_them(
    tmp_path: Path,
) -> None:
    """They are never dropped in silence."""
    _refused(
        _small(tmp_path / "args", mtp_num_layers=1),
        "args say mtp_num_layers=1, but no file holds a tensor mtp.layers.*",
    )
    root = _small(tmp_path / "in")
    name = "mtp.layers.0.eh_proj.weight"
    _edit(root, RANKS[1], lambda c: c["model"].update({name: torch.ones(16, 32)}))
    _refused(root, f"{RANKS[1]}/model_optim_rng.pt: model.{name}: unknown tensor", "[16, 32]")


def test_all_unknown_tensors_are_listed_at_once(tmp_path: Path) -> None:
    """THUDM/slime#1780."""
    root = _small(tmp_path)
    odd = {RANKS[0]: "decoder.layers.0.sandwich_norm.weight", RANKS[3]: "decoder.odd_norm.weight"}
    for rank, name in odd.items():
        _edit(root, rank, lambda c, n=name: c["model"].update({n: torch.ones(2)}))
    text = _refused(root, "(2 faults)")
    for rank, name in odd.items():
        assert f"{rank}/model_optim_rng.pt: model.{name}: unknown tensor" in text


@pytest.mark.parametrize(
    "name",
    ["moe_bf16_tp1pp1ep2_torch", "moe_fp32_tp2pp1ep2_torch", "moe_bf16_tp1pp1ep2_torch_dist"],
)
def test_every_expert_is_read_whatever_the_layout(golden: Path, name: str) -> None:
    """flagos-ai/FlagScale#1185, NVIDIA-NeMo/Megatron-Bridge#3414."""
    names = read_checkpoint(golden / name).manifest.category("")
    assert sum(".experts." in fqn for fqn in names) == 4 * 4 * 3  # layers, experts, w1 w2 w3


# --- L: pickles and dependencies ----------------------------------------------------------------


def test_values_of_libraries_that_are_absent_do_not_stop_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface/transformers#14939, ROCm/Megatron-LM#56; what is written needs none of them."""
    lib = types.ModuleType("megatron.absent")
    kind = enum.Enum("AttnBackend", {"flash": 1, "local": 5}, module="megatron.absent")
    signals = type("SignalHandler", (), {"__module__": "megatron.absent", "kept": 3})
    lib.AttnBackend, lib.SignalHandler = kind, signals  # type: ignore[attr-defined]
    values = {
        "attention_backend": kind.local, "exit_signal_handler": signals(),
        "a_float": np.float64(0.5), "an_int": np.int64(3), "a_path": Path("/data/x"),
        "inner": argparse.Namespace(deep=[1, (2, 3)]), "autocast_dtype": torch.float16,
        "a_device": torch.device("cpu"),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.absent", lib)
        root = _small(tmp_path / "in", **values)
    assert not any(name.startswith("megatron.absent") for name in sys.modules)
    _check(root, _llama())
    assert inspect_ckpt.main([str(root)]) == 0
    for to in ("megatron", "torch_dist"):
        reshard(root, tmp_path / to, to=to, tp=1, pp=1, run=QUIET)
        (file,) = (tmp_path / to).rglob("*.pt")
        with torch.serialization.safe_globals([argparse.Namespace]):
            args = torch.load(file, weights_only=True)["args"]
        assert (args.attention_backend, args.autocast_dtype) == (5, torch.float16)
        assert args.inner.deep == [1, (2, 3)]
        assert args.hidden_size == 16
    assert "exit_signal_handler" in " ".join(read_checkpoint(root).notes)


ALONE = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is not there")

BLOCKED = {"torch", "megatron", "transformers", "accelerate", "transformer_engine", "apex",
           "safetensors"}
sys.meta_path.insert(0, Refuses())
from shardwright.ckpt import merge, reshard, verify
source, out = sys.argv[1:]
merge(source, out + "/hf")
reshard(source, out + "/shards", to="shards", tp=1, pp=1)
reshard(source, out + "/classic", to="megatron", tp=1, pp=1)
reshard(source, out + "/dist", to="torch_dist")
for name in ("shards", "classic", "dist"):
    assert not [d for d in verify(source, out + "/" + name).differences if "state" not in d]
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize("name", [FULL, f"{LLAMA}_torch", FLAT])
def test_no_format_of_megatron_needs_a_library_that_trains(
    golden: Path, tmp_path: Path, name: str
) -> None:
    """THUDM/slime#1167: neither Megatron-LM nor transformers, nor even torch or safetensors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(golden / name), str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert load_tensors(tmp_path / "hf" / "model.safetensors")


@pytest.mark.parametrize(
    ("said", "config"),
    [
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
        ({"rotary_seq_len_interpolation_factor": None}, None),
    ],
)
def test_interpolated_positions_are_a_linear_scaling(said, config) -> None:
    args = {**LLAMA_ARGS, **said}
    assert megatron_args.config_from_args(args, "x")["rope_scaling"] == config


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rotary_base": True}, "rotary_base"),
        ({"rotary_base": 10**400}, "rotary_base"),
        ({"use_rope_scaling": True, "rope_scaling_factor": "x"}, "rope_scaling_factor"),
        ({"window_size": {"$tuple": [15, 15]}}, "window_size"),
        ({"window_size": {"$tuple": [15, 0]}, "window_attn_skip_freq": 2}, "window_attn_skip_freq"),
    ],
)
def test_what_a_config_cannot_say_of_args_is_refused(said, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        megatron_args.config_from_args({**LLAMA_ARGS, **said}, "x")


@pytest.mark.parametrize("window", [[-1, 0], [-1, -1]])
def test_a_window_without_end_is_none(window) -> None:
    args = {**LLAMA_ARGS, "window_size": {"$tuple": window}}
    assert megatron_args.config_from_args(args, "x")["sliding_window"] is None


def test_masters_that_are_shifted_are_no_masters_of_a_run_without_the_optimizer(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of_dist(golden, tmp_path)
    replaced(root, SHIFTED, lambda x: x.flatten().roll(1).view(x.shape))
    (tmp_path / "data.txt").write_text("one and two are three; " * 40)
    argv = [
        "--resume", str(root), "--data", str(tmp_path / "data.txt"), "--seq-length", "16",
        "--steps", "4", "--precision", "bf16", "--micro-batch-size", "1", "--global-batch-size",
        "1", "--lr", "1e-3",
    ]  # fmt: skip
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    jobs = [(1, "train_command", {"argv": argv})]
    ((refused,),) = in_ranks(tmp_path / "with", jobs)
    monkeypatch.setenv("MEGATRON_LM_NO_LOAD_OPTIM", "true")
    ((done_well,),) = in_ranks(tmp_path / "without", jobs)
    assert refused["code"] == 1
    assert "shifted against the weights" in refused["said"]
    assert "MEGATRON_LM_NO_LOAD_OPTIM=true" in refused["said"]
    assert done_well["code"] == 0, done_well["said"][-2000:]
    assert "fp32 master weights initialised from the model" in done_well["said"]


LLAMA_ARGS = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
