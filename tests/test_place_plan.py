"""Geometry, ``place`` and ``plan``: small domains exhaustively, larger ones by properties."""

from __future__ import annotations

import itertools
import json
import math
import random
import tracemalloc

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from strategies import MESHES, VARIANTS, is_valid_tp

from shardwright.ckpt import CheckpointError, open_checkpoint, plan, resolve
from shardwright.ckpt.checkpoint.config import load_model
from shardwright.ckpt.containers.dcp import Blob, BlobSlice
from shardwright.ckpt.model import tiling
from shardwright.ckpt.model.box import Box, full, range_boxes, row_major
from shardwright.ckpt.model.chunk_builder import ChunkBuilder
from shardwright.ckpt.model.family import build_mesh, mesh_flags
from shardwright.ckpt.model.layout import PACKINGS, default_layout, rounds
from shardwright.ckpt.model.manifest import Chunk, Manifest, TensorMeta, View, is_padding
from shardwright.ckpt.model.mesh import Mesh
from shardwright.ckpt.model.pipeline import single, split_evenly
from shardwright.ckpt.model.placement import Placement, logical_shapes, place
from shardwright.ckpt.move import storage

# --- boxes ------------------------------------------------------------------------------------

SHAPES = [(), (1,), (5,), (2, 3), (3, 1), (1, 4), (2, 3, 2), (3, 2, 1), (2, 2, 2, 2), (1, 3, 1, 2)]


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """The elements of a box, marked in a tensor."""
    found = np.zeros(shape, int)
    found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return found


def boxes_in(shape: tuple[int, ...]) -> list[Box]:
    """Every box of a tensor, 0-size ones left out."""
    spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [
        Box(tuple(a for a, _ in combo), tuple(n for _, n in combo))
        for combo in itertools.product(*spans)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_range_boxes_tile_every_range_in_row_major_order(shape):
    total = math.prod(shape)
    numbers = np.arange(total).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(total + 1), 2):
        boxes = range_boxes(shape, start, stop)
        parts = [numbers[mask(shape, box).astype(bool)] for box in boxes]
        assert list(itertools.chain.from_iterable(parts)) == list(range(start, stop))
        assert all(box.numel for box in boxes)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_range_boxes_of_empty_tensors_are_none_and_bounds_are_checked():
    assert range_boxes((0,), 0, 0) == []
    assert range_boxes((3, 0, 2), 0, 0) == []
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="outside a tensor of 6 elements"):
            range_boxes((2, 3), start, stop)


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 2, 2)], ids=str)
def test_intersect_subtract_and_contains_agree_with_element_masks(shape):
    for a, b in itertools.product(boxes_in(shape), repeat=2):
        of_a, of_b = mask(shape, a), mask(shape, b)
        common = a.intersect(b)
        both = mask(shape, common) if common else np.zeros(shape, int)
        assert (both == of_a * of_b).all()
        rest = a.subtract(b)
        left = sum((mask(shape, r) for r in rest), np.zeros(shape, int))
        assert (left == of_a * (1 - of_b)).all()  # and no element twice
        assert len(rest) <= 2 * len(shape)
        assert a.contains(b) == bool((of_b <= of_a).all())


def test_boxes_without_elements_meet_only_where_they_lie():
    empty = Box((2, 0), (0, 3))
    assert empty.intersect(empty) == empty
    assert Box((0,), (0,)).intersect(Box((0,), (0,))) == Box((0,), (0,))
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None
    assert full(()).intersect(full(())) == Box((), ())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_major_strides_are_numpys(shape):
    assert row_major(shape) == tuple(s // 8 for s in np.zeros(shape, "f8").strides)


# --- plan -------------------------------------------------------------------------------------


def manifest(**tensors: list[tuple[Box, str]]) -> Manifest:
    """Tensors as lists of (box, file); each box lies row-major at the start of its file."""
    metas, chunks = {}, {}
    for fqn, rows in tensors.items():
        stops = [[box.stop(d) for box, _ in rows] for d in range(len(rows[0][0].sizes))]
        metas[fqn] = TensorMeta(tuple(map(max, stops)), "F32")
        chunks[fqn] = [
            Chunk(fqn, box, View(file, 0, box.sizes, row_major(box.sizes), "F32"))
            for box, file in rows
        ]
    return Manifest(metas, chunks)


def whole(*shape: int, file: str = "out") -> list[tuple[Box, str]]:
    return [(full(shape), file)]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], tag: str) -> list[tuple[Box, str]]:
    """Disjoint boxes that tile a tensor, made by cutting in two again and again."""
    boxes = [full(shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        cuttable = [d for d, n in enumerate(boxes[at].sizes) if n > 1]
        if not cuttable:
            continue
        box, dim = boxes.pop(at), draw(st.sampled_from(cuttable))
        cut = draw(st.integers(1, box.sizes[dim] - 1))
        one, two = list(box.sizes), list(box.sizes)
        one[dim], two[dim] = cut, box.sizes[dim] - cut
        there = list(box.offsets)
        there[dim] += cut
        boxes += [Box(box.offsets, tuple(one)), Box(tuple(there), tuple(two))]
    return [(box, f"{tag}{i}") for i, box in enumerate(boxes)]


@st.composite
def two_partitions(draw: st.DrawFn):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    return shape, draw(partitions(shape, "src")), draw(partitions(shape, "dst"))


def arrays(shape: tuple[int, ...], rows: list[tuple[Box, str]]) -> dict[str, np.ndarray]:
    """The files of a manifest, their elements numbered as the logical tensor's."""
    numbers = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    return {file: numbers[mask(shape, box).astype(bool)].reshape(-1).copy() for box, file in rows}


def view_of(files: dict[str, np.ndarray], view: View) -> np.ndarray:
    flat = files[view.file][view.offset_bytes // 4 :]
    return np.lib.stride_tricks.as_strided(flat, view.shape, [8 * s for s in view.strides])


@given(two_partitions())
def test_a_plan_writes_every_element_once_and_to_its_place(case):
    shape, sources, targets = case
    made = plan(manifest(x=sources), manifest(x=targets))
    have, want = arrays(shape, sources), arrays(shape, targets)
    written = {file: np.zeros_like(a) for file, a in want.items()}
    times = {file: np.zeros_like(a) for file, a in want.items()}
    for copy in made.copies:
        view_of(written, copy.dst)[...] = view_of(have, copy.src)
        view_of(times, copy.dst)[...] += 1
    for file, a in want.items():
        assert (times[file] == 1).all()
        assert (written[file] == a).all()
    assert made.coverage.written_bytes == made.coverage.read_bytes == 4 * math.prod(shape)
    assert made.replicas == []
    assert made.coverage.dropped == {}


@given(two_partitions(), st.randoms(use_true_random=False))
def test_the_plan_is_the_same_whatever_the_order_of_chunks(case, rng):
    _, sources, targets = case
    first = plan(manifest(x=sources), manifest(x=targets))
    for rows in (sources, targets):
        rng.shuffle(rows)
    again = plan(manifest(x=sources), manifest(x=targets))
    assert sorted(map(repr, first.copies)) == sorted(map(repr, again.copies))


def moved(shape, sources, targets, have):
    """The target's files once a plan has been carried out on the source's."""
    written = {file: np.zeros_like(a) for file, a in arrays(shape, targets).items()}
    for copy in plan(manifest(x=sources), manifest(x=targets)).copies:
        view_of(written, copy.dst)[...] = view_of(have, copy.src)
    return written


@given(two_partitions(), st.data())
def test_a_detour_over_a_third_layout_gives_the_same(case, data):
    shape, first, last = case
    between = data.draw(partitions(shape, "between"))
    have = arrays(shape, first)
    straight = moved(shape, first, last, have)
    detour = moved(shape, between, last, moved(shape, first, between, have))
    assert all((straight[file] == detour[file]).all() for file in straight)


def test_copies_come_in_the_targets_order():
    targets = [(Box((2 * i,), (2,)), f"out{i}") for i in range(4)]
    made = plan(manifest(x=whole(8, file="in"), y=whole(3, file="in2")),
                manifest(y=whole(3), x=targets))  # fmt: skip
    assert [copy.dst.file for copy in made.copies] == ["out", "out0", "out1", "out2", "out3"]


def test_a_hole_is_named_by_its_place_and_size():
    rows = [(Box((0, 0), (2, 4)), "a"), (Box((3, 0), (1, 4)), "b"), (Box((2, 0), (1, 3)), "c")]
    with pytest.raises(CheckpointError, match=r"x: the source holds 15 of 16 elements") as error:
        plan(manifest(x=rows), manifest(x=whole(4, 4)))
    assert "the box at [2, 3] of size [1, 1]" in str(error.value)


def test_elements_that_the_target_has_no_place_for_are_an_error():
    target = manifest(x=[(Box((0,), (2,)), "a"), (Box((3,), (1,)), "b")])
    with pytest.raises(CheckpointError, match="the target has no place for every element") as error:
        plan(manifest(x=whole(4, file="in")), target)
    assert "at [2] of size [1]" in str(error.value)


def test_all_faults_are_reported_together_with_names_and_both_values():
    source = manifest(
        shape=whole(2, 3, file="a"), dtype=whole(2, file="a"), extra=whole(5, file="a")
    )
    target = manifest(shape=whole(3, 2), dtype=whole(2), missing=whole(7))
    source.tensors["dtype"] = TensorMeta((2,), "I32")
    with pytest.raises(CheckpointError) as error:
        plan(source, target)
    said = str(error.value)
    assert "shape: shape [2, 3] in the source, [3, 2] in the target" in said
    assert "dtype: cannot be cast from I32 to F32" in said
    assert "extra: unknown tensor of shape [5], nothing takes it" in said
    assert "missing: missing in the source (shape [7] is needed)" in said
    assert "4 faults" in said


def test_a_source_tensor_is_left_out_only_with_a_reason_that_is_counted():
    source = manifest(x=whole(2, file="a"), y=whole(3, 2, file="a"))
    target = manifest(x=whole(2))
    made = plan(source, target, lambda fqn: "not wanted" if fqn == "y" else None)
    assert made.coverage.dropped == {"not wanted": [1, 24]}
    assert made.coverage.tensors == 1


def test_whole_replicas_are_compared_and_read_once():
    rows = [(full((4,)), "a"), (full((4,)), "b"), (full((4,)), "c")]
    made = plan(manifest(x=rows), manifest(x=whole(4)))
    assert [copy.src.file for copy in made.copies] == ["a"]
    assert [(copy.src.file, copy.dst.file) for copy in made.replicas] == [("a", "b"), ("a", "c")]
    assert made.coverage.replicas == 2


def test_replicas_of_unequal_boxes_are_compared_where_they_overlap():
    rows = [(Box((0,), (4,)), "a"), (Box((2,), (4,)), "b"), (Box((1,), (5,)), "c")]
    made = plan(manifest(x=rows), manifest(x=whole(6)))
    assert sum(copy.box.numel for copy in made.copies) == 6
    assert {(c.src.file, c.box.offsets[0], c.box.stop(0)) for c in made.copies} == {
        ("a", 0, 4), ("b", 4, 6),
    }  # fmt: skip
    compared = {(c.src.file, c.dst.file, c.box.offsets[0], c.box.stop(0)) for c in made.replicas}
    assert compared == {("a", "b", 2, 4), ("a", "c", 1, 4), ("b", "c", 4, 6)}


@given(two_partitions(), st.data())
def test_every_element_of_a_replica_is_read_or_compared(case, data):
    shape, first, targets = case
    second = data.draw(partitions(shape, "again"))
    made = plan(manifest(x=first + second), manifest(x=targets))
    files = arrays(shape, first + second)
    seen = {file: np.zeros_like(a) for file, a in files.items()}
    for copy in made.copies:
        view_of(seen, copy.src)[...] = 1
    for copy in made.replicas:
        view_of(seen, copy.dst)[...] = 1
        assert (view_of(files, copy.src) == view_of(files, copy.dst)).all()
    assert all(marks.all() for marks in seen.values())


def overlapping(count: int, seed: int = 0) -> list[tuple[Box, str]]:
    """Boxes of any size at any place of a square of 1,000."""
    rng = random.Random(seed)
    corners = [(rng.randrange(500), rng.randrange(500)) for _ in range(count)]
    sizes = [(rng.randrange(1, 1000 - a), rng.randrange(1, 1000 - b)) for a, b in corners]
    return [(Box(a, b), f"f{i}") for i, (a, b) in enumerate(zip(corners, sizes, strict=True))]


CROSSED = {
    "boxes at random": overlapping(3000),
    "rows and columns": [(Box((i, 0), (1, 1000)), "a") for i in range(1000)]
    + [(Box((0, i), (1000, 1)), "b") for i in range(1000)],
    "one column beside many cells": [(Box((0, 999), (1000, 1)), "a")]
    + [(Box((i % 1000, i // 1000), (1, 1)), "b") for i in range(3000)],
}


@pytest.mark.parametrize("kind", CROSSED)
def test_boxes_that_overlap_without_end_are_refused_with_the_tensor(kind):
    source = manifest(x=CROSSED[kind])
    source.tensors["x"] = TensorMeta((1000, 1000), "F32")
    with pytest.raises(CheckpointError, match=r"x: the \d+ boxes of the source") as error:
        plan(source, manifest(x=whole(1000, 1000)))
    assert "overlap in more places than any parallel layout gives" in str(error.value)


def test_what_overlaps_cost_in_memory_is_bounded():
    tiling.match.cache_clear()
    rows = [Box((i, 0), (1, 400)) for i in range(400)]
    columns = [Box((0, i), (400, 1)) for i in range(400)]
    tracemalloc.start()
    try:
        assert "overlap" in str(tiling.match(full((400, 400)), (*rows, *columns), ()).fault)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20


def test_two_cuts_that_cross_in_more_places_than_layouts_give_are_refused():
    rows = [(Box((i, 0), (1, 400)), f"r{i}") for i in range(400)]
    columns = [(Box((0, i), (400, 1)), f"c{i}") for i in range(400)]
    with pytest.raises(CheckpointError, match="400 boxes of the source, and the 400 of the target"):
        plan(manifest(x=rows), manifest(x=columns))


def test_cuts_that_layouts_give_are_planned():
    """Many ranks of a distributed optimizer, each with a range, read by many tensor ranks."""
    shape, ranks, tp = (256, 64), 128, 16
    bounds = [i * math.prod(shape) // ranks for i in range(ranks + 1)]
    sources = [
        (box, f"dp{i}")
        for i, pair in enumerate(itertools.pairwise(bounds))
        for box in range_boxes(shape, *pair)
    ]
    targets = [(Box((0, 4 * i), (256, 4)), f"tp{i}") for i in range(tp)]
    made = plan(manifest(x=sources), manifest(x=targets))
    assert len(made.copies) == len(sources) * tp
    thousand = [(full((8,)), f"r{i}") for i in range(3000)]
    assert len(plan(manifest(x=thousand), manifest(x=whole(8))).replicas) == 2999


def test_holes_between_thousands_of_boxes_are_counted_and_the_first_is_named():
    cells = [(Box((2 * (i // 50), 2 * (i % 50)), (1, 1)), "a") for i in range(2500)]
    source = manifest(x=cells)
    source.tensors["x"] = TensorMeta((100, 100), "F32")
    with pytest.raises(CheckpointError, match="holds 2500 of 10000 elements") as error:
        plan(source, manifest(x=whole(100, 100)))
    assert "the box at [0, 1] of size [1, 1]" in str(error.value)


def test_a_target_tensor_written_in_several_places_is_written_in_each():
    targets = [(full((4,)), "one"), (full((4,)), "two"), (Box((2,), (2,)), "half")]
    made = plan(manifest(x=whole(4, file="in")), manifest(x=targets))
    assert [copy.dst.file for copy in made.copies] == ["one", "two", "half"]
    assert made.coverage.written_bytes == 40


@pytest.mark.parametrize(("have", "want"), [(3, 11), (11, 3), (3, 3), (0, 2), (2, 0)])
def test_padding_rows_are_copied_as_far_as_there_is_place(have, want):
    def rows(count: int, file: str) -> Manifest:
        made = manifest(pad=whole(count, 4, file=file))
        made.tensors["pad"] = TensorMeta((count, 4), "F32", elastic=True)
        return made

    made = plan(rows(have, "in"), rows(want, "out"))
    common = min(have, want)
    assert sum(copy.box.numel for copy in made.copies) == 4 * common
    assert made.coverage.zero_bytes == 16 * max(0, want - have)
    lost = sum(nbytes for _, nbytes in made.coverage.dropped.values())
    assert lost == 16 * max(0, have - want)


def test_padding_rows_that_one_side_lacks_are_zero_or_counted():
    pad = manifest(pad=whole(3, 4))
    pad.tensors["pad"] = TensorMeta((3, 4), "F32", elastic=True)
    empty = Manifest({}, {})
    assert plan(empty, pad).coverage.zero_bytes == 48
    (reason,) = plan(pad, empty).coverage.dropped
    assert "padding rows" in reason


def test_tensors_without_dims_or_elements_are_planned_like_any_other():
    source = manifest(scalar=whole(file="a"), empty=whole(0, 4, file="a"))
    made = plan(source, manifest(scalar=whole(), empty=whole(0, 4)))
    assert made.coverage.tensors == 2
    assert [copy.fqn for copy in made.copies if copy.box.numel] == ["scalar"]


def test_plan_opens_no_file_and_resolve_opens_each_at_most_once(golden, monkeypatch):
    """torch_dist puts off reading the headers of its blobs until it is known which are needed."""
    folder = golden / "llama_bf16_tp2pp2_torch_dist"
    source = open_checkpoint(folder).checkpoint.manifest
    targets = {fqn: whole(*meta.shape) for fqn, meta in source.tensors.items()}
    target = manifest(**targets)
    opened: list[str] = []
    really = storage.LocalStorage.open

    def spy(self, path, **more):
        opened.append(path)
        return really(self, path, **more)

    monkeypatch.setattr(storage.LocalStorage, "open", spy)
    made = plan(source, target)
    assert opened == []
    deferred = [copy for copy in made.copies if not isinstance(copy.source, View)]
    assert deferred, "the golden checkpoint has no deferred places"
    with pytest.raises(AssertionError, match="resolve"):
        deferred[0].src  # noqa: B018
    found = resolve(made)
    files = [path for path in opened if path.endswith(".distcp")]
    assert 0 < len(files) == len(set(files))
    assert [copy.box for copy in found.copies] == [copy.box for copy in made.copies]
    assert all(copy.src.shape == copy.box.sizes for copy in found.copies)


@given(st.data())
def test_a_deferred_place_narrowed_and_found_is_the_place_found_and_narrowed(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    blob = Blob("x", "F32", full(shape), "file", 0, 0)
    blob.offset_bytes, blob.strides = 64, row_major(shape)
    flat = Blob("x", "F32", full((math.prod(shape),)), "file", 0, 0)
    flat.offset_bytes, flat.strides = 64, (1,)
    sizes = tuple(shape[dim] for dim in order)
    steps = tuple(row_major(shape)[dim] for dim in order)
    for found in (
        BlobSlice(blob, (0,) * len(shape), sizes, order),
        BlobSlice(flat, (0,), sizes, (), steps),
    ):
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
        inner = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True))
        assert found.narrow(offsets, inner).view() == found.view().narrow(offsets, inner)


# --- place ------------------------------------------------------------------------------------


def model_of(case, folder):
    """The family, sizes and flags that ``ckpt`` takes from a fixture's config."""
    path = folder / "config.json"
    path.write_text(json.dumps(case.config))
    return load_model(path)


def placed_on(model, tp: int, pp: int, layout=None, multiple: int = 4):
    mesh = Mesh((("tp", tp), ("pp", pp)), {"pp": single(split_evenly(model.sizes["layer"], pp))})
    rules = model.family.select(model.flags | mesh_flags(mesh))
    unit = multiple * tp
    sizes = {**model.sizes, "padded_vocab": -(-model.sizes["vocab"] // unit) * unit}
    tags = rounds({**default_layout(model.family), **(layout or {})})
    return rules, sizes, place(rules, sizes, mesh, tags)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_tile_every_stored_and_every_logical_tensor_on_every_mesh(variant, tmp_path):
    model = model_of(strategies.heads24(variant, num_hidden_layers=12), tmp_path)
    for tp, pp in MESHES:
        rules, sizes, placed = placed_on(model, tp, pp)
        shapes = logical_shapes(rules, sizes)
        used: dict[str, int] = {}
        seen: set[tuple[str, Box]] = set()
        for rows in placed.values():
            assert len({row.name for row in rows}) == len(rows)
            for row in rows:
                assert sum(p.stored.numel for p in row.pieces) == math.prod(row.shape)
                for one, two in itertools.combinations(row.pieces, 2):
                    assert one.stored.intersect(two.stored) is None
                for piece in row.pieces:
                    assert sorted(piece.box.sizes) == sorted(piece.stored.sizes)
                    if (piece.fqn, piece.box) not in seen:
                        seen.add((piece.fqn, piece.box))
                        used[piece.fqn] = used.get(piece.fqn, 0) + piece.box.numel
        for fqn, shape in shapes.items():
            assert used[fqn] == math.prod(shape), f"{fqn} on tp{tp} pp{pp}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_tensor_that_transformers_saves_has_exactly_one_row_and_one_target(variant, tmp_path):
    strategies.tiny_model(variant).save_pretrained(tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    model = load_model(tmp_path / "hf" / "config.json")
    rules, sizes, placed = placed_on(model, 1, 1)
    assert logical_shapes(rules, sizes) == on_disk
    parts = [part.fqn for rule in rules for part in rule.parts]
    assert len(set(parts)) == len(parts), "a logical tensor is named by two rows"
    names = [row.name for rows in placed.values() for row in rows]
    assert len(set(names)) == len(names), "a stored tensor is named by two rows"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_hand_written_fixture_is_what_transformers_saves(variant, tmp_path):
    """Guards the fixtures themselves: raw names and shapes follow the model's real ones."""
    model = strategies.tiny_model(variant)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if config["model_type"] == "gpt2":
        sizes = {"H": 24, "n": 12, "g": 12, "d": 2, "F": 96, "L": 4, "V": 37}
    else:
        sizes = {"H": 24, "n": 12, "g": 6, "d": 4, "F": 36, "L": 4, "V": 37}
    config.setdefault("tie_word_embeddings", VARIANTS[variant][0] in ("gpt2", "gemma", "gemma2"))
    wanted = strategies.shapes(config, sizes)
    if config["model_type"] == "gpt2":
        wanted["transformer.wpe.weight"] = (32, 24)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == wanted


def is_placed(model, tp: int) -> bool:
    try:
        placed_on(model, tp, 1)
    except CheckpointError:
        return False
    return True


def test_a_tp_is_refused_exactly_where_the_stated_rule_fails(tmp_path):
    """n % T, g % T or T % g, and (n + 2g) hd % T: every small combination."""
    checked = refused = 0
    for g, times, d, tp in itertools.product(range(1, 5), range(1, 5), range(1, 5), range(1, 9)):
        n = g * times
        case = strategies.raw(
            "llama", heads=(n, g), head_dim=d, hidden=1, ffn=840, layers=1, vocab=840
        )
        model = model_of(case, tmp_path)
        taken = is_placed(model, tp)
        assert taken == is_valid_tp(n, g, d, tp), f"n={n} g={g} hd={d} tp={tp}"
        refused += not taken
        checked += 1
    assert checked == 512
    assert 0 < refused < checked


@pytest.mark.parametrize(
    ("heads", "head_dim", "tp", "says"),
    [
        ((9, 3), 4, 2, "9 query heads do not divide over tp=2"),
        ((12, 6), 4, 4, "6 KV heads neither divide over tp=4 nor are divided by it"),
        ((4, 4), 1, 8, "linear_qkv.weight: dim 0 of size 12 does not divide over tp=8"),
        ((6, 4), 4, 2, "6 query heads do not divide over 4 KV heads"),
    ],
)
def test_a_refusal_names_the_rule_that_failed(heads, head_dim, tp, says, tmp_path):
    case = strategies.raw("llama", heads=heads, head_dim=head_dim, ffn=24, layers=1)
    with pytest.raises(CheckpointError) as error:
        placed_on(model_of(case, tmp_path), tp, 1)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("heads", "head_dim", "tp", "says"),
    [
        ((12, 6), 4, 4, "tp can be 1, 2, 3, 6, 12; 3 is the nearest"),
        ((12, 6), 4, 7, "tp can be 1, 2, 3, 6, 12; 6 is the nearest"),
        ((32, 8), 4, 48, "tp can be 1, 2, 4, 8; 8 is the nearest"),  # ffn 24
        ((9, 3), 4, 2, "tp can be 1, 3; 1 is the nearest"),
    ],
)
def test_a_refusal_says_which_tp_are_possible(heads, head_dim, tp, says, tmp_path):
    """Every one that it says is possible, and no other below 64."""
    case = strategies.raw("llama", heads=heads, head_dim=head_dim, ffn=24, layers=2)
    model = model_of(case, tmp_path)
    with pytest.raises(CheckpointError) as error:
        placed_on(model, tp, 2)
    assert str(error.value).endswith(says)
    listed = {int(n) for n in says.partition(";")[0].removeprefix("tp can be ").split(",")}
    assert {n for n in range(1, 64) if is_placed(model, n)} == listed


def test_no_tp_is_named_where_none_is_possible(tmp_path):
    case = strategies.raw("llama", heads=(6, 4), head_dim=4, ffn=24, layers=1)
    with pytest.raises(CheckpointError) as error:
        placed_on(model_of(case, tmp_path), 2, 1)
    assert "can be" not in str(error.value)


def test_every_row_that_does_not_divide_is_named_at_once(tmp_path):
    case = strategies.raw("llama", heads=(9, 3), head_dim=4, ffn=25, layers=1)
    with pytest.raises(CheckpointError) as error:
        placed_on(model_of(case, tmp_path), 2, 1)
    said = str(error.value)
    for part in ("9 query heads", "3 KV heads", "mlp.linear_fc2.weight: dim 1 of size 25",
                 "gate of size 25 does not divide into 2 rounds"):  # fmt: skip
        assert part in said


@pytest.mark.parametrize("tag", PACKINGS["qkv"])
def test_each_packing_tag_tiles_the_stored_rows(tag, tmp_path):
    heads = (4, 4) if tag == "per_row" else (4, 2)
    model = model_of(strategies.raw("llama", heads=heads, layers=1), tmp_path)
    _, _, placed = placed_on(model, 2, 1, {"qkv": tag})
    for rows in placed.values():
        for row in rows:
            assert sum(piece.stored.numel for piece in row.pieces) == math.prod(row.shape)


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "taken"),
    [(200, 65_536, 1, False), (2, 65_536, 1, False), (200, 96, 128, True), (126, 128, 128, True)],
)
def test_pieces_are_counted_before_they_are_made(layers, heads, head_dim, taken, tmp_path):
    """A config of a few bytes may say any number of layers and heads, and each is a piece."""
    case = strategies.raw("llama", heads=(2, 2), layers=1)
    config = {**case.config, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": heads, "head_dim": head_dim}  # fmt: skip
    config["hidden_size"] = heads * head_dim if taken else 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path / "config.json")
    tracemalloc.start()
    try:
        if taken:
            placed_on(model, 1, 1)
        else:
            with pytest.raises(CheckpointError, match="its packing cuts it into"):
                placed_on(model, 1, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


def test_layers_and_ranks_share_one_geometry(tmp_path):
    """Placing a deep model costs names, and pieces are made where they are asked for."""
    model = model_of(strategies.raw("llama", heads=(4, 4), layers=8), tmp_path)
    _, _, placed = placed_on(model, 2, 2)
    rows = [row for row in placed[("tp", 1), ("pp", 1)] if row.name.endswith("linear_qkv.weight")]
    assert len(rows) == 4
    assert len({id(row.geometry) for row in rows}) == 1
    assert len({row.pieces[0].fqn for row in rows}) == 4
    norms = [{row.name: row for row in placed[("tp", t), ("pp", 0)]} for t in (0, 1)]
    name = "decoder.layers.0.input_layernorm.weight"
    assert norms[0][name] is norms[1][name]


def test_a_file_may_hold_the_shards_of_several_coordinates(tmp_path):
    model = model_of(strategies.raw("llama", heads=(4, 4), layers=4), tmp_path)
    mesh = build_mesh(model, (("tp", 2), ("pp", 2)))
    here = Placement.written(model, mesh, 4)
    one, other = (("tp", 1), ("pp", 0)), (("tp", 1), ("pp", 1))
    both = here.held((one, other))
    assert list(both.values()) == [*here.placed[one], *here.placed[other]]
    assert sum(name.endswith("linear_qkv.weight") for name in both) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_a_manifest_is_the_models_whatever_the_order_of_files(variant, tmp_path):
    model = model_of(strategies.heads24(variant, num_hidden_layers=4), tmp_path)
    here = Placement.written(model, build_mesh(model, (("tp", 2), ("pp", 2))), 4)
    orders = []
    for seed in range(3):
        coords = list(here.mesh.coords())
        random.Random(seed).shuffle(coords)
        builder = ChunkBuilder(here)
        for coord in coords:
            for row in here.placed[coord]:
                builder.add("", row, "file", 0, "F32")
        orders.append([fqn for fqn in builder.manifest().tensors if not is_padding(fqn)])
        assert builder.faults == []
    assert orders[0] == orders[1] == orders[2] == list(here.shapes)


def test_a_clipped_range_keeps_exactly_the_pieces_elements_of_it(tmp_path):
    model = model_of(strategies.raw("gpt2", heads=(4, 4), layers=1), tmp_path)
    _, _, placed = placed_on(model, 2, 1)
    rng = random.Random(0)
    for row in placed[("tp", 1), ("pp", 0)]:
        total = math.prod(row.shape)
        for _ in range(5):
            start, stop = sorted((rng.randint(0, total), rng.randint(0, total)))
            marks = np.zeros(row.shape, int)
            for piece in row.clip(start, stop):
                marks += mask(row.shape, piece.stored)
            assert (marks.reshape(-1) == [start <= i < stop for i in range(total)]).all()
