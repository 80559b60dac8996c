"""The Accelerator against plain transformers, in every layout, on CPU with gloo.

Most tests read what two sets of ranks left: the first trains and saves, the second loads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import train_runs
import warm
from accelerator_jobs import (
    EOS,
    HOOKS,
    LENGTH,
    LR,
    REFUSED,
    VOCAB,
    Case,
    Job,
    in_ranks,
    make_model,
    make_optimizer,
    make_rows,
    plain,
    second_half,
    wavy_loss,
    worst,
)

from shardwright.ckpt import RunOptions, merge, open_checkpoint, reshard, verify

QUIET = RunOptions(quiet=True, workers=1)
TP2PP2 = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}

# Trainings that must be those of plain transformers, whatever their layout.
CASES: Mapping[str, Case] = {
    "one process": Case(
        plugin={"num_micro_batches": 2}, accumulate=2, shuffle=True, clip=0.5, schedule="multistep"
    ),
    "tp2 pp2, right padding, own groups": Case(
        "llama", 4, {**TP2PP2, "return_logits": True, "partition_activations": True},
        pads="right", optimizer="groups", schedule="transformers",
    ),
    "tp2 dp2, distributed, left padding, frozen first layers": Case(
        "gpt2", 4, {"tp_degree": 2, "use_distributed_optimizer": True}, pads="left",
        optimizer="adam", frozen=("transformer.wte", "transformer.wpe", "transformer.h.0"),
    ),
    "pp2 dp2, a frozen stage, nesterov": Case(
        "qwen3", 4, {"pp_degree": 2, "num_micro_batches": 2, "gradient_clipping": 0},
        optimizer="nesterov", schedule="sequential", shuffle=True, clip=2.0,
        frozen=("model.embed", "model.layers.0", "model.layers.1"),
    ),
    "tp2 dp2, sequence parallel, odd length": Case(
        "gpt2", 4, {"tp_degree": 2, "sequence_parallelism": True, "recompute_activations": True},
        length=11, optimizer="sgd", pads="right",
    ),
    "pp2, interleaved, full recomputation": Case(
        "llama", 2, accumulate=3,
        plugin={"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1,
                "num_micro_batches": 2, "checkpoint_num_layers": 1,
                "other_megatron_args": {"make_vocab_size_divisible_by": 1}},
    ),
    "pp2, a short last stage, block recomputation": Case(
        "llama", 2, epochs=1,
        plugin={"pp_degree": 2, "decoder_last_pipeline_num_layers": 1,
                "recompute_method": "block"},
    ),
    "dp2, distributed, bf16": Case(
        "llama", 2, {"use_distributed_optimizer": True}, "bf16", epochs=1
    ),
    "pp2 dp2, distributed, overlapped": Case(
        "gpt2", 4, epochs=1,
        plugin={"pp_degree": 2, "num_micro_batches": 2, "use_distributed_optimizer": True,
                "other_megatron_args": {"overlap_grad_reduce": True}},
    ),
}  # fmt: skip
EVALUATED = [name for name, case in CASES.items() if case.pads != "left" and case.precision == "no"]

# Steps with functions or settings of the user's own: the case and which hooks it has.
VARIANTS: Mapping[str, tuple[Case, tuple[str, ...]]] = {
    "eod": (Case("gpt2", 2, {"pp_degree": 2, "eod_mask_loss": True, "num_micro_batches": 2}), ()),
    "micro-batches' means": (
        Case("llama", 4, {"pp_degree": 2, "num_micro_batches": 2,
                          "calculate_per_token_loss": False}), (),
    ),
    "custom loss": (
        Case("llama", 4, {"pp_degree": 2, "num_micro_batches": 2}), ("custom_loss_function",)
    ),
    "custom loss with logits": (
        Case("llama", 4, {**TP2PP2, "return_logits": True}), ("custom_loss_function",)
    ),
    "custom batch": (
        Case("gpt2", 4, {"tp_degree": 2, "sequence_parallelism": True}, length=10),
        ("custom_get_batch_function",),
    ),
    "custom step": (
        Case("gpt2", 4, {**TP2PP2, "custom_train_step_kwargs": {"factor": 0.5}}, length=10),
        ("custom_train_step_class",),
    ),
    "conditions": (
        Case("llama", 4, {"tp_degree": 2, "pp_degree": 2, "lr_mult": 0.1}),
        ("no_wd_decay_cond", "scale_lr_cond"),
    ),
}  # fmt: skip

# Runs that are saved while they go on, and the layouts that go on from there.
SAVED: Mapping[str, tuple[Case, int]] = {  # and after how many batches
    "tp2pp2": (
        Case("llama", 4, TP2PP2, optimizer="groups", schedule="sequential", shuffle=True,
             rows=18, accumulate=2), 7,
    ),
    "dropout": (
        Case("gpt2-dropout", 4, {"tp_degree": 2, "use_distributed_optimizer": True},
             schedule="multistep", shuffle=True, rows=18, accumulate=2), 4,
    ),
    "sgd": (
        Case("gpt2", 4, {"tp_degree": 2}, "bf16", optimizer="sgd", rows=18, accumulate=2),
        4,
    ),
    "unfinished step": (
        Case("gpt2", 1, accumulate=2, rows=18, frozen=("transformer.wpe", "transformer.h.0.mlp")),
        3,
    ),
}  # fmt: skip
RESUMED: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {  # saved run, ranks, plugin
    "tp2pp2": ("tp2pp2", 4, TP2PP2),
    "tp1pp4": ("tp2pp2", 4, {"pp_degree": 4, "num_micro_batches": 2}),
    "one process": ("tp2pp2", 1, {"num_micro_batches": 2}),
    "tp2, distributed": (
        "tp2pp2",
        2,
        {"tp_degree": 2, "num_micro_batches": 2, "use_distributed_optimizer": True},
    ),
    "dropout": ("dropout", 4, SAVED["dropout"][0].plugin),
    "sgd": ("sgd", 4, SAVED["sgd"][0].plugin),
    "unfinished step": ("unfinished step", 1, {}),
}
EXACT = ("tp2pp2", "dropout", "sgd", "unfinished step")


def _json(case: Case) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(case)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks write."""
    return tmp_path_factory.mktemp("accelerator")


@pytest.fixture(scope="module")
def ran(place: Path) -> dict[str, Any]:
    """Everything that trains and saves; each rank's results by job."""
    _guide_data(place)
    _command_data(place / "command")
    jobs: dict[str, Job] = {
        name: (case.world, "train", {"case": _json(case), "evaluate": name in EVALUATED})
        for name, case in CASES.items()
    }
    for name, (case, hooks) in VARIANTS.items():
        jobs[name] = (case.world, "variant", {"case": _json(case), "hooks": hooks})
    for name, (case, after) in SAVED.items():
        folder = str(place / name)
        jobs["save " + name] = (
            case.world, "save", {"case": _json(case), "folder": folder, "after": after}
        )  # fmt: skip
    tp2dp2 = {"tp_degree": 2, "pp_degree": 1}
    jobs |= {
        "guide tp2 dp2": (4, "guide", {"fields": tp2dp2, "precision": "no", "folder": str(place)}),
        "surface": (4, "surface", {"folder": str(place)}),
        "environment": (4, "environment", {}),
        "command": (2, "command", {"folder": str(place)}),
        "faulty": (4, "faulty", {"folder": str(place)}),
        "schedules": (1, "schedules", {}),
        "consumed": (1, "consumed", {}),
        "orders": (2, "orders", {}),
        "not checked": (1, "not_checked", {}),
    }
    for part in range(4):
        names = list(REFUSED)[part::4]
        jobs[f"refusals {part}"] = (1, "refusals", {"names": names})
    return in_ranks(place / "first", jobs)


@pytest.fixture(scope="module")
def resumed(ran: dict[str, Any], place: Path) -> dict[str, Any]:
    """What goes on from what was saved, in new processes."""
    jobs: dict[str, Job] = {}
    for name, (saved, world, plugin) in RESUMED.items():
        case, after = SAVED[saved]
        case = dataclasses.replace(case, world=world, plugin=plugin)
        source, per_epoch = str(place / saved / "run"), len(ran["save " + saved][0]["losses"]) // 2
        jobs[name] = (
            world, "resume", {"case": _json(case), "source": source, "epoch": after // per_epoch}
        )  # fmt: skip
    make_model("llama").save_pretrained(place / "hf")
    case = _json(Case("llama", 4, {**TP2PP2, "use_distributed_optimizer": True}))
    jobs["hf"] = (4, "load_weights", {"case": case, "source": str(place / "hf")})
    case = _json(Case("llama", 1, {"no_load_optim": True}))
    jobs["weights alone"] = (
        1, "load_weights", {"case": case, "source": str(place / "tp2pp2" / "run")}
    )  # fmt: skip
    case = _json(Case("llama", 2, {"use_distributed_optimizer": True}))
    jobs["dp2"] = (2, "load_weights", {"case": case, "source": str(place / "tp2pp2" / "run")})
    source = str(place / "command" / "out")
    case = _json(Case("llama", 2, {"pp_degree": 2}))
    jobs["of train-ckpt"] = (
        2, "load_weights", {"case": case, "source": source, "vocab_size": BYTES}
    )  # fmt: skip
    return in_ranks(place / "second", jobs)


# --- training ----------------------------------------------------------------------------------


def _apart(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights without the biases of GPT-2's keys, and these.

    The softmax does not see them: their gradient is rounding alone, of which Adam makes steps.
    """
    rest, keys = dict(weights), {}
    for name in rest:
        if name.endswith("attn.c_attn.bias"):
            query, keys[name], value = weights[name].chunk(3)
            rest[name] = torch.cat([query, value])
    return rest, keys


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_that_of_plain_transformers(name: str, ran: dict[str, Any]) -> None:
    case, found = CASES[name], ran[name][0]
    expected = plain(case, found["rows"], found["ends"])
    loose = 500 if case.precision == "bf16" else 1
    for rank in ran[name]:
        losses = [of_step[rank["replica"]] for of_step in expected["losses"]]
        assert rank["losses"] == pytest.approx(losses, abs=1e-4 * loose)
    assert found["norms"] == pytest.approx(expected["norms"], abs=1e-4 * loose)
    assert found["lrs"] == expected["lrs"]
    (ours, keys), (theirs, their_keys) = map(_apart, (found["weights"], expected["weights"]))
    assert worst(ours, theirs) < 2e-4 * loose
    for name, bias in keys.items():
        assert float((bias - their_keys[name]).abs().max()) < 4e-4 * loose, name


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sees_the_same_numbers(name: str, ran: dict[str, Any]) -> None:
    first = ran[name][0]
    for rank in ran[name][1:]:
        for key in ("norms", "lrs", "rows"):
            assert rank[key] == first[key], key
        twin = next(one for one in ran[name] if one["replica"] == rank["replica"])
        assert rank["losses"] == twin["losses"]
        assert worst(rank["weights"], first["weights"]) == 0.0


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_has_every_row_once(name: str, ran: dict[str, Any]) -> None:
    case, found = CASES[name], ran[name][0]
    start, epochs = 0, []
    for end in found["ends"]:
        epochs.append([row for batch in found["rows"][start:end] for row in batch])
        start = end
    assert [sorted(epoch) for epoch in epochs] == [list(range(case.rows))] * case.epochs
    if case.shuffle:
        assert epochs[0] != epochs[1]
    else:
        assert epochs[0] == list(range(case.rows))


def test_shuffled_global_batches_do_not_depend_on_the_layout(ran: dict[str, Any]) -> None:
    one, dp2 = ran["one process"][0]["rows"], ran["pp2 dp2, a frozen stage, nesterov"][0]["rows"]
    assert [*chain(*one)] == [*chain(*dp2)]  # batches of 4 and of 8 rows


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_gives_loss_and_logits_of_transformers(name: str, ran: dict[str, Any]) -> None:
    case, found = CASES[name], ran[name][0]
    model = make_model(case.model)
    model.load_state_dict(found["weights"])
    rows = make_rows(case.rows, case.length, case.pads)
    whole = torch.utils.data.default_collate([rows[i] for i in found["eval_rows"]])
    whole.pop("row")
    share = case.micro * case.plugin.get("num_micro_batches", 1)
    with torch.no_grad():
        expected = model.eval()(**whole)
        for rank in ran[name]:
            at = rank["replica"] * share
            own = {key: value[at : at + share] for key, value in whole.items()}
            assert rank["eval_loss"] == pytest.approx(model(**own).loss.item(), abs=1e-4)
    real = whole.get("attention_mask", torch.ones(len(found["eval_rows"]), case.length)).bool()
    torch.testing.assert_close(found["logits"][real], expected.logits[real], atol=1e-4, rtol=1e-4)
    assert found["logits"].shape[-1] == VOCAB  # padding rows of the vocabulary are left out
    for rank in ran[name][1:]:
        torch.testing.assert_close(rank["logits"], found["logits"])


# --- functions and settings of the user's own --------------------------------------------------


def _micro_batches(name: str, rows: list[int]) -> list[list[dict[str, torch.Tensor]]]:
    """The rows of a global batch as the micro-batches of each data-parallel rank."""
    case = VARIANTS[name][0]
    every, count = make_rows(case.rows, case.length), case.plugin.get("num_micro_batches", 1)
    micros = [
        torch.utils.data.default_collate([every[i] for i in rows[at : at + case.micro]])
        for at in range(0, len(rows), case.micro)
    ]
    return [micros[at : at + count] for at in range(0, len(micros), count)]


def _losses(model, batch: Mapping[str, torch.Tensor], mask4d: torch.Tensor | None = None):
    """(losses [b, s] of predicting the next token, which of them count) by transformers."""
    logits = model(batch["input_ids"], attention_mask=mask4d).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp_min(0), reduction="none")
    return losses, (labels != -100).float()


def _halves(model, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss that `second_half` makes, computed with transformers."""
    ids, labels, mask, hidden, _ = second_half(iter([batch]))
    seen = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    logits = model(ids, attention_mask=seen.expand(len(ids), 1, -1, -1)).logits
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def _expected_loss(name: str, model, micros: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """What the loss of a data-parallel rank must be."""
    if name in ("custom batch", "custom step"):
        factor = 0.5 if name == "custom step" else 1.0
        return factor * sum(_halves(model, micro) for micro in micros) / len(micros)
    total, count = torch.zeros(()), torch.zeros(())
    for micro in micros:
        losses, mask = _losses(model, micro)
        if name == "eod":
            mask = mask * (micro["input_ids"] != EOS)
        if name.startswith("custom loss"):  # weighed by tokens, as the default loss is
            portion, loss = mask.sum(), wavy_loss(mask, losses)[0]
        elif name == "micro-batches' means":
            portion, loss = torch.ones(()), (losses * mask).sum() / mask.sum()
        else:
            portion, loss = mask.sum(), (losses * mask).sum() / mask.sum()
        total, count = total + portion * loss, count + portion
    return total / count


@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_of_the_users_own_has_its_gradient(name: str, ran: dict[str, Any]) -> None:
    found = ran[name][0]
    model = make_model(VARIANTS[name][0].model)
    optimizer = make_optimizer(model, "adamw")
    if name == "conditions":
        optimizer = _conditional_groups(model)
    for number, rows in enumerate(found["rows"]):
        losses = [_expected_loss(name, model, of_rank) for of_rank in _micro_batches(name, rows)]
        (sum(losses) / len(losses)).backward()
        for rank in ran[name]:
            expected = losses[rank["replica"]].item()
            assert rank["losses"][number] == pytest.approx(expected, abs=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert found["norms"][number] == pytest.approx(norm.item(), abs=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    assert worst(found["weights"], model.state_dict()) < 2e-4


def _conditional_groups(model) -> torch.optim.Optimizer:
    """The groups that the conditions of `HOOKS` make, under transformers' names."""
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        slow = "embed_tokens" in name or ".3.mlp" in name
        groups.setdefault((slow, parameter.dim() == 1), []).append(parameter)
    assert len(groups) == 3, "of four kinds one has no parameter: a rank's group may be empty"
    return torch.optim.AdamW(
        [
            {
                "params": params,
                "lr": LR * (0.1 if slow else 1),
                "weight_decay": 0.0 if flat else 0.01,
            }
            for (slow, flat), params in groups.items()
        ],
        lr=LR,
    )


def test_what_a_loss_function_reports_is_on_every_rank(ran: dict[str, Any]) -> None:
    for name in ("custom loss", "custom loss with logits"):
        for rank in ran[name]:
            for loss, reported in zip(rank["losses"], rank["reported"], strict=True):
                assert reported["wavy"].item() == pytest.approx(loss, abs=1e-6)
                assert reported["largest"].item() > 3
    assert (
        ran["custom step"][3]["reported"][0]["lm loss"].item() == ran["custom step"][3]["losses"][0]
    )
    assert ran["eod"][0]["reported"] == [None, None]


BYTES, EOD = 259, 256  # a vocabulary for bytes, and the token that ends a document


def _command_data(place: Path) -> None:
    """A model for bytes, and documents so short that every sample has an end of one."""
    make_model("llama", vocab_size=BYTES).save_pretrained(place / "hf")
    lines = [json.dumps({"text": f"{i} and {i * i}"}) for i in range(40)]
    (place / "data.jsonl").write_text("\n".join(lines))


def test_train_ckpt_takes_the_losses_settings_from_the_environment(
    place: Path, ran: dict[str, Any]
) -> None:
    found, losses = ran["command"], []
    assert [rank["error"] for rank in found] == ["", ""]
    model = make_model("llama", vocab_size=BYTES)
    for batch in found[0]["seen"] + found[1]["seen"]:
        logits = model(batch["tokens"]).logits
        each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        mask = batch["tokens"] != EOD
        assert 0 < mask.sum() < mask.numel()
        losses.append(((each * mask).sum() / mask.sum()).item())
    assert len(losses) == 4
    row = json.loads((place / "command" / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(sum(losses) / 4, abs=1e-4)
    saved = open_checkpoint(place / "command" / "out")
    weights = [saved[name].torch() for name in saved if not name.startswith(("exp", "master"))]
    squares = sum(float(weight.double().square().sum()) for weight in weights)
    assert row["params_norm"] == pytest.approx(squares**0.5, rel=1e-6)


# --- schedules and data ------------------------------------------------------------------------


def test_the_plugins_schedule_moves_once_per_optimizer_step(ran: dict[str, Any]) -> None:
    found = ran["schedules"][0]
    rates = [row[0][0] for row in found["dummy"]]
    assert rates == pytest.approx([LR * x for x in (0, 1 / 2, 1, 3 / 4, 1 / 2, 1 / 4)])
    ratios = [row[1][0] / row[0][0] for row in found["dummy"][1:]]
    assert ratios == pytest.approx([1e-2 / LR] * 5)  # each group keeps its own peak
    assert [row[0][1] for row in found["dummy"]] == [0.2] * 6  # and its weight decay
    assert found["plugin"] == found["plugin and dummy"]
    decay = [row[2][1] for row in found["plugin"]]
    assert decay == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [row[1][1] for row in found["plugin"]] == [0.0] * 6  # a group without stays without


def test_consumed_samples_begin_where_an_earlier_run_ended(ran: dict[str, Any]) -> None:
    rest, following, *whole = ran["consumed"][0]
    assert rest == whole[2][6:]  # 26 samples are two epochs of ten rows and three batches
    assert following == whole[3]


def test_loaders_of_every_kind_give_each_rank_its_rows(ran: dict[str, Any]) -> None:
    first, second = ran["orders"]
    labels = [row["labels"][-1].item() for row in make_rows(10)]
    for name in ("workers",):
        assert [rows for rows, _ in first[name]] == [[0, 1, 2, 3], [8, 9, 0, 1]]
        assert [rows for rows, _ in second[name]] == [[4, 5, 6, 7], [2, 3, 4, 5]]
        # rows that only fill up the last batch have no labels
        assert first[name][1][1] == [labels[8], labels[9], -100, -100]
        assert second[name][1][1] == [-100] * 4
    assert [rows for rows, _ in first["stream"]] == [[0, 1, 2, 3], [8]]
    assert [rows for rows, _ in second["stream"]] == [[4, 5, 6, 7], [9]]
    assert [rows for rows, _ in first["dropping"]] == [[0, 1, 2, 3]]
    for name in ("subset", "weighted", "generator"):
        pairs = zip(first[name], second[name], strict=True)
        found = [*chain(*([*a, *b] for (a, _), (b, _) in pairs))]
        if name == "subset":
            assert sorted(found[:5]) == [1, 3, 5, 7, 9]
        if name == "generator":
            assert sorted(found[:10]) == list(range(10))


def test_a_dummy_schedulers_steps_are_divided_by_the_replicas(ran: dict[str, Any]) -> None:
    """Twelve steps of two replicas are six of the optimizer, and two of them warm-up."""
    for rank in ran["orders"]:
        assert rank["dummy"] == pytest.approx([LR * x for x in (0, 1 / 2, 1, 3 / 4, 1 / 2, 1 / 4)])


def test_an_epoch_that_is_broken_off_does_not_come_again(ran: dict[str, Any]) -> None:
    found = ran["orders"][0]
    assert found["third"] != [rows for rows, _ in found["generator"]]
    assert found["third"] == found["third of torch"]


def test_a_cursor_of_another_global_batch_loses_no_sample(ran: dict[str, Any]) -> None:
    assert ran["orders"][0]["again"] == [4, 1]  # twelve samples are one batch of eight and four


def test_an_evaluation_within_a_step_ends_no_accumulation(ran: dict[str, Any]) -> None:
    # thirty rows are four batches of eight, the last of which ends the epoch
    assert ran["orders"][0]["synchronized"] == [False, False, False, True]


# --- saving and resuming -----------------------------------------------------------------------


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    name: str, ran: dict[str, Any], resumed: dict[str, Any]
) -> None:
    saved, now = RESUMED[name][0], resumed[name][0]
    before, (case, after) = ran["save " + saved][0], SAVED[saved]
    assert now["counter"] == after
    left = len(now["losses"])
    assert left == len(before["losses"]) - after + after % case.accumulate * (saved != "tp2pp2")
    assert now["rows"] == before["rows"][-left:]
    assert now["lrs"] == before["lrs"][-len(now["lrs"]) :] if now["lrs"] else not before["lrs"]
    if name in EXACT:
        assert now["losses"] == before["losses"][-left:]
        assert worst(now["weights"], before["weights"]) == 0.0
    else:
        assert now["losses"] == pytest.approx(before["losses"][-left:], abs=1e-4)
        assert worst(now["weights"], before["weights"]) < 1e-4


def test_an_unfinished_step_is_said_and_comes_again(
    place: Path, ran: dict[str, Any], resumed: dict[str, Any]
) -> None:
    assert ran["save unfinished step"][0]["losses"]
    said = (place / "first" / "output.txt").read_text()
    assert "after 1 of 2 batches of a step" in said
    assert resumed["unfinished step"][0]["step"] == 1


def test_a_random_state_that_cannot_be_restored_is_said(
    place: Path, resumed: dict[str, Any]
) -> None:
    said = (place / "second" / "output.txt").read_text()
    pattern = r"reseeded from \(seed \d+, step 4, rank\); another layout saved it"
    assert len(re.findall(pattern, said)) == 4
    assert resumed["hf"]


def test_a_hugging_face_folder_is_loaded_and_a_rate_of_zero_changes_nothing(
    resumed: dict[str, Any],
) -> None:
    expected = make_model("llama").state_dict()
    for rank in resumed["hf"]:
        assert worst(rank, expected) == 0.0


@pytest.mark.parametrize("name", ["weights alone", "dp2"])
def test_weights_are_loaded_without_their_optimizer_or_over_data_parallel_ranks(
    name: str, place: Path, resumed: dict[str, Any]
) -> None:
    saved = open_checkpoint(place / "tp2pp2" / "run")
    found = resumed[name][0]
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name].torch()), name


def test_a_checkpoint_of_train_ckpt_is_loaded_and_what_does_not_fit_is_said(
    place: Path, resumed: dict[str, Any]
) -> None:
    saved = open_checkpoint(place / "command" / "out")
    for name, tensor in resumed["of train-ckpt"][1].items():
        assert torch.equal(tensor, saved[name].torch()), name
    said = (place / "second" / "output.txt").read_text()
    assert "has 2 param groups, the optimizer 1" in said
    assert "its data cursor is not one of 1 prepared loaders" in said


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_opens_in_transformers(name: str, place: Path, ran: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = place / name / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    expected = ran["save " + name][0]["weights"]
    assert next(model.parameters()).dtype == next(iter(expected.values())).dtype
    assert worst(model.state_dict(), expected) == 0.0
    assert len(list(folder.glob("*.safetensors"))) > 1  # max_shard_size=60KB
    assert json.loads((folder / "config.json").read_text())["architectures"]
    # the pointer of the folder that it was saved into is the checkpoint's
    assert (place / name / "run" / "latest").read_text().startswith("checkpoint-")
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize("name", SAVED)
def test_every_command_reads_what_was_saved(
    name: str, place: Path, ran: dict[str, Any], tmp_path: Path
) -> None:
    assert ran["save " + name]
    source = place / name / "run"
    assert verify(source, run=QUIET).same
    other = tmp_path / "tp1pp2"
    reshard(source, other, tp=1, pp=2, run=QUIET)
    assert verify(source, other, run=QUIET).same
    assert (other / "custom_checkpoint_0.pt").is_file()
    masters = SAVED[name][0].precision == "bf16"
    merge(source, tmp_path / "hf", from_master=masters, run=QUIET)
    state = "master/" if masters else ""
    saved, merged = open_checkpoint(source), open_checkpoint(tmp_path / "hf")
    assert len(merged) > 10
    for fqn in merged:
        assert torch.equal(merged[fqn].torch(), saved[state + fqn].torch()), fqn


# --- the rest of the surface -------------------------------------------------------------------


def test_each_rank_knows_who_it_is(ran: dict[str, Any]) -> None:
    for rank, found in enumerate(ran["surface"]):
        first = rank == 0
        # two replicas: the first rank of the last one is the last process
        who = [rank // 2, rank, 2, first, first, rank == 2, "cpu", True, 4]
        assert found["who"] == who
        assert found["main"] == (0 if first else None)
        assert found["unwrapped"]
        assert found["batch sizes"] == [4, 8, 2]
        assert found["lengths"] == [2, 3, 10]


def test_tensors_are_gathered_over_the_data_parallel_ranks(ran: dict[str, Any]) -> None:
    for rank, found in enumerate(ran["surface"]):
        assert found["gather"]["a"].tolist() == [0, 1]
        assert [part.tolist() for part in found["gather"]["b"]] == [[1, 2], [0, 1]]
        assert found["objects"] == [rank % 2, rank % 2 + 2]
        assert (found["sum"].item(), found["mean"].item()) == (3, 0.5)
        assert found["as it is"].item() == 1  # Accelerate's "none" sums as well


def test_metrics_are_of_every_row_once_in_the_loaders_order(ran: dict[str, Any]) -> None:
    rows = torch.utils.data.default_collate(make_rows(10))
    model = make_model("llama")
    model.load_state_dict(ran["surface"][0]["weights"])
    with torch.no_grad():
        expected = model.eval()(rows["input_ids"]).logits.argmax(-1)
    for rank in ran["surface"]:
        parts = [torch.cat(part) for part in zip(*rank["predicted"], strict=True)]
        assert parts[2].tolist() == list(range(10))
        assert torch.equal(parts[1], rows["labels"])
        assert torch.equal(parts[0], expected)


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of TensorBoard event files."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_a_tracker_has_what_the_script_logged(place: Path, ran: dict[str, Any]) -> None:
    logged = _events(place / "project" / "guide")
    losses = [loss for loss, _ in ran["surface"][0]["train"]]
    assert [step for step, _ in logged["loss"]] == [0, 1]
    assert [value for _, value in logged["loss"]] == pytest.approx(losses)


def test_tensorboard_dir_has_every_step_and_evaluation(place: Path, ran: dict[str, Any]) -> None:
    logged, found = _events(place / "events"), ran["surface"][0]
    assert logged.keys() == {"loss", "lr", "grad_norm", "params_norm", "eval_loss"}
    losses = [  # of both data-parallel ranks
        (one + other) / 2
        for (one, _), (other, _) in zip(found["train"], ran["surface"][2]["train"], strict=True)
    ]
    norms = [norm for _, norm in found["train"]]
    assert [value for _, value in logged["loss"]] == pytest.approx(losses)
    assert [value for _, value in logged["grad_norm"]] == pytest.approx(norms)
    assert [value for _, value in logged["lr"]] == pytest.approx([LR] * 2)
    squares = sum(float(w.double().square().sum()) for w in found["weights"].values())
    assert found["params_norm"] == pytest.approx(squares**0.5, rel=1e-6)
    assert logged["params_norm"][-1][1] == pytest.approx(squares**0.5, rel=1e-6)
    ((step, loss),) = logged["eval_loss"]
    assert step == 2
    assert 3 < loss < 7


def test_another_model_can_be_prepared_after_free_memory(ran: dict[str, Any]) -> None:
    model, row = make_model("gpt2").eval(), make_rows(1)[0]
    with torch.no_grad():
        expected = model(row["input_ids"][None], labels=row["labels"][None]).loss.item()
    assert ran["surface"][0]["eval after free_memory"] == pytest.approx(expected, abs=1e-4)


def test_the_main_process_prints_and_saves(place: Path, ran: dict[str, Any]) -> None:
    said = (place / "first" / "output.txt").read_text()
    assert said.count("printed by the main process alone") == 1
    assert torch.load(place / "one.pt", weights_only=True)["x"].tolist() == [0.0]
    assert ran["surface"]


def test_variables_of_accelerate_launch_make_the_accelerator(ran: dict[str, Any]) -> None:
    for rank in ran["environment"]:
        assert rank == [2, 2, 2, True, 0.25, "bf16", 3, "MEGATRON_LM"]


def test_a_loss_that_is_not_finite_stops_every_rank_with_what_was_saved(
    place: Path, ran: dict[str, Any]
) -> None:
    for rank in ran["faulty"]:
        assert "step 2: the loss is nan (first on rank 2 of 4)" in rank
    assert open_checkpoint(place / "before").step == 1
    assert not list((place / "before").glob("optimizer*"))  # no_save_optim
    first, second = ran["not checked"][0]
    assert math.isfinite(first)
    assert math.isnan(second)


# --- what is refused ---------------------------------------------------------------------------

ERRORS: Mapping[str, tuple[str, ...]] = {
    "a gradient that is not finite": ("step 1: the gradient norm is nan (first on rank 0 of 1)",),
    "no_sync and overlap": ("overlap_grad_reduce",),
    "logits of a pipeline": ("a loss made of logits", "custom_loss_function"),
    "two steps without zero_grad": ("the gradients of the first were not cleared",),
    "the loss of eval": ("eval mode", "model.train()"),
    "unknown keys": ("the batch also has token_type_ids", "collate"),
    "no labels": ("no labels", "model.eval()"),
    "no input_ids": ("needs input_ids", "labels"),
    "labels of another shape": ("(2, 5)", "(2, 12)"),
    "all labels masked": ("every label is masked",),
    "a sequence that is too long": ("12 tokens", "positions of 8"),
    "longer than seq_length": ("12 tokens", "seq_length of 8"),
    "positions of a rotary model": ("position_ids", "leave position_ids out"),
    "a mask of three dims": ("(2, 1, 12)", "[rows, sequence]"),
    "an extra layer": ("value_head.weight", "value_head.bias"),
    "a half frozen tensor": ("q_proj.weight are frozen", "k_proj"),
    "groups that cut a tensor": ("linear_qkv.weight", "different param groups"),
    "a stranger's parameters": ("52 parameters", "model.parameters()"),
    "another optimizer": ("Adagrad", "AdamW, Adam or SGD"),
    "amsgrad": ("AdamW(amsgrad=True)",),
    "a classifier": ("GPT2ForSequenceClassification", "language-model head"),
    "yarn": ("'yarn'", "default, linear, llama3"),
    "conditions and groups": ("3 param groups", "no_wd_decay_cond"),
    "clipping some": ("model.parameters()",),
    "two schedules": ("train_iters", "MegatronLMDummyScheduler"),
    "consumed in part": ("consumed_samples 3", "global batch of 2"),
    "two models": ("free_memory()",),
    "eod without a token": ("eos_token_id",),
    "a loss of the wrong shape": ("custom_loss_function", "a tensor of shape (2, 12)"),
    "a batch function of the wrong shape": ("tokens, labels, loss_mask", "a dict"),
    "a train step without forward": ("forward_step",),
    "positions said wrongly": ("use_rotary_position_embeddings=True", "learned"),
    "another size": ("num_layers", "5", "4"),
    "sgd over dp": ("distributed optimizer has no sgd",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str, ran: dict[str, Any]) -> None:
    error = ran[f"refusals {list(REFUSED).index(name) % 4}"][0][name]
    for part in ERRORS[name]:
        assert part in error


def test_every_hook_is_tried() -> None:
    tried = {hook for _, hooks in VARIANTS.values() for hook in hooks}
    assert tried == HOOKS.keys()


# --- the guide's script ------------------------------------------------------------------------

GUIDE = Path(__file__).parent / "accelerator_guide.py"
CONFIG = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
    "eos_token_id": EOS,
}  # fmt: skip


def _guide_data(place: Path) -> None:
    """The model's config and 40 rows: ten batches of four, eight in the first step."""
    (place / "config.json").write_text(json.dumps(CONFIG))
    torch.save(torch.arange(40 * LENGTH).view(40, LENGTH) * 7919 % VOCAB, place / "ids.pt")


def _plain_guide(place: Path, size: int, ranks: int = 1) -> list[float]:
    """The guide's losses by transformers on the first of ``ranks``; ``size`` rows in a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    batches = torch.load(place / "ids.pt").split(size)
    losses = []
    for number, ids in enumerate(batches, 1):
        of_ranks = [model(part, labels=part).loss for part in ids.split(size // ranks)]
        (sum(of_ranks) / len(of_ranks) / 8).backward()
        losses.append(of_ranks[0].item())
        if number % 8 == 0 or number == len(batches):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _run_guide(command: list[str], fields: Mapping[str, Any], precision: str, place: Path) -> None:
    _guide_data(place)
    command = [*command, str(GUIDE), json.dumps(fields), precision, str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]


def _guide_losses(place: Path, precision: str, ranks: int) -> list[float]:
    found: list[float] = json.loads(
        (place / f"checkpoint-epoch-0-{precision}-{ranks}.json").read_text()
    )
    return found


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]


def test_the_guides_script_runs_in_one_process(tmp_path: Path) -> None:
    fields = {"tp_degree": 1, "pp_degree": 1}
    _run_guide([sys.executable], fields, "no", tmp_path)
    expected = _plain_guide(tmp_path, 4)
    assert _guide_losses(tmp_path, "no", 1) == pytest.approx(expected, abs=1e-4)


SMALL_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
from shardwright.train import Accelerator, MegatronLMPlugin
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=1, pp_degree=1))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/hf")  # comes in eval mode
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [{"input_ids": x, "labels": x} for x in torch.arange(48).view(4, 12)]
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(sys.argv[1] + "/saved")
accelerator.end_training()
"""


def test_train_ckpt_goes_on_from_a_scripts_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and step; a script's loaders have no place in the command's data."""
    make_model("llama", vocab_size=259).save_pretrained(tmp_path / "hf")
    log = tmp_path / "log"
    code = warm.call("warm:script", SMALL_SCRIPT, str(tmp_path), log=log)
    assert code == 0, log.read_text()[-3000:]
    (tmp_path / "data.txt").write_text("one and two are three; " * 40)
    argv = [
        "--model", str(tmp_path / "saved"), "--data", str(tmp_path / "data.txt"), "--save-dir",
        str(tmp_path / "run"), "--resume", str(tmp_path / "saved"), "--pp", "2", "--seq-length",
        str(LENGTH), "--steps", "3", "--micro-batch-size", "1", "--global-batch-size", "2",
    ]  # fmt: skip
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    jobs = [(2, "train_command", {"argv": argv})]
    (ended,) = train_runs.in_ranks(tmp_path / "ranks", jobs)
    said = "".join(rank["said"] for rank in ended)
    assert [rank["code"] for rank in ended] == [0, 0], said[-3000:]
    assert "counts the rows of a script's loaders; samples start from the first" in said
    assert "at step 2" in said
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


def test_the_guides_script_runs_as_it_is_in_four_processes(tmp_path: Path) -> None:
    _run_guide(TORCHRUN, {}, "bf16", tmp_path)
    expected = _plain_guide(tmp_path, 4)
    assert _guide_losses(tmp_path, "bf16", 4) == pytest.approx(expected, abs=1e-2)
    assert verify(tmp_path / "checkpoint-epoch-0-bf16-4", run=QUIET).same


def test_the_guides_script_runs_data_parallel(place: Path, ran: dict[str, Any]) -> None:
    assert ran["guide tp2 dp2"]
    expected = _plain_guide(place, 8, 2)
    assert _guide_losses(place, "no", 4) == pytest.approx(expected, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    "fields",
    [
        {"pp_degree": 1, "recompute_activations": False},
        {"tp_degree": 1, "recompute_activations": False},
        {"tp_degree": 1, "pp_degree": 1},
    ],
    ids=["tp2", "pp2", "dp2"],
)
def test_the_guides_script_runs_on_gpus(fields: dict[str, Any], tmp_path: Path) -> None:
    ranks_of_gpus = [*TORCHRUN[:-1], "--nproc-per-node=2", str(GUIDE.parent / "gpu_ranks.py")]
    _run_guide(ranks_of_gpus, fields, "bf16", tmp_path)
    ranks = fields.get("tp_degree", 2) * fields.get("pp_degree", 2)
    expected = _plain_guide(tmp_path, 4 * 2 // ranks, 2 // ranks)
    assert _guide_losses(tmp_path, "bf16", 2) == pytest.approx(expected, abs=2e-2)


@pytest.mark.slow
def test_the_guides_script_runs_under_accelerate_launch(tmp_path: Path) -> None:
    launch = [
        str(Path(sys.executable).parent / "accelerate"), "launch", "--use_megatron_lm",
        "--num_processes", "4", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--megatron_lm_tp_degree", "2", "--megatron_lm_pp_degree", "2",
        "--megatron_lm_num_micro_batches", "4", "--megatron_lm_gradient_clipping", "1.0",
        "--megatron_lm_use_distributed_optimizer", "true",
    ]  # fmt: skip
    said = dict.fromkeys(
        ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping",
         "use_distributed_optimizer")
    )  # fmt: skip
    _run_guide(launch, said, "no", tmp_path)
    expected = _plain_guide(tmp_path, 4)
    assert _guide_losses(tmp_path, "no", 4) == pytest.approx(expected, abs=1e-4)


def test_a_checkpoint_says_which_weights_were_frozen(ran: dict[str, Any], place: Path) -> None:
    """Their state was missing, as if it were lost."""
    for name, (case, _) in SAVED.items():
        made = place / name / "run"
        (folder,) = [c for c in made.iterdir() if c.name.startswith("checkpoint-")]
        said = json.loads((folder / "checkpoint.json").read_text())["frozen"]
        names = [n for n, _ in make_model(case.model).named_parameters()]
        frozen = {n for n in names if n.startswith(case.frozen)} if case.frozen else set()
        assert {f"transformer.{n.removeprefix('transformer.')}" for n in said} == frozen, name
        verdict = verify(folder, run=QUIET)
        assert verdict.same
        assert not [note for note in verdict.notes if "no optimizer state" in note]
