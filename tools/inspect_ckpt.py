"""``inspect-ckpt``: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import options

EXAMPLES = (
    "checkpoint-1000",
    "checkpoint-1000 --tensor model.norm.weight",
    "Llama-3.1-8B --json",
    "--families",
)


def parser(prog: str = "inspect-ckpt") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    options.add_checkpoint(made)
    made.add_argument("--tensor", metavar="NAME", help="shape, boxes and statistics of one tensor")
    made.add_argument(
        "--families", action="store_true", help="list the model families, and how far each is known"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    options.add_reading(made)
    return made


def command(argv: Sequence[str], prog: str = "inspect-ckpt") -> int:
    """Run with dashed arguments; the exit code."""
    made = parser(prog)
    args = made.parse_args(argv)
    if args.families:
        if args.checkpoint or args.checkpoint_dir or args.tensor:
            made.error("--families is about no checkpoint; leave the others out")
        rows = known_families()
        if args.json:
            print(json.dumps(rows, indent=2))
        else:
            options.say(*_family_lines(rows))
        return options.DONE
    source = options.checkpoint_of(args, made)
    from shardwright.ckpt.errors import CheckpointError
    from shardwright.ckpt.inspect import describe, describe_tensor
    from shardwright.ckpt.reader import read_checkpoint

    ckpt = read_checkpoint(source, options.read_options(args))
    if args.tensor:
        names = ckpt.manifest.tensors
        if args.tensor not in names:
            import difflib

            near = difflib.get_close_matches(args.tensor, list(names), 3, 0.3)
            raise CheckpointError(
                f"{ckpt.path}: no tensor {args.tensor}; similar names: {', '.join(near)}"
            )
        table = describe_tensor(ckpt, args.tensor)
        lines = _tensor_lines(table)
    else:
        table = describe(ckpt)
        lines = _lines(table)
    if args.json:
        print(json.dumps(table, indent=2))
    else:
        options.say(*lines)
    return options.DONE


def known_families() -> list[dict[str, str]]:
    """How far each family is known, as its table and the trainer's say."""
    from shardwright.ckpt.families.known import known
    from shardwright.train.model.traits import FAMILIES

    return [
        {
            "family": family.name,
            "model_type": ", ".join(family.model_types),
            "weights": "yes",
            "megatron": family.args,
            "train": "yes" if family.name in FAMILIES else "no",
        }
        for family in known()
    ]


def _family_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    heads = ("family", "model_type", "weights", "train", "megatron")
    table = [heads, *(tuple(row[head] for head in heads) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(4)] + [0]
    return [
        *("  ".join(w.ljust(n) for w, n in zip(line, widths, strict=True)) for line in table),
        "",
        "weights   files go through every layout and back, byte for byte, with equal logits",
        "train     train-ckpt computes it",
        "megatron  Megatron-LM's args say all of it, and megatron-core computes the same logits",
    ]


def _lines(table: Mapping[str, Any]) -> list[str]:
    from shardwright.ckpt.move.progress import human

    mesh = " ".join(f"{axis}={size}" for axis, size in table["mesh"].items())
    dtypes = ", ".join(f"{d} {n:,}" for d, n in table["dtypes"].items())
    lines = [
        f"{table['path']}",
        f"format      {table['format']}, family {table['family'] or 'unknown'}",
        f"mesh        {mesh}" + (", optimizer sharded" if table["optimizer_sharded"] else ""),
        f"step        {table['step'] if table['step'] is not None else '-'}",
        f"parameters  {table['parameters']:,} in {table['tensors']} tensors",
        f"bytes       {human(table['bytes'])} in {len(table['files'])} files",
        f"dtypes      {dtypes}",
    ]
    if table["vocab_size"]:
        padded = table["padded_vocab_size"]
        more = f", padded to {padded}" if padded and padded != table["vocab_size"] else ""
        lines.append(f"vocabulary  {table['vocab_size']}{more}")
    if table["optimizer_states"]:
        lines.append(f"optimizer   {', '.join(table['optimizer_states'])}")
    if table["state"]:
        lines.append(f"state       {', '.join(table['state'])}")
    if table["layout"]:
        lines.append("layout      " + ", ".join(f"{k}={v}" for k, v in table["layout"].items()))
    lines += ["", *_table(table["files"])]
    return [*lines, *table["notes"]]


def _table(files: list[dict[str, Any]]) -> list[str]:
    """The table of files: rank, layers, tensors and bytes of each."""
    from shardwright.ckpt.errors import printable
    from shardwright.ckpt.move.progress import human

    rows = [("file", "rank", "layers", "tensors", "bytes")]
    rows += [
        (
            printable(f["name"]),
            f["rank"] or "-",
            f["layers"] or "-",
            str(f["tensors"]),
            human(f["bytes"]),
        )
        for f in files
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(word.ljust(w) for word, w in zip(row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip


def _tensor_lines(table: Mapping[str, Any]) -> list[str]:
    lines = [f"{table['name']}  {table['dtype']} {table['shape']}"]
    lines += [
        f"  box at {box['offsets']} of size {box['sizes']}: {box['file']} byte "
        f"{box['offset_bytes']}, strides {box['strides']}"
        for box in table["boxes"]
    ]
    values = ", ".join(f"{k} {v:.6g}" for k, v in table["statistics"].items()) or table["note"]
    return [*lines, f"  {values}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    return options.run(command, argv)


if __name__ == "__main__":
    raise SystemExit(main())
