"""``shardwright fingerprint``: a digest of each tensor, the same in every layout and format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from . import options

EXAMPLES = ("checkpoint-1000", "checkpoint-1000 --json > checkpoint-1000.fingerprint.json")


def parser(prog: str = "shardwright fingerprint") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    options.add_checkpoint(made)
    made.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    made.add_argument("--json", action="store_true", help="print JSON, for verify-ckpt --against")
    options.add_reading(made)
    options.add_running(made, writes=False)
    return made


def command(argv: Sequence[str], prog: str = "shardwright fingerprint") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    source = options.checkpoint_of(args, made)
    from dataclasses import replace

    from shardwright.ckpt.fingerprint import as_json, fingerprint

    read = replace(options.read_options(args), weights_only=args.weights_only)
    found = fingerprint(source, read=read, run=options.run_options(args))
    table = as_json(found)
    if args.json:
        options.emit(json.dumps(table, indent=1))
        return options.DONE
    options.say(*(f"{f.digest}  {name}" for name, f in found.items()))
    print(f"{table['all']}  all {len(found)} tensors")
    return options.DONE
