"""Progress in bytes: a tqdm bar on a terminal or in a notebook, else a plain line now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Any

from ..errors import printable

MOST_BYTES = 2**63 - 1  # what file systems and the kernel count to
LINE_SECONDS = 10.0  # between plain lines, so that the log of a long run stays short


class Progress:
    """Counts bytes from any thread."""

    def __init__(self, total: int, what: str, *, quiet: bool) -> None:
        self.total, self.what = total, what
        self.quiet = quiet or sys.stderr is None  # which is closed in some daemons
        self.done = 0
        self._lock = threading.Lock()
        self._start = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        notebook = "ipykernel" in sys.modules
        if not self.quiet and (notebook or sys.stderr.isatty()):
            if notebook:
                from tqdm.auto import tqdm  # a widget; on a terminal it would only load more
            else:
                from tqdm import tqdm

            self._bar = tqdm(
                total=self.total,
                desc=printable(self.what),
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self.done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            elif not self.quiet and time.monotonic() - self._said > LINE_SECONDS:
                self._said = time.monotonic()
                with contextlib.suppress(OSError):  # a full log is no reason to stop
                    print(printable(self._line()), file=sys.stderr, flush=True)

    def _line(self) -> str:
        rate = self.done / max(time.monotonic() - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        return (
            f"{self.what}: {human(self.done)} of {human(self.total)} "
            f"({human(int(rate))}/s, {left:.0f} s left)"
        )


def human(nbytes: int) -> str:
    """Bytes with a binary unit, three digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def parse_bytes(text: str) -> int:
    """``5GB`` (decimal, as in transformers), ``32MiB`` (binary) or plain bytes."""
    import re

    from ..errors import CheckpointError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise CheckpointError(f"{text!r} is not a size; write it as 5GB, 32MiB or 1048576")
    power = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if size > MOST_BYTES:
        raise CheckpointError(f"{text[:40]!r} is more than any machine has; the most is 8 EiB")
    if size < 1:
        raise CheckpointError(f"{text!r} is not a size above 0")
    return int(size)
