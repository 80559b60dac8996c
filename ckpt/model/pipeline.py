"""How layers are spread over pipeline ranks and their virtual stages.

Every function returns `Stages`. Megatron-LM numbers layers through virtual stage 0 of all ranks,
then through virtual stage 1: a list of counts in that order says everything (``numbered``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from .mesh import Stages

MAX_STAGES = 1 << 16  # virtual ones of all ranks; a layout may claim any number
_LETTERS = "EtmL"  # embedding, decoder layer, layer that predicts further tokens, loss


def split_evenly(
    count: int, ranks: int, what: str = "layer", axis: str = "pp"
) -> tuple[tuple[int, ...], ...]:
    """``count`` indices over ``ranks``, contiguous and equal; CheckpointError if they do not
    divide.

    ``what`` (``layer``, ``expert``) and ``axis`` are for the message.
    """
    if count % ranks:
        hint = ""
        if axis == "pp" and ranks <= count:
            hint = f"; name the stages with --pp-layers, for example {_uneven(count, ranks)}"
        raise CheckpointError(f"{count} {what}s do not divide over {axis}={ranks}{hint}")
    return split_by_counts(count, (count // ranks,) * ranks)


def _uneven(count: int, ranks: int) -> str:
    base, more = divmod(count, ranks)
    return ",".join(str(base + (rank < more)) for rank in range(ranks))


def split_by_counts(count: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Stage s gets the next ``counts[s]`` indices; every index must have an owner."""
    if sum(counts) != count or min(counts, default=0) < 0:
        raise CheckpointError(
            f"--pp-layers {','.join(map(str, counts))} names {sum(counts)} layers, "
            f"the model has {count}"
        )
    starts = itertools.accumulate(counts, initial=0)
    return tuple(tuple(range(s, s + n)) for s, n in zip(starts, counts, strict=False))


def single(owned: Sequence[Sequence[int]]) -> Stages:
    """Ranks of one virtual stage each."""
    return tuple((tuple(layers),) for layers in owned)


def numbered(counts: Sequence[int], ranks: int) -> Stages:
    """Stages of these many layers: virtual stage 0 of all ranks, virtual stage 1, ..."""
    assert len(counts) % ranks == 0, f"{len(counts)} stages on {ranks} ranks"
    owned = split_by_counts(sum(counts), tuple(counts))
    return tuple(owned[rank::ranks] for rank in range(ranks))


def counts_of(stages: Stages) -> list[int] | None:
    """The counts that ``numbered`` makes these stages from; None if layers run another way."""
    if len({len(rank) for rank in stages}) != 1:
        return None
    counts = [len(rank[v]) for v in range(len(stages[0])) for rank in stages]
    return counts if numbered(counts, len(stages)) == stages else None


def interleaved(count: int, ranks: int, vpp: int, rank_layers: Sequence[int] = ()) -> Stages:
    """``count`` layers over ``ranks`` ranks of ``vpp`` virtual stages, cut evenly.

    ``rank_layers`` are the layers of each rank if those differ.
    """
    if vpp > 1 and ranks == 1:
        raise CheckpointError(f"--vpp {vpp}: virtual stages need pipeline stages; pp is 1")
    if not rank_layers and count % (ranks * vpp):
        raise CheckpointError(f"{count} layers do not divide over pp={ranks} with --vpp {vpp}")
    each = tuple(rank_layers) or (count // ranks,) * ranks
    split_by_counts(count, each)  # checks their sum
    odd = [n for n in each if n % vpp]
    if odd:
        raise CheckpointError(f"a stage of {odd[0]} layers does not divide into {vpp} virtual ones")
    return numbered([n // vpp for n in each] * vpp, ranks)


def shortened(count: int, ranks: int, vpp: int, embedding: bool, loss: bool) -> Stages:
    """Even stages in which embedding and loss take the place of a layer.

    Megatron-LM's --account-for-embedding-in-pipeline-split and --account-for-loss-...
    """
    total = count + embedding + loss
    if total % (ranks * vpp):
        raise CheckpointError(
            f"{count} layers, with embedding or loss counted as one, are {total}, which do not "
            f"divide over pp={ranks} of {vpp} virtual stages"
        )
    counts = [total // (ranks * vpp)] * (ranks * vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    return numbered(counts, ranks)


# --- layout strings ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A layout string, spread over ranks."""

    stages: Stages
    mtp: tuple[int, int] | None  # rank and virtual stage of the m; None if there is none


def parse(text: str, ranks: int, layers: int, origin: str) -> Pipeline:
    """A layout string of Megatron-LM, as ``Et*3|(tt|)*29,m|L``, on ``ranks`` ranks.

    ``|`` separates virtual stages, in the order of ``numbered``; E is the embedding, t a decoder
    layer, m a layer that predicts further tokens, L the loss; ``*`` repeats a letter or a group;
    commas mean nothing. CheckpointError with ``origin`` for any other text, or if it is no layout
    of ``layers`` decoder layers.
    """
    written = _expanded(text, origin).split("|")
    if len(written) % ranks:
        raise CheckpointError(
            f"{origin}: {text!r:.200} has {len(written)} stages, which do not divide over "
            f"pp={ranks}"
        )
    flat = "".join(written)
    faults = []
    if written[0][:1] != "E" or flat.count("E") != 1:
        faults.append("its first letter must be its only E (the embedding)")
    if written[-1][-1:] != "L" or flat.count("L") != 1:
        faults.append("its last letter must be its only L (the loss)")
    if flat.count("t") != layers:
        faults.append(f"it names {flat.count('t')} decoder layers (t), the model has {layers}")
    holders = [i for i, stage in enumerate(written) if "m" in stage]
    if len(holders) > 1 or "mt" in flat:
        faults.append("all m must be in one stage, after the decoder layers")
    if faults:
        raise CheckpointError(f"{origin}: {text!r:.200}: {'; '.join(faults)}")
    mtp = (holders[0] % ranks, holders[0] // ranks) if holders else None
    return Pipeline(numbered([stage.count("t") for stage in written], ranks), mtp)


def _expanded(text: str, origin: str) -> str:
    """The string without commas, groups and repeats; its length is bounded."""
    pattern = re.compile(r"([EtmL|])(?:\*(\d{1,6}))?|(\()|\)(?:\*(\d{1,6}))?")
    rest, at = text.replace(",", "").replace(" ", ""), 0
    open_groups: list[str] = [""]
    while at < len(rest):
        match = pattern.match(rest, at)
        closes = match is not None and match[0][0] == ")"
        inside = len(open_groups) > 1  # a group; groups hold no groups
        if match is None or (closes and not inside) or (match[3] and inside):
            raise CheckpointError(
                f"{origin}: {text!r:.200}: {rest[at : at + 20]!r} is no part of a pipeline layout "
                f"(letters {_LETTERS}, |, groups in parentheses, *N)"
            )
        at = match.end()
        if match[3]:
            open_groups.append("")
            continue
        unit, times = (open_groups.pop(), match[4]) if closes else (match[1], match[2])
        if len(open_groups[-1]) + len(unit) * int(times or 1) > MAX_STAGES:
            raise CheckpointError(f"{origin}: {text!r:.200}: has more than {MAX_STAGES} letters")
        open_groups[-1] += unit * int(times or 1)
    if len(open_groups) > 1:
        raise CheckpointError(f"{origin}: {text!r:.200}: a parenthesis is not closed")
    return open_groups[0]


def text_of(stages: Stages, mtp: tuple[int, int] | None = None, mtp_layers: int = 0) -> str | None:
    """The layout string of stages; None if no string says them."""
    counts = counts_of(stages)
    if counts is None:
        return None
    ranks = len(stages)
    rows = ["t" * n for n in counts]
    rows[0] = "E" + rows[0]
    if mtp_layers:
        rank, stage = mtp or (ranks - 1, len(stages[0]) - 1)
        rows[stage * ranks + rank] += "m" * mtp_layers
    rows[-1] += "L"
    return "|".join(rows)
