"""Files of torch.save from before zip archives: read like the others, or refused."""

import argparse
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_torchzip import read, same

from shardwright.ckpt import ReadOptions, RunOptions, merge, reshard, verify
from shardwright.ckpt.containers import torch_legacy, torch_zip
from shardwright.ckpt.errors import CheckpointError

OLD = {"_use_new_zipfile_serialization": False}
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16,
    torch.float8_e4m3fn,
]  # fmt: skip


def bits(shape, dtype):
    top = 2 if dtype == torch.bool else 256
    numel = int(torch.Size(shape).numel())
    raw = torch.randint(0, top, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def plain(tensor):
    """Contiguous with the usual strides, which torch leaves as they are where a dim is 1 or 0."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def flat(value, name=""):
    """(joined key, tensor) for every tensor inside dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield name.removeprefix("."), value
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from flat(inner, f"{name}.{key}")


def check(path, value, **options):
    """Both forms of a value have the same index, and the legacy one points at its bytes."""
    torch.save(value, path, **OLD, **options)
    assert not path.read_bytes().startswith(b"PK")
    index = torch_zip.index(str(path))
    expected = dict(flat(value))
    assert list(index.entries) == list(expected)
    for name, tensor in expected.items():
        assert same(plain(read(index.entries[name], path)), plain(tensor))
    return index


def refused(data, match, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match) as caught:
        torch_zip.index(str(path))
    assert type(caught.value) is CheckpointError
    assert str(path) in str(caught.value)


@st.composite
def tensors(draw):
    """A tensor that is whole, a view, strided, transposed, expanded, 0-d or empty."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    base = bits(shape, dtype)
    how = draw(st.sampled_from(["whole", "view", "strided", "turned", "expanded"]))
    if how == "view" and shape:
        return base[shape[0] // 2 :]
    if how == "strided" and shape:
        return base[..., ::2]
    if how == "turned" and len(shape) > 1:
        return base.transpose(0, -1)
    return base.unsqueeze(0).expand(3, *shape) if how == "expanded" else base


nested = st.recursive(
    tensors(),
    lambda inner: (
        st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=st.dictionaries(st.text("xyz", min_size=1), nested, max_size=4))
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_of_every_kind_lie_where_the_index_says(value, protocol, tmp_path_factory):
    check(tmp_path_factory.mktemp("x") / "a.bin", value, pickle_protocol=protocol)


def test_shared_storages_parameters_and_namespaces_read_as_in_a_zip(tmp_path):
    base = bits((6, 4), torch.float32)
    value = {
        "model": {"w": base, "tied": base, "rows": base[2:4], "p": torch.nn.Parameter(base.T)},
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16),
        "iteration": 7,
    }
    old = check(tmp_path / "old.pt", value)
    torch.save(value, tmp_path / "new.pt")
    new = torch_zip.index(str(tmp_path / "new.pt"))
    assert old.extra["iteration"] == 7
    assert old.extra["args"].state == new.extra["args"].state
    offsets = [old.entries[f"model.{n}"].offset_bytes for n in ("w", "tied", "rows")]
    assert offsets == [offsets[0], offsets[0], offsets[0] + 2 * 4 * 4]


def test_one_tensor_and_no_tensor_are_files_too(tmp_path):
    check(tmp_path / "a.pt", bits((3,), torch.int64))
    assert check(tmp_path / "b.pt", {"step": 3}).extra == {"step": 3}


def test_pickles_longer_than_the_first_read_are_read_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_legacy, "FIRST_READ_BYTES", 64)
    check(tmp_path / "a.pt", {f"layer{i}.weight": bits((2, i), torch.float32) for i in range(50)})


def handmade(root_pickle, keys=("7",), storages=b"", protocol=PROTOCOL):
    head = [pickle.dumps(v, 2) for v in (MAGIC, protocol, {"little_endian": True})]
    return b"".join([*head, root_pickle, pickle.dumps(list(keys), 2), storages])


class Storage:
    """Pickles as a persistent id."""

    def __init__(self, *pid):
        self.pid = pid


class Tensor:
    """Pickles as a call of torch._utils._rebuild_tensor."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return torch._utils._rebuild_tensor, self.args


def root(value):
    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            return item.pid if isinstance(item, Storage) else None

    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


def stored(*pid_rest, view=None, key="7"):
    return Storage("storage", torch.FloatStorage, key, "cpu", *pid_rest, view)


FOUR = struct.pack("<q4f", 4, 0, 1, 2, 3)


def test_views_of_storages_as_torch_0_3_wrote_them_are_resolved(tmp_path):
    value = {"a": Tensor(stored(4), 0, (4,), (1,)),
             "b": Tensor(stored(4, view=("8", 1, 3)), 1, (2,), (1,))}  # fmt: skip
    path = tmp_path / "a.bin"
    path.write_bytes(handmade(root(value), storages=FOUR))
    index = torch_zip.index(str(path))
    assert read(index.entries["a"], path).tolist() == [0, 1, 2, 3]
    assert read(index.entries["b"], path).tolist() == [2, 3]
    assert torch.load(path, weights_only=False)["b"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("value", "more", "match"),
    [
        ({"a": Tensor(stored(4), 1, (4,), (1,))}, {}, "reach byte 20 of a storage of 16"),
        ({"a": Tensor(stored(5), 0, (4,), (1,))}, {}, "has 4 elements.*says 5"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"keys": (), "storages": b""}, "not in the file"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"keys": ("7", "7")}, "listed twice"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"keys": ("7", "9")}, "belongs to no value"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"storages": FOUR + b"x"}, "1 bytes after"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"storages": FOUR[:-1]}, "truncated"),
        ({"a": Tensor(stored(4), 0, (4,), (1,))}, {"protocol": 1000}, "protocol 1000"),
        ({"a": Tensor(stored(4, view=("8", 3, 2)), 0, (2,), (1,))}, {}, "viewed at 3 for 2"),
        ({"a": Tensor(stored(4, view=("8", -1, 2)), 0, (2,), (1,))}, {}, "view a tuple"),
        ({"a": stored(4), "b": stored(2)}, {}, "4 F32 in one place and 2 F32 in another"),
        ({"a": Storage("module", "Net", "net.py", "code")}, {}, "whole module.*state_dict"),
        ({"a": Storage("storage", 1)}, {}, "is not a torch storage"),
        ({"a": os.system}, {}, "system; refused, nothing was executed"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(value, more, match, tmp_path):
    refused(handmade(root(value), **{"storages": FOUR, **more}), match, tmp_path)


def test_a_tar_archive_is_refused_with_the_way_out(tmp_path):
    with tarfile.open(tmp_path / "a.bin", "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    refused((tmp_path / "a.bin").read_bytes(), "tar archive.*torch.save", tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    torch.save({"a": bits((3, 5), torch.float32), "b": bits((2,), torch.int64)},
               tmp_path / "w.bin", **OLD)  # fmt: skip
    data = (tmp_path / "w.bin").read_bytes()
    for length in range(len(data)):
        refused(data[:length], "a.bin", tmp_path)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_files_read_or_are_refused_and_nothing_else(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("x") / "a.bin"
    value = {"a": bits((3, 5), torch.float32), "n": {"b": bits((2,), torch.bfloat16)}, "s": 1}
    torch.save(value, path, **OLD)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        cut = data.draw(st.integers(0, 3))
        raw[at : at + cut] = data.draw(st.binary(max_size=4))
        raw = raw or bytearray(b"\x80")
    path.write_bytes(raw)
    try:
        index = torch_zip.index(str(path))
    except CheckpointError:
        return
    for entry in index.entries.values():
        read(entry, path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/shardwright-was-here",)


@pytest.mark.parametrize("place", range(5))
def test_no_pickle_of_the_five_runs_code(place, tmp_path):
    five = [MAGIC, PROTOCOL, {"little_endian": True}, {}, []]
    five[place] = Evil()
    data = b"".join(pickle.dumps(v, 2) for v in five)
    match = "calls .*system; refused" if place else "no zip archive"
    refused(data, match, tmp_path)
    assert not os.path.exists("/tmp/shardwright-was-here")


def test_an_index_takes_no_memory_for_tensor_bytes(tmp_path):
    path = tmp_path / "a.bin"
    torch.save({f"w{i}": torch.zeros(1 << 20) for i in range(16)}, path, **OLD)
    tracemalloc.start()
    assert len(torch_zip.index(str(path)).entries) == 16
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_legacy_bin_converts_wherever_a_zip_one_does(tmp_path):
    from fixtures_safety import write_hf

    write_hf(tmp_path / "hf")
    quiet = RunOptions(quiet=True)
    (weights,) = (tmp_path / "hf").glob("*.safetensors")
    (tmp_path / "old").mkdir()
    torch.save(load_file(weights), tmp_path / "old" / "pytorch_model.bin", **OLD)
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "old" / "config.json").write_text(json.dumps(json.loads(config)))
    for source in ("hf", "old"):
        reshard(tmp_path / source, tmp_path / f"{source}-s", tp=2, pp=2, run=quiet)
    for file in (tmp_path / "hf-s").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "old-s" / file.name).read_bytes()
    # rank files of the old form in the place of zip ones
    reshard(tmp_path / "hf", tmp_path / "z", tp=2, safe_serialization=False, run=quiet)
    for file in (tmp_path / "z").glob("*.bin"):
        torch.save(torch.load(file, weights_only=True), file, **OLD)
    table = json.loads((tmp_path / "z" / "checkpoint.json").read_text())
    table.pop("files")
    (tmp_path / "z" / "checkpoint.json").write_text(json.dumps(table))
    options = ReadOptions(layout={})
    merge(tmp_path / "z", tmp_path / "one.safetensors", read=options, run=quiet)
    merge(tmp_path / "hf", tmp_path / "two.safetensors", run=quiet)
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()


def test_rank_files_of_megatron_in_the_old_form_hold_the_same(golden, tmp_path):
    pytest.importorskip("megatron.core")
    source = golden / "llama_bf16_tp2pp2_torch"
    shutil.copytree(source, tmp_path / "old")
    files = list((tmp_path / "old").rglob("*.pt"))
    for file in files:
        torch.save(torch.load(file, weights_only=False), file, **OLD)
    assert len(files) == 4
    verdict = verify(source, tmp_path / "old")
    assert verdict.same
    assert verdict.tensors > 100
