"""The API of Hugging Face Accelerate's Megatron-LM integration, on megatron-core alone.

A script written for it runs with its import changed. One process is one rank of tp x pp x dp;
``prepare`` turns a transformers model into this rank's part of a GPTModel, and calling the
prepared model runs the whole pipeline schedule. docs/training.md says what each setting does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.checkpoint import model_from
from shardwright.ckpt.formats.side_files import side_files
from shardwright.ckpt.manifest import SideFile

from . import config as settings_of
from . import weights
from .config import TrainConfig
from .engine import Batch, Engine, EngineOptions, StepResult
from .errors import TrainError
from .optim import OptimizerSpec, ParamGroup
from .parallel import Layout, Parallel, import_megatron, initialize, shutdown
from .plugin import MegatronLMPlugin
from .prepared import (
    PreparedLoader,
    PreparedModel,
    PreparedOptimizer,
    PreparedScheduler,
    group_names,
    stored_groups,
)
from .state import Loaded, RankState, Saver, load
from .trackers import Trackers

CUSTOM = "custom_checkpoint_{}.pt"


class MegatronLMDummyScheduler:
    """Stands for the plugin's own schedule: total and warm-up steps of the optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps


class Accelerator:
    """One process of a tp x pp x dp world, with Accelerate's methods."""

    distributed_type = "MEGATRON_LM"

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        device_placement: bool = True,
        split_batches: bool = False,
        cpu: bool = False,
        seed: int | None = None,
    ) -> None:
        if split_batches:
            raise TrainError("split_batches: batch_size is the micro-batch; leave it out")
        if not device_placement or not step_scheduler_with_optimizer:
            raise TrainError("device_placement and step_scheduler_with_optimizer must stay True")
        if gradient_accumulation_steps < 1:
            raise TrainError(f"accumulation steps {gradient_accumulation_steps}: at least 1")
        self.plugin = megatron_lm_plugin or MegatronLMPlugin()
        self.mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self.gradient_accumulation_steps = gradient_accumulation_steps
        if cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        self.settings: TrainConfig = settings_of.from_plugin(
            self.plugin, self.mixed_precision, world_size=world,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )  # fmt: skip
        p = self.settings.parallelism
        # layers of stages depend on the model, which prepare() brings; groups do not
        early = Layout(p.tp, p.pp, p.sequence_parallel)
        self.seed = self.settings.seed if seed is None else seed
        self.parallel: Parallel = initialize(
            early, seed=self.seed, timeout_s=60.0 * self.settings.launch.timeout_minutes
        )
        self.project_dir = str(project_dir) if project_dir is not None else None
        self.sync_gradients = True
        self.micro_batch_size = 0
        self.step = 0  # optimizer steps done
        self._accumulated = 0
        self._trackers = Trackers(log_with, self.project_dir, self.settings.logging.tensorboard_dir)
        self._custom: list[Any] = []
        self._loaders: list[PreparedLoader] = []
        self._schedulers: list[PreparedScheduler] = []
        self._engine: Engine | None = None
        self._optimizer: PreparedOptimizer | None = None
        self._saver: Saver | None = None
        self._held: RankState | None = None
        self._own_schedule: Any = None
        self._loss: torch.Tensor | None = None
        self._original: Any = None
        atexit.register(self._at_exit)
        for line in self.settings.notes:
            self.print(line)

    # --- who this is -----------------------------------------------------------------------------

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.parallel.rank

    @property
    def local_process_index(self) -> int:
        return self.parallel.local_rank

    @property
    def num_processes(self) -> int:
        """Processes of all machines."""
        return self.parallel.world_size

    @property
    def device(self) -> torch.device:
        return self.parallel.device

    @property
    def is_main_process(self) -> bool:
        return self.parallel.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.parallel.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.parallel.rank == self.parallel.world_size - 1

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step changed nothing because a gradient overflowed."""
        return self._optimizer is not None and self._optimizer.step_was_skipped

    def print(self, *words: Any, **options: Any) -> None:
        """Print once, on the main process."""
        if self.is_main_process:
            print(*words, **options)

    def wait_for_everyone(self) -> None:
        """Barrier; also publishes a save that is still being written."""
        if self._saver is not None:
            self._saver.wait()
        dist.barrier(group=self.parallel.control_group)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block before the others."""
        if not self.is_main_process:
            dist.barrier(group=self.parallel.control_group)
        yield
        if self.is_main_process:
            dist.barrier(group=self.parallel.control_group)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the main process alone."""

        def wrapped(*words: Any, **options: Any) -> Any:
            return function(*words, **options) if self.is_main_process else None

        return wrapped

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """The prepared counterparts of a model, an optimizer, loaders and schedulers, in order."""
        kinds = [_kind(thing) for thing in objects]
        for kind in ("model", "optimizer"):
            if kinds.count(kind) > 1:
                raise TrainError(f"prepare: {kinds.count(kind)} {kind}s; one can be prepared")
        of = {kind: [t for t, k in zip(objects, kinds, strict=True) if k == kind] for kind in
              ("model", "optimizer", "loader", "scheduler", "dummy")}  # fmt: skip
        if of["loader"]:
            self._settle_micro_batch(of["loader"])
        made: dict[int, Any] = {}
        if of["model"]:
            if self._engine is not None:
                raise TrainError("prepare: a model is prepared already; call free_memory() first")
            made[id(of["model"][0])] = self._prepare_model(of["model"][0], of["optimizer"])
        elif of["optimizer"]:
            raise TrainError("prepare: give the optimizer together with its model")
        if of["optimizer"]:
            made[id(of["optimizer"][0])] = self._optimizer
        for loader in of["loader"]:
            made[id(loader)] = self._prepare_loader(loader)
        for thing in of["scheduler"] + of["dummy"]:
            made[id(thing)] = self._prepare_scheduler(thing)
        found = [made[id(thing)] for thing in objects]
        return found[0] if len(found) == 1 else tuple(found)

    def _settle_micro_batch(self, loaders: Sequence[Any]) -> None:
        """The micro-batch is the loaders' batch size; with several the smallest or largest."""
        sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
        if sizes and not self.micro_batch_size:
            pick = min if self.settings.data.smallest_loader else max
            self.micro_batch_size = pick(sizes)
            self.plugin.set_training_args(self.micro_batch_size, self.parallel.dp)

    def _prepare_model(self, original: Any, optimizers: Sequence[Any]) -> PreparedModel:
        model = model_from(original.config.to_dict(), type(original).__name__)
        self._refuse_other_architectures(original)
        self.settings = self._with_optimizer(optimizers[0] if optimizers else None)
        rotary = "pos" not in model.sizes
        from .loop import layout_of, model_options, positions_of

        sizes = settings_of.Sizes(
            type(original).__name__, model.sizes["layer"], positions_of(model), rotary
        )
        self.settings = settings_of.for_model(self.settings, sizes)
        layout = layout_of(self.settings)
        engine = Engine(
            model, self.parallel, layout, model_options(self.settings),
            EngineOptions(
                self.settings.parallelism.distributed_optimizer,
                self.settings.parallelism.overlap and self.gradient_accumulation_steps == 1,
                self.settings.optimizer.check_for_nan,
            ),
        )  # fmt: skip
        settings_of.check_expected(self.settings.model.expected, engine.facts(), sizes.name)
        self._engine, self._original = engine, original
        if optimizers:
            self._attach(engine, original, optimizers[0])
        self._held = engine.rank_state()
        weights.take(original, self._held)
        self._saver = Saver(
            self._held, log=self.print, weights_only=not self.settings.saving.save_optimizer
        )
        engine.zero_grad()
        return PreparedModel(self, engine, original).train(original.training)

    def _refuse_other_architectures(self, original: Any) -> None:
        name = type(original).__name__
        if not name.endswith(("ForCausalLM", "LMHeadModel")):
            raise TrainError(
                f"prepare: {name} is no causal language model; megatron-core's GPTModel has a "
                "language-model head only"
            )

    def _with_optimizer(self, original: torch.optim.Optimizer | None) -> TrainConfig:
        """The settings with what the user's optimizer says."""
        said = _optimizer_settings(original) if original is not None else None
        return settings_of.from_plugin(
            self.plugin, self.mixed_precision, world_size=self.parallel.world_size,
            optimizer=said, micro_batch_size=self.micro_batch_size or None,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )  # fmt: skip

    def _attach(self, engine: Engine, original: Any, optimizer: torch.optim.Optimizer) -> None:
        """megatron's optimizer over the user's own param groups."""
        held = engine.rank_state()
        names = weights.parameter_names(original, engine.model)
        groups = group_names(optimizer, names)
        parts = weights.stored_parts(held)
        frozen = {n for n, p in original.named_parameters() if not p.requires_grad}
        index = stored_groups(parts, groups)
        for name, param in engine.named.items():
            asleep = [fqn for fqn in parts[name] if fqn in frozen]
            if asleep and len(asleep) < len(parts[name]):
                raise TrainError(
                    f"prepare: of {', '.join(parts[name])}, which megatron-core holds as one "
                    f"tensor, only {', '.join(asleep)} are frozen"
                )
            param.requires_grad_(not asleep and index[name] >= 0)
        made = [
            ParamGroup(frozenset(n for n, i in index.items() if i == g), _group_options(options))
            for g, (_, options) in enumerate(groups)
        ]
        o = self.settings.optimizer
        spec = OptimizerSpec(
            name=o.name, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
            momentum=o.momentum, clip_grad=o.clip_grad, precision=self.settings.precision.name,
            distributed=self.settings.parallelism.distributed_optimizer,
        )  # fmt: skip
        engine.attach_optimizer(spec, made)
        self._optimizer = PreparedOptimizer(self, engine, optimizer)

    def _prepare_loader(self, loader: Any) -> PreparedLoader:
        made = PreparedLoader(
            loader, micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.settings.batch.num_micro_batches,
            dp_rank=self.parallel.dp_rank, dp_size=self.parallel.dp, seed=self.seed,
            control=self.parallel.control_group,
        )  # fmt: skip
        self._loaders.append(made)
        return made

    def _prepare_scheduler(self, scheduler: Any) -> Any:
        fields = settings_of.schedule_fields(self.plugin)
        if isinstance(scheduler, MegatronLMDummyScheduler):
            made = PreparedScheduler(self, self._plugin_schedule(scheduler))
        elif fields:
            raise TrainError(
                f"prepare: the plugin's {', '.join(fields)} and a scheduler of torch both set the "
                "learning rate; leave one out, or use MegatronLMDummyScheduler"
            )
        else:
            made = PreparedScheduler(self, scheduler)
        self._schedulers.append(made)
        return made

    def _plugin_schedule(self, dummy: MegatronLMDummyScheduler) -> Any:
        """megatron-core's own schedule, set on the user's groups."""
        assert self._optimizer is not None
        found = settings_of.from_plugin(
            self.plugin, self.mixed_precision, world_size=self.parallel.world_size,
            optimizer=_optimizer_settings(self._optimizer.original),
            micro_batch_size=self.micro_batch_size or None,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            total_steps=dummy.total_num_steps, warmup_steps=dummy.warmup_num_steps,
        ).schedule  # fmt: skip
        if found is None:
            raise TrainError(
                "MegatronLMDummyScheduler: say how long to train: total_num_steps, or the "
                "plugin's train_iters or train_samples"
            )
        return _Annealing(self._optimizer.original, found)

    # --- training --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Sum gradients over ``gradient_accumulation_steps`` calls; the last one synchronizes."""
        self._accumulated += 1
        ended = any(loader.end_of_dataloader for loader in self._loaders)
        self.sync_gradients = self._accumulated % self.gradient_accumulation_steps == 0 or ended
        if self.sync_gradients:
            self._accumulated = 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of the block stay on this data-parallel rank."""
        before, self.sync_gradients = self.sync_gradients, False
        yield
        self.sync_gradients = before

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Nothing to do: the model computes in its own precision."""
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accept the loss of the last forward, whose backward has run inside the schedule."""
        if loss is not self._loss:
            raise TrainError(
                "backward: this is not the loss that the prepared model returned last; its "
                "backward ran inside the forward, so a loss of your own cannot be added. "
                "MegatronLMPlugin(custom_loss_function=...) changes the loss"
            )
        self._loss = None

    def remember_loss(self, loss: torch.Tensor) -> None:
        """Called by the prepared model."""
        self._loss = loss
        if self.settings.optimizer.check_for_nan and not bool(torch.isfinite(loss)):
            raise TrainError(
                f"step {self.step + 1}: the loss is {loss.item()} (seen on rank "
                f"{self.process_index}); check_for_nan_in_loss_and_grad=False goes on"
            )

    @property
    def loss_function(self) -> Callable[[Batch, torch.Tensor], torch.Tensor] | None:
        """The plugin's custom loss on this engine's tensors, or None."""
        custom = self.settings.hooks.loss_function
        if custom is None:
            return None

        def call(batch: Batch, output: torch.Tensor) -> torch.Tensor:
            # Accelerate's signature: (loss_mask, output) -> (loss, {...}); the mean over the
            # mask, spread back over its tokens, leaves the engine's normalisation in force.
            loss, _ = custom(batch["loss_mask"], output)
            return torch.ones_like(output) * loss

        return call

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip at the coming step; the norm before clipping, None while accumulating."""
        if norm_type != 2.0:
            raise TrainError(f"clip_grad_norm_: norm_type {norm_type}; only the L2 norm is known")
        if not self.sync_gradients:
            return None
        engine = self._need_engine()
        assert engine.optimizer is not None
        engine.optimizer.prepare_grads()
        norm = engine.optimizer.get_grad_norm()
        for part in engine.view.parts if engine.view is not None else ():
            part.config.clip_grad = float(max_norm)
        return torch.tensor(float(norm), device=self.device)

    def after_step(self, result: StepResult) -> None:
        """Called by the prepared optimizer."""
        self.step += 1
        if self._saver is not None:
            self._saver.poll()

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise TrainError("prepare() a model first")
        return self._engine

    # --- tensors of other ranks ------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate over the data-parallel ranks; nested lists, tuples and dicts too."""
        return _map(tensor, self._gather_one)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        group = import_megatron("parallel_state").get_data_parallel_group()
        mine = tensor.to(self.device).contiguous()
        mine = mine[None] if mine.dim() == 0 else mine
        every = [torch.empty_like(mine) for _ in range(self.parallel.dp)]
        dist.all_gather(every, mine, group=group)
        return torch.cat(every)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """``gather`` without the rows that fill up an epoch's last batch."""
        if use_gather_object:
            raise TrainError("gather_for_metrics(use_gather_object=True) is not supported")
        found = self.gather(data)
        last = next((ld for ld in self._loaders if ld.end_of_dataloader), None)
        if last is None or last.remainder in (-1, last.total_batch_size):
            return found
        order = [i for r in range(self.parallel.dp) for i in _rank_positions(last, r)]

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[0] != last.total_batch_size:
                return tensor  # not one entry per row: a loss, for example
            return tensor[[k for k, i in enumerate(order) if i < last.remainder]]

        return _map(found, real)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over the data-parallel ranks."""
        if reduction not in ("sum", "mean", "none"):
            raise TrainError(f"reduce: reduction {reduction!r}; choose sum, mean or none")

        def one(value: torch.Tensor) -> torch.Tensor:
            if reduction == "none":
                return value
            box = value.detach().clone().to(self.device)
            dist.all_reduce(box, group=import_megatron("parallel_state").get_data_parallel_group())
            return box * scale / (self.parallel.dp if reduction == "mean" else 1)

        return _map(tensor, one)

    # --- models ----------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """The transformers model that was prepared.

        Its own weights are those from before training: pass
        ``state_dict=accelerator.get_state_dict(model)`` to ``save_pretrained``.
        """
        return model.original if isinstance(model, PreparedModel) else model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole model under transformers' names, on the CPU of every rank."""
        assert self._held is not None
        found = weights.collect(self._held)
        if "tie_word_embeddings" in self._held.model.flags:
            for name, tied in self._held.model.family.tied_names.items():
                found[name] = found[tied]
        return found

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """A Hugging Face checkpoint, streamed: no rank holds the whole model."""
        from shardwright.ckpt import merge
        from shardwright.ckpt.jobs import RunOptions
        from shardwright.ckpt.progress import parse_bytes

        assert self._held is not None
        target = Path(save_directory)
        saver = Saver(self._held, weights_only=True)
        place = target.parent / f".{target.name}.shards"
        saver.save(place, self.step, {}, self._sides())
        saver.wait()
        if self.is_main_process:
            merge(
                place, target, max_shard_size=parse_bytes(max_shard_size),
                safe_serialization=safe_serialization, run=RunOptions(overwrite=True),
            )  # fmt: skip
            shutil.rmtree(place)
            (target.parent / "latest").unlink(missing_ok=True)
        dist.barrier(group=self.parallel.control_group)

    # --- checkpoints -----------------------------------------------------------------------------

    def save_state(self, output_dir: str | os.PathLike[str], **unknown: Any) -> str:
        """Start writing a native checkpoint; training goes on while it is written.

        It is published at a later step, at ``wait_for_everyone``, ``load_state``,
        ``end_training``, or when the script ends.
        """
        if unknown:
            raise TrainError(f"save_state: unknown arguments {', '.join(unknown)}")
        engine = self._need_engine()
        assert self._saver is not None
        final = Path(output_dir).absolute()
        self._saver.save(final, self.step, self._state(engine), self._sides(custom=True))
        return str(final)

    def _state(self, engine: Engine) -> dict[str, object]:
        groups = [] if self._optimizer is None else [
            {"step": engine.view.step() if engine.view else 0,
             **{k: v for k, v in group.items() if k != "params" and not _opaque(v)}}
            for group in self._optimizer.param_groups
        ]  # fmt: skip
        return {
            "schedule": [scheduler.state_dict() for scheduler in self._schedulers],
            "param_groups": groups,
            "data": {
                "loaders": [loader.state() for loader in self._loaders],
                "accumulated": self._accumulated,
            },
        }

    def _sides(self, *, custom: bool = False) -> list[SideFile]:
        """Config, tokenizer and registered objects, which rank 0 writes."""
        if not self.is_main_process:
            return []
        source = getattr(self._original, "name_or_path", "")
        own = list(side_files(Path(source))) if source and Path(source).is_dir() else []
        found = {side.name: side for side in own}
        text = json.dumps(self._original.config.to_diff_dict(), indent=2, default=str)
        with tempfile.TemporaryDirectory() as folder:
            self._original.config.save_pretrained(folder)
            text = (Path(folder) / "config.json").read_text()
        found["config.json"] = SideFile("config.json", text=text)
        if custom and self._custom:
            keep = Path(tempfile.mkdtemp(prefix="shardwright-"))
            atexit.register(shutil.rmtree, keep, ignore_errors=True)
            for i, thing in enumerate(self._custom):
                torch.save(thing.state_dict(), keep / CUSTOM.format(i))
                found[CUSTOM.format(i)] = SideFile(CUSTOM.format(i), str(keep / CUSTOM.format(i)))
        return list(found.values())

    def load_state(self, input_dir: str | os.PathLike[str], **unknown: Any) -> None:
        """Load any readable checkpoint, whatever layout or format: each rank its own share."""
        if unknown:
            raise TrainError(f"load_state: unknown arguments {', '.join(unknown)}")
        engine = self._need_engine()
        assert self._held is not None
        self.wait_for_everyone()
        weights_only = not self.settings.saving.load_optimizer
        found = load(
            input_dir, self._held, weights_only=weights_only, seed=self.seed, log=self.print
        )
        self.step = found.step
        self._restore(engine, found)
        self._load_custom(found.checkpoint.path)
        engine.zero_grad()
        dist.barrier(group=self.parallel.control_group)

    def _restore(self, engine: Engine, found: Loaded) -> None:
        """Groups, schedulers and loaders as they were."""
        groups, data = found.state.get("param_groups"), found.state.get("data")
        if found.optimizer and isinstance(groups, list) and self._optimizer is not None:
            if len(groups) != len(self._optimizer.param_groups):
                raise TrainError(
                    f"{found.checkpoint.path}: has {len(groups)} param groups, the optimizer has "
                    f"{len(self._optimizer.param_groups)}"
                )
            for ours, theirs in zip(self._optimizer.param_groups, groups, strict=True):
                ours.update({k: v for k, v in theirs.items() if k in ours and k != "params"})
            if engine.view is not None and groups:
                engine.view.set_step(int(groups[0].get("step", found.step)))
        schedules = found.state.get("schedule")
        if isinstance(schedules, list):
            for scheduler, state in zip(self._schedulers, schedules, strict=False):
                scheduler.load_state_dict(state)
        if isinstance(data, Mapping):
            self._accumulated = int(data.get("accumulated", 0))
            for loader, state in zip(self._loaders, data.get("loaders", ()), strict=False):
                loader.restore(state)

    def _load_custom(self, folder: Path) -> None:
        for i, thing in enumerate(self._custom):
            path = folder / CUSTOM.format(i)
            if not path.is_file():
                raise TrainError(f"{folder}: has no {path.name} for a registered object")
            thing.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with state_dict and load_state_dict that travel with checkpoints."""
        for thing in objects:
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise TrainError(
                    f"register_for_checkpointing: {type(thing).__name__} has no state_dict and "
                    "load_state_dict"
                )
            self._custom.append(thing)

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> PreparedLoader:
        """A loader whose first epoch begins after ``num_batches``."""
        if not isinstance(loader, PreparedLoader):
            raise TrainError("skip_first_batches: give it a loader that prepare() returned")
        made = loader.skipping(num_batches)
        self._loaders.append(made)
        return made

    # --- logging ---------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the trackers named by ``log_with``, on the main process."""
        if self.is_main_process:
            self._trackers.open(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand numbers to the trackers."""
        if log_kwargs:
            raise TrainError(f"log: log_kwargs {sorted(log_kwargs)} are not supported")
        if self.is_main_process:
            self._trackers.log(values, self.step if step is None else step)

    def end_training(self) -> None:
        """Publish what is still being written, and close the trackers."""
        self.wait_for_everyone()
        self._trackers.close()

    def free_memory(self, *objects: Any) -> list[None]:
        """Release model and optimizer, so that another can be prepared."""
        if self._saver is not None:
            self._saver.wait()
        self._engine = self._optimizer = self._saver = self._held = self._original = None
        self._loss = None
        self._loaders, self._schedulers, self._custom = [], [], []
        self.micro_batch_size = self.step = 0
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def _at_exit(self) -> None:
        """A save that a script did not wait for is published while the ranks are still there."""
        if self._saver is not None and dist.is_initialized():
            self._saver.wait()
        if dist.is_initialized():
            shutdown()


class _Annealing:
    """megatron-core's schedule over the user's own groups, with a torch scheduler's methods."""

    def __init__(self, optimizer: torch.optim.Optimizer, found: settings_of.Schedule) -> None:
        made = import_megatron("optimizer_param_scheduler").OptimizerParamScheduler
        for group in optimizer.param_groups:
            group.setdefault("max_lr", group["lr"])
            group.setdefault("min_lr", found.min_lr)
            group.setdefault("wd_mult", 1.0 if group.get("weight_decay") else 0.0)
            group.setdefault("lr_mult", 1.0)
        self.made = made(
            optimizer, init_lr=0.0, max_lr=found.lr, min_lr=found.min_lr,
            lr_warmup_steps=found.warmup_steps, lr_decay_steps=found.decay_steps,
            lr_decay_style=found.style, start_wd=found.wd_start, end_wd=found.wd_end,
            wd_incr_steps=found.wd_steps, wd_incr_style=found.wd_style,
        )  # fmt: skip
        self.optimizer = optimizer

    def step(self) -> None:
        self.made.step(1)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.made.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made.step(int(state["num_steps"]) - self.made.num_steps)


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, torch.utils.data.DataLoader):
        return "loader"
    if isinstance(thing, MegatronLMDummyScheduler):
        return "dummy"
    if hasattr(thing, "step") and hasattr(thing, "get_last_lr"):
        return "scheduler"
    raise TrainError(
        f"prepare: {type(thing).__name__} is no model, optimizer, DataLoader or scheduler"
    )


def _optimizer_settings(original: torch.optim.Optimizer) -> settings_of.Optimizer:
    """What a torch optimizer says; TrainError for one that megatron-core does not have."""
    names = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
    name = names.get(type(original))
    if name is None:
        raise TrainError(f"prepare: {type(original).__name__}: use torch.optim.AdamW, Adam or SGD")
    d = original.defaults
    for key in ("amsgrad", "maximize"):
        if d.get(key):
            raise TrainError(f"prepare: {type(original).__name__}({key}=True) is not supported")
    made = settings_of.Optimizer(name=name, lr=float(d["lr"]), weight_decay=d["weight_decay"])
    from dataclasses import replace

    if name == "sgd":
        return replace(made, momentum=d["momentum"])
    return replace(made, betas=tuple(d["betas"]), eps=d["eps"])


def _group_options(options: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "dampening")
    return {k: v for k, v in options.items() if k in keys}


def _opaque(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return True
    return False


def _map(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply to every tensor of a nested structure."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: _map(value, function) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_map(value, function) for value in data)
    raise TrainError(f"gather: {type(data).__name__} is no tensor")


def _rank_positions(loader: PreparedLoader, rank: int) -> list[int]:
    """Places in a global batch of the rows that data-parallel rank ``rank`` has, in its order."""
    from .data import _rows

    return [
        i
        for micro in range(loader.num_micro_batches)
        for i in _rows(micro, loader.micro_batch_size, rank, loader.dp_size)
    ]
