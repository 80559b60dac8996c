"""The pickle machine: it says what ``pickle`` says, runs nothing, and fails in one way."""

import argparse
import collections
import dataclasses
import enum
import io
import os
import pathlib
import pickle
import signal
import struct
import sys
import time
import types
import zipfile

import bounded
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.ckpt.containers.pickle_writer import dump_tensors
from shardwright.ckpt.containers.pickles import (
    MAX_DIMS,
    MAX_MARKS,
    Global,
    StorageRef,
    Stub,
    TensorRef,
    contiguous,
    decode,
    storage_ref,
)
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.dtypes import TO_TORCH

PROTOCOLS = (2, 3, 4, 5)


def load(data):
    return decode(data, "x.pt", lambda pid: storage_ref("x.pt", pid))


def refused(data, match=None):
    with pytest.raises(CheckpointError, match=match) as caught:
        load(data)
    assert "x.pt" in str(caught.value)
    assert len(str(caught.value)) < 2_000


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def torch_pickle(value, path):
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/data.pkl")


# --- what is read ---------------------------------------------------------------------------

KEYS = st.one_of(
    st.text(), st.integers(-(2**60) + 1, 2**60 - 1), st.booleans(), st.none(), st.binary(),
    st.tuples(st.text(), st.integers(0, 9)),
)  # fmt: skip
LEAVES = st.one_of(
    KEYS, st.integers(-(2**200), 2**200), st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.sets(KEYS), st.frozensets(KEYS),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(KEYS, inner),
        st.tuples(inner),
        st.tuples(inner, inner),
        st.tuples(inner, inner, inner),
        st.tuples(inner, inner, inner, inner),
    ),
    max_leaves=30,
)


@given(VALUES, st.sampled_from(PROTOCOLS))
@settings(max_examples=300, deadline=None)
def test_plain_values_come_back_as_pickle_gives_them(value, protocol):
    data = pickle.dumps(value, protocol)
    got = load(data)
    assert got == pickle.loads(data)
    assert type(got) is type(value)
    assert load(memoryview(data)) == got


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_long_values_and_many_items_come_back(protocol):
    big = {
        "text": "é" * 70_000, "bytes": bytes(range(256)) * 300, "list": list(range(3_000)),
        "dict": {f"k{i}": i for i in range(3_000)}, "tuple": tuple(range(3_000)),
        "ints": [0, 255, 256, 65_535, 65_536, 2**31 - 1, -(2**31), 2**31, 2**2000, -1],
        "lone surrogate": "\ud800",
    }  # fmt: skip
    assert load(pickle.dumps(big, protocol)) == big


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol):
    inner = [1]
    got = load(pickle.dumps({"a": inner, "b": inner}, protocol))
    assert got["a"] is got["b"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_that_hold_themselves_are_refused(protocol):
    """Nothing that walks, copies or prints them would come to an end."""
    outer = {}
    outer["self"] = outer
    cycle = ([],)
    cycle[0].append(cycle)
    for value in (outer, cycle):
        with pytest.raises(CheckpointError, match="stand for values without end"):
            load(pickle.dumps([value], protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dict_types_become_dicts_and_their_attributes_are_dropped(protocol):
    ordered = collections.OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 1}  # as a torch state dict has it
    values = [
        ordered,
        collections.defaultdict(int, z=3),
        collections.Counter("aab"),
        bytearray(b"x"),
    ]
    got = load(pickle.dumps(values, protocol))
    assert got == [{"b": 1, "a": 2}, {"z": 3}, {"a": 2, "b": 1}, b"x"]
    assert list(got[0]) == ["b", "a"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_library_objects_become_stubs_that_hold_their_state(protocol):
    namespace = argparse.Namespace(lr=0.5, dtype=torch.bfloat16, path=pathlib.PosixPath("/a/b"))
    got = load(pickle.dumps([namespace, types.SimpleNamespace(a=1), signal.SIGTERM], protocol))
    assert [(stub.module, stub.name) for stub in got] == [
        ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals"),
    ]  # fmt: skip
    assert got[0].state["lr"] == 0.5
    assert got[0].state["dtype"] == Global("torch", "bfloat16")
    assert got[0].state["dtype"].dtype == "BF16"
    assert got[0].state["path"].args == ("/", "a", "b")
    assert got[1].state == {"a": 1}
    assert got[2].args == (15,)


@pytest.mark.parametrize(
    "spelled",
    [
        b"csignal\nSIGTERM\n.",  # Python 3.10 and older
        b"c__builtin__\ngetattr\ncsignal\nSignals\nX\x07\x00\x00\x00SIGTERM\x86R.",  # 3.11.0
        b"csignal\nSignals\nK\x0f\x85R.",
    ],
)
def test_a_signal_is_one_value_however_python_spelled_it(spelled):
    assert pickle.loads(spelled) is signal.SIGTERM
    got = load(spelled)
    assert (got.module, got.name, got.args) == ("signal", "Signals", (15,))


@pytest.mark.parametrize(
    "data", [b"csignal\nraise_signal\nK\x0f\x85R.", b"csignal\nSIGTERM\nK\x0f\x85R."]
)
def test_nothing_else_of_signals_is_let_in(data):
    with pytest.raises(CheckpointError):
        load(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bytes_io_is_a_stub_with_its_bytes(protocol):
    file = io.BytesIO(b"amax history")
    file.seek(3)
    got = load(pickle.dumps(file, protocol))
    assert (got.module, got.name, got.state) == ("_io", "BytesIO", (b"amax history", 3, None))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
def test_a_numpy_array_is_a_stub_with_shape_and_bytes(protocol, module):
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    data = pickle.dumps(array, protocol)
    if protocol < 4 and module == "numpy.core":  # as NumPy 1 spelt it
        data = data.replace(b"numpy._core", b"numpy.core")
    got = load(data)
    assert got.module.startswith("numpy.")
    if got.name == "_reconstruct":
        _version, shape, _dtype, fortran, raw = got.state
        assert (shape, fortran) == ((2, 3), False)
    else:  # protocol 5, with the buffer in the pickle
        raw = got.args[0]
    assert raw == array.tobytes()
    load(pickle.dumps([np.float64(1.5), np.dtype("float32"), np.random.MT19937(1)], protocol))


def fake_megatron(monkeypatch):
    """Importable stand-ins, so that ``pickle`` itself writes what it writes for Megatron."""
    module = types.ModuleType("megatron.core.fake")

    class Mode(enum.Enum):
        OFF = "off"

    class Config:
        def __init__(self):
            self.lr = 0.1

    class Attributes(dict):
        pass

    fields = dataclasses.make_dataclass("Fields", ["a"], frozen=True)
    for cls in (Mode, Config, Attributes, fields):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    for name in ("megatron", "megatron.core", "megatron.core.fake"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.fake", module)
    return module


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_megatron_objects_become_stubs_without_megatron(protocol, monkeypatch):
    module = fake_megatron(monkeypatch)
    values = [module.Mode.OFF, module.Config(), module.Fields(3), module.Attributes(k=1)]
    data = pickle.dumps([*values, module.Config], protocol)
    monkeypatch.undo()
    mode, config, fields, attributes, cls = load(data)
    assert (mode.module, mode.name, mode.args) == ("megatron.core.fake", "Mode", ("off",))
    assert config.state == {"lr": 0.1}
    assert fields.state == {"a": 3}
    assert list(attributes.items) == [("k", 1)]
    assert cls == Global("megatron.core.fake", "Config")


def test_an_enum_that_python_3_11_0_wrote_is_a_stub_of_its_member():
    data = (
        b"\x80\x02cbuiltins\ngetattr\ncmegatron.core.enums\nModelType\n" + text("dense") + b"\x86R."
    )
    got = load(data)
    assert (got.module, got.name, got.args) == ("megatron.core.enums", "ModelType.dense", ())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stub_may_be_a_dict_key(protocol, monkeypatch):
    module = fake_megatron(monkeypatch)
    data = pickle.dumps({module.Mode.OFF: 1, (torch.float32, "x"): 2}, protocol)
    monkeypatch.undo()
    (stub, one), (key, two) = load(data).items()
    assert (type(stub), one, key, two) == (Stub, 1, (Global("torch", "float32"), "x"), 2)


def test_distributed_checkpoint_metadata_is_read(golden):
    paths = sorted(golden.glob("**/.metadata"))
    assert paths
    for path in paths:
        got = decode(path.read_bytes(), str(path))
        assert (got.name, len(got.state["state_dict_metadata"]) > 10) == ("Metadata", True)


# --- torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TO_TORCH)
def test_the_writer_says_of_a_tensor_what_torch_says_of_it(dtype, tmp_path):
    shapes = {"a": (2, 3), "scalar": (), "none": (0, 4), "long": (300,)}
    ours = {
        name: contiguous(dtype, shape, str(k)) for k, (name, shape) in enumerate(shapes.items())
    }
    saved = {n: torch.zeros(s, dtype=getattr(torch, TO_TORCH[dtype])) for n, s in shapes.items()}
    assert load(torch_pickle(saved, tmp_path / "x.pt")) == ours
    assert load(dump_tensors(ours)) == ours


@given(
    st.dictionaries(
        st.text(),
        st.builds(
            lambda dtype, key, numel, offset, dims: TensorRef(
                StorageRef(dtype, key, numel), dtype, offset, *zip(*dims, strict=True)
            ),
            st.sampled_from(["F32", "BF16", "I64", "BOOL"]),
            st.text(),
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**63 - 1),
            st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 2), min_size=1, max_size=8),
        ),
    )
)
@settings(deadline=None)
def test_written_tensors_are_read_back(tensors):
    assert load(dump_tensors(tensors)) == tensors


def test_torch_values_that_are_no_tensors_are_read(tmp_path):
    value = {
        "size": torch.Size([2, 3]), "dtype": torch.complex32, "device": torch.device("cuda", 1),
        "layout": torch.strided, "storage": torch.arange(3).untyped_storage(),
    }  # fmt: skip
    got = load(torch_pickle(value, tmp_path / "x.pt"))
    assert got["size"] == (2, 3)
    assert got["dtype"] == Global("torch", "complex32")
    assert got["dtype"].dtype is None
    assert got["device"].args == ("cuda", 1)
    assert got["storage"] == StorageRef("U8", "0", 24)


def test_parameters_and_tensors_with_attributes_are_tensors(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2))
    marked, tensor = torch.nn.Parameter(torch.zeros(3)), torch.zeros(4)
    marked.sequence_parallel = True
    tensor.tensor_model_parallel = True
    got = load(torch_pickle([parameter, marked, tensor], tmp_path / "x.pt"))
    assert [view.shape for view in got] == [(2,), (3,), (4,)]


def test_a_lazy_conjugate_is_refused_because_its_bytes_are_not_its_values(tmp_path):
    lazy = torch.zeros(2, dtype=torch.complex64).conj()
    refused(torch_pickle({"a": lazy}, tmp_path / "x.pt"), "resolve_conj")
    refused(torch_pickle({"a": lazy.imag}, tmp_path / "x.pt"), "resolve_neg")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:ComplexHalf")
def test_other_kinds_of_tensors_are_refused_by_name(tmp_path):
    sparse = torch.zeros(2, 2).to_sparse()
    quantized = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    meta = torch.zeros(2, device="meta")
    refused(torch_pickle(sparse, tmp_path / "x.pt"), "_rebuild_sparse_tensor")
    refused(torch_pickle(quantized, tmp_path / "x.pt"), "_rebuild_qtensor|QInt8Storage")
    refused(torch_pickle(meta, tmp_path / "x.pt"), "_rebuild_meta_tensor_no_storage")
    half = torch.zeros(2, dtype=torch.complex32)
    refused(torch_pickle(half, tmp_path / "x.pt"), "complex32")


VIEW = b"ctorch._utils\n_rebuild_tensor_v2\n(%s%sN}tR."
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x09tQ"


@pytest.mark.parametrize(
    "view",
    [
        b"J\xff\xff\xff\xffK\x02\x85K\x01\x85", b"K\x00J\xff\xff\xff\xff\x85K\x01\x85",
        b"K\x00K\x02\x85J\xff\xff\xff\xff\x85", b"K\x00K\x02\x85)", b"\x88K\x02\x85K\x01\x85",
        b"K\x00\x88\x85K\x01\x85", b"K\x00NK\x01\x85", b"K\x00K\x02\x85" + text("x"),
        b"K\x00(" + b"K\x01" * (MAX_DIMS + 1) + b"t(" + b"K\x01" * (MAX_DIMS + 1) + b"t",
        b"K\x00\x8a\x09" + b"\xff" * 8 + b"\x00\x85K\x01\x85",
    ],
)  # fmt: skip
def test_a_view_that_no_tensor_can_have_is_refused(view):
    assert type(load(VIEW % (STORAGE, b"K\x00K\x02\x85K\x01\x85"))) is TensorRef
    refused(VIEW % (STORAGE, view), "whole numbers")


@pytest.mark.parametrize(
    "storage",
    [
        b"N", b"K\x05", STORAGE.replace(b"storage", b"mystery"), STORAGE.replace(b"K\x09", b"N"),
        STORAGE.replace(b"ctorch\nFloatStorage\n", b"ctorch\nfloat32\n"),
        STORAGE.replace(b"K\x09", b"J\xff\xff\xff\xff"), b"NQ", b"]Q", b"((((tQ", b")Q",
    ],
)  # fmt: skip
def test_a_storage_that_is_none_is_refused(storage):
    refused(VIEW % (storage, b"K\x00K\x02\x85K\x01\x85"))


def test_a_persistent_id_needs_a_file_that_can_hold_storages():
    with pytest.raises(CheckpointError, match=r"y\.pkl.*outside the pickle"):
        decode(b"\x80\x02NQ.", "y.pkl")


# --- hostile input --------------------------------------------------------------------------


class Evil:
    def __init__(self, func, *args):
        self.call = (func, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "func",
    [os.system, exec, eval, __import__, open, pickle.loads, getattr, torch.load, io.open_code,
     np.load, torch.hub.load, sys.settrace],
)  # fmt: skip
def test_calls_are_refused_and_nothing_runs(func, protocol, tmp_path):
    canary = tmp_path / "canary"
    data = pickle.dumps({"weights": [1, 2], "x": Evil(func, f"touch {canary}", "pop")}, protocol)
    refused(data, "refused, nothing was executed")
    assert not canary.exists()


def test_the_message_names_the_file_and_the_global():
    refused(
        b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R.", r"x\.pt: the pickle calls os\.system; "
    )
    refused(b"\x80\x04" + text("os") + text("system") + b"\x93.", r"the pickle calls os\.system; ")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "os.system"), ("torch._utils", "torch.os.system"), ("collections", "abc.sys"),
        ("argparse", "Namespace.__init__.__globals__"), ("argparse", "_os.system"),
        ("builtins", "getattr.__self__"), ("numpy", "ndarray.__reduce__"), ("numpy", "os.system"),
        ("megatron.core", "a b"), ("megatron.core\nos", "system"), ("megatronx", "f"), ("", ""),
        ("megatron.", "x"), ("megatron", ""), ("torch.distributed", "checkpoint;x"), (" os",
        "system"),
        ("torch.storage", "_load_from_bytes"), ("numpy.testing._private.utils", "runstring"),
        ("torch", "\u202egnp.sy" * 50),
    ],
)  # fmt: skip
def test_a_global_through_attributes_is_refused(module, name):
    call = text(module) + text(name) + b"\x93" + text("true") + b"\x85R."
    refused(b"\x80\x04" + call, "refused, nothing was executed")


def test_a_name_inside_a_known_library_stays_text():
    data = (
        b"\x80\x04" + text("megatron.core") + text("os.system") + b"\x93" + text("true") + b"\x85R."
    )
    got = load(data)
    assert (type(got), got.module, got.name, got.args) == (
        Stub,
        "megatron.core",
        "os.system",
        ("true",),
    )


@pytest.mark.parametrize("attribute", ["__globals__", "a.b", "", "_x", 3])
def test_getattr_gives_no_way_out_of_an_enum(attribute):
    named = text(attribute) if isinstance(attribute, str) else b"K\x03"
    refused(b"cbuiltins\ngetattr\ncmegatron.x\nY\n" + named + b"\x86R.", "nothing was executed")
    refused(
        b"cbuiltins\ngetattr\nctorch\nSize\n" + text("index") + b"\x86R.", "nothing was executed"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"N", b"NN.", b"N.N", b"(N.", b"t.", b"(.", b"0.", b"1.", b"\x85.", b"N\x86.",
        b"h\x00.", b"j\x00\x00\x00\x00.", b"q\x00.", b"\x94.", b"Na.", b"]a.", b"]]s.", b"}]Ns.",
        b"}}Ns.", b"}(Nu.", b"](Ns.", b"N(Ne.", b"N(NNu.", b"R.", b"NR.", b"N)R.", b"])R.",
        b"ctorch\nfloat32\n)R.", b"ctorch\nSize\nNR.", b"ctorch\nSize\nN\x85R.", b"Nb.", b"NNb.",
        b"ctorch\nSize", b"c" + b"a" * 500, b"c\xff\n\xff\n.", b"NN\x93.",
        b"K\x01" + text("x") + b"\x93.",
        b"\x80\x06N.", b"\x80", b"\x95" + b"\xff" * 8 + b"N.", b"X\xff\xff\xff\xff",
        b"X\x01\x00\x00\x00\xff.",
        b"\x8d" + b"\xff" * 8 + b"x.", b"\x8e" + b"\xff" * 8 + b"x.", b"\x96" + b"\xff" * 8 + b"x.",
        b"B\xff\xff\xff\x7f.", b"\x8b\xff\xff\xff\x7f.",
        b"\x8b\x00\x10\x00\x00" + b"\x01" * 4096 + b".",
        b"\x8a\x05\x01.", b"I1\n.", b"L1L\n.", b"F1.5\n.", b"S'x'\n.", b"P1\n.",
        b"cos\nsystem\n(tR.",
        b"(ios\nsystem\n.", b"(o.", b"2.", b"\x82\x01.", b"\x83\x01\x01.", b"\x84\x01\x01\x01\x01.",
        b"\x97.", b"N\x98.", b"ccollections\nOrderedDict\n]]a\x85R.",
        b"ccollections\nOrderedDict\nK\x01\x85R.",
        b"cbuiltins\nset\n]]a\x85R.", b"cbuiltins\nset\nK\x01\x85R.",
        b"cbuiltins\ncomplex\nNN\x86R.",
        b"c_codecs\nencode\nNN\x86R.",
        b"c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86R.",
        b"ccopyreg\n__newobj__\n)R.", b"ccopyreg\n__newobj_ex__\n)R.",
        b"\x8f(]\x90.", b"](]\x90.", b"(]\x91.", b"N)N\x92.", b"}K\x01K\x02b",
        b"ctorch._utils\n_rebuild_tensor_v3\n)R.",
        b"ctorch._utils\n_rebuild_parameter\n)R.", b"ctorch._tensor\n_rebuild_from_type_v2\n)R.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n)NtR.",
    ],
)  # fmt: skip
def test_a_malformed_pickle_is_refused(data):
    refused(data)


def test_unhashable_and_costly_keys_are_refused():
    refused(pickle.dumps({(1, (2, 3)): 1})[:-2] + b"]Ns.")
    for key in (b"]", b"}", b"\x8f", b"N]\x86", b"(" + b"N" * 65 + b"t", pickle.dumps(2**61)[:-1]):
        refused(b"}" + key + b"Ns.", "key")


def test_a_nested_tuple_as_key_costs_nothing():
    doubled = b")" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(200))
    deep = b")" + b"\x85" * 300_000  # hashing it would overflow the C stack
    start = time.process_time()
    for key in (doubled, deep):
        refused(b"}" + key + b"Ns.", "key")
        refused(b"\x8f(" + key + b"\x90.", "key")
    assert time.process_time() - start < 5


def test_copying_one_value_over_and_over_is_refused():
    members = b"](" + b"K\x01" * 1_000 + b"eq\x000"
    pairs = b"](" + b"K\x01K\x02\x86" * 1_000 + b"eq\x000"
    blob = text("x" * 100_000) + b"q\x000" + text("latin1") + b"q\x020"
    for value, func, args in [
        (members, b"cbuiltins\nset\n", b"h\x00\x85"),
        (pairs, b"ccollections\nOrderedDict\n", b"h\x00\x85"),
        (members, b"ctorch\nSize\n", b"h\x00\x85"),
        (blob, b"c_codecs\nencode\n", b"h\x00h\x02\x86"),
    ]:
        call = func + b"q\x010"
        once = value + call + b"(" + b"h\x01" + args + b"Rt."
        assert len(load(once)) == 1
        refused(value + call + b"(" + (b"h\x01" + args + b"R") * 10_000 + b"t.", "over and over")


def test_many_tuples_as_keys_are_refused():
    refused(
        b"}(" + b"".join(b"M%bK\x01\x86N" % struct.pack("<H", i) for i in range(5_000)) + b"u.",
        "tuples",
    )


def test_marks_are_bounded_and_depth_without_marks_is_harmless():
    refused(b"(" * (MAX_MARKS + 1) + b".", "inside each other")
    depth = 200_000
    value = load(b")" + b"\x85" * depth + b".")
    for _ in range(depth):
        (value,) = value
    assert value == ()
    nest = load(b"]" * depth + b"a" * (depth - 1) + b".")
    refused(b")" + b"\x85" * depth + b"Nb.", "a tuple")  # messages do not print it
    del nest


def test_a_memo_index_costs_no_memory():
    assert load(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.") is None


@pytest.mark.parametrize("code", [b"\x8f", b"(\x91"], ids=["sets", "frozen"])
def test_opcodes_that_make_more_than_their_bytes_are_counted_before_any_runs(code):
    """At 16 million opcodes it stopped, with 4 GB of empty sets."""
    data = b"\x80\x04N" + code * (8 << 20) + b"."
    with bounded.measured() as cost:
        refused(data, "makes far more of them")
    assert cost.peak_bytes < 4 * len(data)
    load(b"\x80\x04" + b"\x8f0" * 10_000 + b"N.")


def test_memo_numbers_mean_what_they_mean_in_any_order():
    """PUT 3 first, then 0 to 4 in turn: 3 is replaced, 9 stays apart, MEMOIZE counts all."""
    parts = [b"\x80\x04", b"K\x61q\x090", b"K\x01q\x030"]
    parts += [b"K" + bytes([10 + i]) + b"q" + bytes([i]) + b"0" for i in range(5)]
    parts += [b"K\x32\x940"]  # as the seventh
    data = b"".join([*parts, b"(", *(b"h" + bytes([i]) for i in (0, 3, 4, 6, 9)), b"t."])
    assert pickle.loads(data) == load(data) == (10, 13, 14, 50, 97)
    refused(b"\x80\x04K\x01q\x030h\x02.", "memo 2 is used before it is set")


def test_there_is_no_other_limit_to_the_number_of_opcodes():
    """A checkpoint with 2^24 of them was refused, whatever its size."""
    assert load(b"N0" * (1 << 19) + b"N.") is None


SAMPLE = pickle.dumps(
    {
        "args": argparse.Namespace(a=1, b=[None, True, 2.5]), "rng": np.arange(3), "z": {1, 2},
        "dtype": torch.float32, "od": collections.OrderedDict(x=(1, 2, 3, 4)), "long": 2**70,
        "io": io.BytesIO(b"x"),
    }, 2,
)  # fmt: skip
TENSORS = dump_tensors({"a": contiguous("F32", (2, 3), "0"), "b": contiguous("F8_E4M3", (2,), "1")})
NEW = pickle.dumps(
    {"a": [b"x", "y", frozenset([1]), bytearray(b"z")], "s": types.SimpleNamespace(q=1)}, 5
)


@pytest.mark.parametrize("data", [SAMPLE, TENSORS, NEW], ids=["old", "tensors", "new"])
def test_every_truncation_is_refused(data):
    load(data)
    for length in range(len(data)):
        refused(data[:length])


@given(
    st.sampled_from([SAMPLE, TENSORS, NEW]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=1_500, deadline=None)
def test_damaged_pickles_are_read_or_refused(data, changes):
    raw = bytearray(data)
    for at, value in changes:
        raw[at % len(raw)] = value
    read_or_refused(bytes(raw))


@given(st.lists(st.sampled_from([bytes([c]) for c in range(256)] + [text("a"), STORAGE, b"K\x01"])))
@example([b"]", b"q", b"\x00", b"h", b"\x00", b"a", b"."])
@settings(max_examples=1_500, deadline=None)
def test_arbitrary_opcodes_are_read_or_refused(opcodes):
    read_or_refused(b"".join(opcodes) + b".")


def read_or_refused(data):
    refusal = "x.pt"
    try:
        load(data)
    except CheckpointError as error:
        refusal = str(error)
    assert "x.pt" in refusal
