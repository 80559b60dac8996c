"""``shardwright``: every command under one name, also as ``python -m shardwright``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from . import options

PROG = "shardwright"


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``shardwright``."""

    module: str  # of this package
    what: str
    alone: str = ""  # the command that does the same; empty if there is none
    refused: int = options.REFUSED  # exit code of an error


COMMANDS = {
    "reshard": Command("reshard", "write another parallel layout, another format, or both",
                       "reshard"),
    "merge": Command("merge_ckpt", "write one Hugging Face checkpoint", "merge-ckpt"),
    "inspect": Command("inspect_ckpt", "print what a checkpoint is, or its tensors",
                       "inspect-ckpt"),
    "verify": Command("verify_ckpt", "compare two checkpoints bit for bit, or check one",
                      "verify-ckpt", options.USAGE),
    "train": Command("train_ckpt", "train or continue a model", "train-ckpt"),
    "plan": Command("plan_layout", "find the parallel layout that suits a model and its GPUs",
                    "plan-layout"),
    "doctor": Command("train_doctor", "examine this machine for a training run",
                      "train-ckpt doctor"),
    "fingerprint": Command("fingerprint", "print a digest of each tensor, for every layout"),
    "env": Command("env", "print versions and platform, for a bug report"),
    "version": Command("version", "print the version"),
    "completion": Command("completion", "print the completion script of a shell"),
}  # fmt: skip
EXAMPLES = (
    "reshard Llama-3.1-8B --tp 4 --pp 2",
    "merge checkpoint-1000",
    "verify Llama-3.1-8B Llama-3.1-8B-tp4-pp2",
)


def help_text() -> str:
    """The list of commands."""
    lines = [f"usage: {PROG} COMMAND [options]", "", "commands:"]
    for name, row in COMMANDS.items():
        alone = f" ({row.alone})" if row.alone and row.alone != name else ""
        lines.append(f"  {name:<11} {row.what}{alone}")
    lines += ["", f"{PROG} COMMAND --help lists the options of one; {PROG} --version prints the "
              "version", "", "examples:"]  # fmt: skip
    return "\n".join([*lines, *(f"  {PROG} {example}" for example in EXAMPLES)])


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else ""
    if first in ("", "-h", "--help", "help"):
        print(help_text())
        return options.DONE if first else options.USAGE
    first = "version" if first == "--version" else first
    if first not in COMMANDS:
        return options.unknown_command(PROG, first, COMMANDS)
    row = COMMANDS[first]
    module = import_module(f"{__package__}.{row.module}")
    command = partial(module.command, prog=f"{PROG} {first}")
    spelled = getattr(module, "spelled", options.dashed)
    return options.run(command, words[1:], row.refused, spelled)


if __name__ == "__main__":
    raise SystemExit(main())
