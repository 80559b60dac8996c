"""A finding: one fact about a run, and what to do if it is bad.

``train-ckpt doctor`` makes findings before a run, the training loop from its measurements; both
print the same fixes. Imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..planning.hardware import GIB

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and what to do if it is bad."""

    level: str  # ok, note, warning (slow or risky) or problem (it will fail)
    subject: str  # a word or two
    what: str
    fixes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The text of a terminal."""
        head = f"{self.level:<8} {self.subject}: {self.what}"
        return [head, *(f"{'':<8}   fix: {fix}" for fix in self.fixes)]


def listed(counts: Iterable[int]) -> str:
    """Numbers as an option takes them: 10,10,8."""
    return ",".join(map(str, counts))


def divisor_below(number: int, below: int) -> int:
    """The largest divisor of ``number`` that is less than ``below``."""
    return next(n for n in range(min(below - 1, number), 0, -1) if number % n == 0)


def gib(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / GIB:.2f} GiB" if size >= 0.005 * GIB else f"{size} bytes"


def by_level(findings: Iterable[Finding]) -> Mapping[str, int]:
    """How many findings there are of each level."""
    counts = dict.fromkeys((OK, NOTE, WARNING, PROBLEM), 0)
    for found in findings:
        counts[found.level] += 1
    return counts
