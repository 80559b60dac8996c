"""``inspect-ckpt``: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import options

EXAMPLES = (
    "checkpoint-1000",
    "checkpoint-1000 --tensor model.norm.weight",
    "checkpoint-1000 --tensors '*.mlp.*' --statistics",
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
    made.add_argument(
        "--tensors",
        metavar="GLOB",
        help="names, types and shapes of the tensors that match, e.g. '*.q_proj.*' (a plain word: "
        "names with it); also of one rank's file, and of a folder that lacks files",
    )
    made.add_argument(
        "--statistics", action="store_true", help="with --tensors: read and describe the values"
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
    if args.statistics and args.tensors is None:
        made.error("--statistics goes with --tensors GLOB")
    source = options.checkpoint_of(args, made)
    if args.tensors is not None:
        return _tensors(source, args)
    from shardwright.ckpt.errors import CheckpointError
    from shardwright.ckpt.inspect import describe, describe_tensor
    from shardwright.ckpt.reader import read_checkpoint

    ckpt = read_checkpoint(source, options.read_options(args))
    if args.tensor:
        if args.tensor not in ckpt.manifest.tensors:
            similar = _similar(args.tensor, ckpt.manifest.tensors)
            raise CheckpointError(f"{ckpt.path}: no tensor {args.tensor}{similar}")
        table = describe_tensor(ckpt, args.tensor)
        lines = _tensor_lines(table)
    else:
        table = describe(ckpt)
        lines = _lines(table)
    if args.json:
        options.emit(json.dumps(table, indent=2))
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
            "train": family.trained(FAMILIES[family.name].factors)
            if family.name in FAMILIES
            else "no",
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
        "megatron  Megatron-LM's args say all of it; docs/families.md says what is compared",
    ]


def _similar(name: str, known: Iterable[str]) -> str:
    """The names that are most like one that is not there."""
    import difflib

    near = difflib.get_close_matches(name, list(known), 3, 0.3)
    near = near or [other for other in known if name in other][:3]
    return f"; similar names: {', '.join(near)}" if near else "; --tensors '*' lists all"


def _tensors(source: Path, args: argparse.Namespace) -> int:
    """List tensors: logical ones, or those of single files where no checkpoint can be read."""
    from shardwright.ckpt.errors import CheckpointError
    from shardwright.ckpt.inspect import list_stored, list_tensors
    from shardwright.ckpt.move.storage import storage_path
    from shardwright.ckpt.reader import read_checkpoint

    fault = ""
    try:
        ckpt = read_checkpoint(source, options.read_options(args))
        rows = list_tensors(ckpt, args.tensors, args.statistics)
    except CheckpointError as error:
        if not source.exists():
            raise
        fault = str(error)
        rows = list_stored(storage_path(source), args.tensors, args.statistics)
    listed = [row for row in rows if "name" in row]
    if not listed and not fault:
        raise CheckpointError(f"{source}: no tensor matches {args.tensors}")
    if args.json:
        print(json.dumps({"tensors": rows, "fault": fault}, indent=2))
    else:
        options.say(*_rows(rows), f"{len(listed)} tensors")
    if not fault:
        return options.DONE
    print(f"these are the tensors of single files, as they are stored: {fault}", file=sys.stderr)
    return options.DONE if listed and source.is_file() else options.REFUSED


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each tensor, in columns; a heading for each file."""
    named = [row for row in rows if "name" in row]
    width = max((len(row["name"]) for row in named), default=0)
    sizes = max((len(str(row["shape"])) for row in named), default=0)
    lines, file = [], ""
    for row in rows:
        if row.get("file", "") != file:
            file = row["file"]
            lines.append(f"{file}:")
        if "fault" in row:
            lines.append(f"  {row['fault']}")
            continue
        line = f"{row['name']:<{width}}  {row['dtype']:<4}  {row['shape']!s:<{sizes}}"
        lines.append(f"{line}  {_said(row)}".rstrip())
    return lines


def _said(row: Mapping[str, Any]) -> str:
    """The statistics of a tensor in one line."""
    found = dict(row.get("statistics", {}))
    rare = [f"{found.pop(key)} {key}" for key in ("nan", "inf") if found.get(key)]
    plain = [f"{key} {found[key]:.4g}" for key in ("min", "max", "mean", "std") if key in found]
    return ", ".join([*plain, *rare]) or row.get("note", "")


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
