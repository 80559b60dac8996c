"""``train-ckpt config``: asks how a run is spread, and writes the YAML of ``accelerate config``.

Questions that a flag answers are not asked; without a terminal, or with ``--yes``, the others take
their defaults. The file is read by ``accelerate launch``, by scripts and by train-ckpt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.train.config import questions
from shardwright.train.config.accelerate_yaml import (
    FILE_KEYS,
    KEY,
    default_accelerate_path,
    read_accelerate,
)
from shardwright.train.config.fields import FIELDS
from shardwright.train.errors import TrainError

from . import options

_SHORT = {
    "tp_degree": "--tp", "pp_degree": "--pp", "sequence_parallelism": "--sequence-parallel",
    "use_distributed_optimizer": "--distributed-optimizer", "gradient_clipping": "--clip-grad",
}  # fmt: skip


def command(argv: Sequence[str], prog: str = "train-ckpt config") -> int:
    """Run with dashed arguments; the exit code."""
    args = parser(prog).parse_args(argv)
    output = Path(args.output or default_accelerate_path(os.environ)).expanduser()
    read = args.read or (str(output) if args.show else None)
    known = questions.of_file(read_accelerate(read)) if read else {}
    given = questions.read_flags(
        {n: v for n, v in vars(args).items() if n in questions.VALUES and v is not None}
    )
    ask = input if _is_asked(args) else None
    answers = questions.answer(given, known, _proposed(args, given), ask)
    table = questions.table(answers)
    config = questions.check(table, str(args.read or output), os.environ)
    for line in questions.summary(config):
        print(line)
    if args.show:
        return options.DONE
    lost = questions.refuse_to_replace(output, read)
    if lost is not None and not args.overwrite and not _agreed(lost, ask):
        raise TrainError(f"{lost}; replace it with --overwrite, or write elsewhere with --output")
    questions.write(table, output)
    print(f"wrote {output}")
    if table["use_cpu"] and "use_cpu" not in {**known, **given}:
        print("it says use_cpu: true because no GPU was found here; for a machine with GPUs pass "
              "--use-cpu false")  # fmt: skip
    return options.DONE


EXAMPLES = (
    "--yes --num-processes 8 --tp 2 --pp 2 --output layout.yaml",
    "--yes --params 13B --num-processes 8 --output layout.yaml --overwrite",
    "--read layout.yaml --show",
)


def parser(prog: str = "train-ckpt config") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    made.add_argument(
        "--output", metavar="FILE", help="where to write (default: where accelerate launch looks)"
    )
    made.add_argument("--read", metavar="FILE", help="a YAML whose answers are the defaults")
    made.add_argument("--show", action="store_true", help="print what a YAML means; write nothing")
    made.add_argument("--yes", action="store_true", help="ask nothing; use flags and defaults")
    made.add_argument("--ask", action="store_true", help="ask also without a terminal")
    made.add_argument("--overwrite", action="store_true", help="replace an existing file")
    asked = made.add_argument_group("answers")
    for question in questions.QUESTIONS:
        _add(asked, question.name, question.text)
    plan = made.add_argument_group("defaults from plan-layout, for --num-processes GPUs")
    plan.add_argument("--model", metavar="HF_DIR_OR_CONFIG", help="the model to plan for")
    plan.add_argument("--params", metavar="SIZE", help="or a size: 7B, 13B, ... (see plan-layout)")
    plan.add_argument("--gpu", default="A100-80GB", metavar="NAME", help="default: %(default)s")
    plan.add_argument("--seq-length", type=int, default=2048, metavar="N", help="tokens")
    plan.add_argument("--global-batch-size", type=int, default=512, metavar="N", help="sequences")
    others = made.add_argument_group("what is not asked")
    for name in questions.UNASKED:
        _add(others, name, _help(name))
    return made


def _help(name: str) -> str:
    if name not in FIELDS:
        return FILE_KEYS[name].what
    use = FIELDS[name]
    return use.what if use.use == "used" else f"(only the default: {use.reason})"


def _add(group: Any, name: str, text: str) -> None:
    """A flag for one answer: its short name, Accelerate's YAML key, and the field's own."""
    dashed = "--" + name.replace("_", "-")
    flags = [*([_SHORT[name]] if name in _SHORT else []), dashed]
    if name in FIELDS:
        flags.append("--" + (KEY + name).replace("_", "-"))
    values = questions.VALUES[name]
    more: dict[str, Any] = {"metavar": "|".join(values.choices) or values.kind.upper()}
    if values.kind == "bool":
        more = {"nargs": "?", "const": True, "metavar": "BOOL"}
    text = text.replace("%", "%%")
    group.add_argument(*flags, dest=name, default=None, help=text, **more)


def _is_asked(args: argparse.Namespace) -> bool:
    return not (args.yes or args.show) and (args.ask or sys.stdin.isatty())


def _agreed(lost: str, ask: questions.Ask | None) -> bool:
    if ask is None:
        return False
    try:
        return ask(f"{lost}. Replace it? [no]: ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _proposed(args: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """What to suggest where neither flag nor file says: a plan's best layout, or this machine."""
    if args.model or args.params:
        return _planned(args, given)
    from shardwright.train.doctor.nvidia_smi import count_gpus

    count = count_gpus()
    return {"gpus": count} if count else {"gpus": 1, "use_cpu": True}


def _planned(args: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """The best layout of plan-layout for the model on the named GPUs."""
    from shardwright.train.planning import estimate, hardware, report
    from shardwright.train.planning import search as planning

    model, name = planning.read_model(args.model, args.params)
    count = given.get("num_processes") or 8 * given.get("num_machines", 1)
    per_node = max(1, count // given.get("num_machines", -(-count // 8)))
    cluster = estimate.Cluster(hardware.find(args.gpu), count, per_node)
    request = planning.Request(
        cluster, args.seq_length, args.global_batch_size, given.get("recompute"),
        tp=given.get("tp_degree"), pp=given.get("pp_degree"),
    )  # fmt: skip
    found = report.answers(planning.search(model, name, request))
    found.pop("main_process_ip", None)  # a plan cannot know it
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
