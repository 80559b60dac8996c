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
from shardwright.ckpt.move.progress import parse_bytes
from shardwright.ckpt.move.storage import storage_path
from shardwright.ckpt.reader import finish_save, is_checkpoint

from ..checkpoint import ending, registered
from ..checkpoint import hf_weights as weights
from ..checkpoint.hf_output import save_model
from ..checkpoint.load import Loaded, load
from ..checkpoint.meeting import Meetings
from ..checkpoint.original import Original
from ..checkpoint.rank_state import RankState
from ..checkpoint.retention import Numbered
from ..checkpoint.save import NUMBERED as SAVED
from ..checkpoint.save import Saver, SaveWait
from ..config.schema import TrainConfig
from ..core.engine import Engine
from ..core.process import Parallel
from ..doctor import measured
from ..errors import TrainError
from .loader import PreparedLoader
from .optimizer import PreparedOptimizer
from .schedulers import PreparedScheduler, plain

CUSTOM = "custom_checkpoint_{}.pt"
NUMBERED = "checkpoint_"  # what Accelerate calls the checkpoints that it numbers


class Script(Protocol):
    """What is saved of a script: its Accelerator."""

    settings: TrainConfig
    seed: int
    updates: int  # optimizer steps done
    parallel: Parallel

    @property
    def is_main_process(self) -> bool: ...

    @property
    def project_configuration(self) -> Any: ...

    @property
    def project_dir(self) -> str | None: ...

    @property
    def models(self) -> list[Any]: ...

    @property
    def save_hooks(self) -> Sequence[Callable[..., None]]: ...

    @property
    def load_hooks(self) -> Sequence[Callable[..., None]]: ...

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
        self.script, self.engine, self.held = script, engine, held
        self.original = Original(original, held)
        self.meetings = Meetings(held)
        self.saver = Saver(
            held, log=script.tell, weights_only=not script.settings.saving.save_optimizer,
            on_wait=self._say_wait, numbered=NUMBERED if self._folder() else SAVED, pointer=None,
        )  # fmt: skip
        self._keep: Path | None = None  # registered objects of the save under way

    def _say_wait(self, wait: SaveWait) -> None:
        if said := measured.slow_save(*astuple(wait)):
            self.script.tell(said)

    def wait(self) -> None:
        """Publish what is being written; every rank calls it."""
        self.saver.wait()

    def end(self) -> None:
        """The script ends: no other rank can be counted on."""
        self.meetings.announce("the end of the script")
        ending.finish()

    def stepped(self) -> None:
        """After an optimizer step: publish what is written, and let go of what is old."""
        self.saver.poll()
        self.let_go()

    def let_go(self) -> None:
        """The weights of the script's model are those of an earlier step."""
        if self.original.filled:
            self.original.release()

    def unwrapped(self) -> Any:
        """The transformers model with the trained weights, until the next step."""
        if not self.original.filled:
            self.meetings.meet("unwrap_model")
            self.original.fill()
        return self.original.module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model under transformers' names, on the CPU of every rank."""
        self.meetings.meet("get_state_dict")
        found = weights.collect(self.held)
        if "tie_word_embeddings" in self.held.model.flags:
            for name, tied in self.held.model.family.tied_names.items():
                found[name] = found[tied]
        return found

    def model(self, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """A Hugging Face checkpoint, streamed: no rank holds the whole model."""
        self.meetings.meet("save_model")
        limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        save_model(
            self.held, folder.absolute(), self.script.updates, self._sides(),
            max_shard_bytes=limit, safe=safe_serialization, log=self.script.tell,
        )  # fmt: skip

    def save(self, folder: Any, safe_serialization: bool) -> Path:
        """Start writing a native checkpoint; training goes on while it is written.

        The folder is there on return. ``folder`` may be None where Accelerate numbers them.
        """
        self.meetings.meet("save_state")
        self.saver.wait()
        if pending := self.script.pending_batches:
            self.script.tell(
                f"save_state: after {pending} of {self.script.settings.batch.accumulation} "
                "batches of a step; their gradients are not saved, and they are to be seen again"
            )
        final = self._place(folder)
        if self.script.save_hooks:
            self._agree_on(lambda: final.mkdir(parents=True, exist_ok=True))
            for hook in self.script.save_hooks:
                hook(self.script.models, [self.state_dict()], str(final))
        self.saver.keep_last = self._numbering().total_limit if self._folder() else None
        state, sides = self._state(), self._agree_on(self._beside)
        self.saver.save(
            final, self.script.updates, state, sides, safe=safe_serialization, into=True
        )
        self._numbering().iteration += 1
        return final

    def _numbering(self) -> Any:
        return self.script.project_configuration

    def _folder(self) -> Path | None:
        """Where Accelerate numbers checkpoints; None where it does not."""
        if not self._numbering().automatic_checkpoint_naming:
            return None
        return Path(self.script.project_dir or ".").absolute() / "checkpoints"

    def _place(self, folder: Any) -> Path:
        """Where to save: with Accelerate's numbering it decides, as there."""
        numbered = self._folder()
        if numbered is None:
            if folder is None:
                raise TrainError(
                    "save_state: give it a folder, or ProjectConfiguration("
                    "automatic_checkpoint_naming=True)"
                )
            return Path(folder).expanduser().absolute()
        final = Numbered(numbered, NUMBERED).path(self._numbering().iteration)
        if self._agree_on(lambda: final.is_dir() and _shown(final)):
            raise TrainError(
                f"save_state: {final} is there; set project_configuration.iteration to a number "
                "that is free"
            )
        return final

    def _newest(self) -> Path:
        """The last complete checkpoint of Accelerate's numbering."""
        numbered = self._folder()
        if numbered is None:
            raise TrainError("load_state: give it a folder; checkpoints are not numbered here")
        places = Numbered(numbered, NUMBERED)

        def last() -> int | None:
            found = reversed(places.found().items())
            return next((number for number, path in found if _is_whole(path)), None)

        number = self._agree_on(last)
        if number is None:
            raise TrainError(f"load_state: no checkpoint in {numbered}")
        now = self._numbering()
        now.iteration = max(now.iteration, number + 1)
        return places.path(number)

    def _agree_on(self, value: Callable[[], Any]) -> Any:
        """What the main process says, on every rank; its error is everyone's."""
        box: list[Any] = [None, ""]
        if self.script.is_main_process:
            try:
                box = [value(), ""]
            except (OSError, ValueError) as error:
                box = [None, str(error)]
        dist.broadcast_object_list(box, 0, group=self.held.control)
        if box[1]:
            raise TrainError(box[1])
        return box[0]

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

    def _beside(self) -> list[SideFile]:
        """All files that rank 0 writes beside the ranks'."""
        return [*self._sides(), *self._registered()]

    def _sides(self) -> list[SideFile]:
        """Config, tokenizer and the like, which rank 0 writes."""
        if not self.script.is_main_process:
            return []
        source = getattr(self.original.module, "name_or_path", "")
        own = list(side_files(Path(source))) if source and Path(source).is_dir() else []
        found = {side.name: side for side in own}
        config = copy.deepcopy(self.original.module.config)
        config.architectures = [type(self.original.module).__name__]
        dtype = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # transformers before 4.56
        setattr(config, dtype, next(iter(self.engine.named.values())).dtype)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if getattr(self.original.module, "generation_config", None) is not None:
                self.original.module.generation_config.save_pretrained(folder)
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
        for i, (name, thing) in enumerate(zip(names, self.script.registered, strict=True)):
            registered.write(self._keep / name, thing.state_dict(), f"registered object {i}")
        return [SideFile(name, str(self._keep / name)) for name in names]

    def load(self, folder: Any) -> None:
        """Load any readable checkpoint, whatever layout or format: each rank its own share.

        ``folder`` may be None where Accelerate numbers checkpoints: the newest.
        """
        script = self.script
        self.meetings.meet("load_state")
        self.wait()
        place = self._newest() if folder is None else Path(folder).expanduser()
        for hook in script.load_hooks:
            hook(script.models, str(place))
        found = load(
            place, self.held, weights_only=not script.settings.saving.load_optimizer,
            seed=script.seed, verify_source=script.settings.saving.verify_source, log=script.tell,
        )  # fmt: skip
        self.let_go()
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
            thing.load_state_dict(registered.read(Path(path)))


def _is_whole(folder: Path) -> bool:
    finish_save(storage_path(folder))
    return is_checkpoint(folder)


def _shown(folder: Path) -> bool:
    """Whether a folder holds more than what a killed run left."""
    return any(not child.name.startswith(".") for child in folder.iterdir())
