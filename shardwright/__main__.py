"""``python -m shardwright``: the command of that name."""

from shardwright.tools.all_commands import main

if __name__ == "__main__":
    raise SystemExit(main())
