"""What the commands share: option spellings, the checkpoint argument, exit codes.

Imports nothing slow, so ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from shardwright.ckpt import ReadOptions, RunOptions, Verdict

DONE, REFUSED, USAGE = 0, 1, 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of what printing raises


def dashed(argv: Sequence[str]) -> list[str]:
    """Long options with dashes: ``--max_shard_size=5GB`` -> ``--max-shard-size=5GB``."""
    out: list[str] = []
    for position, word in enumerate(argv):
        if word == "--":
            return out + list(argv[position:])
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        out.append(word)
    return out


class _Help(argparse.HelpFormatter):
    """Help whose paragraphs are filled, and whose lists of indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(p if "\n  " in p else fill(p, width, indent) for p in parts)


class _Version(argparse.Action):
    """``--version``: looked up only when it is asked for."""

    def __call__(self, made: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(version())
        made.exit()


class _Parser(argparse.ArgumentParser):
    """A parser with short errors: what is wrong, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the fault, and the most similar option if there is one; exit code 2."""
        self.exit(
            USAGE,
            f"usage: {self.prog} [options] (--help lists them)\n"
            f"{self.prog}: error: {message}{self._meant(message)}\n",
        )

    def _meant(self, message: str) -> str:
        import difflib

        head, _, words = message.partition("unrecognized arguments: ")
        unknown = [w.partition("=")[0] for w in words.split() if w.startswith("--")]
        if head or not unknown:
            return ""
        near = [
            (word, found[0])
            for word in unknown
            if (found := difflib.get_close_matches(word, self._option_string_actions, 1, 0.5))
        ]
        return "".join(f"; {word}: did you mean {other}?" for word, other in near)


CODES = "0 done, 1 refused or different, 2 usage"


def parser(
    prog: str,
    description: str,
    examples: Sequence[str],
    codes: str = CODES,
) -> argparse.ArgumentParser:
    """A parser with examples and the exit codes at the end of its help, and ``--version``.

    An example is what follows ``prog`` on a command line.
    """
    shown = "\n".join(f"  {prog} {example}".rstrip() for example in examples)
    made = _Parser(
        prog=prog, description=description.replace("``", ""), allow_abbrev=False,
        epilog=f"examples:\n{shown}\n\nexit codes: {codes}", formatter_class=_Help,
    )  # fmt: skip
    made.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return made


def version() -> str:
    """The program and its version."""
    from shardwright import __version__

    return f"shardwright {__version__}"


def unknown_command(prog: str, word: str, known: Iterable[str]) -> int:
    """Say that ``word`` is no sub-command, and which one was meant; the exit code."""
    import difflib

    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    print(
        f"usage: {prog} COMMAND [options] (--help lists them)\n"
        f"{prog}: error: no command {word!r}{meant}",
        file=sys.stderr,
    )
    return USAGE


def add_checkpoint(made: argparse.ArgumentParser) -> None:
    """Add DIR, --checkpoint-dir and its other names; the default is the current folder."""
    made.add_argument(
        "checkpoint", nargs="?", metavar="DIR",
        help="the checkpoint, any format; or a model of the Hugging Face hub that is in its cache, "
        "e.g. meta-llama/Llama-3.1-8B or NAME@REVISION",
    )  # fmt: skip
    made.add_argument(
        "--checkpoint-dir",
        "--load-dir",
        "--load",
        dest="checkpoint_dir",
        metavar="DIR",
        help="the same; default: the current folder if it is a checkpoint",
    )
    made.add_argument(
        "--download", action="store_true", help="fetch a model of the hub that the cache lacks"
    )


def add_reading(made: argparse.ArgumentParser, *, sides: bool = False) -> None:
    """Add the options that say what a source does not record.

    With ``sides`` each option also has a form for A and one for B.
    """
    _add_source(made, "")
    for side in ("a", "b") if sides else ():
        _add_source(made.add_argument_group(f"about {side.upper()} of two checkpoints"), side)


_READING = (
    "config", "layout", "vocab_size", "iteration", "format", "trust", "drop_vision", "dequantize",
)  # fmt: skip


def _add_source(made: argparse._ActionsContainer, side: str) -> None:
    end, of = (f"-{side}", f" of {side.upper()}") if side else ("", "")
    made.add_argument(
        f"--config{end}", metavar="HF_DIR",
        help=f"folder with the Hugging Face config.json{of}",
    )  # fmt: skip
    made.add_argument(
        f"--layout{end}", action="append", default=[], metavar="KEY=VALUE",
        help="layout tag that the checkpoint does not record, e.g. qkv=per_rank (may be repeated)"
        if not side else f"layout tag{of}",
    )  # fmt: skip
    made.add_argument(f"--vocab-size{end}", type=int, metavar="N", help=f"real vocabulary rows{of}")
    made.add_argument(
        f"--format{end}", metavar="FORMAT",
        help="shards, megatron, torch_dist or hf, if the folder holds two of them"
        if not side else f"format{of}",
    )  # fmt: skip
    made.add_argument(
        f"--iteration{end}", type=int, metavar="N",
        help="which one, if the folder holds several (default: the newest)"
        if not side else f"iteration{of}",
    )  # fmt: skip
    made.add_argument(
        f"--trust{end}", action="append", default=[], metavar="config[:FIELD]",
        help="if the config contradicts Megatron-LM's args: use the config, for one FIELD or for "
        "all (may be repeated)" if not side else f"use the config{of}, not its args",
    )  # fmt: skip
    made.add_argument(
        f"--drop-vision{end}", action="store_true",
        help=f"leave out vision and audio parts{of}: the language model alone",
    )  # fmt: skip
    made.add_argument(
        f"--dequantize{end}", action="store_true",
        help=f"read quantized weights{of} (block FP8, MXFP4) as bf16",
    )  # fmt: skip


def add_running(made: argparse.ArgumentParser, *, writes: bool = True) -> None:
    """How a job runs."""
    group = made.add_argument_group("running")
    group.add_argument(
        "--memory-budget",
        default="32MiB",
        metavar="BYTES",
        help="buffers of all workers together (default 32MiB)",
    )
    group.add_argument("--workers", type=int, metavar="N", help="threads (default: cores, up to 4)")
    group.add_argument(
        "--replicas",
        choices=("compare", "first"),
        default="compare",
        help="compare replicas (default), or use the first copy without comparing",
    )
    group.add_argument("--quiet", action="store_true", help="print errors only")
    if not writes:
        return
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan: files, bytes, peak memory; write nothing",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing output once the new one is complete",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run; if this one is interrupted, keep its work",
    )
    group.add_argument(
        "--copy-all",
        action="store_true",
        help="also copy training state, other weights, adapters and nested checkpoints",
    )
    group.add_argument(
        "--follow-links",
        action="store_true",
        help="also copy side files that are links to a place outside the checkpoint",
    )
    group.add_argument(
        "--break-lock",
        action="store_true",
        help="write although another run holds the output's lock; only if that run is dead",
    )
    group.add_argument(
        "--no-verify-source",
        dest="verify_source",
        action="store_false",
        help="do not check the checksums that the source records",
    )
    group.add_argument("--checksum", action="store_true", help="record the xxh3-128 of every file")


def add_verify(made: argparse.ArgumentParser) -> None:
    """Whether the output is compared with its source."""
    made.add_argument(
        "--verify", action="store_true", help="compare the result with the source, bit for bit"
    )


def check_verify(args: argparse.Namespace, made: argparse.ArgumentParser) -> None:
    """A dry run writes nothing that could be compared."""
    if args.verify and args.dry_run:
        made.error("--verify compares what was written; --dry-run writes nothing")


def say_verified(verdict: Verdict, quiet: bool) -> int:
    """Print what ``--verify`` found; the exit code."""
    for line in verdict.lines():
        say(line)
    if not quiet and verdict.same:
        print(f"verified: {verdict.tensors} tensors equal")
    return DONE if verdict.same else REFUSED


def checkpoint_of(args: argparse.Namespace, made: argparse.ArgumentParser) -> Path:
    """The checkpoint that the user named, or the current folder."""
    if args.checkpoint and args.checkpoint_dir:
        made.error("give the checkpoint once: as DIR or as --checkpoint-dir")
    named = args.checkpoint or args.checkpoint_dir
    if named:
        return Path(named)
    from shardwright.ckpt.reader import follow, is_checkpoint

    here = Path(os.getcwd())
    if not is_checkpoint(follow(here)):
        made.error(f"no checkpoint in {here}; usage: {made.prog} DIR")
    return here


def read_options(args: argparse.Namespace) -> ReadOptions:
    """The reading options as the API takes them."""
    return _options_of(args, "")


def _options_of(args: argparse.Namespace, side: str) -> ReadOptions:
    from shardwright.ckpt import CheckpointError, ReadOptions
    from shardwright.ckpt.model.layout import parse_layout

    config, layout, vocab, iteration, kind, trust, drop_vision, dequantize = (
        getattr(args, name + side) for name in _READING
    )
    folder = Path(os.path.expanduser(config)) if config else None
    for word in trust:
        if word != "config" and not word.startswith("config:"):
            raise CheckpointError(f"--trust {word}: write config, or config:FIELD")
    return ReadOptions(
        folder,
        parse_layout(layout),
        vocab,
        iteration=iteration,
        format=kind,
        trust=frozenset(trust),
        copy_all=getattr(args, "copy_all", False),
        follow_links=getattr(args, "follow_links", False),
        download=args.download,
        drop_vision=drop_vision,
        dequantize=dequantize,
    )


def read_options_of_two(
    args: argparse.Namespace, made: argparse.ArgumentParser, *, two: bool
) -> tuple[ReadOptions, ReadOptions]:
    """The reading options of A and of B; an option without a side is a usage error if there are
    two."""
    for name in _READING:
        option = "--" + name.replace("_", "-")
        if two and getattr(args, name) not in (None, [], False):
            made.error(f"{option}: which of the two? use {option}-a or {option}-b")
        if not two:
            for side in ("a", "b"):
                if getattr(args, f"{name}_{side}") not in (None, [], False):
                    made.error(f"{option}-{side}: there is only one checkpoint; use {option}")
    return (_options_of(args, "_a"), _options_of(args, "_b")) if two else (
        _options_of(args, ""), _options_of(args, "")
    )  # fmt: skip


def run_options(args: argparse.Namespace) -> RunOptions:
    """The running options as the API takes them."""
    from shardwright.ckpt import CheckpointError, RunOptions
    from shardwright.ckpt.move.progress import parse_bytes

    if args.workers is not None and args.workers < 1:
        raise CheckpointError(f"--workers {args.workers}: must be at least 1")
    return RunOptions(
        dry_run=getattr(args, "dry_run", False),
        memory_budget=parse_bytes(args.memory_budget),
        workers=args.workers or 0,
        overwrite=getattr(args, "overwrite", False),
        resume=getattr(args, "resume", False),
        break_lock=getattr(args, "break_lock", False),
        compare_replicas=args.replicas == "compare",
        checksum=getattr(args, "checksum", False),
        verify_source=getattr(args, "verify_source", True),
        quiet=args.quiet,
    )


def say(*lines: str) -> None:
    """Print lines; control characters in names from files are escaped."""
    from shardwright.ckpt.errors import printable

    emit("\n".join(map(printable, lines)))


def emit(text: str) -> None:
    """Print a text as it is.

    A reader who has gone, as `head` does, does not end the command or change its exit code.
    """
    try:
        print(text)
    except BrokenPipeError:
        _silence()


def _published() -> str:
    """The output that the run published before it was interrupted; empty if there is none."""
    publish = sys.modules.get("shardwright.ckpt.move.publish")
    outputs = publish.published if publish is not None else []
    return "".join(f"{path} was published and is whole" for path in outputs[-1:])


def _silence() -> None:
    """Closing an output that cannot be written would raise once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    """Say here what cannot be printed, and not while Python ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _silence()  # the reader of our output has gone


def run(
    command: Callable[[Sequence[str]], int],
    argv: Sequence[str] | None,
    refused: int = REFUSED,
    spelled: Callable[[Sequence[str]], list[str]] = dashed,
) -> int:
    """Call a command; our errors become one message and the exit code ``refused``.

    ``spelled`` brings the words into the parser's spelling.

    SIGTERM ends a run as Ctrl-C does, so that no partial output is left.
    """

    from shardwright.ckpt.errors import install, is_extra, printable

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    publish = sys.modules.get("shardwright.ckpt.move.publish")
    if publish is not None:  # an earlier run of the same process
        publish.published.clear()
    previous = signal.signal(signal.SIGTERM, stop)
    for stream in (sys.stdout, sys.stderr):  # file names are bytes, not all of them are text
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command(spelled(sys.argv[1:] if argv is None else argv))
        _flush()
        return code
    except KeyboardInterrupt:
        print(f"interrupted; {_published() or 'nothing was published'}", file=sys.stderr)
        return refused
    except BrokenPipeError:
        _silence()
        return refused
    except OSError as error:
        if error.filename is None and error.errno in _FULL:  # errors of files have their names
            _silence()
            done = f"; {_published()}" if _published() else ""
            print(f"error: standard output: {error.strerror}{done}", file=sys.stderr)
            return refused
        if error.filename is None:
            if not isinstance(error, FileNotFoundError):
                raise
            error.filename = "the current folder"  # of which os.getcwd gives no name
        print(printable(f"error: {error.filename}: {error.strerror}"), file=sys.stderr)
        return refused
    except ModuleNotFoundError as error:
        if not is_extra(error.name):
            raise
        print(f"error: {install(error.name or '')}", file=sys.stderr)
        return refused
    except ValueError as error:
        if not {"CheckpointError", "TrainError"} & {kind.__name__ for kind in type(error).__mro__}:
            raise
        print(printable(f"error: {error}"), file=sys.stderr)
        return refused
    finally:
        signal.signal(signal.SIGTERM, previous)
