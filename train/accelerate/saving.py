"""What a script saves and loads: native checkpoints, and models for transformers.

A save is written while training goes on, and published later: at an optimizer step, at
``wait_for_everyone``, at the next save or load, when the script ends.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.ckpt.formats.side_files import side_files
from shardwright.ckpt.model.manifest import SideFile

from ..checkpoint import hf_weights as weights
from ..checkpoint.load import Loaded, load
from ..checkpoint.rank_state import RankState
from ..checkpoint.save import Saver, SaveWait
from ..config.schema import TrainConfig
from ..core.engine import Engine
from ..core.process import Parallel
from ..doctor import measured
from ..errors import TrainError
from .loader import PreparedLoader
from .model import PreparedModel
from .optimizer import PreparedOptimizer
from .schedulers import PreparedScheduler, plain

CUSTOM = "custom_checkpoint_{}.pt"


class Script(Protocol):
    """What is saved of a script: its Accelerator."""

    settings: TrainConfig
    seed: int
    updates: int  # optimizer steps done
    parallel: Parallel

    @property
    def is_main_process(self) -> bool: ...

    @property
    def optimizer(self) -> PreparedOptimizer | None: ...

    @property
    def loaders(self) -> Sequence[PreparedLoader]: ...

    @property
    def schedules(self) -> Sequence[Any]: ...

    @property
    def registered(self) -> Sequence[Any]: ...

    @property
    def pending_batches(self) -> int: ...

    @property
    def active_loader(self) -> PreparedLoader | None: ...

    def restart(self, updates: int) -> None: ...

    def tell(self, line: str) -> None: ...


class Saving:
    """Checkpoints of one prepared model."""

    def __init__(self, script: Script, engine: Engine, held: RankState, original: Any) -> None:
        self.script, self.engine, self.held, self.original = script, engine, held, original
        self.saver = Saver(
            held, log=script.tell, weights_only=not script.settings.saving.save_optimizer,
            on_wait=self._say_wait,
        )  # fmt: skip
        self._keep: Path | None = None  # registered objects of the save under way

    def _say_wait(self, wait: SaveWait) -> None:
        if said := measured.slow_save(*astuple(wait)):
            self.script.tell(said)

    def wait(self) -> None:
        """Publish what is being written; every rank calls it."""
        self.saver.wait()

    def poll(self) -> None:
        """The same, if it is written."""
        self.saver.poll()

    def unwrapped(self, model: Any) -> Any:
        """The transformers model that was prepared.

        Its own weights are those from before training: pass
        ``state_dict=accelerator.get_state_dict(model)`` to ``save_pretrained``.
        """
        return model.original if isinstance(model, PreparedModel) else model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model under transformers' names, on the CPU of every rank."""
        found = weights.collect(self.held)
        if "tie_word_embeddings" in self.held.model.flags:
            for name, tied in self.held.model.family.tied_names.items():
                found[name] = found[tied]
        return found

    def model(self, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """A Hugging Face checkpoint, streamed: no rank holds the whole model."""
        from shardwright.ckpt import merge
        from shardwright.ckpt.jobs import RunOptions
        from shardwright.ckpt.move.progress import parse_bytes

        target = folder.absolute()
        limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        place = target.parent / f".{target.name}.shards"
        saver = Saver(self.held, weights_only=True, reserve=False)
        saver.save(place / "model", self.script.updates, {}, self._sides())
        saver.wait()

        def join() -> None:
            try:
                merge(
                    place / "model", target, max_shard_size=limit,
                    safe_serialization=safe_serialization, run=RunOptions(overwrite=True),
                )  # fmt: skip
            finally:
                shutil.rmtree(place, ignore_errors=True)

        self._on_main(join)

    def _on_main(self, action: Callable[[], None]) -> None:
        """Let the main process act while the others wait; its error is everyone's."""
        fault = [""]
        if self.script.is_main_process:
            try:
                action()
            except (OSError, ValueError) as error:
                fault = [str(error)]
        dist.broadcast_object_list(fault, 0, group=self.held.control)
        if fault[0]:
            raise TrainError(fault[0])

    def save(self, folder: Path, safe_serialization: bool) -> Path:
        """Start writing a native checkpoint; training goes on while it is written."""
        if not safe_serialization:
            raise TrainError(
                "save_state: safe_serialization=False; the trainer writes safetensors, and "
                "reshard --no-safe-serialization makes .bin files of them"
            )
        self.saver.wait()
        if pending := self.script.pending_batches:
            self.script.tell(
                f"save_state: after {pending} of {self.script.settings.batch.accumulation} "
                "batches of a step; their gradients are not saved, and they are to be seen again"
            )
        final = folder.absolute()
        state, sides = self._state(), [*self._sides(), *self._registered()]
        self.saver.save(final, self.script.updates, state, sides)
        return final

    def _state(self) -> dict[str, object]:
        script, engine = self.script, self.engine
        made = script.optimizer.param_groups if script.optimizer is not None else []
        steps = engine.view.step() if engine.view is not None else 0
        box = torch.tensor([steps])  # a stage that is frozen counts no steps
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.held.control)
        options = [{k: v for k, v in group.items() if k != "params"} for group in made]
        # with the cursor of the loader under way: batches of an unfinished step come again
        active = script.active_loader
        now = active.cursor if active is not None else None
        return {
            "schedule": [scheduler.state_dict() for scheduler in script.schedules],
            "param_groups": [{"step": int(box.item()), **plain(group)} for group in options],
            "data": {
                "loaders": [
                    loader.state(script.pending_batches if loader.cursor is now else 0)
                    for loader in script.loaders
                ]
            },
        }

    def _sides(self) -> list[SideFile]:
        """Config, tokenizer and the like, which rank 0 writes."""
        if not self.script.is_main_process:
            return []
        source = getattr(self.original, "name_or_path", "")
        own = list(side_files(Path(source))) if source and Path(source).is_dir() else []
        found = {side.name: side for side in own}
        config = copy.deepcopy(self.original.config)
        config.architectures = [type(self.original).__name__]
        dtype = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # transformers before 4.56
        setattr(config, dtype, next(iter(self.engine.named.values())).dtype)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if getattr(self.original, "generation_config", None) is not None:
                self.original.generation_config.save_pretrained(folder)
            for path in Path(folder).iterdir():
                if path.name == "config.json" or path.name not in found:
                    found[path.name] = SideFile(path.name, text=path.read_text())
        return list(found.values())

    def _registered(self) -> list[SideFile]:
        """Registered objects as they are now, in files of rank 0."""
        if not self.script.is_main_process or not self.script.registered:
            return []
        if self._keep is None:
            self._keep = Path(tempfile.mkdtemp(prefix="shardwright-"))
            atexit.register(shutil.rmtree, self._keep, ignore_errors=True)
        names = [CUSTOM.format(i) for i in range(len(self.script.registered))]
        for name, thing in zip(names, self.script.registered, strict=True):
            torch.save(thing.state_dict(), self._keep / name)
        return [SideFile(name, str(self._keep / name)) for name in names]

    def load(self, folder: Path) -> None:
        """Load any readable checkpoint, whatever layout or format: each rank its own share."""
        script = self.script
        self.wait()
        found = load(
            folder, self.held, weights_only=not script.settings.saving.load_optimizer,
            seed=script.seed, verify_source=script.settings.saving.verify_source, log=script.tell,
        )  # fmt: skip
        script.restart(found.step)
        self._restore_groups(found)
        self._restore_schedules(found)
        self._restore_data(found)
        self._load_custom(found)
        dist.barrier(group=self.held.control)

    def _restore_groups(self, found: Loaded) -> None:
        saved, engine = found.state.get("param_groups"), self.engine
        optimizer = self.script.optimizer
        if not found.optimizer or not isinstance(saved, list) or optimizer is None:
            return
        if engine.view is not None and saved:
            engine.view.set_step(int(saved[0].get("step", found.step)))
        now = optimizer.param_groups
        if len(saved) != len(now):
            self.script.tell(
                f"{found.checkpoint.path}: has {len(saved)} param groups, the optimizer "
                f"{len(now)}; learning rates and the like stay those of the script"
            )
            return
        for ours, theirs in zip(now, saved, strict=True):
            for key in (theirs.keys() & ours.keys()) - {"params"}:
                value = theirs[key]
                ours[key] = tuple(value) if isinstance(ours[key], tuple) else value

    def _restore_schedules(self, found: Loaded) -> None:
        saved, now = found.state.get("schedule"), list(self.script.schedules)
        if isinstance(saved, list) and len(saved) == len(now):
            for scheduler, state in zip(now, saved, strict=True):
                scheduler.load_state_dict(state)
            if any(isinstance(one, PreparedScheduler) and one.of_old for one in now):
                self.script.tell(
                    f"{found.checkpoint.path}: is of an older release; as there, schedulers step "
                    "once with the optimizer, not once for each data-parallel rank"
                )
        elif saved and now:
            self.script.tell(
                f"{found.checkpoint.path}: its schedule is not one of {len(now)} prepared "
                "schedulers; they start from their beginning"
            )

    def _restore_data(self, found: Loaded) -> None:
        data = found.state.get("data")
        saved = data.get("loaders") if isinstance(data, Mapping) else None
        if isinstance(saved, list) and len(saved) == len(self.script.loaders):
            for loader, state in zip(self.script.loaders, saved, strict=True):
                again = loader.restore(state)
                if loader.cursor.old_seed is not None:
                    self.script.tell(
                        f"{found.checkpoint.path}: is of an older release; as there, the order of "
                        "an epoch depends on the seed and its number"
                    )
                if again:
                    self.script.tell(
                        f"{found.checkpoint.path}: was saved after {state['samples']} samples of "
                        f"an epoch; {again} of them come again, since a global batch has "
                        f"{loader.total_batch_size}"
                    )
        elif data and self.script.loaders:
            self.script.tell(
                f"{found.checkpoint.path}: its data cursor is not one of "
                f"{len(self.script.loaders)} prepared loaders; they start from their beginning"
            )

    def _load_custom(self, found: Loaded) -> None:
        folder = found.checkpoint.path
        paths = [folder / CUSTOM.format(i) for i in range(len(self.script.registered))]
        lacking = [path.name for path in paths if not path.is_file()]
        if lacking and len(lacking) == len(paths):
            self.script.tell(
                f"{folder}: has no {', '.join(lacking)}; registered objects stay as they are"
            )
            return
        if lacking:
            raise TrainError(f"{folder}: has no {', '.join(lacking)} for a registered object")
        for path, thing in zip(paths, self.script.registered, strict=True):
            thing.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
