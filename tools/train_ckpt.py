"""``train-ckpt``: train or continue a model with tensor, pipeline and data parallelism.

Writes ``SAVE_DIR/checkpoint-STEP`` in the shard format that reshard, merge-ckpt and verify-ckpt
read, and resumes from any readable checkpoint in any layout. ``train-ckpt config`` asks how a run
is spread and writes Accelerate's YAML; ``train-ckpt doctor`` examines the machine for a run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from shardwright.train import config as settings
from shardwright.train.errors import LOST_A_RANK

from . import options


def command(argv: Sequence[str]) -> int:
    """Run with dashed arguments; the exit code."""
    given = os.environ.get("SHARDWRIGHT_ARGUMENTS")
    if given is not None and not argv:  # a rank of our own launcher
        argv = json.loads(given)
    if argv and argv[0] in _SUBCOMMANDS:
        module = import_module(_SUBCOMMANDS[argv[0]])
        return int(module.command(argv[1:]))
    made = options.parser("train-ckpt", (__doc__ or "").replace("``", ""))
    settings.options(made)
    config = settings.from_options(made.parse_args(argv))
    from shardwright.train import launch

    if launch.is_rank():
        return _run_rank(config)
    from shardwright.train.loop import check

    check(config)
    return launch.launch(config, list(argv))


_SUBCOMMANDS = {
    "config": "shardwright.tools.train_config",
    "doctor": "shardwright.tools.train_doctor",
}


def _run_rank(config: settings.TrainConfig) -> int:
    """One rank. All ranks meet most errors alike: the first speaks, the others soon end with it."""
    from shardwright.train.loop import main as run

    rank = os.environ["RANK"]
    try:
        run(config)
    except ValueError:
        if rank != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the end that the first one brings
            time.sleep(10.0)
        raise
    except RuntimeError as error:
        lost = _LOST.search(str(error))
        if lost is None:
            raise
        if lost[0].startswith(("Timed out", "caught")):
            from shardwright.train.advice import hang

            print(f"rank {rank}: {hang(config.launch.timeout_minutes, lost[0])}", file=sys.stderr)
        else:
            print(f"rank {rank}: lost another rank ({lost[0]}), so it ends too", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # The usual end would wait for threads of groups whose other ends are gone, or abort on
        # them, and the launcher would take that for the cause.
        os._exit(LOST_A_RANK)
    return options.DONE


# What gloo and NCCL say when the process at the other end is gone.
_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Timed out waiting \d+ms"
    r"|caught collective operation timeout"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
