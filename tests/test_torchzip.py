"""The container of ``torch.save``: what is read, what is written, and what is refused."""

import argparse
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import types
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ckpt.containers import torch_zip
from shardwright.ckpt.containers.pickle_writer import dump_tensors
from shardwright.ckpt.containers.pickles import Global, Stub, TensorRef, contiguous
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.box import row_major
from shardwright.ckpt.model.dtypes import ITEMSIZE, TO_TORCH
from shardwright.ckpt.model.file_layout import Spec


def save(path, value, **options):
    torch.save(value, path, **options)
    return str(path)


def read(entry, path):
    """The tensor, from the bytes that the entry points at."""
    dtype = getattr(torch, TO_TORCH[entry.dtype])
    extent = 1 + sum((n - 1) * step for n, step in zip(entry.shape, entry.strides, strict=True))
    if 0 in entry.shape:
        return torch.empty(entry.shape, dtype=dtype)
    with open(path, "rb") as file:
        file.seek(entry.offset_bytes)
        raw = bytearray(file.read(extent * dtype.itemsize))
    assert len(raw) == extent * dtype.itemsize
    return torch.frombuffer(raw, dtype=dtype).as_strided(entry.shape, entry.strides)


def same(a, b):
    """Bit for bit, so that NaN equals itself."""
    flat = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def random(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    numel = int(torch.Size(shape).numel())
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def flat(value, name=""):
    """(joined key, tensor) for every tensor inside dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield name.removeprefix("."), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{name}.{number}")


def check_file(path, value):
    """The index names the tensors of ``value``, in order, and points at their bytes."""
    index = torch_zip.index(path)
    expected = dict(flat(value))
    assert list(index.entries) == list(expected)
    for name, tensor in expected.items():
        assert index.entries[name].name == name
        assert same(read(index.entries[name], path), tensor), name
    assert (index.path, index.size_bytes) == (path, os.path.getsize(path))
    return index


# --- files of torch.save --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TO_TORCH)
def test_every_dtype_of_torch_is_read(dtype, tmp_path):
    kind = getattr(torch, TO_TORCH[dtype])
    shapes = [(3, 4), (), (0,), (2, 0, 3), (1,), (5, 1, 7)]
    value = {f"t{i}": random(shape, kind) for i, shape in enumerate(shapes)}
    index = check_file(save(tmp_path / "a.pt", value), value)
    assert all(entry.dtype == dtype for entry in index.entries.values())
    assert [entry.shape for entry in index.entries.values()] == shapes


def test_views_are_strided_entries_of_one_storage(tmp_path):
    base = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)
    value = {
        "base": base, "transposed": base.transpose(0, 2), "slice": base[1:3, ::2, 3:],
        "row": base[2], "element": base[1, 2, 3], "expanded": base[0, :, :1].expand(5, 6),
        "diagonal": base[0].diagonal(), "empty": base[:, 5:], "tied": base,
    }  # fmt: skip
    index = check_file(save(tmp_path / "a.pt", value), value)
    assert index.entries["transposed"].strides == (1, 6, 30)
    assert index.entries["expanded"].strides == (6, 0)
    start = index.entries["base"].offset_bytes
    assert index.entries["row"].offset_bytes == start + 4 * 60
    assert index.entries["tied"].offset_bytes == start


def test_parameters_ordered_dicts_and_attributes_are_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].weight.tensor_model_parallel = True
    parameters = dict(model.named_parameters())
    check_file(save(tmp_path / "a.pt", parameters), parameters)
    state = model.state_dict()
    index = check_file(save(tmp_path / "b.pt", state), state)
    assert "0.weight" in index.entries


def test_nested_dicts_are_joined_and_the_rest_is_in_extra(tmp_path):
    value = {
        "model": {"embedding": {"weight": torch.ones(3)}, "a.b": torch.zeros(2)},
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
        "iteration": 7,
        "rng_state": [{"random": (3, (1, 2), None), "torch": torch.arange(4)}],
        "scale": torch.tensor(2.0),
        0: {(torch.bfloat16, torch.float32): {"param": torch.ones(5)}},
    }
    index = check_file(save(tmp_path / "a.pt", value), value)
    assert list(index.entries) == [
        "model.embedding.weight", "model.a.b", "rng_state.0.torch", "scale",
        "0.(torch.bfloat16, torch.float32).param",
    ]  # fmt: skip
    assert list(index.extra) == ["model", "args", "iteration", "rng_state", "0"]
    assert index.extra["iteration"] == 7
    assert type(index.extra["args"]) is Stub
    assert index.extra["args"].state == {"lr": 0.1, "dtype": Global("torch", "bfloat16")}
    assert type(index.extra["model"]["embedding"]["weight"]) is TensorRef
    assert index.extra["rng_state"][0]["random"] == (3, (1, 2), None)


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "module"])
def test_a_wrapper_keeps_its_key_in_the_names(wrapper, tmp_path):
    value = {wrapper: {"w": torch.ones(2)}, "epoch": 1}
    index = check_file(save(tmp_path / "a.pt", value), value)
    assert list(index.entries) == [f"{wrapper}.w"]


def test_a_list_or_a_single_tensor_is_a_file_too(tmp_path):
    value = [None, {"a": torch.ones(2)}, torch.zeros(1)]
    index = check_file(save(tmp_path / "a.pt", value), value)
    assert (list(index.entries), index.extra["0"], "2" in index.extra) == (
        ["1.a", "2"],
        None,
        False,
    )
    index = check_file(save(tmp_path / "b.pt", torch.arange(3)), torch.arange(3))
    assert (list(index.entries), index.extra) == ([""], {})
    index = check_file(save(tmp_path / "c.pt", 3), 3)
    assert (index.entries, index.extra) == ({}, {"": 3})
    assert torch_zip.index(save(tmp_path / "d.pt", {})).entries == {}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol, tmp_path):
    value = {"a": torch.ones(2, 3), "b": [torch.zeros(4)]}
    check_file(save(tmp_path / "a.pt", value, pickle_protocol=protocol), value)


def test_a_file_name_outside_ascii_is_a_prefix_like_any_other(tmp_path):
    value = {"ключ": torch.ones(2)}
    check_file(save(tmp_path / "модель.pt", value), value)


def test_an_archive_repacked_without_alignment_is_read(tmp_path):
    value = {"a": torch.ones(3), "b": torch.arange(5, dtype=torch.int16)}
    path = tmp_path / "b.pt"
    with zipfile.ZipFile(save(tmp_path / "a.pt", value)) as old, zipfile.ZipFile(path, "w") as new:
        new.writestr("x/", b"")
        for name in old.namelist():
            new.writestr("x" + name[1:], old.read(name))
    index = check_file(str(path), value)
    assert any(entry.offset_bytes % 4 for entry in index.entries.values())


def test_a_view_that_starts_on_an_odd_byte_is_read(tmp_path):
    path = tmp_path / "a.pt"
    with torch.utils.serialization.config.patch("save.storage_alignment", 1):
        value = {
            "x": torch.ones(3, dtype=torch.uint8)[1:],
            "y": torch.arange(6, dtype=torch.int16)[1::2],
        }
        check_file(save(path, value), value)


def test_a_span_of_a_file_is_an_archive_of_its_own(tmp_path):
    buffers = []
    for fill in (1.0, 2.0):
        buffers.append(io.BytesIO())
        torch.save(torch.full((3,), fill), buffers[-1])
    path = tmp_path / "0.distcp"
    path.write_bytes(b"".join(buffer.getvalue() for buffer in buffers))
    start = len(buffers[0].getvalue())
    for fill, at, length in ((1.0, 0, start), (2.0, start, len(buffers[1].getvalue()))):
        index = torch_zip.index_span(str(path), at, length)
        assert read(index.entries[""], path).tolist() == [fill] * 3
    for at, length in ((start, start + 10**6), (-1, 5), (0, -1), (10, start)):
        with pytest.raises(CheckpointError, match=r"0\.distcp"):
            torch_zip.index_span(str(path), at, length)


# --- golden files of Megatron-LM ------------------------------------------------------------


def stub_pickle():
    """A ``pickle_module`` for torch.load that stands in for Megatron's classes."""

    class Inert:
        def __init__(self, *args):
            pass

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return Inert if module.startswith("megatron") else super().find_class(module, name)

    return types.SimpleNamespace(Unpickler=Unpickler, load=pickle.load, __name__="stub_pickle")


def test_every_golden_file_points_at_what_torch_loads(golden):
    paths = [
        path
        for name in ("model_optim_rng.pt", "distrib_optim.pt", "common.pt")
        for path in sorted(golden.glob(f"**/{name}"))
    ]
    assert len(paths) > 50
    for path in paths:
        value = torch.load(
            path, pickle_module=stub_pickle(), weights_only=False, map_location="cpu"
        )
        index = check_file(str(path), value)
        if path.name != "distrib_optim.pt":
            assert index.extra["args"].name == "Namespace"
            assert index.extra["iteration"] == value["iteration"]


def test_golden_files_are_read_without_torch_or_numpy(golden):
    script = (
        "import sys; from shardwright.ckpt.containers import torch_zip\n"
        "for path in sys.argv[1:]: assert torch_zip.index(path).size_bytes > 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    paths = [str(path) for path in sorted(golden.glob("**/*.pt"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, *paths], check=True, env=environment)


# --- files that are written -----------------------------------------------------------------


def seal(path, layout, tensors):
    """The file of a layout with its tensors and checksums in place."""
    raw = bytearray(layout.size_bytes)
    for offset, data in layout.fixed:
        assert not any(raw[offset : offset + len(data)])
        raw[offset : offset + len(data)] = data
    for name, offset in layout.offsets.items():
        data = bytes(tensors[name].reshape(-1).view(torch.uint8).tolist())
        raw[offset : offset + len(data)] = data
    for sum_ in layout.checksums:
        crc = zlib.crc32(raw[sum_.offset_bytes : sum_.offset_bytes + sum_.length_bytes])
        for slot in sum_.slots:
            raw[slot : slot + 4] = struct.pack("<I", crc)
    Path(path).write_bytes(raw)
    return str(path)


def specs_of(tensors):
    ours = {getattr(torch, name): dtype for dtype, name in TO_TORCH.items()}
    return [Spec(name, ours[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


def check_written(path, tensors):
    for options in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **options)
        assert list(loaded) == list(tensors)
        for name, tensor in tensors.items():
            assert same(loaded[name], tensor), name
            assert loaded[name].is_contiguous()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {row.compress_type for row in archive.infolist()} == {zipfile.ZIP_STORED}
        assert all(row.flag_bits == 0 for row in archive.infolist())
    return check_file(path, tensors)


def test_a_written_file_of_all_dtypes_is_what_torch_and_zipfile_read(tmp_path):
    kinds = [getattr(torch, name) for name in TO_TORCH.values()]
    shapes = [(3, 5), (), (0,), (2, 0), (1, 1, 300)]
    tensors = {f"{kind}.{shape}": random(shape, kind) for kind in kinds for shape in shapes}
    layout = torch_zip.layout(specs_of(tensors), {})
    assert all(offset % 64 == 0 for offset in layout.offsets.values())
    index = check_written(seal(tmp_path / "a.bin", layout, tensors), tensors)
    assert index.metadata == {}
    assert index.extra == {}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.tuples(st.sampled_from(list(ITEMSIZE)), st.lists(st.integers(0, 5), max_size=4)),
        max_size=12,
    ),
    st.dictionaries(st.text(), st.text()),
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, table, metadata):
    tensors = {
        name: random(tuple(shape), getattr(torch, TO_TORCH[dtype]))
        for name, (dtype, shape) in table.items()
    }
    layout = torch_zip.layout(specs_of(tensors), metadata)
    path = seal(tmp_path_factory.mktemp("x") / "a.bin", layout, tensors)
    index = check_written(path, tensors)
    assert index.metadata == metadata
    assert {name: entry.offset_bytes for name, entry in index.entries.items()} == layout.offsets
    assert all(entry.strides == row_major(entry.shape) for entry in index.entries.values())


def test_metadata_is_a_record_that_torch_ignores(tmp_path):
    tensors, metadata = {"a": torch.ones(2)}, {"format": "pt", "step": "7", "é": "\n\u2028"}
    path = seal(tmp_path / "a.bin", torch_zip.layout(specs_of(tensors), metadata), tensors)
    assert check_written(path, tensors).metadata == metadata
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("archive/shardwright.json")) == metadata


def test_the_same_tensors_give_the_same_bytes():
    specs = [Spec("a", "F32", (2, 3)), Spec("b", "F8_E4M3", (5,))]
    assert torch_zip.layout(specs, {"k": "v"}) == torch_zip.layout(specs, {"k": "v"})


def test_every_byte_is_fixed_or_a_tensor():
    specs = [Spec(str(i), "I16", (i,)) for i in range(70)]
    layout = torch_zip.layout(specs, {"k": "v"})
    spans = [(offset, len(data)) for offset, data in layout.fixed]
    spans += [(layout.offsets[str(i)], 2 * i) for i in range(70)]
    at = 0
    for offset, length in sorted(spans):
        assert offset == at
        at += length
    assert at == layout.size_bytes
    assert len(layout.checksums) == 69  # nothing to sum in a record of no bytes


def sparse(path, layout):
    """The file with zeros for tensors; sparse, whatever its size."""
    with open(path, "wb") as file:
        file.truncate(layout.size_bytes)
        for offset, data in layout.fixed:
            file.seek(offset)
            file.write(data)
    return str(path)


def test_a_file_over_4_gib_uses_zip64(tmp_path):
    specs = [
        Spec("a", "U8", (3,)), Spec("b", "F32", (5 << 28,)), Spec("c", "BF16", (2,)),
        Spec("edge", "U8", (0xFFFFFFFF,)), Spec("under", "U8", (0xFFFFFFFE,)), Spec("d", "I64",
        (4,)),
    ]  # fmt: skip
    layout = torch_zip.layout(specs, {"k": "v"})
    path = sparse(tmp_path / "a.bin", layout)
    with open(path, "r+b") as file:
        file.seek(layout.offsets["d"])
        file.write(struct.pack("<4q", 1, -2, 3, -4))
    index = torch_zip.index(path)
    assert {name: entry.offset_bytes for name, entry in index.entries.items()} == layout.offsets
    assert (index.size_bytes > 13 << 30, index.metadata) == (True, {"k": "v"})
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["d"].tolist() == [1, -2, 3, -4]
    assert [tuple(tensor.shape) for tensor in loaded.values()] == [spec.shape for spec in specs]
    with zipfile.ZipFile(path) as archive:
        assert [row.file_size for row in archive.infolist()[2:8]] == [
            3, 5 << 30, 4, 0xFFFFFFFF, 0xFFFFFFFE, 32,
        ]  # fmt: skip


def test_more_than_65535_records_use_the_zip64_end(tmp_path):
    specs = [Spec(f"t{i}", "U8", (1,)) for i in range(66_000)]
    path = sparse(tmp_path / "a.bin", torch_zip.layout(specs, {}))
    index = torch_zip.index(path)
    assert len(index.entries) == 66_000
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 66_003


def test_too_many_tensors_are_refused_with_the_next_step(monkeypatch):
    monkeypatch.setattr(torch_zip, "MAX_RECORDS", 10)
    with pytest.raises(CheckpointError, match="max-shard-size"):
        torch_zip.layout([Spec(f"t{i}", "U8", (1,)) for i in range(7)], {})


# --- hostile and broken files ---------------------------------------------------------------


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        torch_zip.index(str(path))
    assert str(path) in str(caught.value)


def raw_zip(records, end=b"", **faults):
    """A zip archive written by hand; a record is (name, bytes), and may set header fields."""
    body, directory = b"", b""
    for name, data, *rest in records:
        row = {"flags": 0, "method": 0, "size": len(data), "packed": len(data), **dict(*rest)}
        local = {**row, "name": name, **row.pop("local", {})}
        at, crc = row.pop("at", len(body)), zlib.crc32(data)
        marks = row.get("attributes", 0)
        fields = struct.pack("<3H3L", row["method"], 0, 33, crc, row["packed"], row["size"])
        own = struct.pack("<3H3L", local["method"], 0, 33, crc, local["packed"], local["size"])
        body += struct.pack("<4s2H", b"PK\3\4", 20, local["flags"]) + own
        body += struct.pack("<2H", len(local["name"]), 0) + local["name"] + data
        directory += struct.pack("<4s3H", b"PK\1\2", 20, 20, row["flags"]) + fields
        directory += struct.pack("<5H2L", len(name), 0, 0, row.get("disk", 0), 0, marks, at) + name
    count = faults.get("count", len(records))
    at, size = faults.get("at", len(body)), faults.get("size", len(directory))
    tail = struct.pack(
        "<4s4H2LH", b"PK\5\6", faults.get("disk", 0), 0, count, count, size, at, len(end)
    )
    return body + directory + tail + end


PICKLE = (b"x/data.pkl", dump_tensors({"a": contiguous("F32", (2, 3), "0")}))
STORAGE = (b"x/data/0", bytes(24))


def write(tmp_path, *args, **faults):
    path = tmp_path / "a.pt"
    path.write_bytes(raw_zip(*args, **faults))
    return path


def test_the_zip_that_the_tests_write_by_hand_is_read(tmp_path):
    for end in (b"", b"a comment"):
        rest = [(b"x/byteorder", b"little"), (b"x/version", b"3\n")]
        path = write(tmp_path, [PICKLE, STORAGE, *rest], end=end)
        assert list(torch_zip.index(str(path)).entries) == ["a"]
        assert torch.load(path, weights_only=True)["a"].shape == (2, 3)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ({"flags": 1}, "encrypted"), ({"method": 8}, "compressed"), ({"packed": 20}, "compressed"),
        ({"local": {"flags": 1}}, "another"), ({"local": {"method": 8}}, "another"),
        ({"local": {"name": b"x/data/1"}}, "another"), ({"local": {"name": b"x/data/01"}},
        "another"),
        ({"local": {"size": 23}}, "24 bytes in the directory, 23"), ({"local": {"packed": 0}},
        "24 bytes"),
        ({"size": 23, "packed": 23, "local": {"size": 24}}, "23 bytes"), ({"disk": 1}, "damaged"),
        ({"at": 0}, "another"), ({"at": 10**6}, "outside the file"), ({"at": 5}, "another"),
        ({"size": 10**6, "packed": 10**6}, "reach past"), ({"size": 25, "packed": 25},
        "reach past"),
        ({"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}, "ZIP64"), ({"at": 0xFFFFFFFF}, "ZIP64"),
        ({"size": 20, "packed": 20}, "needs 24 bytes, its record holds 20"),
    ],
)  # fmt: skip
def test_a_storage_whose_headers_are_wrong_is_refused(fault, match, tmp_path):
    refused(write(tmp_path, [PICKLE, (*STORAGE, fault)]), match)


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"count": 1}, "more than the 1"),
        ({"count": 3}, "announces 3"),
        ({"disk": 1}, "parts"),
        ({"at": 5}, "must end at"),
        ({"size": 20}, "must end at"),
        ({"at": 0xFFFFFFFF}, "must end at"),
    ],
)
def test_a_directory_that_is_wrong_is_refused(faults, match, tmp_path):
    refused(write(tmp_path, [PICKLE, STORAGE], **faults), match)


@pytest.mark.parametrize("attributes", [0x10, 0x13, 0x005AB674, 0x4020E19D])
def test_a_record_with_bytes_that_is_marked_as_a_folder_is_refused(attributes, tmp_path):
    """torch.load gives what was in memory before: found by ``make torture``."""
    for at in (0, 1):
        records = [PICKLE, STORAGE]
        records[at] = (*records[at], {"attributes": attributes})
        refused(write(tmp_path, records), "bytes and is marked as a folder")


def test_a_storage_whose_name_is_that_of_a_folder_is_refused(tmp_path):
    pickle = dump_tensors({"a": contiguous("F32", (2, 3), "0/")})
    path = write(tmp_path, [(b"x/data.pkl", pickle), (b"x/data/0/", bytes(24))])
    refused(path, "bytes and is marked as a folder")


def test_folders_without_bytes_and_other_attributes_are_read(tmp_path):
    """As programs that pack folders write them."""
    value = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    storage = (STORAGE[0], value.numpy().tobytes(), {"attributes": 0x81A4002F})
    folders = [(b"x/data/", b"", {"attributes": 0x41ED0010}), (b"x/", b"")]
    path = write(tmp_path, [PICKLE, *folders, storage, (b"x/version", b"3\n")])
    assert same(torch.load(path, weights_only=True)["a"], value)
    check_file(str(path), {"a": value})


def test_bytes_after_the_end_are_refused(tmp_path):
    path = write(tmp_path, [PICKLE, STORAGE])
    path.write_bytes(path.read_bytes() + b"x")
    refused(path, "bytes after the end")
    path.write_bytes(b"x" + write(tmp_path, [PICKLE, STORAGE]).read_bytes())
    refused(path, "no zip archive")


def test_records_that_overlap_are_refused(tmp_path):
    inner = raw_zip([STORAGE])[: 30 + len(STORAGE[0]) + 24]
    outer = (b"x/data/1", inner + bytes(9))
    at = len(raw_zip([PICKLE])) - 46 - 22 - len(PICKLE[0]) + 30 + len(outer[0])
    data = raw_zip([PICKLE, outer, (*STORAGE, {"at": at})])
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    refused(path, "overlaps")
    refused(write(tmp_path, [PICKLE, STORAGE, STORAGE]), "two records named")
    refused(
        write(tmp_path, [PICKLE, STORAGE, (*STORAGE, {"at": len(raw_zip([PICKLE])) - 78})]),
        "two|another",
    )


def test_two_ends_that_disagree_are_refused(tmp_path):
    path = save(tmp_path / "a.pt", {"a": torch.ones(2)})
    raw = bytearray(Path(path).read_bytes())
    raw[-22 + 10] -= 1  # the narrow end's number of records
    Path(path).write_bytes(raw)
    refused(path, "disagree")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(200 << 20))
    tracemalloc.start()
    refused(path, "compressed")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_pickle_over_the_limit_is_refused_before_it_is_read(tmp_path):
    size = torch_zip.MAX_RECORD_BYTES + 1
    raw = raw_zip([(b"x/data.pkl", b"", {"size": size, "packed": size})], at=40 + size)
    path = tmp_path / "a.pt"
    with open(path, "wb") as file:
        file.write(raw[:40])
        file.seek(40 + size)
        file.write(raw[40:])
    tracemalloc.start()
    refused(path, "the limit is 100000000")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_files_of_another_kind_are_refused_with_what_they_are(tmp_path):
    path = tmp_path / "a.pt"
    for data, match in [
        (b"", "no zip archive"), (b"PK\3\4" + bytes(100), "without an end"),
        (pickle.dumps({}), "a bare pickle"), (b"version https://git-lfs.github.com/spec/v1\n",
        "lfs pull"),
        (raw_zip([]), "0 records"), (raw_zip([(b"mimetype", b"x")]), "not written by torch.save"),
        (raw_zip([PICKLE, (b"y/data.pkl", b"N.")]), "2 records"), (raw_zip([(b"data.pkl", b"N.")]),
        "0 records"),
    ]:  # fmt: skip
        path.write_bytes(data)
        refused(path, match)


def test_a_torchscript_archive_is_refused_by_name(tmp_path):
    for name in (b"x/constants.pkl", b"x/code/__torch__.py"):
        refused(write(tmp_path, [PICKLE, STORAGE, (name, b"")]), "TorchScript.*state_dict")


def test_big_endian_bytes_are_refused(tmp_path):
    refused(write(tmp_path, [PICKLE, STORAGE, (b"x/byteorder", b"big")]), "byte order")
    refused(write(tmp_path, [PICKLE, STORAGE, (b"x/byteorder", b"")]), "byte order")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '"x"', '{"a": 1}', '{"a": {"b": "c"}}', '{"a": []}', '{"a":"1","a":"2"}',
    '[["a","b"]]',
     "[" * 100_000, '{"a": "\xff"}', '{"a": ' + "9" * 5_000 + "}"],
)  # fmt: skip
def test_metadata_that_is_not_flat_text_is_refused(text, tmp_path):
    record = (b"x/shardwright.json", text.encode("latin-1"))
    refused(write(tmp_path, [PICKLE, STORAGE, record]), "shardwright.json")


def view(shape, strides, offset=0, dtype="F32", numel=6, key="0"):
    whole = contiguous(dtype, (numel,), key)
    ref = TensorRef(whole.storage, dtype, offset, shape, strides)
    return (b"x/data.pkl", dump_tensors({"a": ref}))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (view((7,), (1,)), "reach byte 28 of a storage of 24"), (view((2, 3), (3, 2)),
        "reach byte 32"),
        (view((6,), (1,), offset=1), "reach byte 28"), (view((), (), offset=6), "reach byte 28"),
        (view((2,), (2**62,)), "reach byte"),
        (view((2**40, 2**40), (0, 0)), "reach byte"), (view((6,), (1,), numel=7), "needs 28 bytes"),
        (view((3,), (1,), dtype="F8_E4M3", numel=25), "needs 25 bytes"), (view((6,),
        (1,), key="1"), "not in the"),
        (view((6,), (1,), key="../x"), "not in the"), ((b"x/data.pkl", b"\x80\x02cos\nsystem\n."),
        "os.system"),
        ((b"x/data.pkl", b""), "truncated"),
    ],
)  # fmt: skip
def test_a_view_outside_its_storage_is_refused(bad, match, tmp_path):
    assert torch_zip.index(str(write(tmp_path, [view((2, 2), (3, 1)), STORAGE]))).entries
    refused(write(tmp_path, [bad, STORAGE]), match)


def test_an_empty_view_may_start_anywhere_as_torch_writes_them(tmp_path):
    value = {"a": torch.zeros(2, 0)[1:], "b": torch.zeros(3)[3:]}
    entries = check_file(save(tmp_path / "a.pt", value), value).entries
    assert entries["a"].shape == (1, 0)
    index = torch_zip.index(str(write(tmp_path, [view((0,), (1,), offset=7), STORAGE])))
    assert index.entries["a"].offset_bytes < index.size_bytes


def nested(*ops):
    """A pickle that makes a tensor (memo 0) and then does what ``ops`` say."""
    one = dump_tensors({"a": contiguous("F32", (6,), "0")})
    tensor = one[one.index(b"ctorch") : -2]
    return (b"x/data.pkl", b"\x80\x02" + tensor + b"r\xff\x00\x00\x000" + b"".join(ops) + b".")


GET = b"j\xff\x00\x00\x00"


def test_values_without_end_are_refused(tmp_path):
    doubled = GET + b"".join(
        b"r\x00\x01\x00\x000](j\x00\x01\x00\x00j\x00\x01\x00\x00e" for _ in range(40)
    )
    cycle = b"]r\x00\x01\x00\x00(j\x00\x01\x00\x00j\x00\x01\x00\x00e"
    deep = b"]" * 100 + GET + b"a" * 100
    for ops in (doubled, cycle, deep):
        refused(write(tmp_path, [nested(ops), STORAGE]), "without end")


def test_names_that_are_ambiguous_long_or_no_text_are_refused(tmp_path):
    def text(value):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw

    twice = b"}(" + text("a.b") + GET + text("a") + b"}" + text("b") + GET + b"su"
    refused(write(tmp_path, [nested(twice), STORAGE]), "two tensors whose place reads 'a.b'")
    numbers = b"}(" + text("0") + b"NK\x00Nu"
    refused(write(tmp_path, [nested(numbers), STORAGE]), "two values whose key reads '0'")
    for name in ("\ud800", "x" * 5_000):
        refused(
            write(tmp_path, [nested(b"}" + text(name) + GET + b"s"), STORAGE]),
            "no name of a tensor",
        )


def small_file(tmp_path):
    value = {"a": torch.ones(2, 2), "n": argparse.Namespace(x=1), "b": [torch.zeros(1).t()]}
    return Path(save(tmp_path / "a.pt", value)).read_bytes()


def test_every_truncation_is_refused(tmp_path):
    raw, path = small_file(tmp_path), tmp_path / "b.pt"
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        refused(path, None)


def test_damaged_files_are_read_or_refused(tmp_path):
    raw, path = small_file(tmp_path), tmp_path / "b.pt"
    ours = raw_zip([PICKLE, STORAGE, (b"x/shardwright.json", b'{"a": "b"}')])

    @given(
        st.sampled_from([raw, ours]),
        st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
    )
    @settings(max_examples=1_000, deadline=None)
    def check(data, changes):
        damaged = bytearray(data)
        for at, value in changes:
            damaged[at % len(data)] = value
        path.write_bytes(damaged)
        refusal, entries = str(path), {}
        try:
            entries = torch_zip.index(str(path)).entries
        except CheckpointError as error:
            refusal = str(error)
        assert str(path) in refusal
        for entry in entries.values():
            read(entry, path)

    check()
