"""What ``nvidia-smi topo -m`` says about the links between a machine's GPUs and network cards.

The matrix has a column per device and names each link by the slowest part on the way: ``NV#`` for
# bonded NVLinks (through NVSwitch too), else what PCIe traffic crosses. Tensor parallelism
exchanges activations twice per layer and direction; only NVLink is fast enough for that. Imports
nothing slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ..errors import TrainError

# PCIe links from fast to slow, and what lies between the two devices. SOC is SYS of old drivers.
PCIE = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "two PCIe host bridges of a NUMA node",
    "SYS": "the link between CPU sockets",
    "SOC": "the link between CPU sockets",
}
_GPU = re.compile(r"GPU\d+$")
_LINK = re.compile(rf"(NV\d+|{'|'.join(PCIE)}|X)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # newer versions underline the header


@dataclass(frozen=True, slots=True)
class Link:
    """How two devices are connected."""

    name: str  # as nvidia-smi spells it: NV12, PIX, SYS, ...

    @property
    def is_nvlink(self) -> bool:
        """Whether traffic stays off PCIe."""
        return self.name.startswith("NV")

    @property
    def nvlinks(self) -> int:
        """How many NVLinks are bonded; 0 for PCIe."""
        return int(self.name[2:]) if self.is_nvlink else 0

    @property
    def slowness(self) -> tuple[int, int]:
        """Sorts links from fast to slow: NVLinks by their number, then PCIe by distance."""
        if self.is_nvlink:
            return 0, -self.nvlinks
        return 1, list(PCIE).index(self.name)

    def __str__(self) -> str:
        if self.is_nvlink:
            return f"{self.name}, {self.nvlinks} NVLinks"
        return f"{self.name}, {PCIE[self.name]}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The links of one machine; GPUs are numbered as nvidia-smi numbers them."""

    names: tuple[str, ...]  # of all devices, in the order of the columns
    rows: tuple[tuple[str, ...], ...]  # rows[i][j]: the link between devices i and j, X for i = j
    numa: tuple[str | None, ...]  # NUMA node of each GPU, if it has one

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs' numbers."""
        return tuple(int(n[3:]) for n in self.names if _GPU.match(n))

    @property
    def nics(self) -> tuple[str, ...]:
        """The network cards' names."""
        return tuple(n for n in self.names if not _GPU.match(n))

    def link(self, a: int | str, b: int | str) -> Link:
        """The link between two devices, GPUs by number and cards by name."""
        first, second = (self._index(device) for device in (a, b))
        if first >= len(self.rows):  # cards may have no rows of their own
            first, second = second, first
        return Link(self.rows[first][second])

    def _index(self, device: int | str) -> int:
        name = f"GPU{device}" if isinstance(device, int) else device
        if name not in self.names:
            raise TrainError(f"no {name} in the topology; it has {', '.join(self.names)}")
        return self.names.index(name)

    def slowest(self, gpus: Sequence[int]) -> tuple[int, int, Link] | None:
        """The slowest link within a group of GPUs and its ends; None for fewer than two."""
        pairs = [(a, b, self.link(a, b)) for a, b in combinations(gpus, 2)]
        return max(pairs, key=lambda pair: pair[2].slowness, default=None)

    def islands(self) -> list[tuple[int, ...]]:
        """Groups of GPUs in which every pair has NVLink; each GPU is in one, the first that fits.

        Greedy from the lowest number: exact where links come in cliques (switches, bridges).
        """
        found: list[list[int]] = []
        for gpu in self.gpus:
            for island in found:
                if all(self.link(gpu, other).is_nvlink for other in island):
                    island.append(gpu)
                    break
            else:
                found.append([gpu])
        return [tuple(island) for island in found]

    def order(self, tp: int, count: int) -> tuple[int, ...] | None:
        """``count`` GPUs in an order in which every ``tp`` neighbours share NVLink, or None."""
        groups = [
            island[at : at + tp]
            for island in self.islands()
            for at in range(0, len(island) - tp + 1, tp)
        ]
        if len(groups) * tp < count:
            return None
        return tuple(gpu for group in groups for gpu in group)[:count]

    def near_cards(self, gpu: int) -> tuple[str, ...]:
        """The network cards that a GPU reaches without crossing a host bridge."""
        return tuple(n for n in self.nics if self.link(gpu, n).name in ("PIX", "PXB"))

    def kind(self) -> str:
        """One phrase for the machine's GPU links."""
        gpus = self.gpus
        if len(gpus) < 2:
            return "one GPU"
        links = [self.link(a, b) for a, b in combinations(gpus, 2)]
        nvlink = sum(link.is_nvlink for link in links)
        if nvlink == len(links):
            counts = sorted({link.name for link in links})
            return f"NVLink between all {len(gpus)} GPUs ({', '.join(counts)})"
        if nvlink:
            islands = " ".join("+".join(map(str, i)) for i in self.islands())
            return f"NVLink within some of {len(gpus)} GPUs only: {islands}"
        worst = max(links, key=lambda link: link.slowness)
        return f"PCIe between {len(gpus)} GPUs, at worst {worst}"


def parse(text: str) -> Topology:
    """Read the output of ``nvidia-smi topo -m``; TrainError names the line that does not fit."""
    names: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    numa: list[str | None] = []
    for line in _COLOURS.sub("", text).splitlines():
        words = line.split()
        if not names:
            if words and _GPU.match(words[0]):
                names = _columns(words)
        elif words and words[0] == "Legend:":
            break
        elif words and words[0] in names:
            if words[0] != names[len(rows)]:
                raise TrainError(
                    f"topology: row {words[0]} where {names[len(rows)]} is next; pass the whole "
                    "output of nvidia-smi topo -m"
                )
            rows.append(_row(words, len(names)))
            if _GPU.match(words[0]):
                numa.append(_numa(words[len(names) + 1 :]))
    gpus = sum(bool(_GPU.match(name)) for name in names)
    if not gpus or len(rows) < gpus:
        raise TrainError(
            f"topology: found {len(rows)} rows for {gpus} GPUs; expected the output of "
            "nvidia-smi topo -m"
        )
    return Topology(names, tuple(rows), tuple(numa))


def _columns(words: Sequence[str]) -> tuple[str, ...]:
    """The devices of the header, which the affinity columns follow."""
    end = words.index("CPU") if "CPU" in words else len(words)
    return tuple(words[:end])


def _row(words: Sequence[str], count: int) -> tuple[str, ...]:
    links = tuple(words[1 : count + 1])
    bad = [link for link in links if not _LINK.match(link)]
    if bad or len(links) < count:
        what = f"{bad[0]} is not a known link" if bad else f"{len(links)} links"
        raise TrainError(f"topology: row {words[0]}: {what}; {count} links are expected")
    return links


def _numa(rest: Sequence[str]) -> str | None:
    return rest[1] if len(rest) > 1 and rest[1] != "N/A" else None
