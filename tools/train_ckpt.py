"""``train-ckpt``: train or continue a model with tensor, pipeline and data parallelism.

Writes ``SAVE_DIR/checkpoint-STEP`` in the shard format that reshard, merge-ckpt and verify-ckpt
read, and resumes from any readable checkpoint in any layout. ``train-ckpt config`` asks how a run
is spread and writes Accelerate's YAML; ``train-ckpt doctor`` examines the machine for a run;
``train-ckpt run`` starts the ranks of a script that uses Accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from shardwright.train.config import cli as config_options
from shardwright.train.config import from_options
from shardwright.train.config.schema import TrainConfig
from shardwright.train.errors import WAITED_TOO_LONG, LostRank

from . import options, train_run

EXAMPLES = (
    "--model Llama-3.1-8B --data docs/*.txt --tp 2 --steps 100 --save-dir run --save-interval 50",
    "--model Llama-3.1-8B --data docs/*.txt --pp 2 --steps 200 --save-dir run --resume",
    "--config run.yaml --model Llama-3.1-8B --data docs/*.txt --steps 100 --save-dir run-2",
)


def parser(prog: str = "train-ckpt") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    config_options.options(made)
    return made


def command(argv: Sequence[str], prog: str = "train-ckpt") -> int:
    """Run with dashed arguments; the exit code."""
    given = os.environ.get(from_options.OURS)
    if given is not None and not argv:  # a rank of our own launcher
        argv = json.loads(given)
    if argv and argv[0] in SUBCOMMANDS:
        module = import_module(SUBCOMMANDS[argv[0]])
        return int(module.command(argv[1:], f"{prog} {argv[0]}"))
    if argv and not argv[0].startswith("-"):
        return options.unknown_command(prog, argv[0], SUBCOMMANDS)
    if not argv:
        parser(prog).error("say what to train: --model HF_DIR --data FILE ... --steps N")
    config = from_options.from_options(parser(prog).parse_args(argv))
    from shardwright.train.run import launch

    if launch.is_rank():
        return _run_rank(config)
    print(starting(config), file=sys.stderr, flush=True)
    from shardwright.train.run.trainer import check, prepare

    check(config)
    prepare(config)
    return launch.launch(config, list(argv))


def starting(config: TrainConfig) -> str:
    """What is about to happen: importing torch takes long enough to make people wonder."""
    ranks = config.launch.nproc or max(1, config.world_size // config.launch.num_machines)
    p = config.parallelism
    count = "1 process" if ranks == 1 else f"{ranks} processes"
    text = f"starting {count} at tp={p.tp} pp={p.pp}: importing torch and megatron-core"
    if config.saving.save_dir is None:
        text += "\nno --save-dir: nothing of this run will be kept"
    return text


SUBCOMMANDS = {
    "config": "shardwright.tools.train_config",
    "doctor": "shardwright.tools.train_doctor",
    "run": "shardwright.tools.train_run",
}


def spelled(argv: Sequence[str]) -> list[str]:
    """``argv`` with dashes in our long options; what follows a script is its own."""
    if list(argv[:1]) == ["run"]:
        return ["run", *train_run.spelled(argv[1:])]
    return options.dashed(argv)


def _run_rank(config: TrainConfig) -> int:
    """Run one rank. Most errors occur on all ranks: one prints them, the others end soon after."""
    from shardwright.train.run.trainer import main as run

    rank = os.environ["RANK"]
    try:
        run(config)
    except ValueError:
        if rank != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the end that the first one brings
            time.sleep(10.0)
        raise
    except RuntimeError as error:
        from shardwright.train.doctor import lost_ranks
        from shardwright.train.run import launch

        minutes = config.launch.timeout_minutes
        lost = error if isinstance(error, LostRank) else lost_ranks.lost(error, minutes)
        if lost is None:
            raise
        # our own launcher says once what to do, after the last rank
        late = lost.code == WAITED_TOO_LONG and launch.ARGUMENTS not in os.environ
        print(f"rank {rank}: {lost}{lost_ranks.hang(minutes) if late else ''}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # The usual end would wait for threads of groups whose other ends are gone, or abort on
        # them, and the launcher would take that for the cause.
        os._exit(lost.code)
    return options.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv, spelled=spelled)


if __name__ == "__main__":
    code = main()
    if code and "RANK" in os.environ:
        # A rank that has said why it ends: the usual end may abort on threads of its groups, and
        # the launcher would take that for the cause.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
