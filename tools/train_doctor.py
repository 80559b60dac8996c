"""``train-ckpt doctor``: examines this machine for a run, and names the fix of what is bad.

Takes train-ckpt's own options; those that say nothing of the layout may be left out. Finds out
devices, memory, links between GPUs, NCCL and gloo between real ranks, whether the layout suits
the model and the machine, and the speed of the disk for checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from shardwright.train.config import cli as config_options
from shardwright.train.config import from_options

from . import options


def command(argv: Sequence[str]) -> int:
    """Run with dashed arguments; 1 where something would fail."""
    made = options.parser("train-ckpt doctor", (__doc__ or "").replace("``", ""))
    group = made.add_argument_group("examination")
    group.add_argument(
        "--topology",
        metavar="FILE",
        help="recorded output of nvidia-smi topo -m, in place of this machine's",
    )
    group.add_argument(
        "--no-exchange", action="store_true", help="start no ranks to try NCCL or gloo"
    )
    group.add_argument("--json", action="store_true", help="findings as JSON")
    config_options.options(made)
    args = made.parse_args(argv)
    config = from_options.from_options(args, complete=False)
    from shardwright.train.doctor import doctor
    from shardwright.train.doctor import findings as advice
    from shardwright.train.run.source import find_source

    found = []
    for finding in doctor.examine(
        config,
        lambda said: find_source(said).model(),
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
