"""GPUs as a planner needs them: memory, bandwidths and the peak of bf16 matrix products.

Figures are the vendors' data sheets: dense bf16 peak (no sparsity), memory bandwidth, and link
bandwidth per GPU and direction. Memory is what a process can allocate of it, which is a little
less than the name says. A network is not a property of a GPU: the column holds what its usual
machine has for each GPU; ``--network-bandwidth`` overrides it. Imports nothing heavy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import TrainError, nearest

GIB = 2**30
NVLINK, PCIE = "NVLink", "PCIe"


@dataclass(frozen=True, slots=True)
class GPU:
    """One kind of GPU in its usual machine."""

    name: str
    memory: int  # bytes that a process can allocate
    hbm: float  # bytes per second
    peak: float  # bf16 operations per second, dense
    link: str  # to other GPUs of the machine: NVLink or PCIe
    link_speed: float  # bytes per second and direction
    network_speed: float  # bytes per second of one GPU's share of the network cards


def _gpu(
    name: str, gib: float, hbm: float, peak: float, link: str, speed: float, network: float
) -> GPU:
    """A row: GiB, GB/s, TFLOP/s, link, GB/s, GB/s."""
    return GPU(name, int(gib * GIB), hbm * 1e9, peak * 1e12, link, speed * 1e9, network * 1e9)


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 178, 7700, 2250, NVLINK, 900, 50),  # "up to 8 TB/s"; the bus is 7680 bits
        _gpu("H200", 139.8, 4800, 989, NVLINK, 450, 50),
        _gpu("H100", 79.1, 3350, 989, NVLINK, 450, 50),
        _gpu("H100-PCIe", 79.1, 2000, 756, PCIE, 64, 25),
        _gpu("H20", 95.0, 4000, 148, NVLINK, 450, 50),
        _gpu("A100-80GB", 79.1, 2039, 312, NVLINK, 300, 25),
        _gpu("A100-40GB", 39.4, 1555, 312, NVLINK, 300, 25),
        _gpu("A100-PCIe", 79.1, 1935, 312, PCIE, 32, 12.5),
        _gpu("A800", 79.1, 2039, 312, NVLINK, 200, 25),
        _gpu("L40S", 44.4, 864, 362, PCIE, 32, 12.5),
        _gpu("L4", 22.0, 300, 121, PCIE, 32, 3.1),
        _gpu("A40", 44.4, 696, 149.7, PCIE, 32, 12.5),
        _gpu("A10", 22.0, 600, 125, PCIE, 32, 3.1),
        _gpu("A10G", 22.0, 600, 70, PCIE, 32, 3.1),  # AWS's: little more than half an A10
        _gpu("RTX 4090", 23.5, 1008, 165, PCIE, 32, 3.1),
        _gpu("RTX 3090", 23.5, 936, 71, PCIE, 32, 3.1),
        _gpu("V100", 31.7, 900, 15.7, NVLINK, 150, 3.1),  # no bf16: the peak is that of fp32
    )
}
_ALIASES = {
    "A100": "A100-80GB", "A10080": "A100-80GB", "A10040": "A100-40GB", "A10080GB": "A100-80GB",
    "H10080GB": "H100", "H100SXM": "H100", "A100SXM": "A100-80GB",
    "V10032GB": "V100", "4090": "RTX 4090", "3090": "RTX 3090", "H200SXM": "H200",
}  # fmt: skip


def _key(name: str) -> str:
    key = re.sub(r"[^A-Z0-9]", "", name.upper())
    return re.sub(r"^(NVIDIA|GEFORCE|TESLA)+", "", key)


def find(
    name: str,
    memory: int | None = None,
    bandwidth: float | None = None,
    peak: float | None = None,
    link_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> GPU:
    """The GPU of that name; given values replace the table's figures.

    Bytes, bytes per second and operations per second. A GPU that is not in the table needs
    memory, bandwidth and peak; without ``link_bandwidth`` its links count as PCIe of 25 GB/s.
    TrainError names what is missing.
    """
    keys = {_key(known): known for known in GPUS} | _ALIASES
    known = keys.get(_key(name))
    if known is None:
        wanted = {"--gpu-memory": memory, "--gpu-bandwidth": bandwidth, "--gpu-peak": peak}
        missing = [flag for flag, value in wanted.items() if value is None]
        if missing:
            raise TrainError(
                f"--gpu {name}: not in the table ({', '.join(GPUS)}){nearest(name, GPUS)}; or "
                f"describe it with {', '.join(missing)}"
            )
        assert memory is not None
        assert bandwidth is not None
        assert peak is not None
        # anything faster than PCIe 5 is NVLink or similar
        fast = link_bandwidth is not None and link_bandwidth > 64e9
        found = GPU(name, memory, bandwidth, peak, NVLINK if fast else PCIE, 25e9, 12.5e9)
    else:
        found = GPUS[known]
    given: dict[str, Any] = {
        "memory": memory,
        "hbm": bandwidth,
        "peak": peak,
        "link_speed": link_bandwidth,
        "network_speed": network_bandwidth,
    }
    for field, value in given.items():
        if value is not None:
            found = replace(found, **{field: value})
    return found
