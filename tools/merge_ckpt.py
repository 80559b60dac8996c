"""``merge-ckpt``: any readable checkpoint as one Hugging Face checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import options

if TYPE_CHECKING:
    from shardwright.ckpt import ReadOptions

EXAMPLES = (
    "checkpoint-1000",
    "checkpoint-1000 --output merged.safetensors --dtype bf16",
    "megatron-run --output merged --max-shard-size 5GB --verify",
    "megatron-run --output tested --test-logits '1 2 3'",
)


def parser(prog: str = "merge-ckpt") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    options.add_checkpoint(made)
    made.add_argument(
        "--output",
        "--save-dir",
        "--save",
        metavar="PATH",
        help="a folder, or one file if it ends in .safetensors or .bin "
        "(default: DIR-hf next to DIR)",
    )
    made.add_argument("--dtype", help="cast the weights: fp32, fp16, bf16")
    made.add_argument("--max-shard-size", metavar="5GB", help="split the weights (default: no)")
    made.add_argument(
        "--safe-serialization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="safetensors (default) or torch .bin files",
    )
    made.add_argument(
        "--from-master", action="store_true", help="export the optimizer's fp32 master weights"
    )
    options.add_verify(made)
    made.add_argument(
        "--test-logits", metavar="PROMPT", help="compare the logits of the result with those of "
        "the source's model, in float32 on the CPU (token ids if there is no tokenizer: '1 2 3')",
    )  # fmt: skip
    made.add_argument(
        "--push-to-hub", metavar="REPO", help="upload the result to the Hugging Face hub, with the "
        "stub of a model card (a new repository is private)",
    )  # fmt: skip
    options.add_reading(made)
    options.add_running(made)
    return made


def command(argv: Sequence[str], prog: str = "merge-ckpt") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    options.check_verify(args, made)
    if args.test_logits is not None and args.dry_run:
        made.error("--test-logits opens what was written; --dry-run writes nothing")
    if args.push_to_hub and args.dry_run:
        made.error("--push-to-hub uploads what was written; --dry-run writes nothing")
    source = options.checkpoint_of(args, made)
    from shardwright.ckpt import hub, merge
    from shardwright.ckpt.move.progress import parse_bytes

    size = parse_bytes(args.max_shard_size) if args.max_shard_size else None
    read, run = options.read_options(args), options.run_options(args)
    if args.push_to_hub:
        hub.check_push(args.push_to_hub)
    if args.test_logits is not None:
        from shardwright.ckpt.logits import check_logits

        check_logits(args.output)
    report = merge(
        source,
        args.output,
        dtype=args.dtype,
        max_shard_size=size,
        config=args.config,
        from_master=args.from_master,
        safe_serialization=args.safe_serialization,
        read=read,
        run=run,
    )
    if not args.quiet:
        options.say(*report.lines())
    code = options.DONE
    if args.verify:
        from shardwright.ckpt.convert import verify_output

        verdict = verify_output(source, report.output, args.dtype, args.from_master, read, run)
        code = options.say_verified(verdict, args.quiet)
    if args.test_logits is not None and code == options.DONE:
        _test_logits(args, source, report.output, read)
    if args.push_to_hub and code == options.DONE:
        address = hub.push(report.output, args.push_to_hub, report.output.name)
        if not args.quiet:
            options.say(f"uploaded to {address}")
    return code


def _test_logits(args: argparse.Namespace, source: Path, output: Path, read: ReadOptions) -> None:
    """Print what both models say; CheckpointError where they differ."""
    from shardwright.ckpt.convert import output_logits

    verdict = output_logits(source, output, args.test_logits, args.dtype, args.from_master, read)
    if not args.quiet:
        options.say(*verdict.lines())
    verdict.check(output)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
