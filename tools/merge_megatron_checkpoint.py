"""``merge-ckpt`` under the file name that Accelerate's guides use for it."""

from shardwright.tools.merge_ckpt import main

if __name__ == "__main__":
    raise SystemExit(main())
