"""What a family table says: its rows, and the sizes and flags that a config gives.

A family is data: rows that name a stored tensor, the logical tensors it is packed
from, and the mesh axes that cut it. ``placement.py`` turns them into pieces.

Dims strings. ``"q+k+v h"`` is a 2-d tensor whose dim 0 holds the segments q, k and v
and whose dim 1 is h. A logical part names the same segments in its dims; if their order is another
one, it is a transpose (GPT-2's Conv1D: ``"h q+k+v"``). In the
stored tensor segments are interleaved in ``groups`` equal rounds (q of group 0, k of
group 0, v of group 0, q of group 1, ...); in a logical tensor they come one after another, unless
the part has ``rounds`` of its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError
from .layer_kinds import LayerKinds
from .mesh import EXPERT, Mesh, Shard, ShardByIndex, Stages
from .pipeline import single, split_evenly

Sizes = Mapping[str, int]  # symbol of a dims string -> elements
Axes = Mapping[str, Shard | ShardByIndex]  # mesh axis -> how it cuts a stored tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A logical tensor, or the segments of one, inside a stored tensor."""

    fqn: str  # with the placeholders of the rule's name, e.g. {layer}
    dims: str  # in the logical tensor's dim order
    rounds: str = ""  # symbol: its segments alternate so often in the logical tensor too


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on sizes and mesh that a row needs, and the message if it fails."""

    says: str  # a format string over the sizes
    dividend: str
    divisor: str
    either_way: bool = False  # it is enough if one of the two divides the other

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
    # axis -> where the only rank with it is, by meaning: see Mesh.place
    on: Mapping[str, str] = field(default_factory=dict)
    groups: str = ""  # layout tag that says how segments interleave ("qkv", "glu")
    pad: str = ""  # segment of dim 0 that is padded
    when: tuple[str, ...] = ()  # flags that must hold; "!flag" must not (see `Family.flags`)
    layers: str = ""  # the kind that a layer must be of (see `Family.kinds`)
    mesh: str = ""  # EXPERT: cut by the mesh of the experts (Mesh.experts)
    buffer: bool = False  # not trained: no optimizer state, and casts leave its dtype alone
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Function:
    """What a family computes that its rows do not say.

    Rows and config together must tell a GPTModel of megatron-core from all else: what it does not
    compute is in ``plain`` (for some configs) or in ``beyond`` (for all).
    """

    # what transformers' config class takes where a config is silent: key -> value
    defaults: Mapping[str, object] = field(default_factory=dict)
    # config key -> the values with which a GPTModel computes the family
    plain: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()  # what no GPTModel computes, in words
    layer_norm: bool = False  # norms subtract the mean; otherwise RMSNorm
    rotary: str = "half"  # pairs of rotary dims: d and d + half, or "interleaved": 2d and 2d + 1
    # layers with a sliding window: every one (0), all but each n-th (n), or the key means nothing
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how its config names sizes, and its rows.

    Rows ask for flags: keys of ``flags`` that are true, ``symbol>0`` for each size that may be
    absent, ``axis>1`` for each axis that splits, and ``has NAME`` if the checkpoint has the tensor
    NAME (a template of Hugging Face's names; any layer counts).
    """

    name: str
    model_types: tuple[str, ...]  # `model_type` in config.json
    sizes: Mapping[str, str]  # symbol -> config keys, see `evaluate`
    # config key -> its value if the config does not have it; "key==number" and "key==null" hold
    # for that value, and a key that a config does not have is null
    flags: Mapping[str, bool]
    rules: tuple[Rule, ...]
    norm_offset: int = 0  # 1 if the norm multiplies by 1 + weight
    function: Function = field(default_factory=Function)
    # names in Hugging Face files that carry no weight: pattern -> reason
    ignore: Mapping[str, str] = field(default_factory=dict)
    # prefixes that some files lack or add: name prefix found -> prefix meant
    prefixes: Mapping[str, str] = field(default_factory=dict)
    # the name under which some Hugging Face files store the tied head too
    tied_names: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[LayerKinds, ...] = ()  # each gives every layer a kind
    # templates of tensors that some Hugging Face files hold a second time -> the tensor
    copies: Mapping[str, str] = field(default_factory=dict)

    def logical(self, name: str) -> str:
        """The logical name of a tensor that a file, or a model in memory, spells otherwise."""
        found = next((p for p in self.prefixes if name.startswith(p)), "")
        return self.prefixes.get(found, "") + name[len(found) :]

    def select(self, flags: frozenset[str]) -> list[Rule]:
        """The rows that hold for a model with ``flags``."""
        return [
            rule
            for rule in self.rules
            if all((f[1:] not in flags) if f[0] == "!" else (f in flags) for f in rule.when)
        ]


def placeholders(template: str) -> list[str]:
    """The index names of a template: ``decoder.layers.{layer}.x`` -> ``["layer"]``."""
    return re.findall(r"\{(\w+)\}", template)


def fill(template: str, numbers: Mapping[str, int]) -> str:
    """A template with its index numbers."""
    for name, value in numbers.items():
        template = template.replace("{" + name + "}", str(value))
    return template


def evaluate(family: Family, config: Mapping[str, object], origin: str) -> dict[str, int]:
    """The sizes of a model: each symbol's expression over config keys and earlier symbols.

    ``a|b`` is a, or b if the config lacks a or has null; ``a*b``, ``a/b`` (exact) and ``a+b`` count
    from left to right; ``f?a`` is a if the flag f holds. With ``|0`` at the end the size may be
    absent, null or 0. Raises CheckpointError with the key if nothing gives a value.
    """
    sizes: dict[str, int] = {}
    flags = model_flags(family, config, origin)
    for symbol, expression in family.sizes.items():
        *options, last = expression.split("|")
        may_lack = last == "0"
        for option in options if may_lack else [*options, last]:
            flag, asked, option = option.rpartition("?")
            if asked and flag not in flags:
                continue
            value = _value(option, config, sizes, origin, least=0 if may_lack else 1)
            if value is not None:
                sizes[symbol] = value
                break
        else:
            if may_lack:
                sizes[symbol] = 0
                continue
            raise CheckpointError(f"{origin}: needs {expression.replace('|', ' or ')}")
    return sizes


def _value(
    option: str, config: Mapping[str, object], sizes: Sizes, origin: str, least: int
) -> int | None:
    """One alternative of an expression; None if the config does not have it."""
    total = 1
    for operator, key in re.findall(r"([*/+]?)\s*(\w+)", option):
        if key.isdigit():
            term: object = int(key)
        else:
            term = config[key] if config.get(key) is not None else sizes.get(key)
        if term is None:
            return None
        if type(term) is not int or term < least:
            above = "from 0 on" if least == 0 else "above 0"
            raise CheckpointError(f"{origin}: {key} is {term!r}, not a whole number {above}")
        if operator == "/" and (not term or total % term):
            raise CheckpointError(f"{origin}: {option.strip()} is {total}/{term}, not whole")
        if operator == "+":
            total += term
        else:
            total = total // term if operator == "/" else total * term
    return total


def model_flags(family: Family, config: Mapping[str, object], origin: str) -> frozenset[str]:
    """The flags of a config; the family's default for those that it does not have."""
    found = set()
    for key, default in family.flags.items():
        name, compared, wanted = key.partition("==")
        if compared:
            if config.get(name) == (None if wanted == "null" else int(wanted)):
                found.add(key)
            continue
        value = config.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise CheckpointError(f"{origin}: {key} is {value!r}, neither true nor false")
        if value:
            found.add(key)
    return frozenset(found)


def size_flags(family: Family, sizes: Sizes) -> frozenset[str]:
    """``symbol>0`` for each size that may be absent and is not."""
    may_lack = (symbol for symbol, text in family.sizes.items() if text.endswith("|0"))
    return frozenset(f"{symbol}>0" for symbol in may_lack if sizes[symbol])


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
    kinds: tuple[frozenset[str], ...] = ()  # of each layer; empty if the family has no kinds

    def rules(self, more: frozenset[str] = frozenset()) -> list[Rule]:
        """The rows that some layer has; ``more`` are flags of a mesh."""
        have = frozenset[str]().union(*self.kinds)
        last = self.kinds[-1] if self.kinds else have
        chosen = self.family.select(self.flags | more)
        return [
            rule
            for rule in chosen
            if not rule.layers or rule.layers in (last if is_mtp(rule) else have)
        ]

    def layers_of(self, rule: Rule) -> Sequence[int]:
        """The layers that have a row."""
        if not rule.layers:
            return range(self.sizes["layer"])
        return [i for i, kinds in enumerate(self.kinds) if rule.layers in kinds]


HAS = "has "
# set where a checkpoint holds projections into a latent space whole on each rank of tp
WHOLE_DOWN = "whole_down"
MTP = "mtp"  # index of the layers that predict further tokens
MTP_LAYER = "mtp+layer"  # the same as Hugging Face numbers them: behind the model's layers


def is_mtp(rule: Rule) -> bool:
    """Whether a row is of MTP layers, which are of the last layer's kind."""
    return "{" + MTP + "}" in rule.name


def indexed(names: Sequence[str], values: Sequence[int], sizes: Sizes) -> dict[str, int]:
    """What stands in templates for the indices of one tensor."""
    found = dict(zip(names, values, strict=True))
    if MTP in found:
        found[MTP_LAYER] = sizes["layer"] + found[MTP]
    return found


def _asked(family: Family) -> set[str]:
    """Flags ``has NAME`` that rows of a family ask for."""
    asked = {f.removeprefix("!") for rule in family.rules for f in rule.when if HAS in f}
    return asked | {HAS + template for template in family.copies}


def has_tensors(model: Model) -> list[str] | None:
    """The tensors by which ``with_tensors`` finds the flags again; None if no row asks."""
    asked = _asked(model.family)
    return sorted(f.removeprefix(HAS) for f in asked & model.flags) if asked else None


def with_tensors(model: Model, names: Iterable[str], *, stored: bool = False) -> Model:
    """The model with flags ``has NAME`` for the tensors that a checkpoint has.

    ``names`` are Hugging Face's, or stored ones: these tell only what no other row is stored as.
    """
    rules = model.family.rules
    asked = _asked(model.family)
    if not asked:
        return model
    have = {_shape_of_name(name) for name in names}
    flags = set(model.flags - asked)
    for flag in asked:
        wanted = {flag.removeprefix(HAS)}
        if stored:
            wanted = {rule.name for rule in rules if flag in rule.when}
            wanted -= {rule.name for rule in rules if flag not in rule.when}
        if any(_shape_of_name(name) in have for name in wanted):
            flags.add(flag)
    if stored and any(MTP_LAYER in flag for flag in flags):
        flags |= {HAS + template for template in model.family.copies}  # as the hub's files
    return replace(model, flags=frozenset(flags))


def canonical(model: Model, fqn: str) -> str | None:
    """The tensor that Hugging Face's file repeats under this name; None if it is no copy."""
    for template, original in model.family.copies.items():
        pattern = re.escape(template).replace(re.escape("{" + MTP_LAYER + "}"), r"(\d{1,9})")
        match = re.fullmatch(pattern, fqn)
        if match and 0 <= int(match[1]) - model.sizes["layer"] < model.sizes[MTP]:
            return original
    return None


def copies_of(model: Model) -> dict[str, str]:
    """The copies that the model's files have: name -> the tensor that it repeats."""
    return {
        fill(template, indexed([MTP], [k], model.sizes)): original
        for template, original in model.family.copies.items()
        if HAS + template in model.flags
        for k in range(model.sizes[MTP])
    }


def _shape_of_name(name: str) -> str:
    """A name or a template without its numbers."""
    return re.sub(r"\{[^}]*\}|\d+", "0", name)


def build_mesh(
    model: Model,
    axes: tuple[tuple[str, int], ...],
    stages: Stages | None = None,
    mtp: tuple[int, int] | None = None,
    *,
    ep: int = 1,
    etp: int | None = None,
) -> Mesh:
    """A mesh in which each rank owns an equal share of layers (or other indices).

    ``stages`` gives the layers of each rank of pp, ``mtp`` is the mesh's; ``ep`` ranks share the
    experts, ``etp`` cut each (None: as tp cuts the rest). Raises CheckpointError for an axis of
    several ranks that cuts no row: all its ranks would hold the same.
    """
    rules = model.rules()
    dense = _one_mesh([r for r in rules if not r.mesh], model, axes, stages)
    of_experts = [r for r in rules if r.mesh == EXPERT]
    sizes = dict(axes)
    if not of_experts:
        if ep > 1 or etp not in (None, sizes.get("tp", 1)):
            what = f"ep={ep}" if ep > 1 else f"etp={etp}"
            raise CheckpointError(f"{what}: this model has no experts ({model.family.name})")
        return replace(dense, mtp=mtp)
    cut = (("tp", etp or sizes.get("tp", 1)), ("pp", sizes.get("pp", 1)), ("ep", ep))
    experts = replace(_one_mesh(of_experts, model, cut, stages), mtp=mtp)
    return replace(dense, mtp=mtp, experts=experts)


def _one_mesh(
    rules: Sequence[Rule], model: Model, axes: tuple[tuple[str, int], ...], stages: Stages | None
) -> Mesh:
    found = {} if stages is None else {"pp": stages}
    used = {"pp"}
    for axis, at in itertools.chain(*(rule.axes.items() for rule in rules)):
        used.add(axis)
        if isinstance(at, ShardByIndex) and axis not in found:
            ranks = dict(axes).get(axis, 1)
            found[axis] = single(split_evenly(model.sizes[at.name], ranks, at.name, axis))
    for axis, size in axes:
        if size > 1 and axis not in used:
            raise CheckpointError(f"{axis}={size}: nothing of this model is split over {axis}")
    return Mesh(axes, found)
