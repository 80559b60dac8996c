"""``shardwright version``: print the version."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import options

EXAMPLES = ("",)


def parser(prog: str = "shardwright version") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    return options.parser(prog, __doc__ or "", EXAMPLES)


def command(argv: Sequence[str], prog: str = "shardwright version") -> int:
    """Run with dashed arguments; the exit code."""
    parser(prog).parse_args(argv)
    print(options.version())
    return options.DONE
