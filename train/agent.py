"""torch.distributed.run without its trace-back: a rank that fails has said why already."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    """Run the elastic agent on the command line's arguments; its exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed, so that it could not say anything
            print(f"error: rank {rank} ended by signal {-failure.exitcode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
