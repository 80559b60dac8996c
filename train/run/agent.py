"""torch.distributed.run without its trace-back: a rank that fails has said why already."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

from ..doctor.lost_ranks import hang
from ..errors import LOST_A_RANK, WAITED_TOO_LONG
from .launch import QUIET_AGENT


def run() -> int:
    """Run the elastic agent on the command line's arguments; its exit code."""
    logging.disable(logging.ERROR)
    name, value = QUIET_AGENT
    if os.environ.get(name) == value:  # it has been read; the ranks' logs shall be seen
        del os.environ[name]
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        codes = {rank: f.exitcode for rank, f in error.failures.items()}
        rank, code = _cause(codes)
        if code == WAITED_TOO_LONG:
            print(f"error: {_missing(codes)}{hang()}", file=sys.stderr)
        elif code != 1:  # with 1 it has said why
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            print(f"error: rank {rank} ended {how}", file=sys.stderr)
            if code in _OFTEN:
                print(f"  {_OFTEN[code]}", file=sys.stderr)
        return 1
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        reason = reason or "not all of them came"
        print(f"error: the machines did not find each other: {reason}; start all of them with "
              "the same --main-process-ip and --main-process-port, machine 0 too, and open that "
              "port in the firewalls", file=sys.stderr)  # fmt: skip
        return 1
    except SignalException:
        return 1
    return 0


# Likely causes when a rank dies from a signal.
_OFTEN = {
    -signal.SIGKILL: "killed from outside, often by the kernel because host memory ran out "
    "(dmesg says so); fewer ranks per machine or a smaller model need less",
    -signal.SIGABRT: "aborted; if it gave no reason above, on GPUs often by NCCL after a "
    "collective that timed out; run train-ckpt doctor on each machine, and with NCCL_DEBUG=INFO, "
    "or allow more: --timeout-minutes N",
}


def _cause(codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the first failure that is not the consequence of another."""
    late = {r: c for r, c in codes.items() if c == WAITED_TOO_LONG}
    after = {LOST_A_RANK, WAITED_TOO_LONG, -signal.SIGTERM}
    if late:  # a rank that does not come is killed in the end, by us
        after.add(-signal.SIGKILL)
    causes = {r: c for r, c in codes.items() if c not in after}
    return next(iter((causes or late or codes).items()))


def _missing(codes: Mapping[int, int]) -> str:
    """Which rank did not come while others waited, as far as this machine's ranks tell."""
    waited = sorted(r for r, c in codes.items() if c == WAITED_TOO_LONG)
    absent = sorted(r for r, c in codes.items() if c in (-signal.SIGTERM, -signal.SIGKILL))
    missing = f"{_named(absent)}, which did not answer and was ended" if absent else "another rank"
    return f"{_named(waited)} waited too long for {missing}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


if __name__ == "__main__":
    sys.exit(run())
