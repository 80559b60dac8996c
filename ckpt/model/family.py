"""What a family table says, and where its rows put each element.

A family is data: rows that name a stored tensor, the logical tensors it is packed
from, and the mesh axes that cut it. ``place`` turns rows, sizes and a mesh into
pieces. It knows no axis, family or format by name, and both directions (reading a
rank's file, writing one) use the same pieces, so they cannot disagree.

Dims strings. ``"q+k+v h"`` is a 2-d tensor whose dim 0 holds the segments q, k and v
and whose dim 1 is h. A logical part names the same segments in its own dims; where it
lists them in another order it is a transpose (GPT-2's Conv1D: ``"h q+k+v"``). In the
stored tensor segments are interleaved in ``groups`` equal rounds (q of group 0, k of
group 0, v of group 0, q of group 1, ...); in a logical tensor they follow one another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError, raise_all
from .box import Box, range_boxes, row_major
from .manifest import PADDING
from .mesh import Coord, Mesh, Shard, ShardByIndex, split_evenly

Sizes = Mapping[str, int]  # symbol of a dims string -> elements
MAX_ROUNDS = 1 << 16  # a config may say any number of heads, and each is a piece
Axes = Mapping[str, Shard | ShardByIndex]  # mesh axis -> how it cuts a stored tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A logical tensor, or the segments of one, inside a stored tensor."""

    fqn: str  # with the placeholders of the rule's name, e.g. {layer}
    dims: str  # in the logical tensor's dim order


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on sizes and mesh that a row needs, and what to say where it fails."""

    says: str  # a format string over the sizes
    dividend: str
    divisor: str
    either_way: bool = False  # the division may go the other way round as well

    def fault(self, sizes: Sizes) -> str | None:
        a, b = sizes[self.dividend], sizes[self.divisor]
        if a % b == 0 or (self.either_way and b % a == 0):
            return None
        return self.says.format(**sizes)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: a stored tensor and the logical parts packed into it."""

    name: str  # megatron-core's local-spec name, global 0-based numbers
    dims: str  # stored dims
    parts: tuple[Part, ...]
    axes: Axes = field(default_factory=dict)
    on: Mapping[str, int] = field(default_factory=dict)  # axis -> the only rank; -1 = last
    groups: str = ""  # layout tag that says how segments interleave ("qkv", "glu")
    pad: str = ""  # segment of dim 0 that is padded
    when: tuple[str, ...] = ()  # flags that must hold; "!flag" must not
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how its config names sizes, and its rows."""

    name: str
    model_types: tuple[str, ...]  # `model_type` in config.json
    sizes: Mapping[str, str]  # symbol -> config keys, see `evaluate`
    flags: Mapping[str, bool]  # config key -> its value where the config is silent
    rules: tuple[Rule, ...]
    norm_offset: int = 0  # 1 where the norm multiplies by 1 + weight
    # names in Hugging Face files that carry no weight: pattern -> reason
    ignore: Mapping[str, str] = field(default_factory=dict)
    # prefixes that some files lack or add: name prefix found -> prefix meant
    prefixes: Mapping[str, str] = field(default_factory=dict)
    # a stored name of its own for the tied head in Hugging Face files
    tied_names: Mapping[str, str] = field(default_factory=dict)

    def select(self, flags: frozenset[str]) -> list[Rule]:
        """The rows that hold for a model with ``flags``."""
        return [
            rule
            for rule in self.rules
            if all((f[1:] not in flags) if f[0] == "!" else (f in flags) for f in rule.when)
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor and the box of a stored tensor that holds it."""

    fqn: str
    box: Box  # in the logical tensor's coordinates
    stored: Box  # in the rank's stored tensor's coordinates
    dims: tuple[int, ...]  # logical dim d lies along stored dim dims[d]


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor on one rank: its shape, and what it is made of."""

    name: str
    shape: tuple[int, ...]  # the rank's, elements
    pieces: tuple[Piece, ...]  # they tile the stored tensor exactly

    def bytes_at(self, piece: Piece, base: int, itemsize: int) -> tuple[int, tuple[int, ...]]:
        """Byte offset of a piece's first element, and its strides in logical dim order.

        ``base`` is the byte offset of the stored tensor, which is row-major.
        """
        steps = row_major(self.shape)
        first = sum(o * s for o, s in zip(piece.stored.offsets, steps, strict=True))
        return base + first * itemsize, tuple(steps[dim] for dim in piece.dims)

    def clip(self, start: int, stop: int) -> list[Piece]:
        """The pieces of the row-major range ``[start, stop)``; coordinates stay the same."""
        found = []
        for box in range_boxes(self.shape, start, stop):
            for piece in self.pieces:
                common = piece.stored.intersect(box)
                if common is not None and common.numel:
                    found.append(restrict(piece, common))
        return found


def restrict(piece: Piece, stored: Box) -> Piece:
    """The part of a piece that lies at ``stored`` (inside the piece's stored box)."""
    shift = [stored.offsets[dim] - piece.stored.offsets[dim] for dim in piece.dims]
    offsets = tuple(o + s for o, s in zip(piece.box.offsets, shift, strict=True))
    return Piece(
        piece.fqn, Box(offsets, tuple(stored.sizes[dim] for dim in piece.dims)), stored, piece.dims
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows of one stored dim that belong to one segment."""

    segment: str
    start: int  # stored coordinate, on the rank
    segment_start: int  # coordinate inside the segment
    size: int


def place(
    rules: list[Rule], sizes: Sizes, mesh: Mesh, layout: Mapping[str, str]
) -> dict[Coord, list[Placed]]:
    """Every rank's stored tensors, in row order. Raises with every row that does not divide.

    ``layout`` maps a group tag of a rule to the size symbol that gives its rounds.
    """
    scope = {**sizes, **dict(mesh.axes)}
    raise_all(_faults(rules, scope, mesh, layout), "this layout is not possible")
    placed: dict[Coord, list[Placed]] = {coord: [] for coord in mesh.coords()}
    for coord, rows in placed.items():
        ranks = dict(coord)
        for rule in rules:
            if all(ranks.get(a, 0) == r % mesh.size(a) for a, r in rule.on.items()):
                shape, pieces = _geometry(rule, scope, mesh, ranks, layout)
                rows.extend(_instances(rule, scope, mesh, ranks, shape, pieces))
    return placed


def _instances(
    rule: Rule,
    scope: Sizes,
    mesh: Mesh,
    ranks: Mapping[str, int],
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
) -> Iterator[Placed]:
    """One stored tensor per layer (or expert) that this rank owns; geometry is shared."""
    owner = {at.name: axis for axis, at in rule.axes.items() if isinstance(at, ShardByIndex)}
    names = placeholders(rule.name)
    ranges = [
        mesh.owned[owner[n]][ranks.get(owner[n], 0)]
        if n in owner and owner[n] in mesh.owned
        else range(scope[n])
        for n in names
    ]
    for values in itertools.product(*ranges):
        numbers = dict(zip(names, values, strict=True))
        yield Placed(
            fill(rule.name, numbers),
            shape,
            tuple(Piece(fill(p.fqn, numbers), p.box, p.stored, p.dims) for p in pieces),
        )


def placeholders(template: str) -> list[str]:
    """The index names of a template: ``decoder.layers.{layer}.x`` -> ``["layer"]``."""
    return re.findall(r"\{(\w+)\}", template)


def fill(template: str, numbers: Mapping[str, int]) -> str:
    """A template with its index numbers."""
    for name, value in numbers.items():
        template = template.replace("{" + name + "}", str(value))
    return template


def _faults(rules: list[Rule], scope: Sizes, mesh: Mesh, layout: Mapping[str, str]) -> list[str]:
    """Every condition of every row that fails, each said once."""
    found: dict[str, None] = {}
    for rule in rules:
        broken = [c.fault(scope) for c in rule.checks]
        found.update(dict.fromkeys(text for text in broken if text))
        rounds = _rounds(rule, scope, layout)
        if rounds > MAX_ROUNDS:
            found[f"{rule.name}: {rounds} rounds of the {rule.groups!r} packing"] = None
            continue
        dims = _stored_dims(rule, scope)
        for dim, segments in enumerate(dims):
            if len(segments) > 1 and not (rule.pad and dim == 0):
                for segment, size in segments:
                    if size % rounds:
                        says = f"{rule.name}: {segment} of size {size} does not divide into"
                        found[f"{says} {rounds} rounds of the {rule.groups!r} packing"] = None
        for axis, at in rule.axes.items():
            if isinstance(at, Shard):
                total = sum(size for _, size in dims[at.dim])
                if total % mesh.size(axis):
                    says = f"{rule.name}: dim {at.dim} of size {total} does not divide over"
                    found[f"{says} {axis}={mesh.size(axis)}"] = None
    return list(found)


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
    rounds = _rounds(rule, scope, layout)
    shape, blocks = [], []
    for dim, segments in enumerate(_stored_dims(rule, scope)):
        rows = list(_interleave(segments, 1 if rule.pad and dim == 0 else rounds))
        total = sum(row.size for row in rows)
        for axis, at in rule.axes.items():
            if isinstance(at, Shard) and at.dim == dim:
                size = total // mesh.size(axis)
                rows = list(_cut(rows, ranks.get(axis, 0) * size, size))
                total = size
        shape.append(total)
        blocks.append(rows)
    parts = _with_padding(rule)
    pieces = [_piece(parts, scope, combo) for combo in itertools.product(*blocks)]
    return tuple(shape), tuple(pieces)


def _interleave(segments: list[tuple[str, int]], rounds: int) -> Iterator[_Block]:
    """The blocks of one full stored dim, in order; 0-size segments have none."""
    if len(segments) == 1:
        yield _Block(segments[0][0], 0, 0, segments[0][1])
        return
    at = 0
    for turn in range(rounds):
        for segment, size in segments:
            step = size // rounds
            if step:
                yield _Block(segment, at, turn * step, step)
            at += step


def _cut(rows: list[_Block], start: int, size: int) -> Iterator[_Block]:
    """The blocks of ``[start, start + size)``, in coordinates that begin at ``start``."""
    for row in rows:
        lo, hi = max(row.start, start), min(row.start + row.size, start + size)
        if lo < hi or (row.size == 0 and lo == hi):
            yield _Block(row.segment, lo - start, row.segment_start + lo - row.start, hi - lo)


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
        offsets, sizes, order = [0] * len(dims), [0] * len(dims), [0] * len(dims)
        for stored_dim, (block, dim) in enumerate(zip(combo, where, strict=True)):
            before = itertools.takewhile(lambda s, b=block: s != b.segment, dims[dim])  # type: ignore[misc]
            offsets[dim] = sum(scope[s] for s in before) + block.segment_start
            sizes[dim] = block.size
            order[dim] = stored_dim
        stored = Box(tuple(b.start for b in combo), tuple(b.size for b in combo))
        return Piece(part.fqn, Box(tuple(offsets), tuple(sizes)), stored, tuple(order))
    raise AssertionError(f"no part holds the segments {wanted}")


def logical_shapes(rules: list[Rule], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of a model and its shape, in row order, padding excluded."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        names = placeholders(rule.name)
        for values in itertools.product(*(range(sizes[n]) for n in names)):
            numbers = dict(zip(names, values, strict=True))
            for part in rule.parts:
                shape = tuple(sum(sizes[s] for s in dim.split("+")) for dim in part.dims.split())
                shapes[fill(part.fqn, numbers)] = shape
    return shapes


def evaluate(family: Family, config: Mapping[str, object], origin: str) -> dict[str, int]:
    """The sizes of a model: each symbol's expression over config keys and earlier symbols.

    ``a|b`` is a, or b where the config lacks a or has null; ``a*b`` and ``a/b`` are exact.
    Raises CheckpointError that names the key where nothing gives a value.
    """
    sizes: dict[str, int] = {}
    for symbol, expression in family.sizes.items():
        for option in expression.split("|"):
            value = _value(option, config, sizes, origin)
            if value is not None:
                sizes[symbol] = value
                break
        else:
            raise CheckpointError(f"{origin}: needs {expression.replace('|', ' or ')}")
    return sizes


def _value(option: str, config: Mapping[str, object], sizes: Sizes, origin: str) -> int | None:
    """One alternative of an expression, or None where the config is silent about it."""
    total = 1
    for operator, key in re.findall(r"([*/]?)\s*(\w+)", option):
        if key.isdigit():
            term: object = int(key)
        else:
            term = config[key] if config.get(key) is not None else sizes.get(key)
        if term is None:
            return None
        if type(term) is not int or term <= 0:
            raise CheckpointError(f"{origin}: {key} is {term!r}, not a whole number above 0")
        if operator == "/" and total % term:
            raise CheckpointError(f"{origin}: {option.strip()} is {total}/{term}, not whole")
        total = total // term if operator == "/" else total * term
    return total


def model_flags(family: Family, config: Mapping[str, object], origin: str) -> frozenset[str]:
    """The flags that a config sets, the family's defaults where it is silent."""
    found = set()
    for key, default in family.flags.items():
        value = config.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise CheckpointError(f"{origin}: {key} is {value!r}, neither true nor false")
        if value:
            found.add(key)
    return frozenset(found)


def build_mesh(
    rules: Sequence[Rule],
    sizes: Sizes,
    axes: tuple[tuple[str, int], ...],
    stages: tuple[tuple[int, ...], ...] | None = None,
) -> Mesh:
    """A mesh whose indexed axes own what the rules index by them, split evenly.

    ``stages`` says instead which layers each rank of pp owns. Raises CheckpointError for an
    axis of several ranks that no rule is cut by: each rank would hold the same.
    """
    owned = {} if stages is None else {"pp": stages}
    used = {"pp"}
    for axis, at in itertools.chain(*(rule.axes.items() for rule in rules)):
        used.add(axis)
        if isinstance(at, ShardByIndex) and axis not in owned:
            ranks = dict(axes).get(axis, 1)
            owned[axis] = split_evenly(sizes[at.name], ranks, at.name, axis)
    for axis, size in axes:
        if size > 1 and axis not in used:
            raise CheckpointError(f"{axis}={size}: nothing of this model is split over {axis}")
    return Mesh(axes, owned)


def mesh_flags(mesh: Mesh) -> frozenset[str]:
    """``axis>1`` for every axis that splits; rules may ask for it."""
    return frozenset(f"{axis}>1" for axis, size in mesh.axes if size > 1)


@dataclass(frozen=True, slots=True)
class Model:
    """A family with the sizes and flags of one config."""

    family: Family
    config: Mapping[str, object]
    sizes: dict[str, int]
    flags: frozenset[str]
