"""``train-ckpt``: train or continue a model with tensor, pipeline and data parallelism.

Writes ``SAVE_DIR/checkpoint-STEP`` in the shard format that reshard, merge-ckpt and verify-ckpt
read, and resumes from any readable checkpoint in any layout.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from shardwright.train import config as settings

from . import options


def command(argv: Sequence[str]) -> int:
    """Run with dashed arguments; the exit code."""
    given = os.environ.get("SHARDWRIGHT_ARGUMENTS")
    if given is not None and not argv:  # a rank of our own launcher
        argv = json.loads(given)
    made = options.parser("train-ckpt", (__doc__ or "").replace("``", ""))
    settings.options(made)
    config = settings.from_options(made.parse_args(argv))
    from shardwright.train import launch

    if launch.is_rank():
        return _run_rank(config)
    from shardwright.train.loop import check

    check(config)
    return launch.launch(config, list(argv))


def _run_rank(config: settings.TrainConfig) -> int:
    """One rank. All ranks meet most errors alike: the first speaks, the others soon end with it."""
    from shardwright.train.loop import main as run

    try:
        run(config)
    except ValueError:
        if os.environ["RANK"] != "0":
            time.sleep(3.0)
        raise
    return options.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
