"""Scripts for Accelerate, run in ranks of this machine, and the same training in plain transformers.

``in_ranks`` starts four processes once and lets them be worlds of one, two or four ranks in turn;
each job is a function of this file. A script records which rows it saw in which global batch, and
``plain`` trains a transformers model on those, one process, torch alone.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_helpers import launch

VOCAB, LENGTH, EOS = 97, 12, 5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
CALM = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SHARED = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.1}
MODELS: Mapping[str, Mapping[str, object]] = {
    "gpt2": {"model_type": "gpt2", **GPT2, **CALM, **SHARED},
    "gpt2-dropout": {"model_type": "gpt2", **GPT2, **SHARED},
    "llama": {"model_type": "llama", **SIZES, **SHARED},
    "qwen3": {
        "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **SIZES, **SHARED
    },
}  # fmt: skip


def make_model(name: str, **changes: object):
    """The same random model everywhere, in train mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**MODELS[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def make_rows(count: int, length: int = LENGTH, pads: str = "") -> list[dict[str, torch.Tensor]]:
    """Random rows, some labels ignored, more in each; padded ``left`` or ``right``."""
    random = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=random)
        labels = ids.clone()
        labels[: number % 5] = -100
        row = {"input_ids": ids, "labels": labels, "row": torch.tensor(number)}
        if pads:
            empty = number % 4
            mask = torch.ones(length, dtype=torch.long)
            where = slice(0, empty) if pads == "left" else slice(length - empty, length)
            ids[where], mask[where], labels[where] = EOS, 0, -100
            row["attention_mask"] = mask
        found.append(row)
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """One training by a script: what the script says, and what data it has."""

    model: str = "gpt2"
    world: int = 1
    plugin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "no"
    accumulate: int = 1
    optimizer: str = "adamw"
    schedule: str = ""
    clip: float | None = None  # by clip_grad_norm_; None leaves it to the plugin
    frozen: Sequence[str] = ()  # beginnings of parameter names
    rows: int = 21  # no multiple of any batch: the last one is partial
    length: int = LENGTH
    pads: str = ""
    shuffle: bool = False
    epochs: int = 2
    micro: int = 2


LR = 3e-3


def make_optimizer(model, name: str) -> torch.optim.Optimizer:
    """An optimizer of a script over the model's trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=LR)
    if name == "adam":
        return torch.optim.Adam(trained, lr=LR, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    if name == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "nesterov":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True)
    assert name == "groups"
    named = dict(model.named_parameters())
    flat = [p for p in named.values() if p.dim() == 1]
    embedding = [p for n, p in named.items() if "embed" in n or "wte" in n]
    seen = {id(p) for p in flat + embedding}
    rest = [p for p in named.values() if id(p) not in seen]
    return torch.optim.AdamW(
        [
            {"params": rest, "weight_decay": 0.2},
            {"params": flat, "weight_decay": 0.0, "lr": 1e-2},
            {"params": embedding, "lr": 1e-4, "betas": (0.7, 0.9)},
        ],
        lr=LR,
    )


def make_schedule(optimizer: torch.optim.Optimizer, name: str):
    """A scheduler of torch or transformers, or None."""
    from transformers import get_cosine_schedule_with_warmup

    if not name:
        return None
    if name == "transformers":
        return get_cosine_schedule_with_warmup(optimizer, 2, 8)
    if name == "multistep":
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    assert name == "sequential"
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [2])


def freeze(model, beginnings: Sequence[str]) -> None:
    """Parameters that are not to be trained."""
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(beginnings)):
            parameter.requires_grad_(False)


# --- plain transformers ------------------------------------------------------------------------


def plain(case: Case, batches: Sequence[Sequence[int]], ends: Sequence[int]) -> dict[str, Any]:
    """The case on one process without us: ``batches`` are rows, ``ends`` where an epoch ends."""
    model = make_model(case.model)
    freeze(model, case.frozen)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = make_schedule(optimizer, case.schedule)
    rows = make_rows(case.rows, case.length, case.pads)
    found: dict[str, Any] = {"losses": [], "norms": [], "lrs": []}
    since = 0
    for number, inside in enumerate(batches):
        batch = torch.utils.data.default_collate([rows[i] for i in inside])
        batch.pop("row")
        loss = model(**batch).loss
        (loss / case.accumulate).backward()
        found["losses"].append(loss.item())
        since += 1
        if since == case.accumulate or number + 1 in ends:
            since = 0
            limit = 1.0 if case.clip is None else case.clip
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            found["norms"].append(norm.item())
            optimizer.step()
            if schedule is not None:
                schedule.step()
                found["lrs"].append(schedule.get_last_lr())
            optimizer.zero_grad()
    found["weights"] = model.state_dict()
    return found


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two state dicts of the same names."""
    assert found.keys() == expected.keys()
    return max(float((found[n].float() - expected[n].float()).abs().max()) for n in expected)


# --- in the ranks ------------------------------------------------------------------------------

Job = tuple[int, str, Mapping[str, object]]  # ranks, function below, its arguments as JSON


def in_ranks(folder: Path, jobs: Mapping[str, Job], timeout_s: float = 500.0) -> dict[str, Any]:
    """For each job what its ranks returned, in the order of ranks."""
    found = launch(
        "accelerator_jobs:serve", 4, folder, str(folder), list(jobs.values()), timeout_s=timeout_s
    )
    return {
        name: [rank[i] for rank in found[: jobs[name][0]]]  # type: ignore[index]
        for i, name in enumerate(jobs)
    }


def serve(folder: str, jobs: Sequence[Job]) -> list[object]:
    """In a rank: what every job returned; None for those of fewer ranks."""
    from shardwright.ckpt import CheckpointError
    from shardwright.train import TrainError
    from shardwright.train.parallel import import_megatron, shutdown

    rank, found = int(os.environ["RANK"]), []
    for i, (world, name, arguments) in enumerate(jobs):
        if rank >= world:
            found.append(None)
            continue
        if rank == 0:
            print(f"job {i}: {name} {arguments}", flush=True)
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        store = f"file://{folder}/store_{i}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        try:
            found.append(globals()[name](**arguments))
        except (TrainError, CheckpointError) as error:
            found.append(f"{type(error).__name__}: {error}")
        gc.collect()
        if import_megatron("parallel_state").model_parallel_is_initialized():
            shutdown()
        dist.destroy_process_group()
    return found


def made(case: Case, **options: Any):
    """An accelerator of the case."""
    from shardwright.train import Accelerator, MegatronLMPlugin

    return Accelerator(
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulate,
        megatron_lm_plugin=MegatronLMPlugin(**case.plugin),
        **options,
    )


def prepared(case: Case, accelerator) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and scheduler (or None) of the case."""
    model = make_model(case.model)
    freeze(model, case.frozen)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = make_schedule(optimizer, case.schedule)
    loader = torch.utils.data.DataLoader(
        make_rows(case.rows, case.length, case.pads), batch_size=case.micro, shuffle=case.shuffle
    )
    if schedule is None:
        return (*accelerator.prepare(model, optimizer, loader), None)
    return accelerator.prepare(model, optimizer, loader, schedule)


def one_batch(case: Case, accelerator, model, optimizer, schedule, batch) -> dict[str, Any]:
    """What a script does with a batch; the numbers that it sees."""
    found: dict[str, Any] = {"rows": accelerator.gather_for_metrics(batch.pop("row")).tolist()}
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if case.clip is not None:
            norm = accelerator.clip_grad_norm_(model.parameters(), case.clip)
            assert (norm is not None) == accelerator.sync_gradients
            found["norm"] = norm.item() if norm is not None else None
        elif accelerator.sync_gradients:
            found["norm"] = -1.0  # known after the step
        optimizer.step()
        if found.get("norm") == -1.0:
            found["norm"] = optimizer.last.grad_norm
        if schedule is not None:
            schedule.step()
            found["lr"] = list(schedule.get_last_lr()) if accelerator.sync_gradients else None
        optimizer.zero_grad()
    found["loss"] = loss.item()
    return found


def gathered(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of many batches as lists; those of no step left out."""
    every = list(steps)
    return {
        "losses": [one["loss"] for one in every],
        "norms": [one["norm"] for one in every if one.get("norm") is not None],
        "lrs": [one["lr"] for one in every if one.get("lr") is not None],
        "rows": [one["rows"] for one in every],
    }


def train(case: Mapping[str, Any], evaluate: bool = False) -> dict[str, Any]:
    """Train as the guide does; losses, norms, rows and the weights at the end."""
    said = Case(**case)
    accelerator = made(said)
    model, optimizer, loader, schedule = prepared(said, accelerator)

    def steps() -> Iterator[dict[str, Any]]:
        for _ in range(said.epochs):
            for batch in loader:
                yield one_batch(said, accelerator, model, optimizer, schedule, batch)

    found = gathered(steps())
    found["ends"] = [len(loader) * (epoch + 1) for epoch in range(said.epochs)]
    found["weights"] = accelerator.get_state_dict(model)
    if evaluate:
        model.eval()
        batch = next(iter(loader))
        batch.pop("row")
        out = model(**batch)
        assert not out.loss.requires_grad
        unlabelled = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
        assert unlabelled.loss is None
        if accelerator.plugin.return_logits:
            assert torch.equal(unlabelled.logits, out.logits)
        else:
            assert out.logits is None
        found |= {"eval_loss": out.loss.item(), "logits": unlabelled.logits, "eval_batch": batch}
    return found
