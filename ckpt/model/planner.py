"""Resharding is one function: ``plan(source, target) -> Plan``.

It proves coverage before a byte moves: every destination element is written exactly once, and
every source element is used, or is a replica, or is listed with a reason. All faults of the two
manifests are reported together. ``plan`` uses boxes only, so it is pure and opens no file. If a
format has deferred reading headers, ``resolve(plan)`` then reads those that the copies need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import raise_all
from .box import Box, full
from .dtypes import CASTABLE, ITEMSIZE
from .manifest import Chunk, Manifest, Place, TensorMeta, View, category_of, locate
from .tiling import Match, match, target_fault

MAX_REPEATED_BYTES = 1 << 32  # of a tensor with strides that repeat the same bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of a logical tensor, from one place to another of the same shape."""

    fqn: str
    box: Box  # in the logical tensor's coordinates; the executor tiles along it
    source: Place
    target: Place

    @property
    def src(self) -> View:
        """The source's bytes, known once the plan is resolved."""
        assert isinstance(self.source, View), "resolve(plan) comes before its bytes are asked for"
        return self.source

    @property
    def dst(self) -> View:
        """The target's bytes, known once the plan is resolved."""
        assert isinstance(self.target, View), "resolve(plan) comes before its bytes are asked for"
        return self.target

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.box.numel * ITEMSIZE[self.target.dtype]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two elements are equal if ``|a - b| <= atol + rtol * |b|``; with zeros, bit for bit."""

    rtol: float = 0.0
    atol: float = 0.0
    cast: bool = False  # `b` is `a` cast to its dtype: cast again, then bit for bit

    @property
    def exact(self) -> bool:
        """Whether dtypes must agree as well."""
        return self.rtol == 0.0 and self.atol == 0.0 and not self.cast


@dataclass(slots=True)
class Coverage:
    """What a plan does with every element, for the closing report."""

    tensors: int = 0  # logical tensors written
    read_bytes: int = 0
    written_bytes: int = 0  # tensor bytes; replicas in the target count each time
    zero_bytes: int = 0  # new padding rows
    tied: int = 0  # tied heads that one side repeats or leaves out
    replicas: int = 0  # source chunks that repeat another one
    dropped: dict[str, list[int]] = field(default_factory=dict)  # reason -> [tensors, bytes]

    def drop(self, reason: str, nbytes: int) -> None:
        """Count a tensor that is left out, under the reason that the report prints."""
        row = self.dropped.setdefault(reason, [0, 0])
        row[0] += 1
        row[1] += nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies in destination order, replicas to compare, and the account of coverage."""

    copies: list[Copy]
    replicas: list[Copy]  # src: the chunk that is used; dst: the one that must equal it
    coverage: Coverage
    zeros: list[Chunk] = field(default_factory=list)  # of the target: new padding rows

    def __repr__(self) -> str:
        c = self.coverage
        return (
            f"<Plan: {len(self.copies)} copies of {c.tensors} tensors, {c.written_bytes} bytes, "
            f"{len(self.replicas)} replicas to compare>"
        )


def plan(
    source: Manifest,
    target: Manifest,
    drop: Callable[[str], str | None] = lambda fqn: None,
    *,
    share: bool = False,
    part: bool = False,
) -> Plan:
    """How every element of ``target`` is filled from ``source``.

    ``drop`` gives the reason why a source tensor that the target lacks may be left out; None means
    that it may not. With ``share`` the target is one process's share of a model, so it need not
    take everything. With ``part`` the source is one process's share too: it must cover the target's
    boxes, not whole tensors. Places are copied from the manifests as they are. Raises
    CheckpointError with every fault found.
    """
    faults: list[str] = []
    coverage = Coverage()
    found: dict[str, Match] = {}
    zeros: list[Chunk] = []
    if not share:
        _account_for_unused(source, target, drop, coverage, faults)
    for fqn, meta in target.tensors.items():
        have = source.tensors.get(fqn)
        if have is None:
            if meta.elastic:
                zeros += _new_rows(fqn, 0, target)
            else:
                need = f"shape {list(meta.shape)} is needed"
                faults.append(f"{fqn}: missing in the source ({need})")
            continue
        fault = _meta_fault(have, meta)
        if fault:
            faults.append(f"{fqn}: {fault}")
            continue
        common = full(tuple(map(min, have.shape, meta.shape)))
        if meta.elastic:
            zeros += _new_rows(fqn, have.shape[0], target)
            _account_for_lost_rows(have, meta, coverage)
        boxes = [tuple(c.box for c in m.chunks[fqn]) for m in (source, target)]
        found[fqn] = match(common, boxes[0], boxes[1], part)
        fault = found[fqn].fault
        if not fault and not share:
            fault = target_fault(common, boxes[1])
        if fault:
            faults.append(f"{fqn}: {fault}")
        coverage.tensors += 1
    raise_all(faults, "the plan does not cover every element")
    copies, replicas = _paired(source, target, found, coverage)
    coverage.read_bytes = sum(c.box.numel * ITEMSIZE[c.source.dtype] for c in copies)
    coverage.written_bytes = sum(c.nbytes for c in copies)
    coverage.zero_bytes = sum(z.box.numel * ITEMSIZE[z.place.dtype] for z in zeros)
    return Plan(copies, replicas, coverage, zeros)


def _paired(
    source: Manifest, target: Manifest, found: Mapping[str, Match], coverage: Coverage
) -> tuple[list[Copy], list[Copy]]:
    """The copies, and the replicas to compare, of all matches."""
    copies: list[Copy] = []
    replicas: list[Copy] = []
    for fqn, pairs in found.items():
        ours, theirs = source.chunks[fqn], target.chunks[fqn]
        copies += [Copy(fqn, b, ours[i].narrow(b), theirs[j].narrow(b)) for i, j, b in pairs.moves]
        replicas += [
            Copy(fqn, b, ours[i].narrow(b), ours[j].narrow(b)) for i, j, b in pairs.repeats
        ]
        coverage.replicas += len({j for _, j, _ in pairs.repeats})
    return copies, replicas


def resolve(made: Plan) -> Plan:
    """The plan with every place looked up: the headers that it needs are read, file by file.

    Raises CheckpointError that names every damaged header. Also for a tensor of huge shape with
    strides that repeat a few bytes: writing or comparing it would not end.
    """
    every = (*made.copies, *made.replicas)
    deferred = {p for c in every for p in (c.source, c.target) if not isinstance(p, View)}
    if deferred:
        locate(deferred)
        copies, replicas = ([_found(c) for c in rows] for rows in (made.copies, made.replicas))
        made = Plan(copies, replicas, made.coverage, made.zeros)
    raise_all(
        [fault for c in (*made.copies, *made.replicas) if (fault := _repeated(c))],
        "strides repeat a few bytes",
    )
    return made


def _repeated(copy: Copy) -> str:
    """Why a copy repeats too few bytes too often; empty if it does not."""
    if copy.nbytes <= MAX_REPEATED_BYTES:
        return ""
    for view in (copy.src, copy.dst):
        start, stop = view.extent()
        size = copy.box.numel * ITEMSIZE[view.dtype]
        if size > max(MAX_REPEATED_BYTES, stop - start):
            return (
                f"{view.file}: {copy.fqn}: {stop - start} bytes stand for {size} (shape "
                f"{list(view.shape)}, strides {list(view.strides)}); save it again with "
                ".contiguous()"
            )
    return ""


def _found(copy: Copy) -> Copy:
    source, target = (p if isinstance(p, View) else p.view() for p in (copy.source, copy.target))
    return Copy(copy.fqn, copy.box, source, target)


def _account_for_unused(
    source: Manifest,
    target: Manifest,
    drop: Callable[[str], str | None],
    coverage: Coverage,
    faults: list[str],
) -> None:
    for fqn, meta in source.tensors.items():
        if fqn in target.tensors:
            continue
        reason = drop(fqn)
        if reason is None and meta.elastic:
            reason = "padding rows that the target has no place for"
        if reason is None:
            faults.append(f"{fqn}: unknown tensor of shape {list(meta.shape)}, nothing takes it")
        else:
            coverage.drop(reason, meta.nbytes)


def _new_rows(fqn: str, have: int, target: Manifest) -> Iterator[Chunk]:
    """The places of padding rows from row ``have`` on: files are created as zeros."""
    for chunk in target.chunks.get(fqn, ()):
        rows = chunk.box.stop(0) - max(have, chunk.box.offsets[0])
        if rows > 0 and chunk.box.numel:
            offsets = (chunk.box.stop(0) - rows, *chunk.box.offsets[1:])
            box = Box(offsets, (rows, *chunk.box.sizes[1:]))
            yield Chunk(fqn, box, chunk.narrow(box))


def _meta_fault(have: TensorMeta, want: TensorMeta) -> str | None:
    if have.shape != want.shape:
        same_rank = len(have.shape) == len(want.shape)
        if not (want.elastic and same_rank and have.shape[1:] == want.shape[1:]):
            return f"shape {list(have.shape)} in the source, {list(want.shape)} in the target"
    if have.dtype != want.dtype and not {have.dtype, want.dtype} <= set(CASTABLE):
        return f"cannot be cast from {have.dtype} to {want.dtype}"
    return None


def _account_for_lost_rows(have: TensorMeta, want: TensorMeta, coverage: Coverage) -> None:
    """Padding tensors may differ in rows: count the dropped rows."""
    lost = have.shape[0] - want.shape[0]
    if lost > 0:
        reason = "padding rows that the target has no place for"
        coverage.drop(reason, lost * have.nbytes // have.shape[0])


def chunk_count(*manifests: Manifest) -> int:
    """Chunks held by manifests; each costs under 2 KiB of memory."""
    return sum(len(chunks) for m in manifests for chunks in m.chunks.values())


def by_category(reasons: Mapping[str, str]) -> Callable[[str], str | None]:
    """A ``drop`` function from category (``exp_avg``, ...) to reason."""
    return lambda fqn: reasons.get(category_of(fqn))
