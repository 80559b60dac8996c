"""``train-ckpt run``: starts the ranks of a script that uses Hugging Face Accelerate.

The script may say ``from accelerate import Accelerator`` and runs as it is. Options of the ranks
stand before the script; what follows it is its own. The layout is the script's MegatronLMPlugin,
or these options, or an Accelerate YAML (--config). It stops as the script stops: Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardwright.train.config import cli, from_options
from shardwright.train.config.plugin import ENV
from shardwright.train.config.schema import TrainConfig

from . import options

# What describes ranks, and not a training: the options that also have a plugin's field reach the
# script as Accelerate's environment variables do.
_LAYOUT = (
    "tp", "pp", "virtual_pp_layers", "sequence_parallel", "distributed_optimizer", "recompute",
)  # fmt: skip
_RANKS = (
    "nproc", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "rdzv_backend", "timeout_minutes", "precision",
)  # fmt: skip
EXAMPLES = (
    "--tp 2 --pp 2 finetune.py --learning_rate 1e-4",
    "--nproc 4 finetune.py",
    "--config megatron.yaml -m my_package.train --epochs 3",
)


def parser(prog: str = "train-ckpt run") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    made.usage = f"{prog} [options] [-m MODULE | SCRIPT] [arguments of the script]"
    cli.options(made, (*_LAYOUT, *_RANKS))
    made.add_argument("-m", dest="module", metavar="MODULE", help="a module in place of a script")
    made.add_argument("script", nargs="?", metavar="SCRIPT", help="the script, and its arguments")
    return made


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the script, and the script with its own."""
    known = {flag: action for action in parser()._actions for flag in action.option_strings}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-m":
        name, equals, _ = argv[at].partition("=")
        action = known.get(options.dashed([name])[0])
        at += 1 if equals or action is None or action.nargs == 0 else 2
    return list(argv[:at]), list(argv[at:])


def spelled(argv: Sequence[str]) -> list[str]:
    """Dashes in our long options; the script's arguments stay as they are."""
    before, words = split(argv)
    return [*options.dashed(before), *words]


def command(argv: Sequence[str], prog: str = "train-ckpt run") -> int:
    """Run with dashed arguments; the exit code of the ranks."""
    before, words = split(argv)
    made = parser(prog)
    args = made.parse_args(before)
    if not words or (words[0] == "-m" and len(words) < 2):
        made.error("name the script: train-ckpt run [options] SCRIPT [its arguments]")
    config = from_options.from_options(args, complete=False)
    from shardwright.train.run import launch

    if launch.is_rank():
        made.error("a launcher has started this rank; let it run -m shardwright.train SCRIPT")
    for line in config.notes:
        options.say(line)
    return launch.launch_script(config, words, _said(config, args))


def _said(config: TrainConfig, args: argparse.Namespace) -> dict[str, str]:
    """What the options mean, as ``accelerate launch`` tells it to a script."""
    p = config.parallelism
    values: dict[str, object] = {
        "tp": p.tp,
        "pp": p.pp,
        "virtual_pp_layers": p.virtual_pp_layers,
        "sequence_parallel": p.sequence_parallel,
        "distributed_optimizer": p.distributed_optimizer,
        "recompute": config.recompute.granularity,
    }
    given = {name for name in _LAYOUT if getattr(args, name) is not None}
    if any(path for path in args.config):  # whichever form the file has
        given |= {name for name in _LAYOUT if values[name] != cli.OPTIONS[name].default}
    found = {ENV + cli.OPTIONS[n].field.upper(): str(values[n]) for n in sorted(given)}
    # Accelerate alone would start a training of its own in each rank where there is no GPU
    found["ACCELERATE_USE_MEGATRON_LM"] = "true"
    if args.precision is not None:
        found["ACCELERATE_MIXED_PRECISION"] = "no" if args.precision == "fp32" else args.precision
    return found
