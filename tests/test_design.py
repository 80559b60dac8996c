"""What ``check_design`` refuses before anything is written: names and bytes that meet."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from fixtures_safety import refused

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.box import Box
from shardwright.ckpt.model.design import Design, OutFile, check_design
from shardwright.ckpt.model.dtypes import ITEMSIZE
from shardwright.ckpt.model.file_layout import Checksum, FileLayout
from shardwright.ckpt.model.manifest import Chunk, Manifest, SideFile, TensorMeta, View

ROOT = Path("/out")


def design(views=(), *, size=1000, fixed=((0, b"head"),), checksums=(), names=("w.bin",)):
    """A design of one file that holds ``views``, and empty files of the other names."""
    first, *others = names
    layout = FileLayout(size, {}, tuple(fixed), tuple(checksums))
    files = [OutFile(str(ROOT / first), layout)]
    files += [OutFile(str(ROOT / name), FileLayout(0, {}, ())) for name in others]
    views = [View(str(ROOT / first), *view) for view in views]
    chunks = {
        f"t{i}": [Chunk(f"t{i}", Box((0,) * len(v.shape), v.shape), v)] for i, v in enumerate(views)
    }
    metas = {f"t{i}": TensorMeta(v.shape, v.dtype) for i, v in enumerate(views)}
    return Design(files, Manifest(metas, chunks))


def fault(made, sides=()):
    """What is said against a design; empty where it passes."""
    try:
        check_design(made, ROOT, sides)
    except (CheckpointError, AssertionError) as error:
        return str(error)
    return ""


def touched(view):
    """Every byte of a view, one by one."""
    offset, shape, strides, dtype = view
    size = ITEMSIZE[dtype]
    return {
        offset + size * sum(i * s for i, s in zip(at, strides, strict=True)) + k
        for at in itertools.product(*map(range, shape))
        for k in range(size)
    }


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "word"),
    [
        ("iter_0000000/w.pt", "iter_0000000/w.pt is written there"),
        ("ITER_0000000/W.pt", "iter_0000000/w.pt is written there"),
        ("iter_0000000", "needs a folder where the file iter_0000000 is"),
        ("iter_0000000/w.pt/x", "needs a folder where the file iter_0000000/w.pt is"),
        ("../w.pt", "leads out"),
        ("a//b", "leads out"),
        ("/etc/passwd", "leads out"),
    ],
)
def test_a_side_file_never_meets_a_file_of_the_design(side, word):
    """B3: an old checkpoint in the source's folder would be copied over what was written."""
    made = design(names=("iter_0000000/w.pt",))
    refused(lambda: check_design(made, ROOT, [SideFile(side, "/source/x")]), word)


def test_accents_spelled_in_two_ways_are_one_name():
    made = design(names=("mod\u00e8le.bin",))
    refused(lambda: check_design(made, ROOT, [SideFile("mode\u0300le.bin", "/s")]), "written there")


def test_a_side_file_never_meets_a_text_that_is_written():
    texts = [SideFile("checkpoint.json", text="{}"), SideFile("checkpoint.json", "/source/c")]
    refused(lambda: check_design(design(), ROOT, texts), "/source/c", "checkpoint.json")


def test_side_files_that_differ_in_case_alone_travel_and_those_of_one_name_do_not():
    sides = [SideFile("README.md", "/s/README.md"), SideFile("readme.md", "/s/readme.md")]
    assert fault(design(), sides) == ""
    sides[1] = SideFile("README.md", "/s/readme.md")
    assert "/s/readme.md: README.md is written there" in fault(design(), sides)


def test_two_ranks_never_get_one_file():
    with pytest.raises(AssertionError, match="files of one name"):
        check_design(design(names=("w.bin", "w.bin")), ROOT, [])


# --- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "views",
    [
        [(4, (2, 3), (3, 1), "F32"), (28, (5,), (1,), "F32")],
        [(4, (4, 3), (5, 1), "F32"), (16, (4, 2), (5, 1), "F32")],  # columns of one tensor
        [(16, (4, 2), (5, 1), "F32"), (4, (4, 3), (5, 1), "F32")],
        [(4, (3, 2), (1, 3), "F32"), (28, (3, 2), (1, 3), "F32")],  # transposed
        [(4, (0, 3), (3, 1), "F32"), (4, (2,), (1,), "F32")],  # no elements, no bytes
        [(4, (2, 2, 2), (16, 8, 1), "U8"), (6, (2, 2, 6), (16, 8, 1), "U8")],
        [(100, (2, 3), (8, 1), "U8"), (107, (1, 1), (8, 1), "U8"), (103, (2, 4), (8, 1), "U8")],
    ],
)
def test_tensors_that_share_no_byte_pass(views):
    assert not any(touched(a) & touched(b) for a, b in itertools.combinations(views, 2))
    assert fault(design(views)) == ""


@pytest.mark.parametrize(
    "views",
    [
        [(4, (2, 3), (3, 1), "F32"), (27, (5,), (1,), "F32")],
        [(4, (4, 3), (5, 1), "F32"), (12, (4, 2), (5, 1), "F32")],
        [(4, (4,), (1,), "U8"), (4, (4,), (1,), "U8")],
        [(4, (2, 2, 2), (16, 8, 1), "U8"), (5, (2, 2, 6), (16, 8, 1), "U8")],
        [(3, (2,), (1,), "U8")],  # the header
    ],
)
def test_tensors_that_share_a_byte_are_found(views):
    with pytest.raises(AssertionError, match="share bytes"):
        check_design(design(views), ROOT, [])


def test_a_checksum_is_never_written_into_a_tensor():
    views = [(4, (8,), (1,), "U8")]
    assert fault(design(views, checksums=[Checksum(4, 8, (12, 0))])) == ""
    with pytest.raises(AssertionError, match="checksum"):
        check_design(design(views, checksums=[Checksum(4, 8, (10,))]), ROOT, [])


def test_a_tensor_lies_inside_of_its_file():
    with pytest.raises(AssertionError, match="outside"):
        check_design(design([(4, (8,), (1,), "U8")], size=11), ROOT, [])


def test_boxes_of_one_tensor_meet_where_their_bytes_do():
    """Against the bytes one by one: boxes of a row-major tensor, as writers place them."""
    draw = random.Random(5)
    met = 0
    for _ in range(400):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        order = draw.sample(range(len(shape)), len(shape))
        views = []
        for _ in range(2):
            lows = [draw.randrange(size) for size in shape]
            sizes = [draw.randint(1, n - low) for n, low in zip(shape, lows, strict=True)]
            at = 8 + 2 * sum(low * step for low, step in zip(lows, strides, strict=True))
            box = tuple(sizes[d] for d in order), tuple(strides[d] for d in order)
            views.append((at, *box, "F16"))
        wanted = bool(touched(views[0]) & touched(views[1]))
        met += wanted
        assert ("share bytes" in fault(design(views, size=8 + 2 * 5**4))) == wanted, views
    assert 50 < met < 350
