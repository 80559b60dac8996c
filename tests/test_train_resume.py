"""A run that is resumed is the run that was not interrupted: in its layout bit for bit, in others
to rounding; and what the trainer writes is read by every command.

All runs of this file are made by one set of ranks, in the order of `RUNS`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from train_runs import (
    CALM,
    CONFIGS,
    EVAL_TEXT,
    LR,
    SEQ_LENGTH,
    STEPS,
    Job,
    Run,
    Setup,
    batches,
    cursor,
    hf_model,
    in_ranks,
    job,
    losses,
    make_place,
    random_states,
    rows,
)

from shardwright.ckpt import RunOptions, merge, open_checkpoint, reshard, verify

QUIET = RunOptions(quiet=True, workers=1)

# --- the runs ----------------------------------------------------------------------------------

# Layouts that must go on bit for bit: name -> (model, ranks, options).
SAME: Mapping[str, tuple[str, int, Mapping[str, object]]] = {
    "tp2pp2": ("llama", 4, {"tp": 2, "pp": 2, "eval_data": "eval.txt", "eval_interval": 4}),
    "tp2pp2-dropout": ("gpt2", 4, {"tp": 2, "pp": 2}),
    "tp2pp2-sp-dropout": ("gpt2", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "tp2dp2-recompute": ("gpt2", 4, {"tp": 2, "recompute": "full"}),
    "tp2dp2-distributed": ("llama", 4, {"tp": 2, "distributed_optimizer": True}),
    "tp2pp2-distributed": ("qwen3", 4, {"tp": 2, "pp": 2, "distributed_optimizer": True}),
    "pp2dp2-bf16": ("gpt2", 4, {"pp": 2, "precision": "bf16"}),
    "tp2dp2-bf16-distributed": (
        "llama",
        4,
        {"tp": 2, "distributed_optimizer": True, "precision": "bf16"},
    ),
    "pp2-interleaved": ("llama", 2, {"pp": 2, "virtual_pp_layers": 1}),
    "pp2-sgd": ("gpt2", 2, {"pp": 2, "optimizer": "sgd", "sgd_momentum": 0.9}),
    "one": ("gpt2", 1, {}),
    "one-distributed": ("llama", 1, {"distributed_optimizer": True, "precision": "bf16"}),
}
# A learning rate that rises, falls and ends above zero: a resume must find its place in it.
SCHEDULE = {"lr_decay_style": "cosine", "lr_warmup_steps": 1, "min_lr": 1e-3}


def _same(name: str) -> list[Run]:
    model, world, options = SAME[name]
    options = {**SCHEDULE, **options}
    return [
        Run(name, model, world, options),
        Run(f"{name}-resumed", model, world, options, resume=f"{name}/checkpoint-2"),
    ]


TP2PP2 = {"tp": 2, "pp": 2}
LONG = {"steps": 14, "save_interval": 4, "lr": 3e-3, **CALM}  # ten steps after checkpoint-4
FROM = "base/checkpoint-4"
SHORT_EVAL_TEXT = EVAL_TEXT[:160]
# Runs that go on in another layout: name -> (what they resume, ranks, options).
OTHER: Mapping[str, tuple[str, int, Mapping[str, object]]] = {
    "tp1pp4": (FROM, 4, {"pp": 4}),
    "tp1pp4-tp4pp1": ("tp1pp4/checkpoint-8", 4, {"tp": 4}),
    "tp2dp2": (FROM, 4, {"tp": 2}),
    "tp2dp2-sp-distributed": (
        FROM,
        4,
        {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    ),
    "dp4-distributed": (
        "tp2dp2-sp-distributed/checkpoint-8",
        4,
        {"distributed_optimizer": True, "micro_batch_size": 1},
    ),
    "pp2dp2-distributed": (
        "dp4-distributed/checkpoint-12",
        4,
        {"pp": 2, "distributed_optimizer": True},
    ),
    "pp2": ("tp2dp2-sp-distributed/checkpoint-8", 2, {"pp": 2}),
    "dp2-distributed": (FROM, 2, {"distributed_optimizer": True}),
    "one-rank": ("tp2dp2/checkpoint-8", 1, {}),
    "interleaved": (FROM, 2, {"pp": 2, "virtual_pp_layers": 1, "eval_data": "short-eval.txt"}),
    "interleaved-tp2": ("interleaved/checkpoint-8", 2, {"tp": 2}),
}
OTHER_TIED = {
    "tied-one-rank": ("tied/checkpoint-4", 1, {}),
    "tied-pp2dp2-distributed": ("tied/checkpoint-4", 4, {"pp": 2, "distributed_optimizer": True}),
}
# Resumed and stopped before a step: what was loaded is written again. Model and precision are
# those of the source.
MOVED: Mapping[str, tuple[str, int, Mapping[str, object]]] = {
    "moved-tp4": ("base", 4, {"tp": 4}),
    "moved-pp4-distributed": ("base", 4, {"pp": 4, "distributed_optimizer": True}),
    "moved-tp2dp2-distributed": ("base", 4, {"tp": 2, "distributed_optimizer": True}),
    "moved-one": ("tp2dp2-sp-distributed", 1, {}),
    "moved-dp4": (
        "tp2dp2-sp-distributed",
        4,
        {"distributed_optimizer": True, "micro_batch_size": 1},
    ),
    "moved-tp2pp2": ("tp2dp2-sp-distributed", 4, TP2PP2),
    "moved-bf16": ("half", 4, {"pp": 2, "distributed_optimizer": True, "precision": "bf16"}),
    "moved-bf16-whole": ("half", 2, {"tp": 2, "precision": "bf16"}),
}

HALF = {"tp": 2, "distributed_optimizer": True, "precision": "bf16", **LONG}
RUNS = [
    *(run for name in SAME for run in _same(name)),
    Run(
        "after the epoch",
        "gpt2",
        resume="tp2pp2-dropout/checkpoint-4",
        options={**SCHEDULE, **TP2PP2},
    ),
    # Constant learning rates do not depend on the number of steps.
    Run("constant", world=1, options={"lr_decay_style": "constant"}),
    Run("grown", world=1, options={"lr_decay_style": "constant", "steps": 3}),
    Run("grown", world=1, options={"lr_decay_style": "constant"}, resume="grown"),
    Run("base", options={**TP2PP2, **LONG, "eval_data": "eval.txt"}),
    *(Run(n, "llama", w, {**LONG, **o}, resume=r) for n, (r, w, o) in OTHER.items()),
    Run("tied", "gpt2", options={**TP2PP2, **LONG, "eval_data": "eval.txt"}),
    *(Run(n, "gpt2", w, {**LONG, **o}, resume=r) for n, (r, w, o) in OTHER_TIED.items()),
    Run("half", options={**HALF, "eval_data": "eval.txt"}),
    *(
        Run(n, "llama", w, {**LONG, **o}, resume=f"{r}/checkpoint-8", stop_at=8)
        for n, (r, w, o) in MOVED.items()
    ),
    # No learning rate: weights stay, whatever the gradients.
    Run("still", options={**TP2PP2, "lr": 0.0}, resume=FROM),
    Run("still-half", options={**HALF, "lr": 0.0, "steps": 10}, resume="half/checkpoint-8"),
    # Dropout in another layout.
    Run("relaid", "gpt2", options=TP2PP2 | {"sequence_parallel": True}, resume="one/checkpoint-2"),
    Run(
        "relaid again",
        "gpt2",
        options=TP2PP2 | {"sequence_parallel": True},
        resume="one/checkpoint-2",
    ),
    Run("relaid, stopped", "gpt2", options=TP2PP2, resume="one/checkpoint-2", stop_at=2),
    # Before the first step.
    Run("early", options={**SCHEDULE, **TP2PP2}, stop_at=0),
    Run("early-resumed", options={**SCHEDULE, **TP2PP2}, resume="early"),
    Run("early-half", world=2, options={**SCHEDULE, "precision": "bf16"}, stop_at=0),
    Run(
        "early-half-resumed",
        world=2,
        options={**SCHEDULE, "precision": "bf16"},
        resume="early-half",
    ),
    Run("early-half-whole", world=2, options={**SCHEDULE, "precision": "bf16"}),
    # From Hugging Face weights, and between precisions.
    Run("hf32-bf16", "llama-fp32", 2, {"tp": 2, "precision": "bf16"}, stop_at=0),
    Run(
        "hf32-bf16-distributed",
        "llama-fp32",
        2,
        {"distributed_optimizer": True, "precision": "bf16"},
        stop_at=0,
    ),
    Run("hf16-bf16", "llama-bf16", 2, {"pp": 2, "precision": "bf16"}, stop_at=0),
    Run("hf16-fp32", "llama-bf16", 2, {"tp": 2}, stop_at=0),
    Run("bf16-fp32", "llama", 2, {**LONG, "tp": 2}, resume="half/checkpoint-8", stop_at=8),
    Run(
        "fp32-bf16",
        "llama",
        2,
        {**LONG, "pp": 2, "precision": "bf16"},
        resume="base/checkpoint-8",
        stop_at=8,
    ),
    Run("unslowed", options={**TP2PP2, "save_interval": 1}, stop_at=2),
    # How many checkpoints stay.
    Run("kept", "llama", 1, {"save_interval": 1, "keep_last": 2}),
]

# Models whose steps are compared with transformers: one layout each, and one process.
STEP_MODELS = {"llama-step": {}, "qwen3-step": {}, "gpt2-step": {"vocab_size": 50257}}
STEP_LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "tp2dp2-sp-distributed": (4, {"tp": 2, "sequence_parallel": True, "distributed": True}),
}
IDLE = {
    "fp32 weights": (2, "llama-fp32", {"tp": 2, "precision": "bf16"}),
    "bf16 weights": (2, "llama-bf16", {"pp": 2, "precision": "bf16"}),
    "bf16 weights, distributed": (
        2,
        "llama-bf16",
        {"distributed": True, "precision": "bf16"},
    ),
    "fp32 weights in fp32": (1, "llama-fp32", {}),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where everything is, and what the ranks of each job that is no run returned."""

    place: Path
    returned: Mapping[str, list[Any]]

    def __truediv__(self, name: str) -> Path:
        return self.place / name


def _jobs(place: Path) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for i, run in enumerate(RUNS):
        if "eval_data" in run.options:
            options = {**run.options, "eval_data": place / str(run.options["eval_data"])}
            run = dataclasses.replace(run, options=options)
        jobs[f"run {i}: {run.name}"] = job(run, place)
    for model in STEP_MODELS:
        for layout, (world, given) in STEP_LAYOUTS.items():
            setup = dataclasses.asdict(Setup(str(place / model), weight_decay=0.1, **given))
            jobs[f"steps {model} {layout}"] = (world, "steps_from", {"setup": setup})
    for name, (world, folder, given) in IDLE.items():
        setup = dataclasses.asdict(Setup(str(place / folder), **given))
        jobs[f"idle {name}"] = (world, "idle_step", {"setup": setup})
    slow = Run("slow", options={**TP2PP2, "save_interval": None})
    arguments = {"argv": slow.argv(place), "save_dir": str(place / "slow")}
    jobs["slow"] = (4, "save_slowly", arguments)
    return jobs


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Outcome:
    place = make_place(tmp_path_factory.mktemp("runs"))
    (place / "short-eval.txt").write_text(SHORT_EVAL_TEXT)
    hf_model(place, "llama-fp32")
    hf_model(place, "llama-bf16", torch.bfloat16)
    for name, changes in STEP_MODELS.items():
        hf_model(place, name, **changes)
    jobs = _jobs(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
        found = in_ranks(place / "ranks", list(jobs.values()))
    returned = dict(zip(jobs, found, strict=True))
    failed = {name: said for name, said in returned.items() if name[:3] == "run" and any(said)}
    assert not failed
    return Outcome(place, returned)


# --- in the same layout ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_a_resumed_run_is_the_uninterrupted_one(name, made):
    whole, resumed = made / name, made / f"{name}-resumed"
    assert cursor(whole / "checkpoint-2")["epoch"] == 0
    assert cursor(whole / "checkpoint-6")["epoch"] == 1
    assert verify(whole, resumed, run=QUIET).differences == []
    assert [row for row in rows(whole) if row["step"] > 2] == rows(resumed)
    assert len(set(losses(whole))) == 6
    ours, theirs = (random_states(run / "checkpoint-6") for run in (whole, resumed))
    assert len(ours) == SAME[name][1]
    for rank, tensors in ours.items():
        assert tensors.keys() == theirs[rank].keys()
        assert all(torch.equal(x, theirs[rank][key]) for key, x in tensors.items())


def test_a_resume_behind_an_epochs_end_is_the_uninterrupted_run(made):
    whole, resumed = made / "tp2pp2-dropout", made / "after the epoch"
    assert cursor(whole / "checkpoint-4")["consumed_samples"] == 16
    assert cursor(whole / "checkpoint-4")["epoch"] == 1
    assert verify(whole, resumed, run=QUIET).differences == []
    assert [row for row in rows(whole) if row["step"] > 4] == rows(resumed)


def test_a_run_that_is_given_more_steps_is_a_longer_run(made):
    """The order of samples does not depend on the number of steps, nor does the metrics file."""
    assert (made / "grown" / "checkpoint-3").is_dir()
    assert rows(made / "grown") == rows(made / "constant")
    assert verify(made / "grown", made / "constant", run=QUIET).differences == []


def test_the_learning_rate_finds_its_place(made):
    low, high, decay = 1e-3, 1e-2, 5
    cosine = [low + (high - low) / 2 * (1 + np.cos(np.pi * n / decay)) for n in range(decay)]
    for name in SAME:
        assert [r["lr"] for r in rows(made / name) if "lr" in r] == pytest.approx([0.0, *cosine])


def test_random_states_belong_to_their_rank(made):
    states = random_states(made / "tp2pp2-sp-dropout" / "checkpoint-6")
    tracked = {bytes(s["tracker/model-parallel-rng"].numpy()) for s in states.values()}
    plain = [bytes(states[f"random_states_{r}.safetensors"]["torch"].numpy()) for r in range(4)]
    assert len(tracked) == 4
    assert plain[0] == plain[1] != plain[2] == plain[3]  # tp ranks of a stage share it


# --- in another layout -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OTHER, *OTHER_TIED])
def test_losses_in_another_layout_are_those_of_the_uninterrupted_run(name, made):
    resumed = made / name
    start = int({**OTHER, **OTHER_TIED}[name][0].rpartition("-")[2])
    wanted = losses(made / ("base" if name in OTHER else "tied"), start)
    assert losses(resumed) == pytest.approx(wanted, abs=1e-4)
    assert len(wanted) == 14 - start
    assert max(wanted) - min(wanted) > 0.01  # steps that change nothing would agree as well


@pytest.mark.parametrize("name", MOVED)
def test_what_is_loaded_into_another_layout_is_written_again_to_the_bit(name, made):
    source = made / MOVED[name][0] / "checkpoint-8"
    assert verify(source, made / name, run=QUIET).differences == []


def test_dropout_in_another_layout_is_reseeded_alike_every_time(made):
    assert rows(made / "relaid") == rows(made / "relaid again")
    assert verify(made / "relaid", made / "relaid again", run=QUIET).differences == []
    assert rows(made / "relaid") != [r for r in rows(made / "one") if r["step"] > 2]
    states = random_states(made / "relaid, stopped" / "checkpoint-2")
    plain = [bytes(states[f"random_states_{r}.safetensors"]["torch"].numpy()) for r in range(4)]
    assert plain[0] == plain[1] != plain[2] == plain[3]


# --- weights that must stay --------------------------------------------------------------------


def _weights(checkpoint: Path, prefix: str = "") -> dict[str, np.ndarray]:
    """Logical weights, or masters, without padding."""
    opened = open_checkpoint(checkpoint)
    kinds = ("exp_avg", "master/", "padding/", "momentum_buffer")
    names = [n for n in opened if n.startswith(prefix)] if prefix else list(opened)
    found = {
        n.removeprefix(prefix): opened[n].torch()
        for n in names
        if prefix or not n.startswith(kinds)
    }
    return {n: x for n, x in found.items() if not n.startswith("padding/")}


def _equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    assert a
    assert a.keys() == b.keys()
    return all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


@pytest.mark.parametrize(
    ("before", "after"), [(FROM, "still"), ("half/checkpoint-8", "still-half")]
)
def test_a_learning_rate_of_zero_changes_no_weight(before, after, made):
    assert len(losses(made / after)) == 2
    assert _equal(_weights(made / before), _weights(made / after))
    if after == "still-half":
        assert _equal(_weights(made / before, "master/"), _weights(made / after, "master/"))
    assert not _equal(_weights(made / before, "exp_avg/"), _weights(made / after, "exp_avg/"))


@pytest.mark.parametrize("name", IDLE)
def test_a_step_without_gradients_keeps_loaded_weights(name, made):
    for rank in made.returned[f"idle {name}"]:
        assert rank
        assert [n for n, kept in rank.items() if not kept] == []


@pytest.mark.parametrize("name", ["hf32-bf16", "hf32-bf16-distributed"])
def test_fp32_weights_become_the_masters_of_a_bf16_run(name, made):
    wanted = load_file(made / "llama-fp32" / "model.safetensors")
    assert _equal(_weights(made / name, "master/"), wanted)
    assert _equal(_weights(made / name), {n: x.bfloat16() for n, x in wanted.items()})


def test_bf16_weights_keep_their_values_in_either_precision(made):
    given = load_file(made / "llama-bf16" / "model.safetensors")
    wanted = {n: x.float() for n, x in given.items()}
    assert _equal(_weights(made / "hf16-bf16"), given)
    assert _equal(_weights(made / "hf16-bf16", "master/"), wanted)
    assert _equal(_weights(made / "hf16-fp32"), wanted)


def test_masters_and_fp32_weights_stand_for_each_other_in_a_resume(made):
    half, full = made / "half" / "checkpoint-8", made / "base" / "checkpoint-8"
    assert _equal(_weights(half, "master/"), _weights(made / "bf16-fp32"))
    assert _equal(_weights(full), _weights(made / "fp32-bf16", "master/"))
    for state in ("exp_avg/", "exp_avg_sq/"):
        assert _equal(_weights(half, state), _weights(made / "bf16-fp32", state))
        assert _equal(_weights(full, state), _weights(made / "fp32-bf16", state))


# --- against transformers and torch ------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_steps(made) -> dict[str, dict[str, list[float]]]:
    """The same steps by transformers and torch's AdamW."""
    return {name: _torch_steps(made / name) for name in STEP_MODELS}


def _torch_steps(folder: Path) -> dict[str, list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.1)
    parts = batches(model.config.vocab_size)
    tokens, labels, mask = (
        torch.cat([part[key] for part in parts]) for key in ("tokens", "labels", "loss_mask")
    )
    labels = labels.masked_fill(mask == 0, -100)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        squares = [p.grad.double().square().sum() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found["loss"].append(loss.item())
        # torch's own norm of a million numbers in fp32 is off by 5e-5
        found["grad_norm"].append(sum(squares).sqrt().item())
    return found


@pytest.mark.parametrize("layout", STEP_LAYOUTS)
@pytest.mark.parametrize("model", STEP_MODELS)
def test_steps_are_those_of_transformers_and_torch(model, layout, made, torch_steps):
    for rank in made.returned[f"steps {model} {layout}"]:
        for what, wanted in torch_steps[model].items():
            assert rank[what] == pytest.approx(wanted, abs=1e-4), what


def _validation_loss(
    folder: Path, dtype: torch.dtype = torch.float32, text: str = EVAL_TEXT
) -> float:
    """transformers' loss on the evaluation text, cut as the trainer cuts it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor([*text.encode(), 256])
    count = (len(ids) - 1) // SEQ_LENGTH
    at = torch.arange(count)[:, None] * SEQ_LENGTH + torch.arange(SEQ_LENGTH)
    with torch.no_grad():
        logits = model(ids[at]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[at + 1].flatten()).item()


@pytest.mark.parametrize(("name", "master"), [("base", False), ("tied", False), ("half", True)])
def test_the_merged_model_has_the_last_validation_loss(name, master, made, tmp_path):
    merge(made / name, tmp_path / "hf", from_master=master, run=QUIET)
    last = rows(made / name)[-1]
    assert last["step"] == 14
    assert _validation_loss(tmp_path / "hf") == pytest.approx(last["eval_loss"], abs=1e-3)


def test_an_interleaved_pipeline_evaluates_samples_that_fill_no_multiple_of_its_stages(
    made, tmp_path
):
    """It takes micro-batches in multiples of pp=2; 10 samples make five of two."""
    merge(made / "interleaved", tmp_path / "hf", run=QUIET)
    last = rows(made / "interleaved")[-1]
    wanted = _validation_loss(tmp_path / "hf", text=SHORT_EVAL_TEXT)
    assert last["eval_loss"] == pytest.approx(wanted, abs=1e-3)


# --- the files ---------------------------------------------------------------------------------


def test_every_checkpoint_is_sound_and_its_replicas_are_equal(made):
    """Norms over tp, copies of a tied head, digests."""
    found = sorted(made.place.glob("*/checkpoint-*"))
    assert len(found) > len(RUNS)
    for checkpoint in found:
        assert verify(checkpoint, run=QUIET).differences == [], checkpoint


def test_copies_of_a_parameter_stay_copies(made):
    """As above, looked at without our own reader."""
    for name in ("tp2pp2-dropout", "tp2pp2-sp-dropout", "relaid"):
        parts = {
            (tp, pp): load_file(made / name / "checkpoint-6" / f"model_tp_{tp}_pp_{pp}.safetensors")
            for tp in range(2)
            for pp in range(2)
        }
        for tp in range(2):
            first, last = parts[tp, 0], parts[tp, 1]
            assert torch.equal(
                first["embedding.word_embeddings.weight"], last["output_layer.weight"]
            )
        for pp in range(2):
            one, other = parts[0, pp], parts[1, pp]
            copies = [n for n in one if "layernorm" in n or n.endswith(("proj.bias", "fc2.bias"))]
            assert len(copies) >= 12
            assert all(torch.equal(one[n], other[n]) for n in copies)


def test_each_dp_rank_writes_its_own_part_of_a_distributed_optimizer(made):
    for name, tp, pp, dp in [("tp2dp2-distributed", 2, 1, 2), ("dp4-distributed", 1, 1, 4)]:
        folder = next(iter(sorted((made / name).glob("checkpoint-*"))))
        parts = {
            f"optimizer_tp_{t}_pp_{p}_dp_{d}.safetensors"
            for t in range(tp)
            for p in range(pp)
            for d in range(dp)
        }
        assert {file.name for file in folder.glob("optimizer_*")} == parts
        counts = [
            sum(x.numel() for x in load_file(folder / part).values()) for part in sorted(parts)
        ]
        assert max(counts) < 1.2 * min(counts)


def test_only_the_last_checkpoints_are_kept(made):
    assert sorted(child.name for child in (made / "kept").glob("checkpoint-*")) == [
        "checkpoint-5",
        "checkpoint-6",
    ]
    assert (made / "kept" / "latest").read_text() == "checkpoint-6\n"
    assert not list((made / "kept").glob(".*")), "no partial, none removed, no lock"


@pytest.mark.parametrize(
    ("whole", "resumed"), [("tp2pp2", "early-resumed"), ("early-half-whole", "early-half-resumed")]
)
def test_a_checkpoint_from_before_the_first_step_is_the_start(whole, resumed, made):
    assert [c.name for c in (made / resumed.removesuffix("-resumed")).glob("checkpoint-*")] == [
        "checkpoint-0"
    ]
    assert losses(made / whole) == losses(made / resumed)
    assert verify(made / whole, made / resumed, run=QUIET).differences == []


def test_saving_goes_on_while_training_does(made):
    for rank in made.returned["slow"]:
        assert rank["first call back"] == {"latest": None, "complete": []}
        assert rank["published early"] is False
        assert rank["while writing"] == {"latest": None, "complete": []}
        assert rank["held up"]  # the second save waits for the first
        assert rank["second call back"] == {"latest": "checkpoint-1", "complete": ["checkpoint-1"]}
        assert rank["end"] == {
            "latest": "checkpoint-2",
            "complete": ["checkpoint-1", "checkpoint-2"],
        }
    for name in ("checkpoint-1", "checkpoint-2"):  # as at the call, not as after the next step
        assert verify(made / "slow" / name, made / "unslowed" / name, run=QUIET).differences == []


# --- other commands on what the trainer wrote --------------------------------------------------


@pytest.mark.parametrize("name", ["pp2dp2-bf16", "tp2dp2-bf16-distributed", "one-distributed"])
def test_commands_read_what_the_trainer_wrote(name, made, tmp_path):
    source = made / name
    reshard(source, tmp_path / "there", tp=1, pp=4, run=QUIET)
    assert verify(source, tmp_path / "there", run=QUIET).differences == []
    reshard(tmp_path / "there", tmp_path / "back", tp=2, pp=2, dp=2, run=QUIET)
    assert verify(source, tmp_path / "back", run=QUIET).differences == []
    merge(source, tmp_path / "hf", from_master=True, run=QUIET)
    merge(tmp_path / "back", tmp_path / "hf-back", from_master=True, run=QUIET)
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    masters = _weights(source, "master/")
    assert _equal(merged, {n: masters[n] for n in merged})
    assert _equal(merged, load_file(tmp_path / "hf-back" / "model.safetensors"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] in CONFIGS
