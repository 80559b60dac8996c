"""Idioms of scripts for Accelerate, each as a script has it: it knows nothing of our engine.

An idiom is given a ``Kit``, whose Accelerator is Accelerate's own or ours. It returns what a script
sees, by name: ``ranks.py`` runs it on every layout, and test_idioms.py compares.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

VOCAB, LENGTH = 61, 9
IDIOMS: dict[str, Callable[[Kit], dict[str, Any]]] = {}


def idiom(function: Callable[[Kit], dict[str, Any]]) -> Callable[[Kit], dict[str, Any]]:
    IDIOMS[function.__name__] = function
    return function


def rows(count: int, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Random tokens; some labels do not count, in each row another number."""
    random = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=random)
        labels = ids.clone()
        labels[: number % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@dataclass
class Kit:
    """What an idiom is given."""

    make: Callable[..., Any]  # an Accelerator of these arguments
    model: Callable[[], Any]  # a small causal model, always the same
    plain: bool  # Accelerate's own engine
    graph: bool  # a backward pass of the script's own runs through the model

    def prepared(self, accelerator: Any, *more: Any, data: Any = None, **how: Any) -> Any:
        """Model, optimizer and a loader of batches of two rows, prepared; and what is made."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(rows(8) if data is None else data, **{"batch_size": 2, **how})
        made = [make(optimizer) for make in more]
        return accelerator.prepare(model, optimizer, loader, *made)


def seen(accelerator: Any, model: Any, losses: list[torch.Tensor], **more: Any) -> dict[str, Any]:
    """Losses of this process, and the trained weights."""
    values = [float(loss.detach()) for loss in losses]
    return {"losses": values, "weights": accelerator.get_state_dict(model), **more}


def trained(kit: Kit, change: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> dict[str, Any]:
    """An ordinary loop whose loss is changed before ``backward``."""
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator, **how)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(change(loss))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


# --- losses --------------------------------------------------------------------------------------


@idiom
def loss_as_it_is(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss)


@idiom
def loss_divided(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss / 4)


@idiom
def loss_multiplied(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss * 3)


@idiom
def loss_mean(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss.mean())


@idiom
def loss_squared(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss + 0.1 * loss**2)


@idiom
def loss_of_zero(kit: Kit) -> dict[str, Any]:
    return trained(kit, lambda loss: loss * 0.0)


@idiom
def loss_backward_of_torch(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def zero_grad_first(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def zero_grad_between(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def zero_grad_of_the_model(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        model.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def accumulated_by_hand(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator, data=rows(16))
    losses = []
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def weighed_by_tokens(kit: Kit) -> dict[str, Any]:
    """Each of two batches of a step counts by its tokens: another factor every time."""
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator, data=rows(16))
    losses = []
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss * (batch["labels"] != -100).sum() / 20)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def two_forwards_one_backward(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    batches, losses = list(loader), []
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        one, two = model(**first).loss, model(**second).loss
        accelerator.backward(one + 0.5 * two)
        optimizer.step()
        optimizer.zero_grad()
        losses += [one, two]
    return seen(accelerator, model, losses)


@idiom
def accumulate(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make(gradient_accumulation_steps=2)
    model, optimizer, loader = kit.prepared(accelerator, data=rows(12))
    losses, synchronized = [], []
    for batch in itertools.chain(loader, loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
        synchronized.append(accelerator.sync_gradients)
    return seen(accelerator, model, losses, same={"synchronized": synchronized})


@idiom
def no_sync(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
        else:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def forward_under_no_grad(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        with torch.no_grad():
            before = model(**batch).loss
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += [before, loss]
    return seen(accelerator, model, losses)


@idiom
def batch_skipped(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator, data=rows(16))
    losses = []
    for number, batch in enumerate(loader):
        loss = model(**batch).loss
        losses.append(loss)
        if number % 2 == 0:
            continue
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return seen(accelerator, model, losses)


@idiom
def retain_graph(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss, retain_graph=True)
        if kit.plain and accelerator.num_processes > 1:
            # torch's DDP cannot reduce one forward twice; the gradient of a mean is linear
            for parameter in model.parameters():
                parameter.grad *= 1.5
        else:
            accelerator.backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


def own_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@idiom
def own_loss_of_logits(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = own_loss(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def loss_and_logits(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        out = model(**batch)
        loss = out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


NEEDS_THE_GRAPH = {"own_loss_of_logits": "no labels", "loss_and_logits": "return_logits=True"}


# --- batches -------------------------------------------------------------------------------------


@idiom
def labels_in_the_loop(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    torch.manual_seed(5)
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        labels = batch["input_ids"].clone()
        labels[torch.rand(labels.shape) < 0.3] = -100
        loss = model(batch["input_ids"], labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def tuples(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    ids = torch.stack([row["input_ids"] for row in rows(8)])
    data = torch.utils.data.TensorDataset(ids, torch.ones_like(ids))
    model, optimizer, loader = kit.prepared(accelerator, data=data)
    losses = []
    for ids, mask in loader:
        out = model(ids, mask, labels=ids, return_dict=False)
        accelerator.backward(out[0])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out[0])
    return seen(accelerator, model, losses)


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    longest = max(len(row["input_ids"]) for row in batch)

    def fill(row: torch.Tensor, value: int) -> torch.Tensor:
        return F.pad(row, (0, longest - len(row)), value=value)

    return {
        "input_ids": torch.stack([fill(row["input_ids"], 0) for row in batch]),
        "labels": torch.stack([fill(row["labels"], -100) for row in batch]),
        "attention_mask": torch.stack([fill(torch.ones_like(r["labels"]), 0) for r in batch]),
    }


@idiom
def unequal_lengths(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    data = [{k: v[: 4 + i % 5] for k, v in row.items()} for i, row in enumerate(rows(8))]
    model, optimizer, loader = kit.prepared(accelerator, data=data, collate_fn=padded)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    model.eval()
    picked = []
    for batch in loader:
        with torch.no_grad():
            best = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1)
        best = accelerator.pad_across_processes(best, dim=1, pad_index=-1)
        first = accelerator.pad_across_processes(best, dim=1, pad_index=-1, pad_first=True)
        assert torch.equal(first, best)
        picked.append(accelerator.gather_for_metrics(best).tolist())
    return seen(accelerator, model, losses, same={"picked": picked})


def without_filler(kit: Kit, accelerator: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What differs from Accelerate: rows that only fill the last batch have no label."""
    state = accelerator.gradient_state
    if not kit.plain or not state.end_of_dataloader or state.remainder <= 0:
        return batch
    count = len(batch["labels"])
    real = max(0, min(count, state.remainder - accelerator.process_index * count))
    if accelerator.num_processes > 1:
        batch["labels"][real:] = -100
    return batch


@idiom
def short_last_batch(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator, data=rows(7))
    losses, sizes = [], []
    for batch in loader:
        batch = without_filler(kit, accelerator, batch)
        sizes.append(len(batch["labels"]))
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses, same={"sizes": sizes, "length": len(loader)})


@idiom
def harmless_keywords(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for number, batch in enumerate(loader):
        items = {} if number % 2 else {"num_items_in_batch": torch.tensor(11)}
        loss = model(**batch, use_cache=False, return_dict=True, **items).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


# --- schedules and clipping ----------------------------------------------------------------------


def scheduled(kit: Kit, make: Callable[..., Any], metric: bool = False) -> dict[str, Any]:
    accelerator = kit.make(gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = kit.prepared(accelerator, make, data=rows(24))
    losses, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step(*([4.5] if metric else []))
            optimizer.zero_grad()
        losses.append(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return seen(accelerator, model, losses, rates=rates, last=schedule.get_last_lr())


@idiom
def schedule_of_transformers(kit: Kit) -> dict[str, Any]:
    from transformers import get_scheduler

    return scheduled(kit, lambda o: get_scheduler("cosine", o, 2, 12))


@idiom
def schedule_one_cycle(kit: Kit) -> dict[str, Any]:
    make = torch.optim.lr_scheduler.OneCycleLR
    return scheduled(kit, lambda o: make(o, 0.1, total_steps=12))


@idiom
def schedule_on_plateau(kit: Kit) -> dict[str, Any]:
    make = torch.optim.lr_scheduler.ReduceLROnPlateau
    return scheduled(kit, lambda o: make(o, factor=0.5, patience=1), metric=True)


@idiom
def schedule_alone(kit: Kit) -> dict[str, Any]:
    """A scheduler that is not prepared steps as the script says."""
    accelerator = kit.make()
    model = kit.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows(8), batch_size=2)
    )
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses, last=schedule.get_last_lr())


@idiom
def clipped(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses, norms = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses, norms=norms)


@idiom
def clipped_by_value(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


# --- evaluation ----------------------------------------------------------------------------------


@idiom
def evaluation_by_repeated_losses(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, _, loader = kit.prepared(accelerator, data=rows(8))
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(2)))
    return {"losses": torch.cat(losses).tolist()}


@idiom
def evaluation_of_every_row_once(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, _, loader = kit.prepared(accelerator, data=rows(11))
    model.eval()
    rates, words, labels = [], [], []
    for batch in loader:
        with torch.no_grad():
            out = model(**batch)
        assert not out.loss.requires_grad
        best = out["logits"].max(-1)
        value, index = accelerator.gather_for_metrics((best.values[:, 0], best.indices[:, 0]))
        rates += value.tolist()
        labels += index.tolist()
        said = [f"{int(row[0])}" for row in batch["input_ids"]]
        words += accelerator.gather_for_metrics(said, use_gather_object=True)
    return {"losses": rates, "same": {"words": words, "labels": labels}}


@idiom
def evaluation_of_an_unprepared_loader(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, loader = kit.prepared(accelerator)
    other = DataLoader(rows(5), batch_size=3)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for more in other:
                more = {k: v.to(accelerator.device) for k, v in more.items()}
                losses.append(model(**more).loss)
        model.train()
    return seen(accelerator, model, losses)


# --- loaders -------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Rows that say which they are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Stream(IterableDataset):
    """The same without an index, in an order that nobody seeded where ``shuffled``."""

    def __init__(self, count: int = 12, shuffled: bool = False) -> None:
        self.count, self.shuffled = count, shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.count) if self.shuffled else torch.arange(self.count)
        return iter(order[:, None])


def order_of(accelerator: Any, loader: Any) -> list[list[int]]:
    """The rows of each global batch, as all processes have them."""
    return [accelerator.gather(batch).flatten().tolist() for batch in loader]


def ordered(kit: Kit, loader: Any, epochs: int = 2, **options: Any) -> dict[str, Any]:
    """Each process's rows in some epochs."""
    accelerator = kit.make(**options)
    made = accelerator.prepare(loader)
    mine = [[batch.flatten().tolist() for batch in made] for _ in range(epochs)]
    sized = not isinstance(loader.dataset, IterableDataset)
    return {"same": {"rows": mine, "length": len(made) if sized else None}}


@idiom
def loader_in_order(kit: Kit) -> dict[str, Any]:
    return ordered(kit, DataLoader(Numbers(), batch_size=5))


@idiom
def loader_dropping(kit: Kit) -> dict[str, Any]:
    return ordered(kit, DataLoader(Numbers(), batch_size=5, drop_last=True))


@idiom
def loader_with_workers(kit: Kit) -> dict[str, Any]:
    return ordered(kit, DataLoader(Numbers(), batch_size=4, num_workers=1), 1)


@idiom
def loader_of_batches(kit: Kit) -> dict[str, Any]:
    sampler = torch.utils.data.BatchSampler(range(12), 3, False)
    return ordered(kit, DataLoader(Numbers(), batch_sampler=sampler))


@idiom
def loader_of_a_stream(kit: Kit) -> dict[str, Any]:
    return ordered(kit, DataLoader(Stream(), batch_size=5))


@idiom
def loader_split(kit: Kit) -> dict[str, Any]:
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True)
    return ordered(kit, DataLoader(Numbers(), batch_size=4), dataloader_config=config)


@idiom
def loader_dispatched(kit: Kit) -> dict[str, Any]:
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=True)
    return ordered(kit, DataLoader(Numbers(), batch_size=3), dataloader_config=config)


@idiom
def loader_seedable(kit: Kit) -> dict[str, Any]:
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(4)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=9)
    loader = DataLoader(Numbers(), batch_size=3, shuffle=True)
    return ordered(kit, loader, dataloader_config=config)


@idiom
def loader_skipping(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    made = accelerator.prepare(DataLoader(Numbers(), batch_size=2))
    rest = accelerator.skip_first_batches(made, 1)
    mine = [[batch.flatten().tolist() for batch in one] for one in (rest, made)]
    return {"same": {"rows": mine, "length": len(rest)}}


def shuffled(kit: Kit, make: Callable[[], DataLoader[Any]], seed: Callable[[], None]) -> Any:
    """The order of all processes in two epochs: here that of one process on every layout."""
    accelerator = kit.make()
    seed()
    made = accelerator.prepare(make())
    return {"order": [order_of(accelerator, made) for _ in range(2)]}


@idiom
def shuffle_after_set_seed(kit: Kit) -> dict[str, Any]:
    from accelerate.utils import set_seed

    return shuffled(
        kit, lambda: DataLoader(Numbers(), batch_size=2, shuffle=True), lambda: set_seed(4)
    )


@idiom
def shuffle_by_a_generator(kit: Kit) -> dict[str, Any]:
    def make() -> DataLoader[Any]:
        random = torch.Generator().manual_seed(8)
        return DataLoader(Numbers(), batch_size=2, shuffle=True, generator=random)

    return shuffled(kit, make, lambda: None)


# --- processes -----------------------------------------------------------------------------------


@idiom
def processes(kit: Kit) -> dict[str, Any]:
    """Numbers and decorators: who acts, once in a process."""
    import accelerate

    accelerator = kit.make()
    state = accelerate.PartialState()
    acted = {
        "main": accelerator.is_main_process and "main",
        "last": accelerator.is_last_process and "last",
    }
    for name, decorate in {
        "on_main": accelerator.on_main_process,
        "on_last": accelerator.on_last_process,
        "on_0": accelerator.on_process(process_index=0),
        "on_1": accelerator.on_process(process_index=1),
        "on_state": state.on_main_process,
    }.items():
        acted[name] = bool(decorate(lambda: True)())
    order = []
    with accelerator.main_process_first():
        order.append(accelerator.process_index)
    with accelerator.split_between_processes(list(range(5))) as share:
        mine = list(share)
    accelerator.wait_for_everyone()
    return {
        "same": {
            "who": [accelerator.process_index, accelerator.num_processes, state.num_processes],
            "share": mine, "order": order,
        },
        "acted": acted,
    }  # fmt: skip


@idiom
def triggers(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    found = [accelerator.check_trigger()]
    if accelerator.is_main_process:
        accelerator.set_trigger()
    found += [accelerator.check_trigger(), accelerator.check_trigger()]
    return {"same": {"found": found}}


@idiom
def collectives(kit: Kit) -> dict[str, Any]:
    from accelerate import utils

    accelerator = kit.make()
    rank = accelerator.process_index
    mine = {"a": torch.arange(2) + 10 * rank, "b": [torch.tensor(float(rank))]}
    objects = [f"main {rank}"] if accelerator.is_main_process else [None]
    long = torch.ones(1 + rank)
    found = {
        "gather": accelerator.gather(mine), "function": utils.gather(mine["a"]),
        "objects": utils.gather_object([rank]), "sum": accelerator.reduce(mine["a"]),
        "mean": utils.reduce(mine["b"][0], "mean"),
        "broadcast": utils.broadcast(mine["a"].clone(), 0),
        "from the main process": utils.broadcast_object_list(objects),
        "padded": utils.pad_across_processes(long, pad_index=7),
    }  # fmt: skip
    return {"same": utils.operations.recursively_apply(lambda t: t.tolist(), found)}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().split("] ")[-1])


@idiom
def logging_and_trackers(kit: Kit) -> dict[str, Any]:
    from accelerate.logging import get_logger
    from accelerate.tracking import GeneralTracker, on_main_process

    logged: list[Any] = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "ours", False

        @on_main_process
        def __init__(self) -> None:
            super().__init__()

        tracker = property(lambda self: logged)

        @on_main_process
        def start(self) -> None:
            logged.append("start")

        @on_main_process
        def store_init_configuration(self, values: Mapping[str, Any]) -> None:
            logged.append(dict(values))

        @on_main_process
        def log(self, values: Mapping[str, Any], step: int | None = None, **more: Any) -> None:
            logged.append((dict(values), step))

    import accelerate

    accelerate.PartialState(cpu=True)
    handler = Lines()
    logger = get_logger("conformance", log_level="INFO")
    logger.logger.addHandler(handler)
    accelerator = kit.make(log_with=Tracker())
    accelerator.init_trackers("run", {"lr": 1})
    accelerator.log({"loss": 2.0}, step=3)
    logger.info("one")
    logger.info("each", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    logger.logger.removeHandler(handler)
    return {"acted": {"lines": handler.lines, "logged": logged}}


@idiom
def second_accelerator(kit: Kit) -> dict[str, Any]:
    import accelerate

    first = kit.make()
    second = type(first)(cpu=True) if kit.plain else kit.make()
    model, optimizer, loader = kit.prepared(second)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        second.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    same = first.num_processes == second.num_processes == accelerate.PartialState().num_processes
    return seen(second, model, losses, same={"same": same})


@idiom
def strangers(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    things = [None, 3, "text", [1, 2], {"a": 1}, object()]
    found = accelerator.prepare(*things)
    same = [a is b for a, b in zip(things, found, strict=True)]
    return {"same": {"as they are": same, "alone": accelerator.prepare(5)}}


@idiom
def model_is_a_module(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    model, optimizer, _ = kit.prepared(accelerator)
    found = [isinstance(model, torch.nn.Module), model.training]
    model.eval()
    found += [model.training, len(list(model.parameters())) > 3]
    found += [isinstance(optimizer, torch.optim.Optimizer), len(optimizer.param_groups)]
    return {"same": {"found": found}}


@idiom
def another_model_after_free_memory(kit: Kit) -> dict[str, Any]:
    accelerator = kit.make()
    things = kit.prepared(accelerator)
    accelerator.free_memory(*things)
    del things
    model, optimizer, loader = kit.prepared(accelerator)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)


@idiom
def prepared_one_by_one(kit: Kit) -> dict[str, Any]:
    """A model, and then an optimizer of what came back."""
    accelerator = kit.make()
    model = accelerator.prepare(kit.model())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = accelerator.prepare_data_loader(DataLoader(rows(8), batch_size=2))
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return seen(accelerator, model, losses)
