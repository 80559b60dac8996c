"""More ranks than GPUs, for tests and measurements of memory.

NCCL refuses two ranks on one GPU of one host. Told that each rank is a host of its own, it lets
them share the GPU and moves their data through sockets: as right as, and much slower than, ranks
with a GPU each. Memory of each process is what it would be.

    torchrun --nproc-per-node=4 gpu_ranks.py SCRIPT ARGUMENTS, or -m MODULE ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys

import torch


def share() -> None:
    """In a rank, before it starts torch.distributed: have a GPU, alone or with others."""
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ["LOCAL_RANK"] = str(local % gpus)
        os.environ["NCCL_HOSTID"] = f"rank-{local}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


if __name__ == "__main__":
    share()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
