"""Small files that stand for much: refused, at once and in little memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bounded import CPU_SECONDS, measured
from fixtures_safety import case, write_hf, write_native
from safetensors.torch import save_file

from shardwright.ckpt import CheckpointError, open_checkpoint
from shardwright.ckpt.checkpoint.json_io import load_json
from shardwright.ckpt.containers import torch_legacy, torch_zip
from shardwright.ckpt.containers.pickles import decode
from shardwright.ckpt.errors import raise_all
from shardwright.ckpt.model.box import Box, tile
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_tool


def doubled(times: int, join=lambda a, b: [a, b]):
    """A value of 2^times parts in a few bytes for each doubling."""
    value = join(1, 2)
    for _ in range(times):
        value = join(value, value)
    return value


class Holder:
    """Pickles as an object of a class that is kept as it is."""

    def __init__(self, inside):
        self.inside = inside

    def __reduce__(self):
        return torch.device, ("cpu",), {"inside": self.inside}


JOINS = {
    "lists": lambda a, b: [a, b],
    "tuples": lambda a, b: (a, b),
    "dicts": lambda a, b: {"x": a, "y": b},
    "objects": lambda a, b: Holder([a, b]),
}


@pytest.mark.parametrize("kind", JOINS)
def test_a_pickle_that_names_its_parts_again_and_again_is_refused(kind):
    raw = pickle.dumps(doubled(40, JOINS[kind]))
    assert len(raw) < 3000
    with pytest.raises(CheckpointError, match="stand for values without end"):
        decode(raw, "file")


def test_long_texts_count_as_often_as_they_are_named():
    for value in ("x" * 100_000, b"y" * 100_000):
        with pytest.raises(CheckpointError, match="stand for values without end"):
            decode(pickle.dumps([value] * 100_000), "file")


def test_a_list_that_holds_itself_is_refused_and_an_object_that_does_is_not():
    value: list[object] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="stand for values without end"):
        decode(pickle.dumps(value), "file")
    holder = Holder(None)
    holder.inside = [holder]
    assert decode(pickle.dumps(holder), "file").state["inside"]


def test_values_that_many_others_share_are_read():
    shared = {"a": [1, 2], "b": "text"}
    assert decode(pickle.dumps([shared] * 2000), "file") == [shared] * 2000


@pytest.mark.parametrize("zipped", [True, False])
def test_both_forms_of_torch_files_are_measured(zipped, tmp_path):
    torch.save({"w": torch.ones(2), "args": doubled(40)}, tmp_path / "a.bin",
               _use_new_zipfile_serialization=zipped)  # fmt: skip
    with pytest.raises(CheckpointError, match="stand for values without end"):
        torch_zip.index(tmp_path / "a.bin")
    assert torch_legacy.MAX_PICKLES_BYTES == torch_zip.MAX_RECORD_BYTES == 100_000_000


@pytest.mark.parametrize("part", ["[],", '{"":0},'])
def test_json_of_more_values_than_a_table_has_is_refused_before_it_is_parsed(part, tmp_path):
    text = "[" + part * (1 << 21) + "0]"
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"JSON of about \d+ values; at most 4194304"):
        load_json(tmp_path / "a.json")
    head = text.encode()
    (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(CheckpointError, match=r"JSON of about \d+ values; at most 4194304"):
        open_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("shards", [True, False])
def test_a_header_of_unknown_names_costs_little_more_than_its_bytes(shards, tmp_path):
    """300,000 of them took 15 s and 666 MiB: a chunk and a line of the error for each."""
    folder = write_native(tmp_path / "x") if shards else write_hf(tmp_path / "x")
    file = next(folder.glob("model*.safetensors"))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    row = {"dtype": "F32", "shape": [0], "data_offsets": [len(body)] * 2}
    header |= {f"unknown.{i}": row for i in range(60_000)}
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    if shards:
        table = json.loads((folder / "checkpoint.json").read_text())
        table.pop("files", None)
        (folder / "checkpoint.json").write_text(json.dumps(table))
    with measured() as cost, pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert "60000 faults" in str(error.value)
    assert len(str(error.value)) < 5000
    assert cost.peak_bytes < 15 * len(text)
    assert cost.cpu_s < CPU_SECONDS


# --- files that are larger, or smaller, than they should be -----------------------------------


def in_little_memory(code: str, *words: object, mib: int = 300) -> str:
    """The output of code that runs in a process of its own; it may take ``mib`` MiB."""
    script = (
        "import sys\n"
        "from shardwright.ckpt import *\n"
        f"try:\n    {code}\nexcept CheckpointError as error:\n    print('REFUSED', error)\n"
        "[line] = [text for text in open('/proc/self/status') if text.startswith('VmHWM')]\n"
        "print(int(line.split()[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)],
                          capture_output=True, text=True, check=True, timeout=600)  # fmt: skip
    text, _, used = done.stdout.rstrip().rpartition("\n")
    assert int(used) < mib, f"{used} MiB"
    return text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_description_of_gigabytes_is_refused_and_not_read(name, tmp_path):
    write_hf(tmp_path / "hf")
    if "index" in name:
        (tmp_path / "hf/model.safetensors").unlink()
    with open(tmp_path / "hf" / name, "wb") as file:
        file.truncate(3 << 30)
    text = in_little_memory("open_checkpoint(sys.argv[1])", tmp_path / "hf")
    assert text.startswith("REFUSED")
    assert f"{name}: 3221225472 bytes; at most 100000000" in text


def test_a_pointer_of_gigabytes_is_refused_and_not_read(tmp_path):
    with open(tmp_path / "latest", "wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(CheckpointError, match="latest: 3221225472 bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kernel", ["/proc/self/mem", "/proc/self/maps", "/proc/kmsg", "/dev/zero"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_to_files_of_the_kernel_never_hang(kernel, name, tmp_path):
    if not Path(kernel).exists():
        pytest.skip("this system has no such file")
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink()
    (tmp_path / "hf" / name).symlink_to(kernel)
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        open_checkpoint(tmp_path / "hf")


def test_a_pipe_in_the_place_of_a_file_never_hangs(tmp_path):
    write_hf(tmp_path / "hf")
    for name in ("model.safetensors", "config.json"):
        kept = (tmp_path / "hf" / name).read_bytes()
        (tmp_path / "hf" / name).unlink()
        os.mkfifo(tmp_path / "hf" / name)
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "hf")
        (tmp_path / "hf" / name).unlink()
        (tmp_path / "hf" / name).write_bytes(kept)


def test_a_tensor_that_repeats_one_element_is_shown_in_little_memory(tmp_path):
    write_hf(tmp_path / "hf", binary=True)
    (tmp_path / "hf/config.json").unlink()
    torch.save({"w": torch.ones(1).expand(1 << 31)}, tmp_path / "hf/pytorch_model.bin")
    code = (
        "from shardwright.ckpt.inspect import describe_tensor; "
        "print(describe_tensor(open_checkpoint(sys.argv[1]).checkpoint, 'w'))"
    )
    text = in_little_memory(code, tmp_path / "hf")
    assert "2147483648" in text


# --- counts that a file claims ----------------------------------------------------------------


@pytest.mark.parametrize("key", ["make_vocab_size_divisible_by", "mesh"])
@pytest.mark.parametrize("value", [10**9, 2**63, 10**30])
def test_counts_of_checkpoint_json_are_bounded(key, value, tmp_path):
    folder = write_native(tmp_path / "native", 1, 1, made=case(), multiple=2)
    table = json.loads((folder / "checkpoint.json").read_text())
    table[key] = value if key != "mesh" else {**table["mesh"], "dp": value}
    (folder / "checkpoint.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=str(value)):
        open_checkpoint(folder)


# --- boxes that overlap -----------------------------------------------------------------------


def test_boxes_tile_a_tensor_or_they_do_not():
    """Exhaustively: every pair and triple of boxes of a 3 x 3 tensor, against counting."""
    spans = [(o, s) for o in range(3) for s in range(1, 4 - o)]
    boxes = [Box((a, b), (n, m)) for a, n in spans for b, m in spans]

    def covered_once(chosen) -> bool:
        count = [[0] * 3 for _ in range(3)]
        for box in chosen:
            for i in range(box.offsets[0], box.stop(0)):
                for j in range(box.offsets[1], box.stop(1)):
                    count[i][j] += 1
        return all(n == 1 for row in count for n in row)

    tilings = 0
    for i, a in enumerate(boxes):
        for j, b in enumerate(boxes[i:], i):
            for c in (None, *boxes[j:]):
                chosen = [a, b] if c is None else [a, b, c]
                tilings += covered_once(chosen)
                assert tile(chosen, (3, 3)) == covered_once(chosen), chosen
    assert tilings > 10


def test_boxes_of_no_elements_and_of_no_dims_tile():
    assert tile([Box((), ())], ())
    assert not tile([Box((), ()), Box((), ())], ())
    assert tile([], (0, 3))
    assert tile([Box((0, 0), (0, 3))], (0, 3))
    assert not tile([], (2,))


def test_thousands_of_boxes_are_proven_at_once():
    boxes = [Box((i, 0, j), (1, 7, 1)) for i in range(100) for j in range(100)]
    assert tile(boxes, (100, 7, 100))
    assert not tile([*boxes[1:], boxes[2]], (100, 7, 100))


# --- names that a terminal would obey ---------------------------------------------------------

EVIL = "w\x1b[2J\nerror: all is well\r\u202e"


@pytest.mark.parametrize("binary", [True, False])
def test_names_of_a_file_are_printed_escaped(binary, tmp_path, capsys):
    """In every table, report and error: no escape sequence, and no line that is not ours."""
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = {EVIL: torch.ones(2), "b": torch.ones(1)}
    if binary:
        torch.save({**tensors, f"{EVIL}step": 5}, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / EVIL.replace("/", "")).write_text("a side file")
    (folder / "config.json").write_text(json.dumps({"model_type": EVIL}))
    for main, argv in (
        (inspect_ckpt.main, [str(folder)]),
        (inspect_ckpt.main, [str(folder), "--tensor", EVIL]),
        (inspect_ckpt.main, [str(folder), "--tensor", "none"]),
        (merge_ckpt.main, [str(folder), "--output", str(tmp_path / "to"), "--verify"]),
        (merge_ckpt.main, [str(folder), "--output", str(tmp_path / "to")]),
        (reshard_tool.main, [str(folder), "--tp", "2"]),
        (verify_ckpt.main, [str(folder), str(tmp_path / "to")]),
        (verify_ckpt.main, [str(folder)]),
    ):
        main(argv)
        said = "".join(capsys.readouterr())
        assert said
        assert not {c for c in said if not c.isprintable()} - {"\n"}, repr(said)
        assert not any(line.startswith("error: all is well") for line in said.splitlines())


def test_an_error_keeps_its_own_list_and_no_line_of_a_name():
    with pytest.raises(CheckpointError) as caught:
        raise_all([f"{EVIL}: missing", "b: missing"], "two")
    lines = str(caught.value).split("\n")
    assert [line[:4] for line in lines] == ["two ", "  - ", "  - "]
    assert "\\x1b[2J\\nerror: all is well\\r\\u202e: missing" in lines[1]


def test_values_of_a_bin_that_are_no_tensors_are_named(tmp_path):
    torch.save(
        {"w": torch.ones(2), "step": 3, "args": {"lr": 0.1}, "model": {"x": torch.ones(1)}},
        tmp_path / "a.bin",
    )
    notes = open_checkpoint(tmp_path / "a.bin").checkpoint.notes
    assert any(note.endswith("a.bin: not copied, no tensors: step, args") for note in notes)
