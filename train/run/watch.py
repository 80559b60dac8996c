"""Measures the phases of training steps, and says what to do where one is slow.

megatron-core's schedules call ``config.timers`` around each forward and backward pass. ``Timers``
has that interface and costs nearly nothing: a clock on CPU, a pair of events on a GPU, which are
read when the step is over and the stream is waited for anyway. megatron-core's own timers wait
for the GPU at each start and stop, and so change what they measure.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..config.schema import TrainConfig
from ..core.process import Parallel
from ..doctor import lost_ranks, measured
from ..doctor import memory as device_memory
from ..errors import TrainError

FIRST_REPORT = 5  # the step of a run after which its usual phases are judged
HISTORY = 20  # steps that say what is usual
SLOW_FACTOR, SLOW_SECONDS = 2.5, 1.0  # a slow step exceeds the usual by both
QUIET_STEPS = 50  # between two reports of slow steps

_COMPUTE = ("forward-compute", "backward-compute")
_SCHEDULE = "forward-backward"


class _Span:
    """One name's time: what megatron-core starts and stops."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._started: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def start(self, barrier: bool = False) -> None:
        self._started = self._now()

    def stop(self, barrier: bool = False) -> None:
        if self._started is None:
            return
        if self._on_gpu:
            self._pairs.append((self._started, self._now()))
        else:
            self._seconds += self._now() - self._started
        self._started = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """The seconds since the last call; on a GPU its stream must be idle."""
        seconds = self._seconds + sum(a.elapsed_time(b) for a, b in self._pairs) / 1000
        self._seconds, self._pairs = 0.0, []
        return seconds


class _Ignored:
    """A name whose time is not measured."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


class Timers:
    """``timers(name).start()`` and ``.stop()``, as megatron-core calls them."""

    def __init__(self, on_gpu: bool) -> None:
        self._spans = {name: _Span(on_gpu) for name in (*_COMPUTE, _SCHEDULE)}
        self._ignored = _Ignored()

    def __call__(self, name: str, log_level: int | None = None) -> _Span | _Ignored:
        return self._spans.get(name, self._ignored)

    def take(self) -> tuple[float, float]:
        """Seconds in passes, and in schedules, since the last call."""
        found = {name: span.take() for name, span in self._spans.items()}
        return sum(found[name] for name in _COMPUTE), found[_SCHEDULE]


class Watch:
    """One rank's measurements; ``report_if_due`` is a collective."""

    def __init__(
        self, config: TrainConfig, parallel: Parallel, layers: int, say: Callable[[str], None]
    ) -> None:
        self.config, self.parallel, self.layers, self.say = config, parallel, layers, say
        self.timers = Timers(parallel.device.type == "cuda")
        self.where = "set-up"  # the phase under way, for errors
        self.slow = False  # whether this rank found the last step slow
        self._phases: dict[str, float] = {}
        self._usual: deque[measured.StepTimes] = deque(maxlen=HISTORY)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._crowded = parallel.device.type == "cpu" and local > (os.cpu_count() or 1)
        self._steps = 0
        self._next_slow = 0
        self._last = measured.StepTimes(parallel.rank, parallel.pp_rank, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of a step, and name it in an error that comes out of it."""
        self.where, started = name, time.monotonic()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + time.monotonic() - started
        self.where = "step"

    def end_step(self, seconds: float, saving: bool) -> None:
        """Note a step that took ``seconds``; its loss has been read, so that a GPU is idle."""
        compute, schedule = self.timers.take()
        self._last = measured.StepTimes(
            self.parallel.rank, self.parallel.pp_rank, seconds, self._phases.get("data", 0.0),
            self._phases.get("forward and backward", 0.0), schedule, compute,
            self._phases.get("optimizer", 0.0), saving,
        )  # fmt: skip
        self._phases = {}
        self._steps += 1
        usual = None
        if len(self._usual) >= FIRST_REPORT:
            usual = median(t.step for t in self._usual)
        self.slow = (
            usual is not None
            and self._steps >= self._next_slow
            and seconds > SLOW_FACTOR * usual
            and seconds > usual + SLOW_SECONDS
        )
        if self._steps > 1 and not self.slow:  # the first step warms up
            self._usual.append(self._last)

    def report_if_due(self, step: int, slow: bool) -> None:
        """Say what follows from usual steps, or from the last one if some rank found it ``slow``.

        Every rank calls it with the same arguments after the same step.
        """
        if not slow and self._steps != FIRST_REPORT:
            return
        if slow:
            self._next_slow = self._steps + QUIET_STEPS
        usual = measured.usual_times(self._usual or [self._last])
        every: list[Any] = [None] * self.parallel.world_size
        dist.all_gather_object(every, (self._last, usual), group=self.parallel.control_group)
        last, before = zip(*every, strict=True)
        found = measured.Slow(step, max(t.step for t in before), before) if slow else None
        times = last if slow else before
        lines = measured.report(self.config, step, times, self.layers, found, self._crowded).lines
        if lines:
            self.say("\n".join(lines))

    @contextmanager
    def advising(self, step: Callable[[], int]) -> Iterator[None]:
        """Turn errors of the allocator and of collectives into ours, which say where this rank was.

        ``step()`` is the current step. Raises TrainError if memory ran out, and LostRank if another
        rank has ended or did not come.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if device_memory.is_out_of_memory(error):
                raise TrainError(self.out_of_memory(error, step())) from None
            where = f"step {step()}" + (f", {self.where}" if self.where != "step" else "")
            lost = lost_ranks.lost(error, self.config.launch.timeout_minutes, where)
            if lost is None:
                raise
            raise lost from None

    def out_of_memory(self, error: BaseException, step: int) -> str:
        """The message for an error of the allocator."""
        memory = device_memory.DeviceMemory(requested=device_memory.requested_bytes(str(error)))
        if self.parallel.device.type == "cuda":
            memory = device_memory.DeviceMemory(
                torch.cuda.get_device_properties(self.parallel.device).total_memory,
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                memory.requested,
            )
        p = self.parallel
        return device_memory.out_of_memory(
            self.config, memory, rank=p.rank, stage=p.pp_rank, step=step, where=self.where,
            layers=self.layers,
        )  # fmt: skip
