"""``verify-ckpt A B``: compare two checkpoints of any formats and layouts, bit for bit.

``verify-ckpt A`` checks one: sizes, headers, digests, replicas and coverage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import options


def _parser() -> argparse.ArgumentParser:
    made = options.parser("verify-ckpt", (__doc__ or "").replace("``", ""))
    options.add_checkpoint(made)
    made.add_argument("other", nargs="?", metavar="B", help="the checkpoint to compare with")
    made.add_argument("--rtol", type=float, default=0.0, help="relative tolerance, for cast copies")
    made.add_argument("--atol", type=float, default=0.0, help="absolute tolerance")
    made.add_argument("--weights-only", action="store_true", help="ignore optimizer and state")
    made.add_argument("--json", action="store_true", help="print the verdict as JSON")
    options.add_reading(made)
    options.add_running(made, writes=False)
    return made


def command(argv: Sequence[str]) -> int:
    """Run with dashed arguments; the exit code."""
    made = _parser()
    args = made.parse_args(argv)
    if args.checkpoint_dir and args.checkpoint and not args.other:
        args.other, args.checkpoint = args.checkpoint, None
    if not 0 <= args.rtol < float("inf") or not 0 <= args.atol < float("inf"):
        made.error("--rtol and --atol must be finite and at least 0")
    source = options.checkpoint_of(args, made)
    from shardwright.ckpt import verify

    verdict = verify(
        source,
        args.other,
        rtol=args.rtol,
        atol=args.atol,
        weights_only=args.weights_only,
        read=options.read_options(args),
        run=options.run_options(args),
    )
    if args.json:
        import json

        table = {"same": verdict.same, "tensors": verdict.tensors, "bytes": verdict.nbytes,
                 "differences": verdict.differences, "notes": verdict.notes}  # fmt: skip
        print(json.dumps(table, indent=2))
        return options.DONE if verdict.same else options.REFUSED
    for line in verdict.differences:
        print(f"differs: {line}")
    if not args.quiet:
        from shardwright.ckpt.move.progress import human

        head = _summary(verdict.same, args.other is None)
        for line in [*verdict.notes, f"{head}: {verdict.tensors} tensors, {human(verdict.nbytes)}"]:
            print(line)
    return options.DONE if verdict.same else options.REFUSED


def _summary(same: bool, alone: bool) -> str:
    if alone:
        return "sound" if same else "damaged"
    return "equal" if same else "different"


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
