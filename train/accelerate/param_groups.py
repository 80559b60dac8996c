"""What a script's torch optimizer says: settings and param groups.

megatron-core packs several of a model's tensors into one (query, key and value; gate and up),
which then have one learning rate. A group of megatron's optimizer carries ``source``, the index
of the script's group that it follows, and the factors of the plugin's conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..config import schema as settings_of
from ..core.optim import ParamGroup
from ..errors import TrainError

HANDED_ON = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "dampening")
_NAMES = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}


def settings_from(original: torch.optim.Optimizer) -> settings_of.OptimizerSettings:
    """What a torch optimizer says; TrainError for one that megatron-core does not have."""
    kind, said = type(original).__name__, original.defaults
    name = _NAMES.get(type(original))
    if name is None:
        raise TrainError(f"prepare: {kind}: use torch.optim.AdamW, Adam or SGD")
    for key in ("amsgrad", "maximize"):
        if said.get(key):
            raise TrainError(f"prepare: {kind}({key}=True) is not supported; leave it out")
    if name == "adam" and said.get("decoupled_weight_decay"):
        name = "adamw"
    made = settings_of.OptimizerSettings(
        name=name, lr=float(said["lr"]), weight_decay=float(said["weight_decay"])
    )
    if name == "sgd":
        return replace(made, momentum=said["momentum"])
    return replace(made, betas=tuple(said["betas"]), eps=said["eps"])


def group_names(original: torch.optim.Optimizer, names: Mapping[int, str]) -> list[set[str]]:
    """For each of the script's groups the names of its parameters; ``names`` is by id."""
    found = []
    for group in original.param_groups:
        strangers = sum(id(param) not in names for param in group["params"])
        if strangers:
            raise TrainError(
                f"prepare: the optimizer holds {strangers} parameters that the model does not "
                "have; make it from model.parameters()"
            )
        found.append({names[id(param)] for param in group["params"]})
    return found


def stored_groups(
    parts: Mapping[str, Sequence[str]], groups: Sequence[set[str]], frozen: set[str]
) -> dict[str, int]:
    """Stored name -> index of its group, -1 where it is not trained.

    ``parts`` maps a stored tensor to the logical tensors packed into it, which must share a
    group and must all be frozen or none.
    """
    return {name: _group_of(name, parts[name], groups, frozen) for name in parts}


def _group_of(
    stored: str, logical: Sequence[str], groups: Sequence[set[str]], frozen: set[str]
) -> int:
    asleep = [fqn for fqn in logical if fqn in frozen]
    if asleep and len(asleep) < len(logical):
        raise TrainError(
            f"prepare: of {', '.join(logical)}, which megatron-core holds as one tensor, only "
            f"{', '.join(asleep)} are frozen; freeze all of them or none"
        )
    inside = {next((i for i, names in enumerate(groups) if fqn in names), -1) for fqn in logical}
    if len(inside) > 1:
        raise TrainError(
            f"prepare: {', '.join(logical)} are in different param groups, and megatron-core "
            f"holds them as one tensor ({stored}); put them into one group"
        )
    return -1 if asleep else inside.pop()


def param_groups(
    original: torch.optim.Optimizer,
    index: Mapping[str, int],
    named: Mapping[str, torch.nn.Parameter],
    settings: settings_of.OptimizerSettings,
) -> list[ParamGroup]:
    """The groups of megatron's optimizer; ``index`` is what ``stored_groups`` gave.

    The plugin's conditions cut the script's only group; where it has several of its own, those
    say what the conditions would, and having both is an error.
    """
    theirs = original.param_groups
    conditions = [
        name
        for name, given in (
            ("no_wd_decay_cond", settings.no_weight_decay),
            ("scale_lr_cond", settings.scale_lr),
        )
        if given is not None
    ]
    if conditions and len(theirs) > 1:
        raise TrainError(
            f"prepare: the optimizer has {len(theirs)} param groups of its own and the plugin "
            f"{' and '.join(conditions)}; both set weight decay and learning rate by parameter, "
            "drop one"
        )
    found = []
    for number, options in enumerate(theirs):
        names = {name for name, group in index.items() if group == number}
        for lr_mult, wd_mult, inside in _by_condition(names, named, settings):
            kept = {key: options[key] for key in HANDED_ON if key in options}
            factors = {"source": number, "lr_mult": lr_mult, "wd_mult": wd_mult}
            found.append(ParamGroup(frozenset(inside), kept | factors))
    return found


def _by_condition(
    names: set[str],
    named: Mapping[str, torch.nn.Parameter],
    settings: settings_of.OptimizerSettings,
) -> list[tuple[float, float, set[str]]]:
    """(factor of the learning rate, of the weight decay, names), the same number on each rank."""
    no_decay, scaled = settings.no_weight_decay, settings.scale_lr
    if no_decay is None and scaled is None:
        return [(1.0, 1.0, names)]
    bare = {n for n in names if no_decay is not None and no_decay(n, named[n])}
    fast = {n for n in names if scaled is not None and scaled(n, named[n])}
    return [
        (1.0, 1.0, names - bare - fast),
        (1.0, 0.0, bare - fast),
        (settings.lr_mult, 1.0, fast - bare),
        (settings.lr_mult, 0.0, fast & bare),
    ]
