"""Where a model's rows put each element on each rank of a mesh.

``Placement.of`` is the one way from a model, a mesh and layout tags to stored tensors. It contains
no name of an axis, a family or a format. Reading a rank's file and writing one use the same pieces,
so they cannot disagree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError, raise_all
from .box import Box, range_boxes, row_major
from .family import WHOLE_DOWN, Model, Part, Rule, Sizes, fill, indexed, mesh_flags, placeholders
from .layout import PACKINGS, default_layout, rounds
from .manifest import PADDING
from .mesh import Coord, Mesh, Shard, ShardByIndex

MAX_ROUNDS = 1 << 16  # of one packing; a config may claim any number of heads
# Pieces of all ranks' stored tensors together: each becomes a chunk, and chunks take memory.
FEW_PIECES = 1 << 17  # this many are always allowed
PIECE_ELEMENTS = 64  # above that, a piece must have this many elements on average
MAX_PIECES = 1 << 22
PIECE_BYTES = 4096  # as many bytes of a source allow one piece more; a chunk takes half of that
TRIED_SIZES = 256  # of an axis that does not fit: which ones would
_REPACK = (
    "rows of query, key and value alternate (qkv=per_row, as Megatron-LM of checkpoint_version 1 "
    "wrote them), and so each row is a piece: load it with Megatron-LM, which packs them anew, "
    "and save it again"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor and the box of a stored tensor that holds it."""

    fqn: str
    box: Box  # in the logical tensor's coordinates
    stored: Box  # in the rank's stored tensor's coordinates
    dims: tuple[int, ...]  # logical dim d lies along stored dim dims[d]; -1: it has one place there
    # logical dim whose place is the stored tensor's number of that name -> the name
    index: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor on one rank: its shape and its pieces.

    All layers (and all experts) share one geometry; only the numbers in the names differ.
    """

    name: str
    shape: tuple[int, ...]  # the rank's, elements
    geometry: tuple[Piece, ...]  # they tile the stored tensor; names with placeholders
    numbers: tuple[tuple[str, int], ...] = ()  # placeholder -> its value
    stage: int = 0  # virtual stage of its rank
    trained: bool = True  # a buffer is not

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The boxes of logical tensors that tile the stored tensor exactly."""
        return tuple(self._named(self.geometry))

    @property
    def parts(self) -> tuple[str, ...]:
        """The logical tensors in it, each once."""
        numbers = dict(self.numbers)
        return tuple(fill(name, numbers) for name in dict.fromkeys(p.fqn for p in self.geometry))

    def bytes_at(
        self, piece: Piece, base: int, itemsize: int, steps: tuple[int, ...] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Byte offset of a piece's first element, and its strides in logical dim order.

        ``base`` is the byte offset of the stored tensor, which is row-major without ``steps``.
        """
        steps = steps or row_major(self.shape)
        first = sum(o * s for o, s in zip(piece.stored.offsets, steps, strict=True))
        return base + first * itemsize, tuple(0 if dim < 0 else steps[dim] for dim in piece.dims)

    def clip(self, start: int, stop: int) -> list[Piece]:
        """The pieces of the row-major range ``[start, stop)``; coordinates stay the same."""
        found = []
        for box in range_boxes(self.shape, start, stop):
            for piece in self.geometry:
                common = piece.stored.intersect(box)
                if common is not None and common.numel:
                    found.append(restrict(piece, common))
        return list(self._named(found))

    def _named(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        numbers = dict(self.numbers)
        if not numbers:
            yield from pieces
            return
        names: dict[str, str] = {}  # each once in memory
        for piece in pieces:
            name = names.get(piece.fqn)
            if name is None:
                name = names[piece.fqn] = fill(piece.fqn, numbers)
            box = piece.box
            if piece.index:
                offsets = list(box.offsets)
                for dim, of in piece.index:
                    offsets[dim] = numbers[of]
                box = Box(tuple(offsets), box.sizes)
            yield Piece(name, box, piece.stored, piece.dims)


def restrict(piece: Piece, stored: Box) -> Piece:
    """The part of a piece that lies at ``stored`` (inside the piece's stored box)."""
    offsets, sizes = list(piece.box.offsets), list(piece.box.sizes)
    for d, dim in enumerate(piece.dims):
        if dim >= 0:
            offsets[d] += stored.offsets[dim] - piece.stored.offsets[dim]
            sizes[d] = stored.sizes[dim]
    box = Box(tuple(offsets), tuple(sizes))
    return Piece(piece.fqn, box, stored, piece.dims, piece.index)


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows of one stored dim that belong to one segment."""

    segment: str
    start: int  # stored coordinate, on the rank
    segment_start: int  # coordinate inside the segment
    size: int


Layers = Callable[[Rule], Sequence[int]]  # the layers that have a row


def place(
    rules: Sequence[Rule],
    sizes: Sizes,
    mesh: Mesh,
    layout: Mapping[str, str],
    layers: Layers | None = None,
    nbytes: int = 0,
) -> dict[Coord, list[Placed]]:
    """Every rank's stored tensors, in row order. CheckpointError lists every row that does not
    divide.

    ``layout`` maps a rule's group tag to the size symbol that gives its rounds, ``layers`` gives
    the layers of rows that not all have, ``nbytes`` are the bytes of the files that hold them, or
    0 where none do yet. Ranks that hold the same part of a rule share one result.
    """
    scope = {**sizes, **dict(mesh.axes)}
    faults = _faults(rules, scope, mesh, layout) or _too_many(rules, scope, mesh, layout, nbytes)
    if faults:
        hint = _way_on(rules, scope, mesh, layout)
        raise_all(faults, "this layout is not possible", hint=hint)
    geometries: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Piece, ...]]] = {}
    named: dict[tuple[object, ...], list[_Name]] = {}
    made: dict[tuple[object, ...], list[Placed]] = {}
    placed: dict[Coord, list[Placed]] = {coord: [] for coord in mesh.coords()}
    only = [{a: mesh.place(a, where) for a, where in rule.on.items()} for rule in rules]
    for coord, rows in placed.items():
        ranks = dict(coord)
        for number, rule in enumerate(rules):
            if any(ranks.get(a, 0) != rank for a, (rank, _) in only[number].items()):
                continue
            cut = [a for a, at in rule.axes.items() if isinstance(at, Shard)]
            shared = (number, *(ranks.get(a, 0) for a in cut))
            owned = (number, *(ranks.get(a, 0) for a in rule.axes if a not in cut))
            same = (number, *(ranks.get(a, 0) for a in rule.axes))
            if shared not in geometries:
                geometries[shared] = _geometry(rule, scope, mesh, ranks, layout)
            if owned not in named:
                stage = max((stage for _, stage in only[number].values()), default=0)
                named[owned] = list(_names(rule, scope, mesh, ranks, stage, layers))
            if same not in made:
                shape, pieces = geometries[shared]
                trained = not rule.buffer
                made[same] = [Placed(n, shape, pieces, at, v, trained) for n, at, v in named[owned]]
            rows.extend(made[same])
    return placed


def _way_on(rules: Sequence[Rule], scope: Sizes, mesh: Mesh, layout: Mapping[str, str]) -> str:
    """The sizes of an axis with which every row divides, the other axes as they are."""
    cut = {a for rule in rules for a, at in rule.axes.items() if isinstance(at, Shard)}
    found = []
    for axis, size in mesh.axes:
        if axis not in cut or size == 1:
            continue
        sizes = range(1, TRIED_SIZES + 1)
        fit = [n for n in sizes if not _faults_of(rules, scope, mesh, layout, axis, n)]
        if fit and size not in fit:
            near = min(fit, key=lambda n: (abs(n - size), n))
            found.append(
                f"{mesh.label(axis)} can be {', '.join(map(str, fit))}; {near} is the nearest"
            )
    return "; ".join(found)


def _faults_of(
    rules: Sequence[Rule], scope: Sizes, mesh: Mesh, layout: Mapping[str, str], axis: str, size: int
) -> list[str]:
    """`_faults` with another size of an axis, and as many padding rows as that needs."""
    padded = {
        f"padded_{rule.pad}": -(-scope[rule.pad] // size) * size for rule in rules if rule.pad
    }
    other = Mesh(tuple((a, size if a == axis else n) for a, n in mesh.axes), mesh.stages)
    return _faults(rules, {**scope, **padded, axis: size}, other, layout)


_Name = tuple[str, tuple[tuple[str, int], ...], int]  # name, its numbers, virtual stage


def _names(
    rule: Rule,
    scope: Sizes,
    mesh: Mesh,
    ranks: Mapping[str, int],
    stage: int,
    layers: Layers | None,
) -> Iterator[_Name]:
    """The name of each stored tensor of a row that this rank owns, one per layer and expert.

    ``stage`` is the virtual stage of a tensor that has no index.
    """
    owner = {at.name: axis for axis, at in rule.axes.items() if isinstance(at, ShardByIndex)}
    names = placeholders(rule.name)
    ranges: list[list[tuple[int, int]]] = []  # of each name: (virtual stage, index)
    for name in names:
        stages = mesh.stages.get(owner.get(name, ""))
        if stages is None:
            found = [(stage, index) for index in range(scope[name])]
        else:
            own = stages[ranks.get(owner[name], 0)]
            found = [(v, index) for v, owned in enumerate(own) for index in owned]
        if name == "layer" and rule.layers and layers is not None:
            having = frozenset(layers(rule))
            found = [row for row in found if row[1] in having]
        ranges.append(found)
    for values in itertools.product(*ranges):
        numbers = indexed(names, [index for _, index in values], scope)
        at = max((v for v, _ in values), default=stage)
        yield rule.name.format(**numbers), tuple(numbers.items()), at


def _too_many(
    rules: Sequence[Rule], scope: Sizes, mesh: Mesh, layout: Mapping[str, str], nbytes: int
) -> list[str]:
    """Count pieces before they are made: a config may claim any number of layers and heads, unless
    the files have ``nbytes`` for it.
    """
    counts = [_count(rule, scope, mesh, layout) for rule in rules]
    pieces, elements = (sum(column) for column in zip(*counts, strict=True))
    most_pieces = min(MAX_PIECES, max(FEW_PIECES, elements // PIECE_ELEMENTS))
    if pieces <= max(most_pieces, nbytes // PIECE_BYTES):
        return []
    most = max(range(len(rules)), key=lambda i: counts[i][0])
    by_row = layout.get("qkv") == PACKINGS["qkv"]["per_row"]
    return [
        f"{rules[most].name}: its packing cuts it into {counts[most][0]} of the model's {pieces} "
        f"pieces, which hold {elements} elements; the limit is {MAX_PIECES}, and above "
        f"{FEW_PIECES} they must hold {PIECE_ELEMENTS} elements each, or files {PIECE_BYTES} bytes "
        "for each; " + (_REPACK if by_row else "is the config of this model?")
    ]


def _count(rule: Rule, scope: Sizes, mesh: Mesh, layout: Mapping[str, str]) -> tuple[int, int]:
    """(pieces, elements) of one rule on all ranks, pieces counted high rather than low."""
    turns = _rounds(rule, scope, layout)
    turns += sum(scope[part.rounds] for part in rule.parts if part.rounds)
    pieces = elements = math.prod(scope[name] for name in placeholders(rule.name))
    for dim, segments in enumerate(_stored_dims(rule, scope)):
        cuts = math.prod(
            mesh.size(a) for a, at in rule.axes.items() if isinstance(at, Shard) and at.dim == dim
        )
        packed = len(segments) > 1 and not (rule.pad and dim == 0)
        blocks = sum(size > 0 for _, size in segments) * (turns if packed else 1)
        pieces *= max(blocks, 1) + cuts - 1
        elements *= sum(size for _, size in segments)
    spread = {**dict.fromkeys(rule.axes, 1), **dict.fromkeys(rule.on, 1)}
    copies = math.prod(size for axis, size in mesh.axes if axis not in spread)
    return pieces * copies, elements * copies


def _faults(
    rules: Sequence[Rule], scope: Sizes, mesh: Mesh, layout: Mapping[str, str]
) -> list[str]:
    """Every condition of every row that fails, each once."""
    found: dict[str, None] = {}
    for rule in rules:
        broken = [c.fault(scope) for c in rule.checks]
        found.update(dict.fromkeys(text for text in broken if text))
        turns = _rounds(rule, scope, layout)
        if turns > MAX_ROUNDS:
            found[f"{rule.name}: {turns} rounds of the {rule.groups!r} packing"] = None
            continue
        found.update(dict.fromkeys(_part_faults(rule, scope)))
        dims = _stored_dims(rule, scope)
        for dim, segments in enumerate(dims):
            if len(segments) > 1 and not (rule.pad and dim == 0):
                for segment, size in segments:
                    if size % turns:
                        says = f"{rule.name}: {segment} of size {size} does not divide into"
                        found[f"{says} {turns} rounds of the {rule.groups!r} packing"] = None
        for axis, at in rule.axes.items():
            if isinstance(at, Shard):
                total = sum(size for _, size in dims[at.dim])
                if total % mesh.size(axis):
                    says = f"{rule.name}: dim {at.dim} of size {total} does not divide over"
                    found[f"{says} {mesh.label(axis)}={mesh.size(axis)}"] = None
    return list(found)


def _part_faults(rule: Rule, scope: Sizes) -> Iterator[str]:
    """Logical tensors whose segments do not divide into their rounds."""
    for part in rule.parts:
        turns = scope[part.rounds] if part.rounds else 1
        if turns > MAX_ROUNDS or any(scope[s] % turns for s in _alternating(part)):
            yield f"{part.fqn}: its segments do not divide into {turns} rounds"


def _alternating(part: Part) -> list[str]:
    """The segments of a logical tensor that come in rounds."""
    if not part.rounds:
        return []
    return [s for dim in part.dims.split() if "+" in dim for s in dim.split("+")]


def _rounds(rule: Rule, scope: Sizes, layout: Mapping[str, str]) -> int:
    return scope[layout[rule.groups]] if rule.groups else 1


def _stored_dims(rule: Rule, scope: Sizes) -> list[list[tuple[str, int]]]:
    """For each stored dim its segments and their full sizes, the padding segment included."""
    dims = [[(s, scope[s]) for s in dim.split("+")] for dim in rule.dims.split()]
    if rule.pad:
        dims[0].append((PADDING, scope["padded_" + rule.pad] - scope[rule.pad]))
    return dims


def _geometry(
    rule: Rule, scope: Sizes, mesh: Mesh, ranks: Mapping[str, int], layout: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The rank's stored shape and its pieces, names still templates."""
    turns = _rounds(rule, scope, layout)
    steps = {  # the segments that logical tensors hold in rounds -> elements of a round
        segment: scope[segment] // scope[part.rounds]
        for part in rule.parts
        for segment in _alternating(part)
    }
    shape, blocks = [], []
    for dim, segments in enumerate(_stored_dims(rule, scope)):
        rows = list(_interleave(segments, 1 if rule.pad and dim == 0 else turns))
        total = sum(row.size for row in rows)
        for axis, at in rule.axes.items():
            if isinstance(at, Shard) and at.dim == dim:
                size = total // mesh.size(axis)
                rows = list(_cut(rows, ranks.get(axis, 0) * size, size))
                total = size
        shape.append(total)
        blocks.append([part for row in rows for part in _by_round(row, steps)])
    parts = _with_padding(rule)
    pieces = [_piece(parts, scope, combo) for combo in itertools.product(*blocks)]
    return tuple(shape), tuple(pieces)


def _interleave(segments: list[tuple[str, int]], turns: int) -> Iterator[_Block]:
    """The blocks of one full stored dim, in order; 0-size segments have none."""
    if len(segments) == 1:
        yield _Block(segments[0][0], 0, 0, segments[0][1])
        return
    at = 0
    for turn in range(turns):
        for segment, size in segments:
            step = size // turns
            if step:
                yield _Block(segment, at, turn * step, step)
            at += step


def _cut(rows: list[_Block], start: int, size: int) -> Iterator[_Block]:
    """The blocks of ``[start, start + size)``, in coordinates relative to ``start``."""
    for row in rows:
        lo, hi = max(row.start, start), min(row.start + row.size, start + size)
        if lo < hi or (row.size == 0 and lo == hi):
            yield _Block(row.segment, lo - start, row.segment_start + lo - row.start, hi - lo)


def _by_round(row: _Block, steps: Mapping[str, int]) -> Iterator[_Block]:
    """A block as those that lie in one round of a logical tensor each."""
    step = steps.get(row.segment)
    if not step:
        yield row
        return
    at, end = row.segment_start, row.segment_start + row.size
    while at < end:
        stop = min(end, (at // step + 1) * step)
        yield _Block(row.segment, row.start + at - row.segment_start, at, stop - at)
        at = stop


def _with_padding(rule: Rule) -> tuple[Part, ...]:
    """The rule's parts, and for a padded rule the part that its padding rows form."""
    if not rule.pad:
        return rule.parts
    (part,) = rule.parts
    return (part, Part(PADDING + part.fqn, part.dims.replace(rule.pad, PADDING)))


def _piece(parts: tuple[Part, ...], scope: Sizes, combo: tuple[_Block, ...]) -> Piece:
    """The piece of one block per stored dim: the part that has all of their segments."""
    wanted = [block.segment for block in combo]
    for part in parts:
        dims = [dim.split("+") for dim in part.dims.split()]
        where = [next((d for d, s in enumerate(dims) if seg in s), -1) for seg in wanted]
        if -1 in where:
            continue
        offsets, sizes, order = [0] * len(dims), [1] * len(dims), [-1] * len(dims)
        for stored_dim, (block, dim) in enumerate(zip(combo, where, strict=True)):
            turns = scope[part.rounds] if part.rounds and len(dims[dim]) > 1 else 1
            offsets[dim] = _logical_offset(block, dims[dim], scope, turns)
            sizes[dim] = block.size
            order[dim] = stored_dim
        stored = Box(tuple(b.start for b in combo), tuple(b.size for b in combo))
        index = tuple((d, dims[d][0].strip("{}")) for d, dim in enumerate(order) if dim < 0)
        box = Box(tuple(offsets), tuple(sizes))
        return Piece(part.fqn, box, stored, tuple(order), index)
    raise AssertionError(f"no part holds the segments {wanted}")


def _logical_offset(block: _Block, segments: list[str], scope: Sizes, turns: int) -> int:
    """Where a block begins in a logical dim whose segments come in ``turns`` rounds."""
    before = sum(scope[s] for s in itertools.takewhile(lambda s: s != block.segment, segments))
    if turns == 1:
        return before + block.segment_start
    turn, within = divmod(block.segment_start, scope[block.segment] // turns)
    return (turn * sum(scope[s] for s in segments) + before) // turns + within


def logical_shapes(
    rules: Sequence[Rule], sizes: Sizes, layers: Layers | None = None
) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of a model and its shape, in row order, padding excluded."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        names = placeholders(rule.name)
        ranges = [
            layers(rule) if layers is not None and n == "layer" else range(sizes[n]) for n in names
        ]
        for values in itertools.product(*ranges):
            numbers = indexed(names, values, sizes)
            for part in rule.parts:
                dims = part.dims.replace("{", "").replace("}", "").split()
                shape = tuple(sum(sizes[s] for s in dim.split("+")) for dim in dims)
                shapes[fill(part.fqn, numbers)] = shape
    return shapes


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of a model on a single rank and its shape, in the model's order."""
    return logical_shapes(model.rules(), model.sizes, model.layers_of)


def buffers_of(model: Model) -> frozenset[str]:
    """The logical tensors that are not trained."""
    rules = [rule for rule in model.rules() if rule.buffer]
    return frozenset(logical_shapes(rules, model.sizes, model.layers_of))


def padded_vocab(vocab: int, multiple: int, tp: int) -> int:
    """The smallest multiple of ``multiple * tp`` that is at least ``vocab`` (Megatron's rule)."""
    unit = multiple * tp
    return -(-vocab // unit) * unit


@dataclass(frozen=True, slots=True)
class Placement:
    """A model on a mesh in one packing: its logical tensors, and where each rank holds them."""

    model: Model
    mesh: Mesh
    rules: tuple[Rule, ...]  # those that hold for the model on this mesh
    padded: int  # vocabulary rows of all ranks together
    shapes: dict[str, tuple[int, ...]]  # logical tensors, in the model's order, padding excluded
    # every rank's stored tensors, in row order; coordinates of experts have the axis ep
    placed: dict[Coord, list[Placed]]

    @classmethod
    def of(
        cls,
        model: Model,
        mesh: Mesh,
        layout: Mapping[str, str],
        padded: int,
        variant: frozenset[str] = frozenset({WHOLE_DOWN}),
        *,
        nbytes: int = 0,
    ) -> Placement:
        """``layout`` has a value for each of the family's tags, ``padded`` is as the field,
        ``nbytes`` the size of a source's files.

        ``variant`` are the flags of what a format cuts in another way. CheckpointError for a mesh
        that is not possible, with every row that does not divide.
        """
        assert padded >= model.sizes["vocab"], f"{padded} rows for {model.sizes['vocab']}"
        rules = tuple(model.rules(mesh_flags(mesh) | variant))
        sizes = {**model.sizes, "padded_vocab": padded}
        placed: dict[Coord, list[Placed]] = {}
        for one, name in mesh.parts():
            chosen = [rule for rule in rules if rule.mesh == name]
            placed |= place(chosen, sizes, one, rounds(layout), model.layers_of, nbytes)
        shapes = logical_shapes(rules, sizes, model.layers_of)
        return cls(model, mesh, rules, padded, shapes, placed)

    @classmethod
    def written(
        cls,
        model: Model,
        mesh: Mesh,
        vocab_multiple: int,
        variant: frozenset[str] = frozenset({WHOLE_DOWN}),
    ) -> Placement:
        """In the packing that this tool writes, rows padded to a multiple of this times tp."""
        padded = padded_vocab(model.sizes["vocab"], vocab_multiple, mesh.size("tp"))
        return cls.of(model, mesh, default_layout(model.family), padded, variant)

    @staticmethod
    def way_on(model: Model, mesh: Mesh) -> str:
        """What to say of a mesh that is not possible: the sizes of each axis that are."""
        rules = [rule for rule in model.rules(mesh_flags(mesh)) if not rule.mesh]
        scope = {**model.sizes, **dict(mesh.axes)}
        return _way_on(rules, scope, mesh, rounds(default_layout(model.family)))

    @property
    def tied_copies(self) -> int:
        """Stored tensors that repeat a tied one on another stage."""
        return sum({"tie_word_embeddings", "pp>1"} <= set(rule.when) for rule in self.rules)

    def held(self, shards: Iterable[Coord]) -> dict[str, Placed]:
        """The stored tensors of all shards in one file, by name, in row order."""
        return {row.name: row for coord in shards for row in self.placed[coord]}

    def find(self, coord: Coord, name: str) -> Placed:
        """The stored tensor of that name on a rank."""
        for row in self.placed[coord]:
            if row.name == name:
                return row
        raise CheckpointError(f"{name}: no stored tensor of this rank has that name")
