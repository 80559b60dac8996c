"""The training loop of ``train-ckpt``: one rank's run from start or resume to the last step."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.errors import install
from shardwright.ckpt.formats.side_files import side_files
from shardwright.ckpt.model.manifest import SideFile
from shardwright.ckpt.move.lock import OutputLock
from shardwright.ckpt.reader import LATEST

from ..checkpoint.load import Loaded, load
from ..checkpoint.rank_state import RankState
from ..checkpoint.save import Saver, SaveWait, gather
from ..config.schema import TrainConfig
from ..core.from_config import engine_of, layout_of, positions_of, settle
from ..core.layout import check_layout
from ..core.process import Parallel, initialize, need_packages, shutdown, take_device
from ..core.schedule import schedule_of
from ..data.samples import Batches, EvalBatches, Samples
from ..data.tokenizer import find_tokenizer
from ..doctor import measured
from ..errors import TrainError
from . import save_dir, stopping
from .corpora import open_corpora
from .metrics import Metrics, flops_per_token, peak_memory_bytes
from .source import find_source
from .stopping import stop_file_exists
from .watch import Watch


def check(config: TrainConfig) -> None:
    """What can be refused before any process is started: model, layout, batch, files."""
    need_packages()
    source = find_source(config)
    model = source.model()
    config = settle(config, model, str(source.config))
    layout = layout_of(config)
    layout.data_parallel(config.world_size)
    check_layout(model, layout, config.model.vocab_multiple)
    for name in (*config.data.files, *config.data.eval_files):
        if not Path(name).exists() and not Path(name + ".bin").exists():
            raise TrainError(f"--data {name}: there is no such file")
    save_dir.check_unused(config)
    if config.logging.tensorboard_dir is not None and find_spec("tensorboard") is None:
        raise TrainError(f"--tensorboard-dir: {install('tensorboard')}")


def prepare(config: TrainConfig) -> None:
    """Tokenise what is not in the cache yet, before ranks start: they wait for nobody."""
    source = find_source(config)
    open_corpora(config, source, source.model())


class Trainer:
    """Everything of a run on one rank."""

    def __init__(self, config: TrainConfig) -> None:
        self.source = find_source(config)
        self.model = self.source.model()
        self.config = settle(config, self.model, str(self.source.config))
        save_dir.check_unused(config)  # before any rank writes there
        take_device()
        self.corpora = open_corpora(self.config, self.source, self.model)
        self.parallel: Parallel = initialize(
            layout_of(self.config),
            seed=config.seed,
            timeout_s=60.0 * config.launch.timeout_minutes,
        )
        self.stop = False
        p = self.parallel
        self.shows = p.is_last_stage and p.tp_rank == 0 and p.dp_rank == 0
        self.step = 0
        self.watch = Watch(self.config, p, self.model.sizes["layer"], self.say)
        self._lock: OutputLock | None = None  # of SAVE_DIR
        try:
            with self.watch.advising(lambda: self.step):
                self._build(p)
        except BaseException:
            self._unlock()
            raise

    def _build(self, p: Parallel) -> None:
        """Engine, data, state and files."""
        self.engine = engine_of(
            self.config, self.model, p, str(self.source.config), eod_tokens=self._eod_tokens()
        )
        self.engine.attach_optimizer(self.config.optimizer)
        self.engine.config.timers = self.watch.timers
        self.held: RankState = RankState.of(self.engine)
        assert self.config.schedule is not None, "the command always has a schedule"
        self.schedule = schedule_of(self.config.schedule, self.engine.optimizer)
        self._open_data()
        self._load()
        saving = self.config.saving
        self.save_dir = Path(saving.save_dir) if saving.save_dir else None
        replaced = self._take_save_dir()
        self.metrics = Metrics(
            self.save_dir, writes=self.shows, bar=self.shows, steps=self.config.steps or 0,
            done=self.step, tensorboard_dir=self.config.logging.tensorboard_dir,
        )  # fmt: skip
        self.saver = Saver(
            self.held, keep_last=saving.keep_last, log=self.say,
            weights_only=not saving.save_optimizer, reserve=self.save_dir is not None,
            on_wait=self._say_wait, replaced=replaced,
        )  # fmt: skip

    def _take_save_dir(self) -> list[Path]:
        """Lock SAVE_DIR on rank 0, until the run ends; the checkpoints that this run's replace."""
        why, found = "", []
        if self.save_dir is not None and self.parallel.rank == 0:
            try:
                self._lock = save_dir.lock(self.save_dir, break_it=self.config.saving.break_lock)
                save_dir.check_unused(self.config)  # a run may have ended in it meanwhile
            except (TrainError, OSError) as error:
                why = str(error)
            if self.config.saving.overwrite:
                found = [p for p in save_dir.earlier(self.save_dir) if save_dir.is_numbered(p)]
        why = gather(why, self.parallel.control_group)[0]
        if why:
            raise TrainError(why)
        return found

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _say_wait(self, wait: SaveWait) -> None:
        if said := measured.slow_save(*astuple(wait)):
            self.say(said)

    def say(self, line: str) -> None:
        """A line for the user, from one rank."""
        if self.shows:
            metrics = getattr(self, "metrics", None)
            if metrics is None:
                print(line, flush=True)
            else:
                metrics.say(line)

    def _eod_tokens(self) -> tuple[int, ...]:
        """The end-of-document token, where its positions do not count toward the loss."""
        if not self.config.data.eod_mask_loss:
            return ()
        return (find_tokenizer(self.source.folder, self.model.sizes["vocab"]).load()[1],)

    def _open_data(self) -> None:
        d, p = self.config.data, self.parallel
        assert d.seq_length is not None
        longest = positions_of(self.model)
        batch = self.config.batch
        self.batches = Batches(
            Samples(self.corpora.train, d.seq_length, self.config.seed, longest),
            micro_batch_size=batch.micro_batch_size,
            global_batch_size=batch.samples_per_step,
            dp_rank=p.dp_rank,
            dp_size=p.dp,
            consumed_samples=d.consumed_samples[0],
        )
        self.evaluation = None
        if self.corpora.evaluation is not None:
            self.evaluation = EvalBatches(
                self.corpora.evaluation,
                seq_length=d.seq_length,
                num_samples=d.eval_iters * batch.global_batch_size,
                micro_batch_size=batch.micro_batch_size,
                dp_rank=p.dp_rank,
                dp_size=p.dp,
                max_positions=longest,
                multiple_of=p.pp if self.config.parallelism.virtual_pp_layers else 1,
            )

    def _load(self) -> None:
        """Weights from a Hugging Face folder, or everything from a checkpoint."""
        self.sides: tuple[SideFile, ...] = ()
        if self.source.weights is None:
            if self.source.folder is not None and self.parallel.rank == 0:
                self.sides = side_files(self.source.folder)
            self.say("starting from random weights")
            return
        weights_only = not (self.source.resumes and self.config.saving.load_optimizer)
        found = load(
            self.source.weights, self.held, read=self.source.reading(), weights_only=weights_only,
            seed=self.config.seed, verify_source=self.config.saving.verify_source, log=self.say,
        )  # fmt: skip
        # not all below its folder: one of Megatron-LM holds weights of other names
        self.sides = found.checkpoint.manifest.side_files
        if self.source.resumes:
            self._resume(found)
        self.say(f"loaded {self.source.weights}" + (f" at step {self.step}" if self.step else ""))

    def _resume(self, found: Loaded) -> None:
        self.step = found.step
        data = found.state.get("data")
        if isinstance(data, Mapping) and "loaders" not in data:
            self.batches.restore(data)
        else:
            why = "has no data cursor" if data is None else "counts the rows of a script's loaders"
            self.say(f"the checkpoint {why}; samples start from the first")
        groups = found.state.get("param_groups")
        if not found.optimizer and self.config.saving.load_optimizer:
            self.say("the checkpoint has no optimizer state; moments start at zero")
        if found.optimizer and isinstance(groups, list) and groups and self.engine.view:
            self.engine.view.set_step(int(groups[0].get("step", found.step)))
        self.schedule.step(self.step)
        self._say_what_changed(found.state.get("schedule"), groups)

    def _say_what_changed(self, schedule: object, groups: object) -> None:
        """This run's options count; a line where the checkpoint's run had others."""
        now = self.state()
        of_schedule = ("style", "lr", "min_lr", "warmup_steps", "decay_steps")
        rows: list[tuple[object, Any, tuple[str, ...]]] = [(schedule, now["schedule"], of_schedule)]
        if isinstance(groups, list) and groups:
            rows.append(
                (groups[0], now["param_groups"][0], ("weight_decay", "betas", "eps", "momentum"))
            )
        changed = [
            f"{name} {ours[name]} instead of {theirs[name]}"
            for theirs, ours, names in rows
            if isinstance(theirs, Mapping)
            for name in names
            if name in theirs and name in ours and _listed(theirs[name]) != _listed(ours[name])
        ]
        if changed:
            self.say(f"other settings than the checkpoint's run: {', '.join(changed)}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the tensors."""
        s, view = self.config.schedule, self.engine.view
        assert s is not None
        assert view is not None
        groups = [
            {
                "step": view.step(),
                **{k: group[k] for k in ("lr", "weight_decay", "betas", "eps", "momentum")
                   if k in group},
            }
            for group in view.made.param_groups
        ]  # fmt: skip
        schedule = {
            "style": s.style, "lr": s.lr, "min_lr": s.min_lr, "warmup_steps": s.warmup_steps,
            "decay_steps": s.decay_steps, "num_steps": self.schedule.num_steps,
        }  # fmt: skip
        return {"schedule": schedule, "param_groups": groups, "data": self.batches.state()}

    def run(self) -> None:
        """Train to the last step, evaluate, save."""
        _on_signals(self)
        try:
            with self.watch.advising(lambda: self.step + 1):
                self._run()
        except BaseException:
            self.metrics.end_bar()  # before the error is said
            raise
        finally:
            self._unlock()

    def _run(self) -> None:
        steps, eval_interval = self.config.steps or 0, self.config.data.eval_interval
        per_token = flops_per_token(self.model, self.config.data.seq_length or 0)
        saved, stopped = self._saved_step(), False
        if self.step >= steps:
            self.say(f"at step {self.step} already: --steps {steps} asks for no more")
        while self.step < steps and not (stopped := self._asked_to_stop()):
            self._one_step(per_token)
            saving = self.config.saving
            self.saver.poll()
            if saving.save_interval and self.step % saving.save_interval == 0:
                self._save()
                saved = self.step
            if self.evaluation is not None and self.step % eval_interval == 0:
                self._evaluate()
        if self.evaluation is not None and not stopped and self.step % eval_interval:
            self._evaluate()
        if self.save_dir is not None and saved != self.step:
            self._save()
        self.saver.wait()
        self.metrics.close()
        if stopped:
            saved_too = ", which is saved; continue with --resume" if self.save_dir else ""
            self.say(f"stopped at step {self.step}{saved_too}")

    def _saved_step(self) -> int:
        """The step that SAVE_DIR holds as it is now, -1 for none: a resume from there."""
        if self.save_dir is None or not self.source.resumes or self.source.weights is None:
            return -1
        here = self.save_dir / f"checkpoint-{self.step}"
        return self.step if self.source.weights.resolve() == here.resolve() else -1

    def _asked_to_stop(self) -> bool:
        """Whether any rank got a signal; the ranks agree, so that all save the same step.

        They agree on whether the last step was slow as well.
        """
        if not self.stop and stopping.is_orphan():
            stopping.silence()
            self.stop = True
        box = torch.tensor([int(self.stop or stop_file_exists()), int(self.watch.slow)])
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.parallel.control_group)
        stopped, slow = box.tolist()
        self.watch.report_if_due(self.step, bool(slow))
        return bool(stopped)  # `stop` stays: a signal may come at any moment

    def _one_step(self, per_token: float) -> None:
        started = time.monotonic()
        engine, watch = self.engine, self.watch
        engine.zero_grad()
        with watch.phase("data"):
            batches = next(self.batches)
        with watch.phase("forward and backward"):
            loss, _ = engine.forward_backward(batches, reduce=True)
        self._check_finite("loss", loss)
        lr = engine.optimizer.param_groups[0]["lr"] if engine.optimizer else 0.0
        with watch.phase("optimizer"):
            result = engine.step()
        self._check_finite("gradient norm", result.grad_norm)
        self.schedule.step(1)
        self.step += 1
        seconds = time.monotonic() - started
        watch.end_step(seconds, self.saver.is_writing)
        d = self.config.data
        tokens = self.config.batch.samples_per_step * (d.seq_length or 0) / seconds
        more = {"params_norm": engine.params_norm()} if self.config.logging.params_norm else {}
        rate = tokens * per_token / self.parallel.world_size / 1e12
        self.metrics.add(
            {"step": self.step, "loss": loss, "lr": lr, "grad_norm": result.grad_norm,
             "tokens_per_s": tokens, **more},
            {"loss": f"{loss:.4f}", "lr": f"{lr:.2e}", "norm": f"{result.grad_norm:.2f}",
             "tok/s": f"{tokens:.0f}",
             "TF/s": f"{rate:.2f}" if rate >= 0.1 else f"{rate:.1e}",
             "GiB": f"{peak_memory_bytes() / 2**30:.2f}"},
        )  # fmt: skip

    def _check_finite(self, what: str, value: float) -> None:
        """Stop before a bad value reaches the weights' next save."""
        if math.isfinite(value) or not self.config.optimizer.check_for_nan:
            return
        self.saver.wait()
        rank, world = self.engine.faulty_rank, self.parallel.world_size
        where = f" (first on rank {rank} of {world})" if rank is not None else ""
        kept = "none"
        if self.save_dir is not None and (self.save_dir / LATEST).exists():
            kept = str(self.save_dir / (self.save_dir / LATEST).read_text().strip())
        raise TrainError(
            f"step {self.step + 1}: the {what} is {value}{where}; the last checkpoint is {kept}. "
            f"{measured.not_finite(self.config)} "
            "(MEGATRON_LM_CHECK_FOR_NAN_IN_LOSS_AND_GRAD=false continues)"
        )

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        loss, _ = self.engine.forward_backward(list(self.evaluation), forward_only=True)
        self.say(f"step {self.step}: validation loss {loss:.6f}")
        self.metrics.note({"step": self.step, "eval_loss": loss})

    def _save(self) -> None:
        if self.save_dir is None:
            return
        sides: list[SideFile] = []
        if self.parallel.rank == 0:
            sides = [s for s in self.sides if s.name != "config.json"]
            source, text = self.source.config, self.source.described
            sides.append(SideFile("config.json", "" if text else str(source), text or ""))
        self.saver.save(self.save_dir / f"checkpoint-{self.step}", self.step, self.state(), sides)


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _on_signals(trainer: Trainer) -> None:
    """Ctrl-C, SIGTERM and SIGHUP ask for a save and an end; the step in progress is finished first.

    Our launcher asks with a file; a signal from it comes second, and means at once.
    """

    def ask(number: int, frame: object) -> None:
        if stop_file_exists():
            raise KeyboardInterrupt
        trainer.stop = True

    for number in stopping.signals():
        signal.signal(number, ask)


def main(config: TrainConfig) -> None:
    """Run one rank."""
    trainer = Trainer(config)
    for line in config.notes:
        trainer.say(line)
    trainer.run()
    shutdown()
