"""``verify-ckpt A B``: compare two checkpoints of any formats and layouts, bit for bit.

``verify-ckpt A`` checks one: sizes, headers, digests, replicas and coverage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardwright.ckpt.verdict import WORST

from . import options

UNREADABLE = 2  # as diff and cmp: a script must not take "cannot read" for "different"
CODES = "0 the same or sound, 1 different or damaged, 2 cannot be read, or usage"


EXAMPLES = (
    "checkpoint-1000",
    "Llama-3.1-8B Llama-3.1-8B-tp4-pp2",
    "checkpoint-1000 merged --weights-only --rtol 1e-2",
)


def parser(prog: str = "verify-ckpt") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES, CODES)
    options.add_checkpoint(made)
    made.add_argument("other", nargs="?", metavar="B", help="the checkpoint to compare with")
    made.add_argument(
        "--against", metavar="FILE", help="compare DIR with fingerprints (of shardwright "
        "fingerprint --json) in place of a second checkpoint",
    )  # fmt: skip
    made.add_argument("--rtol", type=float, default=0.0, help="relative tolerance, for cast copies")
    made.add_argument("--atol", type=float, default=0.0, help="absolute tolerance")
    made.add_argument("--weights-only", action="store_true", help="ignore optimizer and state")
    made.add_argument("--json", action="store_true", help="print the verdict as JSON")
    made.add_argument(
        "--all", action="store_true", help="print every difference, not the worst ten"
    )
    options.add_reading(made, sides=True)
    options.add_running(made, writes=False)
    return made


def command(argv: Sequence[str], prog: str = "verify-ckpt") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    if args.checkpoint_dir and args.checkpoint and not args.other:
        args.other, args.checkpoint = args.checkpoint, None
    if not 0 <= args.rtol < float("inf") or not 0 <= args.atol < float("inf"):
        made.error("--rtol and --atol must be finite and at least 0")
    source = options.checkpoint_of(args, made)
    read, read_b = options.read_options_of_two(args, made, two=args.other is not None)
    run = options.run_options(args)
    if args.against:
        if args.other or args.rtol or args.atol:
            made.error("--against FILE takes one checkpoint, and no tolerance")
        from dataclasses import replace

        from shardwright.ckpt.fingerprint import verify_against

        read = replace(read, weights_only=args.weights_only)
        verdict = verify_against(
            source, args.against, weights_only=args.weights_only, read=read, run=run
        )
    else:
        from shardwright.ckpt import verify

        verdict = verify(
            source,
            args.other,
            rtol=args.rtol,
            atol=args.atol,
            weights_only=args.weights_only,
            read=read,
            read_b=read_b,
            run=run,
        )
    if args.json:
        import json

        table = {"a": str(source), "b": args.other or args.against, **verdict.table()}
        options.emit(json.dumps(table, indent=2, allow_nan=False))
        return options.DONE if verdict.same else options.REFUSED
    limit = max(WORST, len(verdict.findings) if args.all else 0)
    for line in verdict.lines(limit):
        options.say(line)
    if not args.quiet:
        for line in [*verdict.notes, verdict.summary()]:
            options.say(line)
    return options.DONE if verdict.same else options.REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv, UNREADABLE)


if __name__ == "__main__":
    raise SystemExit(main())
