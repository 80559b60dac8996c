"""What a run writes: metrics.jsonl, a progress bar, TensorBoard events, a loss curve."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.placement import shapes_of
from shardwright.ckpt.move import tree

from ..errors import TrainError

METRICS = "metrics.jsonl"
CURVE = "loss.png"
_BAR = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def flops_per_token(model: Model, seq_length: int) -> float:
    """Floating-point operations of a training step per token, without recomputation.

    6 x (parameters of layers and head) + 6 x layers x hidden x sequence: a multiply and an add
    per weight, forward and twice backward, and causal attention's two products.
    """
    shapes = shapes_of(model)
    vocab, hidden = model.sizes["vocab"], model.sizes["h"]
    layers = sum(_count(shape) for shape in shapes.values() if shape[0] != vocab)
    positions = model.sizes.get("pos", 0) * hidden
    weights = layers - positions + vocab * hidden  # the head, tied or not
    return 6.0 * weights + 6.0 * model.sizes["layer"] * hidden * seq_length


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def peak_memory_bytes() -> int:
    """The most that this process held: on its GPU, else resident in memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Metrics:
    """One row per step; only the ranks that are told to write anything do."""

    def __init__(
        self,
        save_dir: Path | None,
        *,
        writes: bool,
        bar: bool,
        steps: int,
        done: int,
        tensorboard_dir: str | None = None,
    ) -> None:
        self._file: Any = None
        self._board: Any = None
        self._bar: Any = None
        self.save_dir = save_dir if writes else None
        if self.save_dir is not None:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            path = self.save_dir / METRICS
            _forget_after(path, done)
            self._file = path.open("a", encoding="utf-8")
            tensorboard_dir = tensorboard_dir or str(self.save_dir / "tensorboard")
        if writes and tensorboard_dir is not None:
            self._board = _tensorboard(tensorboard_dir)
        self._log = _Lines(steps, done) if bar and not _is_terminal() else None
        if bar and self._log is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps, initial=done, desc="train", mininterval=1.0, bar_format=_BAR
            )

    def add(self, row: Mapping[str, float | int], shown: Mapping[str, str]) -> None:
        """A step's numbers, and how the bar shows them."""
        self.note(row)
        if self._log is not None:
            self._log.add(int(row["step"]), shown, self.say)
        if self._bar is not None:
            with contextlib.suppress(OSError):  # a closed terminal does not end the run
                self._bar.set_postfix(shown, refresh=False)
                self._bar.update(1)

    def note(self, row: Mapping[str, float | int]) -> None:
        """Numbers that are not a step's, such as an evaluation's."""
        if self._file is not None:
            self._file.write(json.dumps(dict(row)) + "\n")
            self._file.flush()
        if self._board is not None:
            for key, value in row.items():
                if key != "step":
                    self._board.add_scalar(key, value, int(row["step"]))

    def say(self, line: str) -> None:
        """A line above the bar."""
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.write(line, file=sys.stderr)
            else:
                print(line, file=sys.stderr, flush=True)

    def end_bar(self) -> None:
        """Leave the bar as it stands, so that what follows begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Finish the files, and draw the loss curve."""
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()
        if self.save_dir is not None:
            draw_curve(self.save_dir)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Lines:
    """Steps as lines of a log: the first, the last, and one every ten seconds between them."""

    SECONDS = 10.0

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.first = steps, done + 1
        self.start = self.said = time.monotonic()

    def add(self, step: int, shown: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Say a step if its turn has come."""
        now = time.monotonic()
        if step not in (self.first, self.steps) and now - self.said < self.SECONDS:
            return
        self.said = now
        left = (now - self.start) / (step - self.first + 1) * (self.steps - step)
        values = ", ".join(f"{name}={value}" for name, value in shown.items())
        say(f"step {step}/{self.steps}: {values}, {left:.0f} s left")


def _forget_after(path: Path, step: int) -> None:
    """Drop rows after the step that is resumed from: they will be written again."""
    if not path.exists():
        return
    kept = [line for line, row in _rows(path) if row["step"] <= step]
    text = "".join(line + "\n" for line in kept)
    if path.read_text(encoding="utf-8") != text:
        tree.replace_file(path, text.encode())


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Lines and what they say; half of a last line, which a kill leaves, is left out."""
    lines, found = path.read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("a row has a step")
        except ValueError as error:
            if number == len(lines):
                break
            if line:
                raise TrainError(
                    f"{path}: line {number} is not a row of metrics ({error}); repair it, or move "
                    "the file away"
                ) from None
            continue
        found.append((line, row))
    return found


def _tensorboard(folder: str) -> Any:
    """An event writer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder)


def draw_curve(save_dir: Path) -> None:
    """``loss.png`` from metrics.jsonl; nothing where matplotlib is not installed."""
    rows = [row for _, row in _rows(save_dir / METRICS)]
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    if not train:
        return
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    points = "." if len(train) < 50 else ""  # a line through one point is not to be seen
    axes.plot(
        *zip(*train, strict=True), color="0.35", linewidth=1.2, marker=points, label="training"
    )
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color="black", marker="o", linestyle="--",
            label="validation",
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(visible=True, color="0.85")
    axes.legend()
    figure.savefig(save_dir / CURVE, dpi=120)
    plt.close(figure)
