"""``plan-layout``: which tensor, pipeline and data parallelism suits a model and its GPUs.

Estimates memory and time of every valid layout, explains the best, and prints the commands that
run it. The times are a roofline with efficiencies that were measured on two H200.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from . import options

EXAMPLES = (
    "--params 13B --gpus 8",
    "--model Llama-3.1-8B --gpus 16 --gpu H100 --seq-length 8192",
    "--params 70B --gpus 64 --output plan.yaml --plot plan.png",
)


def parser(prog: str = "plan-layout") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    made.add_argument(
        "--model", metavar="HF_DIR_OR_CONFIG", help="a model folder or config.json; no weights"
    )
    made.add_argument("--params", metavar="SIZE", help="or a size instead: 8B, 13B, 1.5B, ...")
    made.add_argument("--guide", action="store_true", help="print the guide's table of sizes, "
                      "with its layouts and those found here")  # fmt: skip
    machine = made.add_argument_group("machines")
    machine.add_argument("--gpus", type=int, metavar="N", help="GPUs of all machines together")
    machine.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 8, or --gpus")
    machine.add_argument("--gpu", metavar="NAME", help="H100, A100, ... (default: A100-80GB)")
    machine.add_argument("--gpu-memory", metavar="80GB", help="of one GPU (default: the GPU's)")
    machine.add_argument("--gpu-bandwidth", metavar="2TB", help="of its memory, per second")
    machine.add_argument("--gpu-peak", type=float, metavar="TFLOPS", help="of bf16, dense")
    machine.add_argument(
        "--link-bandwidth", metavar="300GB", help="between GPUs of a machine, per direction"
    )
    machine.add_argument(
        "--network-bandwidth", metavar="25GB", help="between machines, per GPU and direction"
    )
    run = made.add_argument_group("the run")
    run.add_argument("--seq-length", type=int, metavar="N", help="tokens (default: 2048)")
    run.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences of a step (default: 512)"
    )
    run.add_argument("--recompute", choices=("none", "selective", "full"), help="default: none "
                     "or full, the better one")  # fmt: skip
    run.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw")
    run.add_argument(
        "--distributed-optimizer", action=argparse.BooleanOptionalAction, default=None,
        help="cut the optimizer over data-parallel ranks (default: yes)",
    )  # fmt: skip
    run.add_argument("--tp", type=int, metavar="N", help="these tensor-parallel ranks only")
    run.add_argument("--pp", type=int, metavar="N", help="these pipeline stages only")
    run.add_argument("--micro-batch-size", type=int, metavar="N", help="this size only")
    run.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, default=None,
        help="only with or only without it (default: the better one)",
    )  # fmt: skip
    out = made.add_argument_group("output")
    out.add_argument("--top", type=int, default=8, metavar="N", help="layouts to show (default: 8)")
    out.add_argument("--output", metavar="plan.yaml", help="write the best as Accelerate's YAML")
    out.add_argument("--overwrite", action="store_true", help="replace an existing YAML")
    out.add_argument("--plot", metavar="out.png", help="memory and timeline, .png or .svg")
    out.add_argument("--json", action="store_true", help="print JSON")
    return made


def command(argv: Sequence[str], prog: str = "plan-layout") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    if args.gpus is None and not args.guide:
        made.error("the number of GPUs is missing: --gpus 8")
    from shardwright.train.errors import TrainError
    from shardwright.train.planning import report
    from shardwright.train.planning import search as planning

    if args.plot and Path(args.plot).suffix not in (".png", ".svg"):
        raise TrainError(f"--plot {args.plot}: write .png or .svg")
    if args.overwrite and not args.output:
        raise TrainError("--overwrite: there is no --output to replace")
    if args.top < 1:
        raise TrainError(f"--top {args.top}: must be at least 1")
    if args.guide:
        return _guide(args)
    request = _request(args)
    model, name = planning.read_model(args.model, args.params)
    result = planning.search(model, name, request)
    if not result.fitting:
        raise TrainError(planning.does_not_fit(result, model, name))
    if args.json:
        print(json.dumps(report.as_json(result, args.model, args.top), indent=2))
    else:
        _report(result, args)
    _write(result, args)
    return options.DONE


def _request(args: argparse.Namespace):
    from shardwright.ckpt.move.progress import parse_bytes
    from shardwright.train.errors import TrainError
    from shardwright.train.planning import hardware
    from shardwright.train.planning import search as planning
    from shardwright.train.planning.estimate import Cluster

    if args.optimizer == "sgd" and args.distributed_optimizer:
        raise TrainError(
            "--distributed-optimizer has no sgd in megatron-core; use --optimizer adamw"
        )
    if args.gpu_peak is not None and not 0 < args.gpu_peak < math.inf:  # nan is neither
        raise TrainError(f"--gpu-peak {args.gpu_peak:g}: must be a number above 0, of TFLOP/s")
    rates = [
        parse_bytes(text) if text else None
        for text in (args.gpu_memory, args.gpu_bandwidth, args.link_bandwidth,
                     args.network_bandwidth)
    ]  # fmt: skip
    memory, bandwidth, link, network = rates
    peak = args.gpu_peak * 1e12 if args.gpu_peak else None
    gpu = hardware.find(args.gpu or "A100-80GB", memory, bandwidth, peak, link, network)
    per_node = args.gpus_per_node if args.gpus_per_node is not None else max(min(args.gpus, 8), 1)
    return planning.Request(
        Cluster(gpu, args.gpus, per_node),
        2048 if args.seq_length is None else args.seq_length,
        512 if args.global_batch_size is None else args.global_batch_size,
        args.recompute,
        args.optimizer,
        args.distributed_optimizer is not False,
        args.tp,
        args.pp,
        args.micro_batch_size,
        args.sequence_parallel,
    )


def _report(result, args: argparse.Namespace) -> None:
    from shardwright.train.planning import report

    request = result.request
    gpu = request.cluster.gpu
    # a pipe gets a width that most terminals have
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    head = (
        f"{result.shape.name}: {result.parameters / 1e9:.2f}B parameters on {request.cluster.gpus} "
        f"x {gpu.name} ({gpu.memory / 2**30:.1f} GiB), {request.global_batch} sequences of "
        f"{request.seq} in a step; {len(result.fitting)} of "
        f"{len(result.fitting) + len(result.over)} valid layouts fit. The best of each split:"
    )
    print(textwrap.fill(head, width))
    print("\n".join(["", *report.table(result, args.top, width), ""]))
    for text in (report.legend(result, args.top), report.explain(result)):
        print(f"{textwrap.fill(text, width)}\n")
    print("\n".join(report.folded(line, width) for line in report.commands(result, args.model)))


def _write(result, args: argparse.Namespace) -> None:
    """The YAML and the picture."""
    if args.output:
        from shardwright.train.config import questions
        from shardwright.train.errors import TrainError
        from shardwright.train.planning import report

        path = Path(args.output)
        lost = questions.refuse_to_replace(path, None)
        if lost is not None and not args.overwrite:
            raise TrainError(f"{lost}; replace it with --overwrite")
        made = questions.table(report.answers(result))
        # only the file itself counts here: a run may have another environment
        questions.check(made, str(path), {})
        beside = report.beside_file(result, args.model, args.output)
        questions.write(made, path, beside)
        print("\n".join([f"wrote {path}", *beside]), file=sys.stderr)
    if args.plot:
        from shardwright.train.planning import pictures

        pictures.draw(result, Path(args.plot), args.top)
        print(f"wrote {args.plot}", file=sys.stderr)


def _guide(args: argparse.Namespace) -> int:
    from shardwright.train.errors import TrainError
    from shardwright.train.planning import report

    chosen = {
        "--model": args.model, "--params": args.params, "--gpus": args.gpus, "--gpu": args.gpu,
        "--gpus-per-node": args.gpus_per_node, "--gpu-memory": args.gpu_memory,
        "--gpu-bandwidth": args.gpu_bandwidth, "--gpu-peak": args.gpu_peak,
        "--link-bandwidth": args.link_bandwidth, "--network-bandwidth": args.network_bandwidth,
        "--recompute": args.recompute, "--tp": args.tp, "--pp": args.pp,
        "--distributed-optimizer": args.distributed_optimizer,
        "--sequence-parallel": args.sequence_parallel, "--micro-batch-size": args.micro_batch_size,
        "--output": args.output, "--plot": args.plot, "--json": args.json or None,
    }  # fmt: skip
    for flag, value in chosen.items():
        if value is not None:
            raise TrainError(
                f"--guide has fixed models and GPUs, {flag} sets others; leave one out"
            )
    rows = report.guide(args.global_batch_size or 512, args.seq_length or 2048)
    print("\n".join(report.guide_lines(rows)))
    return options.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
