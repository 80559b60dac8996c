"""The API of Hugging Face Accelerate's Megatron-LM integration, on megatron-core alone.

A script written for it runs with its import changed. One process is one rank of tp x pp x dp;
``prepare`` turns a transformers model into this rank's part of a GPTModel, and calling the
prepared model runs the whole pipeline schedule. docs/training.md says what each setting does.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.formats.side_files import side_files
from shardwright.ckpt.model.manifest import SideFile

from ..checkpoint import hf_weights as weights
from ..checkpoint.load import Loaded, load
from ..checkpoint.rank_state import RankState
from ..checkpoint.save import Saver, SaveWait
from ..config import from_plugin as config_plugin
from ..config import schema as settings_of
from ..config.plugin import MegatronLMPlugin
from ..config.schema import TrainConfig
from ..core.engine import Engine, StepResult
from ..core.from_config import (
    engine_of,
    groups_of,
    layout_of,
    positions_of,
    settle,
)
from ..core.process import Parallel, initialize, shutdown
from ..doctor import measured
from ..errors import TrainError
from ..patches.megatron import import_megatron
from . import param_groups as groups
from .loader import Cursor, PreparedLoader, Share
from .prepare import PreparedModel, PreparedOptimizer, PreparedScheduler, plain
from .trackers import StepLog, Trackers

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
        gradient_accumulation_steps: int | None = None,
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
        self.plugin = megatron_lm_plugin or MegatronLMPlugin()
        self._precision = mixed_precision
        self.gradient_accumulation_steps = _accumulation(gradient_accumulation_steps)
        self.micro_batch_size = 0
        world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        self.settings: TrainConfig = self._settings(world)
        self.seed = self.settings.seed if seed is None else seed
        self.project_dir = str(project_dir) if project_dir is not None else None
        self._trackers = Trackers(log_with, self.project_dir)
        launch = self.settings.launch
        if cpu or launch.use_cpu or _is_true(os.environ.get("ACCELERATE_USE_CPU", "")):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.parallel: Parallel = initialize(
            groups_of(self.settings), seed=self.seed, timeout_s=60.0 * launch.timeout_minutes
        )
        self._log = StepLog(self.settings.logging.tensorboard_dir, writes=self.is_main_process)
        self._forget()
        self._keep: Path | None = None  # registered objects of the save under way
        atexit.register(self._at_exit)
        for line in (*self.settings.notes, *self._idle_settings()):
            self.print(line)

    def _forget(self) -> None:
        """The state before ``prepare``."""
        self.sync_gradients = True
        self.micro_batch_size = self.step = 0  # step: optimizer steps done
        self._accumulated = 0
        self._custom: list[Any] = []
        self._loaders: list[PreparedLoader] = []
        self._active: list[PreparedLoader] = []  # that are being iterated, the innermost last
        self._schedulers: list[PreparedScheduler] = []
        self._own_schedule: groups.Annealing | None = None  # the plugin's, where no object says
        self._engine: Engine | None = None
        self._optimizer: PreparedOptimizer | None = None
        self._saver: Saver | None = None
        self._held: RankState | None = None
        self._loss: torch.Tensor | None = None
        self._original: Any = None
        self._positions: int | None = None

    def _idle_settings(self) -> list[str]:
        """Lines on settings that only train-ckpt has a use for, or that need another one."""
        plugin = self.plugin
        idle = [name for name in ("eval_iters", "eval_interval") if plugin.given(name)]
        lines = [f"{name}: no effect here, since the script says when to evaluate" for name in idle]
        if plugin.set_all_logging_options and plugin.tensorboard_dir is None:
            lines.append("set_all_logging_options: no effect without tensorboard_dir")
        if self.settings.parallelism.overlap and self.gradient_accumulation_steps > 1:
            lines.append("overlap_grad_reduce: no effect with gradient accumulation")
        return lines

    def _settings(self, world: int, **more: Any) -> TrainConfig:
        """The plugin's settings with what is known of optimizer and batches."""
        return config_plugin.from_plugin(
            self.plugin, self._precision, world_size=world,
            micro_batch_size=self.micro_batch_size or None,
            gradient_accumulation_steps=self.gradient_accumulation_steps, **more,
        )  # fmt: skip

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
    def mixed_precision(self) -> str:
        """``no`` or ``bf16``."""
        return "bf16" if self.settings.precision.name == "bf16" else "no"

    @property
    def state(self) -> SimpleNamespace:
        """What scripts read from Accelerate's state; a copy."""
        return SimpleNamespace(
            distributed_type=self.distributed_type, device=self.device,
            num_processes=self.num_processes, process_index=self.process_index,
            local_process_index=self.local_process_index, is_main_process=self.is_main_process,
            mixed_precision=self.mixed_precision, megatron_lm_plugin=self.plugin,
        )  # fmt: skip

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

    def _on_main(self, action: Callable[[], None]) -> None:
        """Let the main process act while the others wait; its error is everyone's."""
        fault = [""]
        if self.is_main_process:
            try:
                action()
            except (OSError, ValueError) as error:
                fault = [str(error)]
        dist.broadcast_object_list(fault, 0, group=self.parallel.control_group)
        if fault[0]:
            raise TrainError(fault[0])

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """The prepared counterparts of a model, an optimizer, loaders and schedulers, in order."""
        kinds = [_kind(thing) for thing in objects]
        for kind in ("model", "optimizer"):
            if kinds.count(kind) > 1:
                raise TrainError(f"prepare: {kinds.count(kind)} {kind}s; one can be prepared")
        of = {kind: [t for t, k in zip(objects, kinds, strict=True) if k == kind] for kind in
              ("model", "optimizer", "loader", "scheduler", "prepared")}  # fmt: skip
        if of["loader"]:
            self._settle_micro_batch(of["loader"])
        made: dict[int, Any] = {id(thing): thing for thing in of["prepared"]}
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
        for thing in of["scheduler"]:
            made[id(thing)] = self._prepare_scheduler(thing)
        if of["optimizer"] and not self._schedulers and config_plugin.schedule_fields(self.plugin):
            self._own_schedule = self._plugin_schedule(None, 0)
        found = [made[id(thing)] for thing in objects]
        return found[0] if len(found) == 1 else tuple(found)

    def _settle_micro_batch(self, loaders: Sequence[Any]) -> None:
        """The micro-batch is the loaders' batch size; with several the smallest or largest."""
        sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
        if sizes and not self.micro_batch_size:
            pick = min if self.settings.data.smallest_loader else max
            self.micro_batch_size = pick(sizes)
            self.plugin.set_training_args(self.micro_batch_size, self.parallel.dp)

    def rows_of_micro_batch(self, rows: int) -> int:
        """Rows of a micro-batch; where no loader says, a batch is num_micro_batches of them."""
        every = self.settings.batch.num_micro_batches
        return self.micro_batch_size or (rows // every if rows % every == 0 else rows)

    @property
    def longest(self) -> tuple[int | None, str]:
        """The longest sequence that is allowed, and who says so."""
        said = self.settings.data.seq_length
        return (self._positions, "the model's positions") if said is None else (said, "seq_length")

    def _prepare_model(self, original: Any, optimizers: Sequence[Any]) -> PreparedModel:
        name = type(original).__name__
        if not name.endswith(("ForCausalLM", "LMHeadModel")):
            raise TrainError(
                f"prepare: {name} is no causal language model; megatron-core's GPTModel has a "
                "language-model head only"
            )
        model = model_from(original.config.to_dict(), name)
        said = groups.settings_from(optimizers[0]) if optimizers else None
        settings = self._settings(self.parallel.world_size, optimizer=said)
        self._positions = positions_of(model)
        self.settings = settings = settle(settings, model, name)
        parts = weights.stored_parts(
            model, layout_of(settings), self.parallel, settings.model.vocab_multiple
        )
        weights.check_names(original, model)
        index = self._groups(original, model, optimizers, parts)
        engine = engine_of(
            settings, model, self.parallel, name,
            eod_tokens=self._eod_tokens(original),
            several_calls=self.gradient_accumulation_steps > 1,
            trained=None if index is None else lambda stored: index[stored] >= 0,
        )  # fmt: skip
        self._engine, self._original = engine, original
        if index is not None:
            self._attach(engine, optimizers[0], index)
        self._held = RankState.of(engine)
        weights.take(original, self._held)
        self._saver = Saver(
            self._held, log=self.print, weights_only=not settings.saving.save_optimizer,
            on_wait=self._say_wait,
        )  # fmt: skip
        engine.zero_grad()
        # in train mode whatever the original's is, as Accelerate's Megatron engine
        return PreparedModel(self, engine, original, self._handler(engine))

    def _say_wait(self, wait: SaveWait) -> None:
        if said := measured.slow_save(*astuple(wait)):
            self.print(said)

    def _eod_tokens(self, original: Any) -> list[int]:
        """The end-of-document tokens, where their positions do not count toward the loss."""
        if not self.settings.data.eod_mask_loss:
            return []
        eod = original.config.eos_token_id
        if eod is None:
            raise TrainError(
                "eod_mask_loss: the model's config has no eos_token_id; set it before prepare()"
            )
        return eod if isinstance(eod, list) else [eod]

    def _groups(
        self, original: Any, model: Any, optimizers: Sequence[Any], parts: Mapping[str, list[str]]
    ) -> dict[str, int] | None:
        """Stored name -> the script's param group, -1 where frozen; None without optimizer."""
        if not optimizers:
            return None
        names = weights.parameter_names(original, model)
        frozen = {n for n, p in original.named_parameters() if not p.requires_grad}
        return groups.stored_groups(parts, groups.group_names(optimizers[0], names), frozen)

    def _attach(
        self, engine: Engine, optimizer: torch.optim.Optimizer, index: Mapping[str, int]
    ) -> None:
        """megatron's optimizer over the user's own param groups."""
        made = groups.param_groups(optimizer, index, engine.named, self.settings.optimizer)
        engine.attach_optimizer(self.settings.optimizer, made)
        self._optimizer = PreparedOptimizer(self, engine, optimizer)

    def _handler(self, engine: Engine) -> Any:
        """An instance of the plugin's custom_train_step_class, or None."""
        hooks = self.settings.hooks
        if hooks.train_step_class is None:
            return None
        for name in ("loss_function", "get_batch"):
            if getattr(hooks, name) is not None:
                raise TrainError(
                    f"custom_train_step_class makes its own batches and losses; drop custom_{name}"
                    + ("_function" if name == "get_batch" else "")
                )
        args = settings_of.megatron_args(self.settings) | engine.facts()
        args["eos_token_id"] = engine.model.config.get("eos_token_id")
        made = hooks.train_step_class(SimpleNamespace(**args), **hooks.train_step_kwargs)
        if not callable(getattr(made, "forward_step", None)):
            raise TrainError(
                f"custom_train_step_class: {type(made).__name__} has no forward_step; set it to a "
                "function of (iterator, model) in __init__"
            )
        return made

    def _prepare_loader(self, loader: Any) -> PreparedLoader:
        p, number = self.parallel, len(self._loaders)
        share = Share(self.micro_batch_size, self.settings.batch.num_micro_batches, p.dp_rank, p.dp)
        seeded = getattr(loader, "generator", None)
        made = PreparedLoader(
            loader, share, Cursor(self.seed if seeded is None else seeded.initial_seed()),
            device=self.device, control=p.control_group, active=self._active,
        )  # fmt: skip
        consumed = self.settings.data.consumed_samples[number : number + 1]
        if consumed and consumed[0]:
            made.start_after(consumed[0])
        self._loaders.append(made)
        return made

    def _prepare_scheduler(self, scheduler: Any) -> Any:
        fields = config_plugin.schedule_fields(self.plugin)
        if isinstance(scheduler, MegatronLMDummyScheduler):
            found: Any = self._plugin_schedule(
                scheduler.total_num_steps, scheduler.warmup_num_steps
            )
            self._own_schedule = None
        elif fields:
            raise TrainError(
                f"prepare: the plugin's {', '.join(fields)} and a scheduler of torch both set the "
                "learning rate; leave one out, or use MegatronLMDummyScheduler"
            )
        else:
            found = scheduler
        self._schedulers.append(PreparedScheduler(self, found))
        return self._schedulers[-1]

    def _plugin_schedule(self, total: int | None, warmup: int) -> groups.Annealing:
        """megatron-core's own schedule, set on the user's groups."""
        if self._optimizer is None:
            raise TrainError("prepare: give MegatronLMDummyScheduler together with its optimizer")
        original = self._optimizer.original
        found = self._settings(
            self.parallel.world_size, optimizer=groups.settings_from(original),
            total_steps=total, warmup_steps=warmup,
        ).schedule  # fmt: skip
        if found is None:
            raise TrainError(
                "MegatronLMDummyScheduler: say how long to train: total_num_steps, or the "
                "plugin's train_iters or train_samples"
            )
        return groups.Annealing(original, found)

    # --- training --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Sum gradients over ``gradient_accumulation_steps`` calls; the last one synchronizes.

        An epoch's last batch always does.
        """
        self._accumulated += 1
        ended = bool(self._active) and self._active[-1].end_of_dataloader
        self.sync_gradients = ended or self._accumulated == self.gradient_accumulation_steps
        if self.sync_gradients:
            self._accumulated = 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of the block stay on this data-parallel rank."""
        if self._need_engine().options.overlap:
            raise TrainError(
                "no_sync: overlap_grad_reduce reduces gradients while they are computed; drop one"
            )
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Nothing to do: the model computes in its own precision."""
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accept the loss of the last forward, whose backward has run inside the schedule."""
        if loss is self._loss and not loss.requires_grad:
            raise TrainError(
                "backward: the loss has no gradients, since its forward ran in eval mode or under "
                "torch.no_grad(); call model.train() and leave no_grad out"
            )
        if loss is not self._loss:
            raise TrainError(
                "backward: this is not the loss that the prepared model returned last; its "
                "backward ran inside the forward, so a loss of your own cannot be added. "
                "MegatronLMPlugin(custom_loss_function=...) changes the loss"
            )
        self._loss = None

    def remember_loss(self, value: float, training: bool) -> torch.Tensor:
        """Called by the prepared model: a forward's loss as the tensor that it returns."""
        if training:
            self._check_finite("loss", value)
        self._log.loss(value, training)
        self._loss = torch.tensor(value, device=self.device, requires_grad=training)
        return self._loss

    def evaluated(self) -> None:
        """Called by the prepared model, which trains again."""
        self._log.evaluated(self.step)

    def _check_finite(self, what: str, value: float) -> None:
        """Stop, with everything that was saved before published."""
        if math.isfinite(value) or not self.settings.optimizer.check_for_nan:
            return
        if self._saver is not None:
            self._saver.wait()
        rank = self._need_engine().faulty_rank
        where = f" (first on rank {rank} of {self.num_processes})" if rank is not None else ""
        raise TrainError(
            f"step {self.step + 1}: the {what} is {value}{where}. Lower the learning rate; "
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
        engine = self._need_engine()
        given = {id(p) for p in ([parameters] if torch.is_tensor(parameters) else parameters)}
        if not (
            given >= {id(p) for p in engine.named.values() if p.requires_grad}
            or given >= {id(p) for p in self._original.parameters() if p.requires_grad}
        ):
            raise TrainError(
                "clip_grad_norm_: the gradients of all parameters are clipped together; give it "
                "model.parameters()"
            )
        if not self.sync_gradients:
            return None
        assert engine.optimizer is not None, "no optimizer was prepared"
        norm = engine.grad_norm()
        self._set_clipping(float(max_norm))
        return torch.tensor(norm, device=self.device)

    def _set_clipping(self, norm: float) -> None:
        view = self._need_engine().view
        for part in view.parts if view is not None else ():
            part.config.clip_grad = norm

    def after_step(self, result: StepResult) -> None:
        """Called by the prepared optimizer."""
        engine = self._need_engine()
        self._check_finite("gradient norm", result.grad_norm)
        self.step += 1
        self._set_clipping(self.settings.optimizer.clip_grad)
        assert self._optimizer is not None
        if self.settings.logging.tensorboard_dir is not None:
            lr = self._optimizer.param_groups[0]["lr"]
            numbers = {"lr": float(lr), "grad_norm": result.grad_norm}
            if self.settings.logging.params_norm:
                numbers["params_norm"] = engine.params_norm()
            self._log.step(self.step, numbers)
        if self._own_schedule is not None and not result.skipped:
            self._own_schedule.step()
        if self._saver is not None:
            self._saver.poll()

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise TrainError("prepare() a model first")
        return self._engine

    # --- tensors of other ranks ------------------------------------------------------------------

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
        """``gather`` of one entry per row, in the loader's order, without rows that only fill up.

        With ``use_gather_object`` the ranks' lists are joined as they are.
        """
        if use_gather_object:
            every: list[Any] = [None] * self.parallel.dp
            group = import_megatron("parallel_state").get_data_parallel_group()
            dist.all_gather_object(every, data, group=group)
            return [item for part in every for item in part]
        found = self.gather(data)
        if not self._active:
            return found
        loader = self._active[-1]
        share, rows = loader.share, loader.share.total_rows
        places = [place for rank in range(share.dp_size) for place in share.places(rank)]
        order = sorted(range(rows), key=places.__getitem__)
        if loader.end_of_dataloader:
            order = order[: loader.remainder]

        def real(tensor: torch.Tensor) -> torch.Tensor:
            # anything else is not one entry per row: a loss, for example
            return tensor[order] if tensor.shape[0] == rows else tensor

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
        held = self._need_held()
        found = weights.collect(held)
        if "tie_word_embeddings" in held.model.flags:
            for name, tied in held.model.family.tied_names.items():
                found[name] = found[tied]
        return found

    def _need_held(self) -> RankState:
        self._need_engine()
        assert self._held is not None
        return self._held

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """``torch.save`` (or safetensors) on the main process; ``save_function`` of scripts."""
        if not self.is_main_process:
            return
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(obj, f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """A Hugging Face checkpoint, streamed: no rank holds the whole model."""
        from shardwright.ckpt import merge
        from shardwright.ckpt.jobs import RunOptions
        from shardwright.ckpt.move.progress import parse_bytes

        held, target = self._need_held(), Path(save_directory).absolute()
        limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        place = target.parent / f".{target.name}.shards"
        saver = Saver(held, weights_only=True, reserve=False)
        saver.save(place / "model", self.step, {}, self._sides())
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

    # --- checkpoints -----------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str],
        safe_serialization: bool = True,
        **unknown: Any,
    ) -> str:
        """Start writing a native checkpoint; training goes on while it is written.

        It is published at a later step, at ``wait_for_everyone``, ``load_state``,
        ``end_training``, or when the script ends.
        """
        if unknown:
            raise TrainError(f"save_state: unknown arguments {', '.join(unknown)}")
        if not safe_serialization:
            raise TrainError(
                "save_state: safe_serialization=False; the trainer writes safetensors, and "
                "reshard --no-safe-serialization makes .bin files of them"
            )
        engine = self._need_engine()
        assert self._saver is not None
        self._saver.wait()
        if self._accumulated:
            self.print(
                f"save_state: after {self._accumulated} of {self.gradient_accumulation_steps} "
                "batches of a step; their gradients are not saved, and they are to be seen again"
            )
        final = Path(output_dir).absolute()
        state, sides = self._state(engine), [*self._sides(), *self._registered()]
        self._saver.save(final, self.step, state, sides)
        return str(final)

    def _state(self, engine: Engine) -> dict[str, object]:
        made = self._optimizer.param_groups if self._optimizer is not None else []
        steps = engine.view.step() if engine.view is not None else 0
        box = torch.tensor([steps])  # a stage that is frozen counts no steps
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.parallel.control_group)
        options = [{k: v for k, v in group.items() if k != "params"} for group in made]
        # with the cursor of the loader under way: batches of an unfinished step come again
        now = self._active[-1].cursor if self._active else None
        return {
            "schedule": [scheduler.state_dict() for scheduler in self._schedules()],
            "param_groups": [{"step": int(box.item()), **plain(group)} for group in options],
            "data": {
                "loaders": [
                    loader.state(self._accumulated if loader.cursor is now else 0)
                    for loader in self._loaders
                ]
            },
        }

    def _schedules(self) -> list[Any]:
        return [*self._schedulers, *([self._own_schedule] if self._own_schedule else [])]

    def _sides(self) -> list[SideFile]:
        """Config, tokenizer and the like, which rank 0 writes."""
        if not self.is_main_process:
            return []
        source = getattr(self._original, "name_or_path", "")
        own = list(side_files(Path(source))) if source and Path(source).is_dir() else []
        found = {side.name: side for side in own}
        config = copy.deepcopy(self._original.config)
        config.architectures = [type(self._original).__name__]
        config.dtype = next(iter(self._need_engine().named.values())).dtype
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if getattr(self._original, "generation_config", None) is not None:
                self._original.generation_config.save_pretrained(folder)
            for path in Path(folder).iterdir():
                if path.name == "config.json" or path.name not in found:
                    found[path.name] = SideFile(path.name, text=path.read_text())
        return list(found.values())

    def _registered(self) -> list[SideFile]:
        """Registered objects as they are now, in files of rank 0."""
        if not self.is_main_process or not self._custom:
            return []
        if self._keep is None:
            self._keep = Path(tempfile.mkdtemp(prefix="shardwright-"))
            atexit.register(shutil.rmtree, self._keep, ignore_errors=True)
        names = [CUSTOM.format(i) for i in range(len(self._custom))]
        for name, thing in zip(names, self._custom, strict=True):
            torch.save(thing.state_dict(), self._keep / name)
        return [SideFile(name, str(self._keep / name)) for name in names]

    def load_state(self, input_dir: str | os.PathLike[str], **unknown: Any) -> None:
        """Load any readable checkpoint, whatever layout or format: each rank its own share."""
        if unknown:
            raise TrainError(f"load_state: unknown arguments {', '.join(unknown)}")
        engine, held = self._need_engine(), self._need_held()
        self.wait_for_everyone()
        found = load(
            Path(input_dir), held, weights_only=not self.settings.saving.load_optimizer,
            seed=self.seed, verify_source=self.settings.saving.verify_source, log=self.print,
        )  # fmt: skip
        self.step, self._accumulated, self.sync_gradients = found.step, 0, True
        self._restore_groups(engine, found)
        self._restore_schedules(found)
        self._restore_data(found)
        self._load_custom(found)
        engine.zero_grad()
        dist.barrier(group=self.parallel.control_group)

    def _restore_groups(self, engine: Engine, found: Loaded) -> None:
        saved = found.state.get("param_groups")
        if not found.optimizer or not isinstance(saved, list) or self._optimizer is None:
            return
        if engine.view is not None and saved:
            engine.view.set_step(int(saved[0].get("step", found.step)))
        now = self._optimizer.param_groups
        if len(saved) != len(now):
            self.print(
                f"{found.checkpoint.path}: has {len(saved)} param groups, the optimizer "
                f"{len(now)}; learning rates and the like stay those of the script"
            )
            return
        for ours, theirs in zip(now, saved, strict=True):
            for key in (theirs.keys() & ours.keys()) - {"params"}:
                value = theirs[key]
                ours[key] = tuple(value) if isinstance(ours[key], tuple) else value

    def _restore_schedules(self, found: Loaded) -> None:
        saved, now = found.state.get("schedule"), self._schedules()
        if isinstance(saved, list) and len(saved) == len(now):
            for scheduler, state in zip(now, saved, strict=True):
                scheduler.load_state_dict(state)
        elif saved and now:
            self.print(
                f"{found.checkpoint.path}: its schedule is not one of {len(now)} prepared "
                "schedulers; they start from their beginning"
            )

    def _restore_data(self, found: Loaded) -> None:
        data = found.state.get("data")
        saved = data.get("loaders") if isinstance(data, Mapping) else None
        if isinstance(saved, list) and len(saved) == len(self._loaders):
            for loader, state in zip(self._loaders, saved, strict=True):
                if again := loader.restore(state):
                    self.print(
                        f"{found.checkpoint.path}: was saved after {state['samples']} samples of "
                        f"an epoch; {again} of them come again, since a global batch has "
                        f"{loader.total_batch_size}"
                    )
        elif data and self._loaders:
            self.print(
                f"{found.checkpoint.path}: its data cursor is not one of {len(self._loaders)} "
                "prepared loaders; they start from their beginning"
            )

    def _load_custom(self, found: Loaded) -> None:
        folder = found.checkpoint.path
        paths = [folder / CUSTOM.format(i) for i in range(len(self._custom))]
        lacking = [path.name for path in paths if not path.is_file()]
        if lacking and len(lacking) == len(paths):
            self.print(
                f"{folder}: has no {', '.join(lacking)}; registered objects stay as they are"
            )
            return
        if lacking:
            raise TrainError(f"{folder}: has no {', '.join(lacking)} for a registered object")
        for path, thing in zip(paths, self._custom, strict=True):
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
        return loader.skipping(num_batches)

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
        self._log.close(self.step)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release model and optimizer, so that another can be prepared."""
        if self._saver is not None:
            self._saver.wait()
        self._forget()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def _at_exit(self) -> None:
        """A save that a script did not wait for is published while the ranks are still there."""
        if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
            return  # an error ends the script: other ranks may be gone or elsewhere
        if self._saver is not None:
            self._saver.wait()
        shutdown()


def _kind(thing: Any) -> str:
    if isinstance(thing, (PreparedModel, PreparedOptimizer, PreparedLoader, PreparedScheduler)):
        return "prepared"
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, torch.utils.data.DataLoader):
        return "loader"
    if isinstance(thing, MegatronLMDummyScheduler):
        return "scheduler"
    if hasattr(thing, "step") and hasattr(thing, "get_last_lr"):
        return "scheduler"
    raise TrainError(
        f"prepare: {type(thing).__name__} is no model, optimizer, DataLoader or scheduler"
    )


def _accumulation(given: int | None) -> int:
    """Accumulation steps: the argument's, else the environment's, else 1."""
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    value = given if given is not None else os.environ.get(name, "1")
    if not str(value).isdigit() or int(value) < 1:
        raise TrainError(f"gradient_accumulation_steps {value!r}: must be a number of at least 1")
    return int(value)


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _map(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply to every tensor of a nested structure."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: _map(value, function) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_map(value, function) for value in data)
    raise TrainError(f"gather: {type(data).__name__} is no tensor")
