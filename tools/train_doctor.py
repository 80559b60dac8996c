"""``train-ckpt doctor``: examines this machine for a run, and names the fix of what is bad.

Takes train-ckpt's own options; those that say nothing of the layout may be left out. Finds out
devices, memory, links between GPUs, NCCL and gloo between real ranks, whether the layout suits
the model and the machine, and the speed of the disk for checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.train.config import cli as config_options
from shardwright.train.config import from_options

from . import options

if TYPE_CHECKING:
    from shardwright.ckpt.model.family import Model
    from shardwright.train.config.schema import TrainConfig

EXAMPLES = (
    "",
    "--model Llama-3.1-8B --tp 2 --pp 2 --no-exchange",
    "--config run.yaml --json --no-exchange",
)


def parser(prog: str = "train-ckpt doctor") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    group = made.add_argument_group("examination")
    group.add_argument(
        "--topology",
        metavar="FILE",
        help="recorded output of nvidia-smi topo -m, instead of this machine's",
    )
    group.add_argument(
        "--no-exchange", action="store_true", help="start no ranks to try NCCL or gloo"
    )
    group.add_argument("--json", action="store_true", help="findings as JSON")
    config_options.options(made)
    return made


def command(argv: Sequence[str], prog: str = "train-ckpt doctor") -> int:
    """Run with dashed arguments; 1 where something would fail."""
    args = parser(prog).parse_args(argv)
    config = from_options.from_options(args, complete=False)
    from shardwright.train.doctor import doctor
    from shardwright.train.doctor import findings as advice

    found = []
    for finding in doctor.examine(
        config,
        _model,
        topology_file=args.topology,
        try_exchange=not args.no_exchange,
    ):
        found.append(finding)
        if not args.json:
            print("\n".join(finding.lines()), flush=True)
    counts = advice.by_level(found)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        print(f"{counts['problem']} problems, {counts['warning']} warnings")
    return options.REFUSED if counts["problem"] else options.DONE


def _model(config: TrainConfig) -> Model:
    """The model of the run. Its loading imports torch, without which the rest is examined."""
    from shardwright.train.run.source import find_source

    return find_source(config).model()
