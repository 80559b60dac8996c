"""Which rank folders a classic checkpoint has where experts are spread over ranks.

In each pipeline stage rank r has tp rank r % tp, and of the experts' mesh etp rank r % etp and ep
rank r // etp % ep. A folder is named after tp, pp and ep ranks, so ranks that differ only in etp
share one: then the last writer wins, and such checkpoints cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ....errors import CheckpointError
from ....model.mesh import Coord, Mesh


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the axes that folders are named after, and of etp."""

    tp: int
    pp: int
    ep: int
    etp: int
    experts: bool  # whether the model has any

    @classmethod
    def of(cls, mesh: Mesh) -> Grid:
        """The grid of a mesh."""
        tp, pp = mesh.size("tp"), mesh.size("pp")
        if mesh.experts is None:
            return cls(tp, pp, 1, tp, False)
        return cls(tp, pp, mesh.experts.size("ep"), mesh.experts.size("tp"), True)

    def check(self, origin: str) -> None:
        """CheckpointError where two ranks share a folder."""
        if self.tp % self.etp:
            raise CheckpointError(
                f"{origin}: etp={self.etp} does not divide tp={self.tp}: Megatron-LM's classic "
                "format has one name for several ranks of experts, of which the last one written "
                "stays; use torch_dist (--ckpt-format torch_dist, --to torch_dist)"
            )

    def cells(self) -> dict[tuple[int, int], int]:
        """(tp rank, ep rank) of every folder of a pipeline stage -> the first rank in it."""
        found: dict[tuple[int, int], int] = {}
        for rank in range(math.lcm(self.tp, self.etp * self.ep)):
            found.setdefault((rank % self.tp, rank // self.etp % self.ep), rank)
        return found

    def coords(self) -> list[Coord]:
        """The coordinate of every folder, in the order of names."""
        if not self.experts:
            return list(Mesh((("tp", self.tp), ("pp", self.pp))).coords())
        return [
            (("tp", t), ("pp", p), ("ep", e))
            for t, e in sorted(self.cells())
            for p in range(self.pp)
        ]

    def folder(self, coord: Coord) -> str:
        """``mp_rank_00``, with several stages ``mp_rank_00_000``, and the ep rank at the end."""
        at = dict(coord)
        name = f"mp_rank_{at['tp']:02d}" + (f"_{at['pp']:03d}" if self.pp > 1 else "")
        return name + (f"_{at['ep']:03d}" if self.ep > 1 else "")

    def number(self, coord: Coord, dp: int) -> int:
        """The first rank of Megatron-LM that has the folder, with ``dp`` data-parallel ones."""
        at = dict(coord)
        inner = self.cells()[at["tp"], at["ep"]] if self.experts else at["tp"]
        return inner + at["pp"] * self.tp * dp

    def is_first(self, coord: Coord) -> bool:
        """Whether the folder's rank is a first data-parallel one of tensors beside the experts."""
        at = dict(coord)
        return not self.experts or self.cells()[at["tp"], at["ep"]] < self.tp

    def shards(self, coord: Coord) -> tuple[Coord, ...]:
        """The shards of the model in a folder: one of the dense mesh, and one of the experts'."""
        at = dict(coord)
        dense: Coord = (("tp", at["tp"]), ("pp", at["pp"]))
        if not self.experts:
            return (dense,)
        return (dense, (("tp", at["tp"] % self.etp), ("pp", at["pp"]), ("ep", at["ep"])))

    def missing(self, have: Iterable[Coord]) -> list[str]:
        """What no folder holds. A dense shard lies in the folders of several ep ranks: one is
        enough.
        """
        there = set(have)
        held: Mapping[Coord, bool] = {s: True for c in there for s in self.shards(c)}
        faults, lost = [], set()
        for coord in self.coords():
            if any(shard not in held for shard in self.shards(coord)):
                faults.append(f"{self.folder(coord)}: is missing")
                lost.add(dict(coord)["tp"])
        written = min(self.tp, self.etp * self.ep)
        if lost and min(lost) >= written and self.experts:
            ranks = ", ".join(map(str, sorted(lost)))
            return [
                f"the shards of the tp ranks {ranks} were never saved: Megatron-Core up to 0.17 "
                f"writes only {written} of {self.tp} where tp={self.tp} is larger than ep="
                f"{self.ep} x etp={self.etp} (NVIDIA/Megatron-LM#4200); save it again with 0.18 "
                "or with --ckpt-format torch_dist"
            ]
        return faults
