"""Hugging Face's Accelerator on our engine: a run at tp x pp x dp is one on dp processes.

``prepare`` turns a transformers model into this rank's part of a GPTModel, and a call of the
prepared model runs the whole pipeline schedule. The rest is Accelerate's own, which sees
data-parallel replicas for processes (state.py). docs/training.md says what differs.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs, MegatronLMDummyDataLoader

from ..config import from_plugin as config_plugin
from ..config.plugin import ASSIGNED, CONSTRUCTOR, OTHER
from ..config.schema import TrainConfig
from ..core import rng
from ..core.engine import Engine, StepResult
from ..core.process import Parallel, shutdown
from ..errors import TrainError
from . import build, param_groups, state
from .arguments import accumulation, arguments_of, check_engines, is_true
from .loader import PreparedLoader, Share
from .model import PreparedModel
from .optimizer import PreparedOptimizer
from .passes import Passes
from .plugin import translated
from .replica import Replica
from .saving import Saving
from .schedulers import Annealing, MegatronLMDummyScheduler, PreparedScheduler
from .step_log import StepLog


class Accelerator(accelerate.Accelerator):
    """One process of a tp x pp x dp world."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments_of(args, kwargs)
        check_engines(given)
        plugin, world = given.pop("megatron_lm_plugin", None), state.current()
        first = world is None
        if world is not None and plugin is None:
            plugin = world.plugin
        self.plugin = translated(plugin)
        self._precision = given.get("mixed_precision")
        self.micro_batch_size = 0
        self._accumulation = accumulation(given)
        self.settings: TrainConfig = self._settings()
        if world is None:
            world = self._join(given, plugin)
        else:
            self._check_layout(world)
        self.parallel: Parallel = world.parallel
        self.replica: Replica = world.replica
        self._start(given, world, first)
        self._log = StepLog(self.settings.logging.tensorboard_dir, writes=self.is_main_process)
        self._forget()
        atexit.register(self._at_exit)
        for line in (*self.settings.notes, *self._idle_settings()):
            self.tell(line)

    def _check_layout(self, world: state.World) -> None:
        """TrainError unless a further Accelerator has the layout of the first."""
        p, of = self.settings.parallelism, world.layout
        if (p.tp, p.pp) != (of.tp, of.pp):
            raise TrainError(
                f"Accelerator: tp={p.tp} pp={p.pp}, but this process is a rank of tp={of.tp} "
                f"pp={of.pp}; give a further one the same layout, or none"
            )

    def _join(self, given: dict[str, Any], plugin: Any) -> state.World:
        """This process becomes a rank; on CPU where the script or the launcher says so."""
        launch = self.settings.launch
        asked = is_true(os.environ.get("ACCELERATE_USE_CPU", ""))
        if given.get("cpu") or launch.use_cpu or asked:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        timeout_s = 60.0 * launch.timeout_minutes
        for handler in given.get("kwargs_handlers") or ():
            if isinstance(handler, InitProcessGroupKwargs) and handler.timeout is not None:
                timeout_s = handler.timeout.total_seconds()
        shown = plugin if plugin is not None else self.plugin
        return state.join(self.settings, shown, timeout_s)

    def _start(self, given: dict[str, Any], world: state.World, first: bool) -> None:
        """Accelerate's own constructor, and what it is not to find out by itself."""
        given["cpu"] = self.parallel.device.type == "cpu"
        if first:
            given["mixed_precision"] = "bf16" if self.settings.precision.name == "bf16" else "no"
            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        with state.without_megatron():
            super().__init__(**given)
        state.enter(world)
        self.native_amp, self.scaler = False, None  # the model computes in its own precision

    def _forget(self) -> None:
        """The state before ``prepare``."""
        self.micro_batch_size = self.updates = 0  # updates: optimizer steps done
        self.seed = self.settings.seed
        self._own_schedule: Annealing | None = None  # the plugin's, where no object says
        self._built: build.Built | None = None
        self._saving: Saving | None = None
        self._passes: Passes | None = None

    def _idle_settings(self) -> list[str]:
        """Lines on settings that only train-ckpt has a use for, or that need another one."""
        plugin = self.plugin
        idle = [name for name in ("eval_iters", "eval_interval") if plugin.given(name)]
        lines = [f"{name}: no effect here, since the script says when to evaluate" for name in idle]
        if plugin.set_all_logging_options and plugin.tensorboard_dir is None:
            lines.append("set_all_logging_options: no effect without tensorboard_dir")
        if self.settings.parallelism.overlap and self._accumulation > 1:
            lines.append("overlap_grad_reduce: no effect with gradient accumulation")
        return lines

    def _settings(self, **more: Any) -> TrainConfig:
        """The plugin's settings with what is known of optimizer and batches."""
        launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        return config_plugin.from_plugin(
            self.plugin, self._precision,
            world_size=dist.get_world_size() if dist.is_initialized() else launched,
            micro_batch_size=self.micro_batch_size or None,
            gradient_accumulation_steps=self._accumulation, **more,
        )  # fmt: skip

    def tell(self, line: str) -> None:
        """Print once."""
        if self.is_main_process:
            print(line)

    # --- who this is -----------------------------------------------------------------------------

    @property
    def is_last_process(self) -> bool:
        """The first rank of the last replica."""
        return bool(self.state.is_last_process)

    def wait_for_everyone(self) -> None:
        """A barrier of all ranks; also publishes a save that is still being written."""
        if self._saving is not None:
            self._saving.meetings.announce("wait_for_everyone")
            self._saving.wait()
        super().wait_for_everyone()

    def check_trigger(self) -> bool:
        """Whether any rank has set the trigger, which is then reset."""
        flag: torch.Tensor | None = getattr(self, "flag_tensor")  # noqa: B009
        mine = flag is not None and bool(flag)
        box = torch.tensor(int(mine))
        dist.all_reduce(box, group=self.parallel.control_group)
        self.flag_tensor = torch.tensor(0, device=self.device)
        return bool(box)

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """The prepared counterparts of a model, an optimizer, loaders and schedulers, in order.

        Whatever else is given comes back as it is.
        """
        if device_placement is not None:
            raise TrainError("prepare: device_placement cannot be chosen; every rank has a device")
        kinds = [_kind(thing) for thing in args]
        of = {kind: [t for t, k in zip(args, kinds, strict=True) if k == kind] for kind in
              ("model", "optimizer", "loader", "scheduler")}  # fmt: skip
        for kind in ("model", "optimizer"):
            if len(of[kind]) > 1:
                raise TrainError(f"prepare: {len(of[kind])} {kind}s; one can be prepared")
        made: dict[int, Any] = {id(loader): self.prepare_data_loader(loader) for loader in
                                of["loader"]}  # fmt: skip
        self._settle_micro_batch(of["loader"])
        optimizer = of["optimizer"][0] if of["optimizer"] else None
        if of["model"]:
            made[id(of["model"][0])] = self._prepare_model(of["model"][0], optimizer)
        elif optimizer is not None:
            self._attach(optimizer)
        if optimizer is not None:
            made[id(optimizer)] = self.optimizer
        for thing in of["scheduler"]:
            made[id(thing)] = self.prepare_scheduler(thing)
        if optimizer is not None and not self._schedulers:
            self._own_schedule = self._plugin_schedule()
        found = [made.get(id(thing), thing) for thing in args]
        for thing in made.values():
            thing._is_accelerate_prepared = True
        return found[0] if len(found) == 1 else tuple(found)

    def _settle_micro_batch(self, loaders: Sequence[Any]) -> None:
        """The plugin tells scripts one batch size: the loaders' smallest or largest."""
        sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
        if sizes and not self.micro_batch_size:
            pick = min if self.settings.data.smallest_loader else max
            self.micro_batch_size = pick(sizes)
            for plugin in (self.plugin, self.state.megatron_lm_plugin):
                plugin.set_training_args(self.micro_batch_size, self.parallel.dp)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """A model without an optimizer: it can be evaluated."""
        return self.prepare(model)

    def _prepare_model(self, original: Any, optimizer: torch.optim.Optimizer | None) -> Any:
        build.check_kind(original)
        if self._built is not None:
            raise TrainError("prepare: a model is prepared already; call free_memory() first")
        if any(parameter.is_meta for parameter in original.parameters()):
            self.tell("the model is on the meta device: its weights come by load_state")
        said = param_groups.settings_from(optimizer) if optimizer is not None else None
        self.settings = self._settings(optimizer=said)
        self.seed = self._drawn_seed()
        rng.seed_model(self.seed, self.parallel.pp_rank)
        with rng.kept():  # a script's shuffle must not depend on how a model is made
            built = build.build(
                original, optimizer, self.settings, self.parallel,
                several_calls=self.gradient_accumulation_steps > 1,
            )  # fmt: skip
        self._built, self.settings = built, built.settings
        self._saving = Saving(self, built.engine, built.held, original)
        weight = 1.0 / self.gradient_accumulation_steps
        self._passes = Passes(built.engine, self.tell, weight)
        if optimizer is not None:
            self._wrap(optimizer)
        # in train mode whatever the original's is, as Accelerate's Megatron engine
        model = PreparedModel(self, built, original)
        self._saving.let_go()  # the engine holds the weights
        self._models.append(model)
        return model

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer of the model that is prepared already."""
        if self._built is None:
            raise TrainError("prepare: prepare the model before its optimizer, or with it")
        if self.optimizer is not None:
            raise TrainError("prepare: the model has an optimizer already; one can be prepared")
        said = param_groups.settings_from(optimizer)
        settings = replace(self.settings, optimizer=self._settings(optimizer=said).optimizer)
        build.attach(self._built, self._models[-1].original, optimizer, settings)
        self.settings = settings
        self._wrap(optimizer)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        made = PreparedOptimizer(
            optimizer, self.engine, self.passes.finish, self._after_step, self.clear_gradients
        )
        self._optimizers.append(made)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Cut every gradient, summed over the ranks, to at most ``clip_value``."""
        self._check_all(parameters)
        if self.sync_gradients:
            self.passes.finish()
            self.engine.gradients.cut(float(clip_value))

    def _drawn_seed(self) -> int:
        """The seed of dropout: the plugin's, or one that the script's own seed decides."""
        if "seed" in self.plugin.arguments:
            return self.settings.seed
        with rng.kept():
            drawn = int(torch.randint(0, 2**31 - 10**6, ()))
        return self.replica.share(lambda: drawn)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader whose data is cut over the replicas."""
        if _kind(data_loader) == "prepared":
            return data_loader
        p, number = self.parallel, len(self._dataloaders)
        share = Share(
            self.settings.batch.num_micro_batches, p.dp, p.dp_rank, self.dataloader_config,
            tuple(self.rng_types),
        )  # fmt: skip
        place = self.device_placement if device_placement is None else device_placement
        made = PreparedLoader.of(data_loader, share, self.replica, self.device, place)
        consumed = self.settings.data.consumed_samples[number : number + 1]
        if consumed and consumed[0]:
            made.start_after(consumed[0])
        self._dataloaders.append(made)
        return made

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """The optimizer; its model is prepared in the same call of ``prepare``."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that steps as often as with Accelerate on data-parallel processes."""
        if _kind(scheduler) == "prepared":
            return scheduler
        dummy, fields = isinstance(scheduler, MegatronLMDummyScheduler), self._schedule_fields()
        self._own_schedule = None
        if dummy:
            found: Any = self._dummy_schedule(scheduler)
        else:
            found = scheduler
            self._one_schedule(fields)
        made = PreparedScheduler(
            found, self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches or dummy,
        )  # fmt: skip
        self._schedulers.append(made)
        return made

    def _one_schedule(self, fields: Sequence[str]) -> None:
        """A script's scheduler overrides a file's or launcher's; TrainError for two of its own."""
        own = [
            name for name in fields if self.plugin.origin(name) in (CONSTRUCTOR, ASSIGNED, OTHER)
        ]
        if own:
            raise TrainError(
                f"prepare: the plugin's {', '.join(own)} and a scheduler of torch both set the "
                "learning rate; leave one out, or use MegatronLMDummyScheduler"
            )
        for name in fields:
            self.tell(f"{self.plugin.origin(name)}: the script's own scheduler overrides it")

    def _schedule_fields(self) -> list[str]:
        return config_plugin.schedule_fields(self.plugin)

    def _plugin_schedule(self) -> Annealing | None:
        """megatron-core's own schedule by the plugin's fields alone, if it has any."""
        if not self._schedule_fields() or self.optimizer is None:
            return None
        original = self.optimizer.optimizer
        found = self._settings(optimizer=param_groups.settings_from(original)).schedule
        return None if found is None else Annealing(original, found)

    def _dummy_schedule(self, dummy: Any) -> Annealing:
        """The same where a script says how long: its steps are those of all replicas together."""
        if self.optimizer is None:
            raise TrainError("prepare: give MegatronLMDummyScheduler together with its optimizer")
        original, made = self.optimizer.optimizer, []
        for share in (self.parallel.dp, 1):
            total, warmup = dummy.total_num_steps, dummy.warmup_num_steps or 0
            made.append(
                self._settings(
                    optimizer=param_groups.settings_from(original),
                    total_steps=None if total is None else max(1, total // share),
                    warmup_steps=warmup // share,
                ).schedule
            )
        found, of_old = made
        if found is None:
            raise TrainError(
                "MegatronLMDummyScheduler: say how long to train: total_num_steps, or the "
                "plugin's train_iters or train_samples"
            )
        return Annealing(original, found, of_old)

    # --- training --------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """That of the prepared model; TrainError before there is one."""
        if self._built is None:
            raise TrainError("prepare() a model first")
        return self._built.engine

    @property
    def passes(self) -> Passes:
        """What of each forward's gradients is in the buffers."""
        if self._passes is None:
            raise TrainError("prepare() a model first")
        return self._passes

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of the block stay on this data-parallel rank, as they do until a step."""
        if self._built is not None and self.engine.options.overlap:
            raise TrainError(
                "no_sync: overlap_grad_reduce reduces gradients while they are computed; drop one"
            )
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of a loss, divided by the accumulation's steps as in Accelerate."""
        if not loss.requires_grad:
            raise TrainError(
                "backward: the loss has no gradients, since its forward ran in eval mode or under "
                "torch.no_grad(); call model.train() and leave no_grad out"
            )
        kwargs.pop("learning_rate", None)  # of an optimizer that is not here
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    @contextlib.contextmanager
    def watched(self, training: bool) -> Iterator[None]:
        """Called by the prepared model around a forward with a loss: what it was on all ranks."""
        yield
        mean = self.engine.mean_loss
        if training:
            self._check_finite("loss", mean)
        self._log.loss(mean, training)

    def begin_pass(self, training: bool) -> float:
        """Called before the schedule runs: the factor of the gradients that it computes."""
        return self.passes.begin() if training else 1.0

    def end_pass(self, value: float, random: Any, training: bool) -> torch.Tensor:
        """Called after it: the loss for the script."""
        if training:
            return self.passes.add(value, random, self.device)
        return torch.tensor(value, device=self.device)

    def evaluated(self) -> None:
        """Called by the prepared model, which trains again."""
        self._log.evaluated(self.updates)

    def clear_gradients(self) -> None:
        """Forget the gradients of every backward pass so far."""
        self.passes.clear()

    def _check_finite(self, what: str, value: float) -> None:
        """Stop, with everything that was saved before published."""
        if math.isfinite(value) or not self.settings.optimizer.check_for_nan:
            return
        if self._saving is not None:
            self._saving.wait()
        rank = self.engine.faulty_rank
        where = f" (first on rank {rank} of {self.parallel.world_size})" if rank is not None else ""
        raise TrainError(
            f"step {self.updates + 1}: the {what} is {value}{where}. Lower the learning rate; "
            "MegatronLMPlugin(check_for_nan_in_loss_and_grad=False) goes on"
        )

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip at the coming step; the norm before clipping, None while accumulating.

        For that step it outranks the plugin's gradient_clipping.
        """
        if norm_type != 2.0:
            raise TrainError(f"clip_grad_norm_: norm_type {norm_type}; only the L2 norm is known")
        if max_norm <= 0:
            raise TrainError(f"clip_grad_norm_: max_norm {max_norm} must be above 0")
        engine = self.engine
        self._check_all(parameters)
        if not self.sync_gradients:
            return None
        assert engine.optimizer is not None, "no optimizer was prepared"
        self.passes.finish()
        norm = engine.grad_norm()
        self._set_clipping(float(max_norm))
        return torch.tensor(norm, device=self.device)

    def _check_all(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """TrainError unless these are all parameters, prepared or not."""
        given = {id(p) for p in ([parameters] if torch.is_tensor(parameters) else parameters)}
        for every in (self.engine.named.values(), self._models[-1].original.parameters()):
            if given >= {id(p) for p in every if p.requires_grad}:
                return
        raise TrainError(
            "clip_grad_norm_: the gradients of all parameters are clipped together; give it "
            "model.parameters()"
        )

    def _set_clipping(self, norm: float) -> None:
        view = self.engine.view
        for part in view.parts if view is not None else ():
            part.config.clip_grad = norm

    def _after_step(self, result: StepResult) -> None:
        """Called by the prepared optimizer."""
        self.passes.after_step()
        self._check_finite("gradient norm", result.grad_norm)
        self.updates += 1
        self._set_clipping(self.settings.optimizer.clip_grad)
        assert self.optimizer is not None
        if self.settings.logging.tensorboard_dir is not None:
            lr = self.optimizer.param_groups[0]["lr"]
            numbers = {"lr": float(lr), "grad_norm": result.grad_norm}
            if self.settings.logging.params_norm:
                numbers["params_norm"] = self.engine.params_norm()
            self._log.step(self.updates, numbers)
        if self._own_schedule is not None and not result.skipped:
            self._own_schedule.step()
        if self._saving is not None:
            self._saving.stepped()

    # --- models and checkpoints ------------------------------------------------------------------

    @property
    def saving(self) -> Saving:
        """Checkpoints of the prepared model; TrainError before there is one."""
        if self._saving is None:
            raise TrainError("prepare() a model first")
        return self._saving

    @property
    def optimizer(self) -> PreparedOptimizer | None:
        """The prepared optimizer."""
        return self._optimizers[-1] if self._optimizers else None

    @property
    def loaders(self) -> Sequence[PreparedLoader]:
        """The prepared loaders, in the order of ``prepare``."""
        return self._dataloaders

    @property
    def schedules(self) -> Sequence[Any]:
        """Everything that moves learning rates."""
        return [*self._schedulers, *([self._own_schedule] if self._own_schedule else [])]

    @property
    def registered(self) -> Sequence[Any]:
        """Objects that travel with checkpoints."""
        return self._custom_objects

    @property
    def pending_batches(self) -> int:
        """Batches since the last optimizer step, where a step takes several."""
        return 0 if self.sync_gradients else self.step % self.gradient_accumulation_steps

    @property
    def active_loader(self) -> PreparedLoader | None:
        """The prepared loader that is being iterated, the innermost."""
        found = self.gradient_state.active_dataloader
        return found if type(found) is PreparedLoader else None

    def restart(self, updates: int) -> None:
        """Called when a checkpoint of that many optimizer steps was loaded."""
        self.updates, self.step = updates, 0
        self.gradient_state._set_sync_gradients(True)
        self.passes.after_step()
        self.engine.zero_grad()

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Called by the prepared model: the whole model under transformers' names."""
        return self.saving.state_dict()

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The transformers model that was prepared, with the trained weights until the next step.

        Every rank calls it. Any other model is unwrapped as Accelerate does it.
        """
        if isinstance(model, PreparedModel):
            return self.saving.unwrapped()
        return super().unwrap_model(model, keep_fp32_wrapper)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole model under transformers' names, on the CPU of every rank."""
        if isinstance(model, PreparedModel):
            return self.saving.state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """A Hugging Face checkpoint, streamed: no rank holds the whole model."""
        self.saving.model(Path(save_directory), max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **unknown: Any
    ) -> str:
        """Start writing a native checkpoint; training goes on while it is written.

        Its files are added to the folder, which is there on return. They come at a later step, at
        ``wait_for_everyone``, ``load_state``, ``end_training``, or when the script ends, however it
        does. Without a folder it is numbered by the project configuration.
        """
        if unknown:
            raise TrainError(f"save_state: unknown arguments {', '.join(unknown)}")
        return str(self.saving.save(output_dir, safe_serialization))

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **unknown: Any) -> None:
        """Load any readable checkpoint, whatever layout or format: each rank its own share.

        Without a folder it is the newest that the project configuration numbered.
        """
        if unknown:
            raise TrainError(f"load_state: unknown arguments {', '.join(unknown)}")
        self.saving.load(input_dir)

    @property
    def models(self) -> list[Any]:
        """Prepared models, as hooks of saving and loading get them."""
        return list(self._models)

    @property
    def save_hooks(self) -> Sequence[Callable[..., None]]:
        """What was registered by ``register_save_state_pre_hook``."""
        return list(self._save_model_state_pre_hook.values())

    @property
    def load_hooks(self) -> Sequence[Callable[..., None]]:
        """What was registered by ``register_load_state_pre_hook``."""
        return list(self._load_model_state_pre_hook.values())

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose first epoch begins after ``num_batches``."""
        if isinstance(dataloader, PreparedLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def end_training(self) -> None:
        """Publish what is still being written, and close the trackers."""
        self.wait_for_everyone()
        for tracker in self.trackers:
            tracker.finish()
        self._log.close(self.updates)

    def free_memory(self, *objects: Any) -> Any:
        """Release model and optimizer, so that another can be prepared."""
        if self._saving is not None:
            self._saving.wait()
        self._forget()
        return super().free_memory(*objects)

    def _at_exit(self) -> None:
        """A save that a script did not wait for is published, without the help of other ranks."""
        if self._saving is not None:
            self._saving.end()
        if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
            return  # an error ends the script: other ranks may be gone or elsewhere
        if state.current() is not None:
            shutdown()


def _kind(thing: Any) -> str:
    if isinstance(thing, (PreparedModel, PreparedOptimizer, PreparedScheduler)):
        return "prepared"
    if type(thing) is PreparedLoader:
        return "prepared"
    if isinstance(thing, torch.nn.Module):
        return "model" if any(True for _ in thing.parameters()) else "stranger"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, torch.utils.data.DataLoader):
        return "loader"
    if isinstance(thing, (MegatronLMDummyScheduler, torch.optim.lr_scheduler.LRScheduler)):
        return "scheduler"
    if isinstance(thing, MegatronLMDummyDataLoader):
        raise TrainError(
            "prepare: MegatronLMDummyDataLoader is not read here yet; give it a DataLoader over "
            "your data set (megatron-core's GPTDataset is one), or use train-ckpt"
        )
    return "stranger"
