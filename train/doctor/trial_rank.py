"""A rank of the doctor's trial: joins the others, sums a buffer over all, and says how fast.

Started by torch.distributed.run. Rank 0 prints one JSON line: {"backend", "ranks", "bytes",
"seconds"}, the seconds of one all-reduce.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

BYTES = {"nccl": 256 * 2**20, "gloo": 4 * 2**20}
REPEATS = 5
TIMEOUT_S = 60.0


def main() -> None:
    """Run one rank."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    backend = "nccl" if gpu else "gloo"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    box = torch.ones(BYTES[backend] // 4, device="cuda" if gpu else "cpu")
    dist.all_reduce(box)  # connects
    assert box[0].item() == dist.get_world_size()
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(box)
    float(box[0].item())  # waits for a GPU
    seconds = (time.perf_counter() - started) / REPEATS
    if dist.get_rank() == 0:
        found = {"backend": backend, "ranks": dist.get_world_size(), "bytes": BYTES[backend]}
        print(json.dumps({**found, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
