"""Scripts for Accelerate, run in ranks of this machine, and the same in plain transformers.

``in_ranks`` starts four processes once and lets them be worlds of one, two or four ranks in turn,
small worlds side by side; each job is a function of this file. A script records which rows it saw
in which global batch, and ``plain`` trains a transformers model on those, with torch alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import runpy
import sys
import time
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
    """The case on one process without us: ``batches`` are rows, ``ends`` where an epoch ends.

    Each data-parallel rank has the mean loss of its share of a batch, and gradients are those of
    the mean of these; ``losses`` has a list for each batch.
    """
    share, dp = case.micro * case.plugin.get("num_micro_batches", 1), replicas(case)
    model = make_model(case.model)
    freeze(model, case.frozen)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = make_schedule(optimizer, case.schedule)
    rows = make_rows(case.rows, case.length, case.pads)
    found: dict[str, Any] = {"losses": [], "norms": [], "lrs": []}
    since = 0
    for number, inside in enumerate(batches):
        shares = [inside[at : at + share] for at in range(0, len(inside), share)]
        losses = []
        for ours in shares:
            batch = torch.utils.data.default_collate([rows[i] for i in ours])
            batch.pop("row")
            loss = model(**batch).loss
            (loss / case.accumulate / len(shares)).backward()
            losses.append(loss.item())
        idle = [sum(losses) / len(losses)] * (dp - len(losses))  # ranks without a real row
        found["losses"].append(losses + idle)
        since += 1
        if since == case.accumulate or number + 1 in ends:
            since = 0
            limit = 1.0 if case.clip is None else case.clip
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            found["norms"].append(norm.item())
            optimizer.step()
            if schedule is not None:
                for _ in range(dp):
                    schedule.step()
                found["lrs"].append(schedule.get_last_lr())
            optimizer.zero_grad()
    found["weights"] = model.state_dict()
    return found


def replicas(case: Case) -> int:
    """The data-parallel ranks of a case."""
    return case.world // (case.plugin.get("tp_degree", 1) * case.plugin.get("pp_degree", 1))


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two state dicts of the same names."""
    assert found.keys() == expected.keys()
    return max(float((found[n].float() - expected[n].float()).abs().max()) for n in expected)


# --- in the ranks ------------------------------------------------------------------------------

Job = tuple[int, str, Mapping[str, object]]  # ranks, function below, its arguments as JSON


def in_ranks(folder: Path, jobs: Mapping[str, Job]) -> dict[str, Any]:
    """For each job what its ranks returned, in the order of ranks."""
    found = launch("accelerator_jobs:serve", 4, folder, str(folder), list(jobs.values()))
    return {
        name: [found[process][i] for process in _processes(i, jobs[name][0])]  # type: ignore[index]
        for i, name in enumerate(jobs)
    }


def _processes(number: int, world: int) -> range:
    """Which of the four processes do a job."""
    first = number * world % 4
    return range(first, first + world)


def serve(folder: str, jobs: Sequence[Job]) -> list[object]:
    """In a process: what every job returned; None for those of other processes."""
    from shardwright.ckpt import CheckpointError
    from shardwright.train import TrainError

    process, found, started = int(os.environ["RANK"]), [], time.monotonic()
    for i, (world, name, arguments) in enumerate(jobs):
        if process not in _processes(i, world):
            found.append(None)
            continue
        rank = process - _processes(i, world)[0]
        if rank == 0:
            print(f"job {i} at {time.monotonic() - started:.1f} s: {name} {arguments}", flush=True)
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        store = f"file://{folder}/store_{i}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        try:
            found.append(globals()[name](**arguments))
        except (TrainError, CheckpointError) as error:
            found.append(f"{type(error).__name__}: {error}")
        leave()
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
    torch.manual_seed(11)  # of a shuffle, and of dropout
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
    found["replica"] = accelerator.process_index
    found["weights"] = accelerator.get_state_dict(model)
    if evaluate:
        model.eval()
        for batch in loader:
            rows = accelerator.gather_for_metrics(batch.pop("row")).tolist()
            found |= {"eval_rows": rows, **_evaluated(accelerator, model, batch)}
            break
    return found


def _evaluated(accelerator, model, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Loss of a batch and logits of all its rows, in the loader's order."""
    out = model(**batch)
    assert not out.loss.requires_grad
    unlabelled = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
    assert unlabelled.loss is None
    assert torch.equal(unlabelled.logits, out.logits)
    logits = accelerator.gather_for_metrics(unlabelled.logits)
    return {"eval_loss": out.loss.item(), "logits": logits}


# --- variants of one step ----------------------------------------------------------------------


def wavy_loss(loss_mask: torch.Tensor, losses: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of a script: later positions weigh more, and large losses more than in proportion."""
    losses = losses[0] if isinstance(losses, tuple) else losses
    weight = torch.linspace(0.5, 1.5, losses.shape[1])
    each = losses.float() * weight + 0.1 * losses.float().square()
    loss = (each * loss_mask).sum() / loss_mask.sum()
    return loss, {"wavy": loss, "largest": losses.max(), "logits": losses}


def second_half(iterator: Iterator[Mapping[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Megatron's get_batch: the loss of the second half alone, and two halves that are apart."""
    ids = next(iterator)["input_ids"]
    rows, length = ids.shape
    mask = torch.zeros(rows, length)
    mask[:, length // 2 : -1] = 1
    labels = ids.roll(-1, 1)
    at = torch.arange(length)
    hidden = (at[:, None] < at) | (at[:, None] // (length // 2) != at // (length // 2))
    return ids, labels, mask, hidden[None, None], at.expand(rows, length)


def train_step_class():
    """A train step of Accelerate's shape: its own batches, forward and loss."""
    from functools import partial

    from accelerate.utils.megatron_lm import AbstractTrainStep

    class Halves(AbstractTrainStep):
        def __init__(self, args, factor: float = 1.0) -> None:
            super().__init__("Halves")
            assert args.tensor_model_parallel_size * args.pipeline_model_parallel_size == 4
            assert args.eos_token_id == EOS
            self.factor = factor
            self.forward_step = self.get_forward_step_func()

        def get_loss_func(self, accelerator):
            def loss_func(loss_mask, output):
                loss = self.factor * (output * loss_mask).sum() / loss_mask.sum()
                return loss, {"lm loss": loss}

            return loss_func

        def get_forward_step_func(self):
            def forward_step(iterator, model):
                tokens, labels, loss_mask, hidden, positions = second_half(iterator)
                output = model(tokens, positions, hidden, labels=labels)
                return output, partial(self.get_loss_func(None), loss_mask)

            return forward_step

    return Halves


# field -> what only a constructor can give
HOOKS = {
    "custom_loss_function": lambda: wavy_loss,
    "custom_get_batch_function": lambda: second_half,
    "custom_train_step_class": train_step_class,
    "no_wd_decay_cond": lambda: lambda name, param: param.dim() == 1,
    "scale_lr_cond": lambda: lambda name, param: "word_embeddings" in name or ".3.mlp" in name,
}


def variant(case: Mapping[str, Any], hooks: Sequence[str] = (), steps: int = 2) -> dict[str, Any]:
    """A few steps on whole batches; loss, norm, what was reported, and the weights."""
    said = Case(**case)
    said = dataclasses.replace(said, plugin={**said.plugin, **{n: HOOKS[n]() for n in hooks}})
    accelerator = made(said)
    model, optimizer, loader, _ = prepared(said, accelerator)
    found: dict[str, Any] = {"losses": [], "norms": [], "reported": [], "rows": []}
    for _, batch in zip(range(steps), loader, strict=False):
        found["rows"].append(accelerator.gather_for_metrics(batch.pop("row")).tolist())
        if "custom_get_batch_function" in hooks or "custom_train_step_class" in hooks:
            batch.pop("labels")
        out = model(**batch)
        accelerator.backward(out.loss)
        found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        found["losses"].append(out.loss.item())
        found["reported"].append(getattr(out, "reported", None))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"], found["replica"] = (
        accelerator.get_state_dict(model),
        accelerator.process_index,
    )
    return found


def schedules() -> dict[str, Any]:
    """The plugin's own schedule, by a dummy scheduler and without any; weight decay too."""
    from shardwright.train import MegatronLMDummyScheduler

    fields = {
        "train_iters": 8, "lr_warmup_iters": 2, "min_lr": 1e-4, "lr_decay_style": "cosine",
        "weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.8,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, plugin, arguments in (
        ("dummy", {}, {"total_num_steps": 6, "warmup_num_steps": 2}),
        ("plugin and dummy", fields, {}),
        ("plugin", fields, None),
    ):
        case = Case(plugin=plugin, accumulate=2, rows=24)
        accelerator = made(case)
        model = make_model("gpt2")
        optimizer = make_optimizer(model, "groups")
        loader = torch.utils.data.DataLoader(make_rows(24), batch_size=2)
        things = [model, optimizer, loader]
        if arguments is not None:
            things.append(MegatronLMDummyScheduler(optimizer, **arguments))
        made_things = accelerator.prepare(*things)
        schedule = made_things[3] if arguments is not None else None
        rows = []
        for batch in made_things[2]:
            before = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
            one_batch(case, accelerator, made_things[0], made_things[1], schedule, batch)
            if accelerator.sync_gradients:
                rows.append(before)
        found[name] = rows
        _leave(accelerator)
    return found


def leave() -> None:
    """Make way for another accelerator, and another layout, in this process."""
    from shardwright.train.accelerate import state

    state.leave()


def _leave(accelerator) -> None:
    accelerator.free_memory()
    leave()


# --- saving and resuming -----------------------------------------------------------------------


class Counter:
    """An object of a script that travels with its checkpoints."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": torch.full((2,), float(self.value))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = int(state["value"])
        assert state["tensor"].tolist() == [self.value] * 2


def save(case: Mapping[str, Any], folder: str, after: int) -> dict[str, Any]:
    """Train to the end without a break, saving after some batches while training goes on."""
    said = Case(**case)
    accelerator = made(said)
    things = prepared(said, accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def steps() -> Iterator[dict[str, Any]]:
        for _ in range(said.epochs):
            for batch in things[2]:
                yield one_batch(said, accelerator, *_without_loader(things), batch)
                counter.value += 1
                if counter.value == after:
                    accelerator.save_state(Path(folder) / "run" / f"checkpoint-{after}")

    found = gathered(steps())
    accelerator.wait_for_everyone()
    accelerator.save_model(things[0], Path(folder) / "run" / "model", max_shard_size="60KB")
    found["weights"] = accelerator.get_state_dict(things[0])
    return found


def _without_loader(things: Sequence[Any]) -> tuple[Any, Any, Any]:
    return things[0], things[1], things[3]


def resume(case: Mapping[str, Any], source: str, epoch: int) -> dict[str, Any]:
    """Go on from a checkpoint, in whatever layout the case says, from the epoch on."""
    said = Case(**case)
    accelerator = made(said)
    model = make_model(said.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # whatever is not loaded will show
    freeze(model, said.frozen)
    things = _prepared_like(said, accelerator, model)
    counter = Counter(99)
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(source)
    loader, count = things[2], counter.value
    first = accelerator.skip_first_batches(loader, loader.batches_seen)

    def steps() -> Iterator[dict[str, Any]]:
        for now in range(epoch, said.epochs):
            for batch in first if now == epoch else loader:
                yield one_batch(said, accelerator, *_without_loader(things), batch)

    start = accelerator.updates
    found = gathered(steps())
    return found | {
        "counter": count,
        "step": start,
        "weights": accelerator.get_state_dict(things[0]),
    }


def _prepared_like(case: Case, accelerator, model) -> Any:
    optimizer = make_optimizer(model, case.optimizer)
    schedule = make_schedule(optimizer, case.schedule)
    rows = make_rows(case.rows, case.length, case.pads)
    loader = torch.utils.data.DataLoader(rows, batch_size=case.micro, shuffle=case.shuffle)
    things = [model, optimizer, loader, *([schedule] if schedule is not None else [])]
    made_things = accelerator.prepare(*things)
    return made_things if schedule is not None else (*made_things, None)


def load_weights(
    case: Mapping[str, Any], source: str, vocab_size: int = VOCAB
) -> dict[str, torch.Tensor]:
    """The weights after loading a checkpoint of any format, and after a step of rate zero."""
    said = Case(**case)
    accelerator = made(said)
    things = _prepared_like(said, accelerator, make_model(said.model, vocab_size=vocab_size))
    model, optimizer, loader, _ = things
    accelerator.load_state(source)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    batch = next(iter(loader))
    batch.pop("row")
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    return accelerator.get_state_dict(model)


# --- the rest of the surface -------------------------------------------------------------------


def guide(fields: Mapping[str, Any], precision: str, folder: str) -> None:
    """The guide's script in this rank."""
    script = str(Path(__file__).with_name("accelerator_guide.py"))
    sys.argv = [script, json.dumps(fields), precision, folder]
    runpy.run_path(script, run_name="__main__")


def surface(folder: str) -> dict[str, Any]:
    """Every other method that scripts use, once, on tp 2 x dp 2."""
    from shardwright.train import Accelerator, MegatronLMPlugin

    place = Path(folder)
    plugin = MegatronLMPlugin(
        tp_degree=2, tensorboard_dir=str(place / "events"), set_all_logging_options=True
    )
    accelerator = Accelerator(
        megatron_lm_plugin=plugin, log_with="tensorboard", project_dir=place / "project"
    )
    with accelerator.main_process_first(), accelerator.autocast():
        original = make_model("llama")
    optimizer = make_optimizer(original, "adamw")
    rows = make_rows(10)
    loaders = [torch.utils.data.DataLoader(rows, batch_size=size) for size in (4, 2)]
    model, optimizer, loader, evaluation = accelerator.prepare(original, optimizer, *loaders)
    rank, dp_rank = accelerator.parallel.rank, accelerator.parallel.dp_rank
    mine = torch.tensor([float(dp_rank)])
    found: dict[str, Any] = {
        "who": [
            accelerator.process_index, accelerator.local_process_index, accelerator.num_processes,
            accelerator.is_main_process, accelerator.is_local_main_process,
            accelerator.is_last_process, str(accelerator.device), accelerator.sync_gradients,
            accelerator.state.megatron_lm_plugin.global_batch_size,
        ],
        "batch sizes": [loader.batch_size, loader.total_batch_size, evaluation.batch_size],
        "lengths": [len(loader), len(evaluation), loader.total_dataset_length],
        "gather": accelerator.gather({"a": mine, "b": [mine + 1, mine[0]]}),
        "objects": accelerator.gather_for_metrics([rank], use_gather_object=True),
        "sum": accelerator.reduce(mine + 1), "mean": accelerator.reduce(mine, "mean", scale=2.0),
        "as it is": accelerator.reduce(mine, "none"),
        "unwrapped": accelerator.unwrap_model(model) is original,
        "main": accelerator.on_main_process(lambda: rank)(),
    }  # fmt: skip
    accelerator.init_trackers("guide", {"lr": LR})
    found["train"] = []
    for number, batch in enumerate(loader):
        batch.pop("row")
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item(), "note": "text"}, step=number)
        found["train"].append([loss.item(), optimizer.last.grad_norm])
    found["params_norm"] = model.engine.params_norm()
    found["weights"] = accelerator.get_state_dict(model)
    model.eval()
    found["predicted"] = []
    for batch in evaluation:
        seen, labels = batch.pop("row"), batch.pop("labels")
        picked = model(**batch).logits.argmax(-1)
        picked, labels, seen = accelerator.gather_for_metrics((picked, labels, seen))
        found["predicted"].append((picked, labels, seen))
    for batch in evaluation:
        batch.pop("row")
        with torch.no_grad():
            model(**batch)
    model.train()
    accelerator.save({"x": mine}, place / "one.pt")
    accelerator.print("printed by the main process alone")
    accelerator.end_training()
    assert accelerator.free_memory(model, optimizer) == [None, None]
    again = accelerator.prepare(make_model("gpt2"))
    found["eval after free_memory"] = again.eval()(
        input_ids=rows[0]["input_ids"][None], labels=rows[0]["labels"][None]
    ).loss.item()
    return found


def environment() -> list[Any]:
    """What MEGATRON_LM_* variables alone make of an accelerator."""
    from shardwright.train import Accelerator

    said = {
        "MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_PP_DEGREE": "2",
        "MEGATRON_LM_NUM_MICRO_BATCHES": "2", "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
        "MEGATRON_LM_GRADIENT_CLIPPING": "0.25", "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }  # fmt: skip
    os.environ.update(said)
    try:
        accelerator = Accelerator()
    finally:
        for name in said:
            del os.environ[name]
    p, s = accelerator.parallel, accelerator.settings
    return [
        p.tp, p.pp, s.batch.num_micro_batches, s.parallelism.sequence_parallel,
        s.optimizer.clip_grad, accelerator.mixed_precision,
        accelerator.gradient_accumulation_steps, accelerator.distributed_type.value,
    ]  # fmt: skip


def command(folder: str) -> dict[str, Any]:
    """A step of train-ckpt with plugin fields from the environment, and the batches it saw."""
    from train_runs import train as train_ckpt

    from shardwright.train.core import engine

    place = Path(folder) / "command"
    seen: list[dict[str, torch.Tensor]] = []
    weighted = engine.Engine._weighted

    def note(self, batch):
        seen.append({name: batch[name] for name in ("tokens", "labels")})
        return weighted(self, batch)

    argv = [
        "--model", str(place / "hf"), "--data", str(place / "data.jsonl"), "--seq-length", "16",
        "--micro-batch-size", "1", "--global-batch-size", "4", "--steps", "1",
        "--save-dir", str(place / "out"),
    ]  # fmt: skip
    said = {
        "MEGATRON_LM_EOD_MASK_LOSS": "true", "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": "false",
        "MEGATRON_LM_SET_ALL_LOGGING_OPTIONS": "true", "SHARDWRIGHT_CACHE": str(place / "cache"),
    }  # fmt: skip
    os.environ.update(said)
    engine.Engine._weighted = note  # type: ignore[method-assign]
    try:
        error = train_ckpt(argv)
    finally:
        engine.Engine._weighted = weighted  # type: ignore[method-assign]
        for name in said:
            del os.environ[name]
    return {"error": error, "seen": seen}


def consumed() -> list[list[int]]:
    """The rows of the rest of an epoch and of the next, after samples that were seen before."""
    case = Case(plugin={"consumed_samples": [26], "num_micro_batches": 1}, rows=10, shuffle=True)
    accelerator = made(case)
    loader = prepared(case, accelerator)[2]
    found = [[int(i) for batch in loader for i in batch["row"]] for _ in range(2)]
    _leave(accelerator)
    whole = prepared(case_of := dataclasses.replace(case, plugin={}), made(case_of))[2]
    return found + [[int(i) for batch in whole for i in batch["row"]] for _ in range(4)]


class Stream(torch.utils.data.IterableDataset):
    """Rows without an index."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(make_rows(10))


def orders() -> dict[str, Any]:
    """The rows that loaders of every kind give this rank, on two data-parallel ranks."""
    dummy = _dummy_rates()
    case = Case(plugin={"num_micro_batches": 2}, accumulate=4, rows=30)
    accelerator = made(case)
    model, _, loader, _ = prepared(case, accelerator)
    rows, data = make_rows(10), torch.utils.data
    weights = [1.0 + i for i in range(10)]
    loaders = {
        "stream": data.DataLoader(Stream(), batch_size=2),
        "workers": data.DataLoader(rows, batch_size=2, num_workers=1),
        "dropping": data.DataLoader(rows, batch_size=2, drop_last=True),
        "subset": data.DataLoader(
            rows, batch_size=2, sampler=data.SubsetRandomSampler([1, 3, 5, 7, 9])
        ),
        "weighted": data.DataLoader(
            rows, batch_size=2, sampler=data.WeightedRandomSampler(weights, 8)
        ),
        "generator": data.DataLoader(
            rows, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)
        ),
    }  # fmt: skip
    found: dict[str, Any] = {"dummy": dummy}
    made_loaders = dict(zip(loaders, accelerator.prepare(*loaders.values()), strict=True))
    for name, one in made_loaders.items():
        found[name] = [(b["row"].tolist(), b["labels"][:, -1].tolist()) for b in one]
    shuffled = made_loaders["generator"]
    for _ in shuffled:
        break  # an epoch that is broken off is over
    found["third"] = [b["row"].tolist() for b in shuffled]
    p = accelerator.parallel
    found["third of torch"] = _third_of_torch(rows, p.dp_rank)
    found["again"] = [
        made_loaders["workers"].restore({"epoch": 1, "seed": 3, "samples": 12}),
        made_loaders["workers"].batches_seen,
    ]
    found["synchronized"] = []
    for batch in loader:  # a whole evaluation within each step ends no accumulation
        batch.pop("row")
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            found["synchronized"].append(accelerator.sync_gradients)
        assert len(list(made_loaders["workers"])) == len(made_loaders["workers"])
    return found


def _dummy_rates() -> list[float]:
    """The learning rate before each step, by a dummy scheduler of twelve steps, four of warm-up."""
    from accelerate.utils import MegatronLMDummyScheduler

    case = Case(rows=24)
    accelerator = made(case)
    model = make_model("gpt2")
    optimizer = make_optimizer(model, "adamw")
    loader = torch.utils.data.DataLoader(make_rows(24), batch_size=2)
    dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, dummy)
    rates = []
    for batch in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        one_batch(case, accelerator, model, optimizer, schedule, batch)
    _leave(accelerator)
    return rates


def _third_of_torch(rows, replica: int) -> list[list[int]]:
    """This rank's rows in torch's third iteration over the loader `generator` of eight rows."""
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=generator)
    for _ in range(3):
        batches = [batch["row"].tolist() for batch in loader]
    (whole, rest) = batches
    filled = (rest + whole)[:8]
    return [part[replica * 4 : replica * 4 + 4] for part in (whole, filled)]


def broken_gradient(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A finite loss whose gradient is not."""
    return losses.mean() + (losses.sum() * 0.0).sqrt(), {}


def not_checked() -> list[float]:
    """Losses after a step that made every weight NaN, where nobody checks."""
    case = Case(
        plugin={"custom_loss_function": broken_gradient, "check_for_nan_in_loss_and_grad": False}
    )
    accelerator = made(case)
    model, optimizer, loader, schedule = prepared(case, accelerator)
    pairs = zip(range(2), loader, strict=False)
    return [
        one_batch(case, accelerator, model, optimizer, schedule, batch)["loss"]
        for _, batch in pairs
    ]


def faulty(folder: str) -> str:
    """A weight of rank 2 becomes NaN after a save; the error that every rank ends with."""
    case = Case("llama", 4, {"tp_degree": 2, "pp_degree": 2, "no_save_optim": True})
    accelerator = made(case)
    model, optimizer, loader, schedule = prepared(case, accelerator)
    for number, batch in enumerate(loader):
        if number == 1:
            accelerator.save_state(Path(folder) / "before")
            if accelerator.parallel.rank == 2:
                with torch.no_grad():
                    next(iter(model.parameters())).view(-1)[0] = torch.nan
        one_batch(case, accelerator, model, optimizer, schedule, batch)
    raise AssertionError("a loss that is not finite went by")


# --- what is refused ---------------------------------------------------------------------------


def refusals(names: Sequence[str]) -> dict[str, str]:
    """The error that each of `REFUSED` ends with, or nothing."""
    from shardwright.ckpt import CheckpointError
    from shardwright.train import TrainError

    found = {}
    for name in names:
        try:
            REFUSED[name]()
            found[name] = ""
        except (TrainError, CheckpointError) as error:
            found[name] = str(error)
        leave()
    return found


def _with(model=None, optimizer=None, plugin: Mapping[str, Any] | None = None):
    """A prepared model and optimizer, and their accelerator."""
    accelerator = made(Case(plugin=plugin or {}))
    model = make_model("gpt2") if model is None else model
    optimizer = make_optimizer(model, "adamw") if optimizer is None else optimizer(model)
    loader = torch.utils.data.DataLoader(make_rows(8), batch_size=2)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def _call(change: Any, plugin: Mapping[str, Any] | None = None, **config: Any) -> None:
    """A forward of a batch that ``change`` has changed."""
    model = make_model(config.pop("model", "gpt2"), **config)
    _, model, _, loader = _with(model, plugin=plugin)
    batch = next(iter(loader))
    batch.pop("row")
    model(**change(batch))


def _broken_gradient() -> None:
    case = Case(plugin={"custom_loss_function": broken_gradient})
    accelerator = made(case)
    model, optimizer, loader, schedule = prepared(case, accelerator)
    one_batch(case, accelerator, model, optimizer, schedule, next(iter(loader)))


def _no_sync() -> None:
    accelerator, model, _, _ = _with(plugin={"other_megatron_args": {"overlap_grad_reduce": True}})
    with accelerator.no_sync(model):
        pass


def _logits_of_a_pipeline() -> None:
    accelerator, model, _, loader = _with(plugin={"num_micro_batches": 2, "return_logits": True})
    batch = next(iter(loader))
    batch.pop("row")
    accelerator.backward(model(**batch).logits.logsumexp(-1).mean())


def _two_steps() -> None:
    accelerator, model, optimizer, loader = _with(plugin={"num_micro_batches": 2})
    for batch in loader:
        batch.pop("row")
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def _loss_of_eval() -> None:
    accelerator, model, _, loader = _with()
    batch = next(iter(loader))
    batch.pop("row")
    accelerator.backward(model.eval()(**batch).loss)


def _extra_layer() -> None:
    model = make_model("gpt2")
    model.value_head = torch.nn.Linear(32, 1)
    _with(model)


def _half_frozen() -> None:
    model = make_model("llama")
    freeze(model, ["model.layers.0.self_attn.q_proj"])
    _with(model)


def _split_groups(model) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    queries = [p for n, p in named.items() if "q_proj" in n]
    ids = {id(p) for p in queries}
    rest = [p for p in named.values() if id(p) not in ids]
    return torch.optim.AdamW([{"params": queries}, {"params": rest}], lr=LR)


def _classifier() -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    _with(GPT2ForSequenceClassification(GPT2Config(**GPT2, **SHARED, pad_token_id=0)))


def _yarn() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    _with(make_model("llama", rope_parameters=rope))


def _clip_some() -> None:
    accelerator, model, _, _ = _with()
    accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)


def _two_schedules() -> None:
    accelerator = made(Case(plugin={"train_iters": 5}))
    model = make_model("gpt2")
    optimizer = make_optimizer(model, "adamw")
    accelerator.prepare(model, optimizer, make_schedule(optimizer, "multistep"))


def _consumed_in_part() -> None:
    _with(plugin={"consumed_samples": [3]})


def _twice() -> None:
    accelerator, *_ = _with()
    accelerator.prepare(make_model("gpt2"))


def _kept(change: Mapping[str, Any]):
    return lambda batch: {**batch, **change}


REFUSED = {
    "a gradient that is not finite": _broken_gradient,
    "no_sync and overlap": _no_sync,
    "logits of a pipeline": _logits_of_a_pipeline,
    "two steps without zero_grad": _two_steps,
    "the loss of eval": _loss_of_eval,
    "unknown keys": lambda: _call(
        _kept({"token_type_ids": torch.zeros(2, LENGTH), "use_cache": 1})
    ),
    "no labels": lambda: _call(
        lambda batch: {"input_ids": batch["input_ids"]}, {"num_micro_batches": 2}
    ),
    "no input_ids": lambda: _call(lambda batch: {"labels": batch["labels"]}),
    "labels of another shape": lambda: _call(_kept({"labels": torch.zeros(2, 5).long()})),
    "all labels masked": lambda: _call(_kept({"labels": torch.full((2, LENGTH), -100)})),
    "a sequence that is too long": lambda: _call(lambda batch: batch, n_positions=8),
    "longer than seq_length": lambda: _call(lambda batch: batch, {"seq_length": 8}),
    "positions of a rotary model": lambda: _call(
        _kept({"position_ids": torch.arange(LENGTH).flip(0)[None]}), model="llama"
    ),
    "a mask of three dims": lambda: _call(_kept({"attention_mask": torch.ones(2, 1, LENGTH)})),
    "an extra layer": _extra_layer,
    "a half frozen tensor": _half_frozen,
    "groups that cut a tensor": lambda: _with(make_model("llama"), _split_groups),
    "a stranger's parameters": lambda: _with(
        optimizer=lambda model: torch.optim.SGD(make_model("gpt2").parameters(), lr=LR)
    ),
    "another optimizer": lambda: _with(
        optimizer=lambda model: torch.optim.Adagrad(model.parameters())
    ),
    "amsgrad": lambda: _with(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True)
    ),
    "a classifier": _classifier,
    "yarn": _yarn,
    "conditions and groups": lambda: _with(
        optimizer=lambda model: make_optimizer(model, "groups"),
        plugin={"no_wd_decay_cond": HOOKS["no_wd_decay_cond"]()},
    ),
    "clipping some": _clip_some,
    "two schedules": _two_schedules,
    "consumed in part": _consumed_in_part,
    "two models": _twice,
    "eod without a token": lambda: _call(
        lambda batch: batch, {"eod_mask_loss": True}, eos_token_id=None
    ),
    "a loss of the wrong shape": lambda: _call(
        lambda batch: batch, {"custom_loss_function": lambda mask, losses: (losses, {})}
    ),
    "a batch function of the wrong shape": lambda: _call(
        lambda batch: batch, {"custom_get_batch_function": lambda iterator: next(iterator)}
    ),
    "a train step without forward": lambda: _with(
        plugin={"custom_train_step_class": lambda args: copy}
    ),
    "positions said wrongly": lambda: _with(plugin={"use_rotary_position_embeddings": True}),
    "sgd over dp": lambda: _with(
        optimizer=lambda model: make_optimizer(model, "sgd"),
        plugin={"use_distributed_optimizer": True},
    ),
    "another size": lambda: _with(plugin={"other_megatron_args": {"num_layers": 5}}),
}
