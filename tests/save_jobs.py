"""A script's saves, in two ranks: one function that does all that tests look at, in one layout."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from accelerator_jobs import Case, leave, made, one_batch, prepared

from shardwright.train import TrainError


class Registered:
    """An object of a script whose state is more than plain values."""

    def __init__(self) -> None:
        self.seen: deque[float] = deque([1.5], maxlen=3)
        self.best = np.float32(0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.best = state["seen"], state["best"]


class Unsavable(Registered):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


def refusal(call: Any) -> str:
    """What a call says that is to be refused."""
    try:
        call()
    except TrainError as error:
        return str(error)
    return ""


def scripts(folder: str, layouts: list[dict[str, int]]) -> list[Any]:
    """The script in each layout, one after the other; each has a folder of its own."""
    found, rank = [], int(os.environ["RANK"])
    for number, plugin in enumerate(layouts):
        store = f"file://{folder}/store_{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        found.append(script(Path(folder) / str(number), plugin))
        leave()
        dist.destroy_process_group()
    return found


def script(place: Path, plugin: dict[str, int]) -> dict[str, Any]:
    """Train a little, saving in every way."""
    from accelerate.utils import ProjectConfiguration

    case = Case(model="llama", plugin=plugin)
    project = ProjectConfiguration(
        project_dir=str(place / "project"), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = made(case, project_config=project)
    things = prepared(case, accelerator)
    model, loader = things[0], things[2]
    original = model.original
    counter = Registered()
    accelerator.register_for_checkpointing(counter)
    batches = iter(loader)

    def step() -> None:
        one_batch(case, accelerator, things[0], things[1], things[3], next(batches))

    hooked: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        hooked.append((len(models), sorted(weights[0])[:1], os.path.isdir(output_dir)))
        if accelerator.is_main_process:
            (Path(output_dir) / "of_the_hook.txt").write_text("mine")

    handle = accelerator.register_save_state_pre_hook(before_save)
    step()
    listed = [os.listdir(accelerator.save_state())]
    handle.remove()
    step()
    first = accelerator.get_state_dict(model)
    counter.seen.append(2.5)
    listed.append(os.listdir(accelerator.save_state()))
    taken = refusal(lambda: _again(accelerator, project))
    # without numbering: the guide's names, in a folder of the user's
    project.automatic_checkpoint_naming = False
    if accelerator.is_main_process:
        (place / "own").mkdir()
        (place / "own/notes.txt").write_text("mine")
    accelerator.wait_for_everyone()
    accelerator.save_state(str(place / "own"), safe_serialization=False)
    (place / f"own/of_rank_{accelerator.parallel.rank}").write_text("mine")
    nowhere = refusal(accelerator.save_state)
    project.automatic_checkpoint_naming = True
    weights = {"before": refusal(lambda: original.save_pretrained(place / "never"))}
    if accelerator.parallel.rank == 0:
        alone = refusal(lambda: accelerator.unwrap_model(model))
        accelerator.saving.meetings.announce("wait_for_everyone")
    else:
        alone = ""
        accelerator.saving.meetings.announce("wait_for_everyone")
        accelerator.saving.meetings._notes.next()
    unwrapped = accelerator.unwrap_model(model)
    weights["same"] = str(unwrapped is original)
    unwrapped.save_pretrained(
        place / "trained", is_main_process=accelerator.is_main_process,
        save_function=accelerator.save, state_dict=None,
    )  # fmt: skip
    accelerator.save_model(model, place / "trained_too")
    step()
    weights["after"] = refusal(lambda: original.save_pretrained(place / "never"))
    accelerator.save_state()
    accelerator.wait_for_everyone()
    counter.seen.clear()
    counter.best = None
    loads: list[Any] = []
    accelerator.register_load_state_pre_hook(lambda models, where: loads.append(str(where)))
    for parameter in model.parameters():
        parameter.data.zero_()
    accelerator.load_state()
    end = accelerator.get_state_dict(model)
    accelerator.register_for_checkpointing(Unsavable())
    unsavable = refusal(accelerator.save_state)
    return {
        "hooked": hooked, "listed": listed, "taken": taken, "nowhere": nowhere, "alone": alone,
        "weights": weights, "first": first, "end": end, "loads": loads, "unsavable": unsavable,
        "counter": [list(counter.seen), counter.seen.maxlen, float(counter.best)],
        "iteration": project.iteration,
    }  # fmt: skip


def _again(accelerator: Any, project: Any) -> None:
    project.iteration -= 1
    try:
        accelerator.save_state()
    finally:
        project.iteration += 1
