"""What ``verify`` found: findings by tensor, by layer and in total, as lines and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .move.progress import human
from .screen import Printer, one_screen

_NUMBER = re.compile(r"\.(\d{1,9})\.")  # model.layers.3.mlp, transformer.h.3.attn
_TENSORS = ("values", "missing", "shape", "dtype", "fingerprint")  # kinds that are about one tensor
WORST = 10  # findings that are printed where there are more


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, or one fault of a single checkpoint."""

    kind: str  # values, missing, shape, dtype, fingerprint, config, state, optimizer, file
    name: str  # of the tensor, the setting, the state's key or the file
    text: str  # one line for people
    elements: int = 0  # that differ
    numel: int = 0  # of the tensor
    max_abs: float = 0.0
    index: tuple[int, ...] | None = None  # of the first element that differs
    first: tuple[str, str] | None = None  # its values
    files: tuple[str, str] | None = None  # where it lies

    @property
    def about_tensor(self) -> bool:
        """Whether it is about one tensor, and not about settings, state or files."""
        return self.kind in _TENSORS

    @property
    def layer(self) -> int | None:
        """The layer of a tensor; None outside of the layers."""
        match = _NUMBER.search(self.name) if self.about_tensor else None
        return int(match[1]) if match else None

    def table(self) -> dict[str, object]:
        """The finding as JSON; keys that do not apply are left out."""
        found: dict[str, object] = {"kind": self.kind, "name": self.name, "text": self.text}
        if self.layer is not None:
            found["layer"] = self.layer
        if self.kind == "values":
            assert self.index is not None
            assert self.first is not None
            assert self.files is not None
            found |= {
                "elements": self.elements,
                "of": self.numel,
                "max_abs": _finite(self.max_abs),
                "first": {
                    "index": list(self.index),
                    "values": list(self.first),
                    "files": list(self.files),
                },
            }
        return found


def _finite(number: float) -> float | str:
    """JSON has no infinities."""
    return number if abs(number) < float("inf") else str(number)


@dataclass(slots=True)
class Verdict:
    """What was compared or checked, and everything that is wrong."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0  # logical tensors compared
    nbytes: int = 0  # bytes of one side that were compared
    alone: bool = False  # one checkpoint was checked, not two compared

    @property
    def same(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def differences(self) -> list[str]:
        """Every finding as a line."""
        return [finding.text for finding in self.findings]

    @property
    def tensors_differ(self) -> int:
        """Logical tensors that differ, are missing on a side, or have another shape or dtype."""
        return len({f.name for f in self.findings if f.about_tensor})

    def add(self, kind: str, name: str, text: str) -> None:
        """A finding without values."""
        self.findings.append(Finding(kind, name, text))

    def worst(self, limit: int = WORST) -> list[Finding]:
        """The findings to print first: those not about values, then the largest differences."""

        def rank(finding: Finding) -> tuple[bool, float, int]:
            return finding.kind == "values", -finding.max_abs, -finding.elements

        return sorted(self.findings, key=rank)[:limit]

    def layers(self) -> dict[str, dict[str, object]]:
        """Layer (``"none"`` outside of the layers) -> tensors and elements that differ there."""
        found: dict[int, list[Finding]] = {}
        for finding in self.findings:
            if finding.about_tensor:
                layer = finding.layer
                found.setdefault(-1 if layer is None else layer, []).append(finding)
        return {
            "none" if layer < 0 else str(layer): _summary(rows)
            for layer, rows in sorted(found.items())
        }

    def summary(self) -> str:
        """The last line: the verdict, and how much was compared."""
        size = human(self.nbytes)
        if self.alone:
            return f"{'sound' if self.same else 'damaged'}: {self.tensors} tensors, {size}"
        if self.same:
            return f"equal: {self.tensors} tensors compared, {size}"
        others = len(self.findings) - sum(finding.about_tensor for finding in self.findings)
        more = f" and {others} other differences" if others else ""
        return (
            f"different: {self.tensors_differ} tensors differ{more}; "
            f"{self.tensors} tensors compared, {size}"
        )

    def __str__(self) -> str:
        """The verdict on one screen."""
        return one_screen([*self.lines(), *self.notes, self.summary()])

    def __repr__(self) -> str:
        return f"<Verdict: {self.summary()}>"

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """What a notebook shows of the last value of a cell."""
        printer.text(str(self))

    def table(self) -> dict[str, object]:
        """The verdict as JSON."""
        return {
            "same": self.same,
            "compared": {"tensors": self.tensors, "bytes": self.nbytes},
            "differ": {
                "tensors": self.tensors_differ,
                "elements": sum(finding.elements for finding in self.findings),
            },
            "layers": self.layers(),
            "differences": [finding.table() for finding in self.findings],
            "notes": self.notes,
        }

    def lines(self, limit: int = WORST) -> list[str]:
        """The findings as lines: the worst ``limit``, and a summary if there are more."""
        shown = self.findings if len(self.findings) <= limit else self.worst(limit)
        out = [f"differs: {finding.text}" for finding in shown]
        if len(self.findings) > len(shown):
            out.append(
                f"these are the worst {len(shown)} of {len(self.findings)} differences "
                "(--all prints each, --json as a table)"
            )
        if len(self.findings) > 1:
            out += [_layer_line(layer, row) for layer, row in self.layers().items()]
        return out


def _summary(rows: Iterable[Finding]) -> dict[str, object]:
    rows = list(rows)
    return {
        "tensors": len({row.name for row in rows}),
        "elements": sum(row.elements for row in rows),
        "max_abs": _finite(max(row.max_abs for row in rows)),
    }


def _layer_line(layer: str, row: dict[str, object]) -> str:
    where = "outside the layers" if layer == "none" else f"layer {layer}"
    gap = row["max_abs"] if isinstance(row["max_abs"], str) else f"{row['max_abs']:g}"
    return (
        f"{where}: tensors that differ: {row['tensors']}, elements: {row['elements']}, "
        f"max abs difference {gap}"
    )
