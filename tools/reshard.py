"""``reshard``: any readable checkpoint in another parallel layout, format, or both."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardwright.ckpt.model.mesh import AXES

from . import options

EXAMPLES = (
    "Llama-3.1-8B --tp 4 --pp 2",
    "checkpoint-1000 --tp 2 --pp 4 --dry-run",
    "Llama-3.1-8B --to megatron --tp 4 --pp 2 --output for-megatron",
)


def parser(prog: str = "reshard") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    options.add_checkpoint(made)
    _add_layout(made)
    _add_output(made)
    _add_megatron(made)
    options.add_verify(made)
    options.add_reading(made)
    options.add_running(made)
    return made


def _add_layout(made: argparse.ArgumentParser) -> None:
    """The parallel layout of the output."""
    made.add_argument(
        "--tp",
        "--tensor-model-parallel-size",
        "--target-tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel ranks (default: as the source)",
    )
    made.add_argument(
        "--pp",
        "--pipeline-model-parallel-size",
        "--target-pipeline-parallel-size",
        type=int,
        metavar="N",
        help="pipeline stages (default: as the source)",
    )
    for axis in AXES[2:]:
        made.add_argument(f"--{axis}", type=int, metavar="N", help=f"ranks of the axis {axis}")
    made.add_argument(
        "--dp",
        type=int,
        metavar="N",
        help="shard the optimizer state over N data-parallel ranks (default: as the source)",
    )
    made.add_argument(
        "--ep",
        "--expert-model-parallel-size",
        type=int,
        metavar="N",
        help="ranks over which experts are spread (default: as the source)",
    )
    made.add_argument(
        "--etp",
        "--expert-tensor-parallel-size",
        type=int,
        metavar="N",
        help="ranks that cut each expert (default: as the source, else as --tp)",
    )
    made.add_argument(
        "--vpp",
        "--virtual-pipeline-model-parallel-size",
        type=int,
        metavar="N",
        help="virtual stages of each pipeline stage (default: 1)",
    )
    made.add_argument("--pp-layers", metavar="10,10,8", help="layers of each pipeline stage")
    made.add_argument(
        "--pp-layout",
        "--pipeline-model-parallel-layout",
        metavar="'Et*3|(tt|)*29,m|L'",
        help="layers of each virtual stage, in Megatron-LM's words",
    )


def _add_output(made: argparse.ArgumentParser) -> None:
    """Where the output goes, its format, and which values it holds."""
    made.add_argument(
        "--to",
        metavar="FORMAT",
        help="shards, megatron, torch_dist or hf (default: as the source; hf becomes shards)",
    )
    made.add_argument(
        "--output", "--save-dir", "--save", metavar="PATH", help="default: DIR-tp4-pp2 next to DIR"
    )
    made.add_argument("--dtype", help="cast the weights: fp32, fp16, bf16")
    made.add_argument(
        "--safe-serialization",
        action=argparse.BooleanOptionalAction,
        help="safetensors files or torch .bin files (default: as the source)",
    )
    made.add_argument(
        "--drop-mtp", action="store_true", help="leave out the layers that predict further tokens"
    )
    made.add_argument(
        "--weights-only", action="store_true", help="leave out optimizer and training state"
    )
    made.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        help="pad the vocabulary to a multiple of N x tp (default: as the source, else 128)",
    )
    made.add_argument(
        "--max-shard-size", metavar="5GB", help="with --to hf: split the weights (default: no)"
    )
    made.add_argument(
        "--from-master",
        action="store_true",
        help="with --to hf: export the optimizer's fp32 master weights",
    )


def _add_megatron(made: argparse.ArgumentParser) -> None:
    """What only Megatron-LM's formats take."""
    made.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        help="form of the optimizer for Megatron-LM (default: distributed if dp > 1)",
    )
    made.add_argument(
        "--allow-incomplete-args",
        action="store_true",
        help="with --to megatron or torch_dist: write args that lack a part of the model",
    )
    made.add_argument(
        "--adam",
        choices=("fused", "torch"),
        help="of --to megatron and torch_dist: whose Adam loads the plain optimizer, Apex's and "
        "TransformerEngine's or torch's (default: as the source, else fused)",
    )


def _layers(text: str | None, made: argparse.ArgumentParser) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        made.error(f"--pp-layers {text}: write it as whole numbers with commas, e.g. 10,10,8")


def command(argv: Sequence[str], prog: str = "reshard") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    options.check_verify(args, made)
    layers = _layers(args.pp_layers, made)
    source = options.checkpoint_of(args, made)
    axes = {axis: getattr(args, axis) for axis in AXES}
    layout = (layers, args.dp, args.to, args.vpp, args.pp_layout, args.ep, args.etp,
              args.use_distributed_optimizer,
              *axes.values())  # fmt: skip
    others = (args.dtype, args.safe_serialization, args.weights_only or None,
              args.make_vocab_size_divisible_by)  # fmt: skip
    if all(value is None for value in (*layout, *others)):
        made.error(
            "name the new layout: --tp, --pp, --pp-layers, --pp-layout, --vpp, --ep, --etp or "
            "--dp; or a format: --to; or a type: --dtype"
        )
    from shardwright.ckpt import reshard
    from shardwright.ckpt.move.progress import parse_bytes

    read, run = options.read_options(args), options.run_options(args)
    report = reshard(
        source,
        args.output,
        **axes,
        dp=args.dp,
        pp_layers=layers,
        dtype=args.dtype,
        safe_serialization=args.safe_serialization,
        weights_only=args.weights_only,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
        to=args.to,
        vpp=args.vpp,
        pp_layout=args.pp_layout,
        ep=args.ep,
        drop_mtp=args.drop_mtp,
        etp=args.etp,
        use_distributed_optimizer=args.use_distributed_optimizer,
        max_shard_size=parse_bytes(args.max_shard_size) if args.max_shard_size else None,
        from_master=args.from_master,
        allow_incomplete_args=args.allow_incomplete_args,
        adam=args.adam,
        read=read,
        run=run,
    )
    if not args.quiet:
        options.say(*report.lines())
    if not args.verify:
        return options.DONE
    from shardwright.ckpt.convert import verify_output

    verdict = verify_output(
        source, report.output, args.dtype, args.from_master, read, run,
        weights_only=args.weights_only or args.to == "hf",
    )  # fmt: skip
    return options.say_verified(verdict, args.quiet)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
