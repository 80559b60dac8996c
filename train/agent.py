"""torch.distributed.run without its trace-back: a rank that fails has said why already."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

from .errors import LOST_A_RANK


def run() -> int:
    """Run the elastic agent on the command line's arguments; its exit code."""
    logging.disable(logging.ERROR)
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        rank, code = _cause({rank: f.exitcode for rank, f in error.failures.items()})
        if code != 1:  # with 1 it has said why
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            print(f"error: rank {rank} ended {how}", file=sys.stderr)
            if code in _OFTEN:
                print(f"  {_OFTEN[code]}", file=sys.stderr)
        return 1
    except (RendezvousError, DistNetworkError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        print(f"error: the machines did not meet: {reason}; start all of them with the same "
              "--main-process-ip and --main-process-port, which no firewall may close, and machine "
              "0 too", file=sys.stderr)  # fmt: skip
        return 1
    except SignalException:
        return 1
    return 0


# What is most often behind an end by a signal.
_OFTEN = {
    -signal.SIGKILL: "killed from outside, often by the kernel for lack of host memory (dmesg "
    "says so); fewer ranks per machine or a smaller model need less",
    -signal.SIGABRT: "aborted, often by NCCL after a collective that timed out; run train-ckpt "
    "doctor on each machine, and with NCCL_DEBUG=INFO, or allow more: --timeout-minutes N",
}


def _cause(codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the first failure that is not the consequence of another."""
    causes = {r: c for r, c in codes.items() if c not in (LOST_A_RANK, -signal.SIGTERM)}
    return next(iter((causes or codes).items()))


if __name__ == "__main__":
    sys.exit(run())
