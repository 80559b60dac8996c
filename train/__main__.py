"""``python -m shardwright.train SCRIPT``: runs a script for Accelerate with our Accelerator.

A launcher starts it in place of the script: ``torchrun --nproc-per-node 4 -m shardwright.train
script.py --lr 1e-4``, or ``accelerate launch ... -m shardwright.train script.py``. Without a
launcher the script is the only process. ``-m MODULE`` runs a module.
"""

from __future__ import annotations

import sys

USAGE = "usage: python -m shardwright.train [-m MODULE | SCRIPT] [arguments of the script]"


def main() -> None:
    """Run the script that the command line names."""
    from .run import script

    words = script.arguments(sys.argv[1:])
    if words[:1] in ([], ["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__.replace('``', '')}", file=sys.stderr)
        raise SystemExit(2 if not words else 0)
    from .accelerate import factory

    factory.install()
    script.run(words)


if __name__ == "__main__":
    main()
