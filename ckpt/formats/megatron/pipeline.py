"""Args that say how layers are spread over the pipeline: read into stages, written from them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import CheckpointError
from ...model import pipeline
from ...model.mesh import Mesh, Stages
from ...model.pipeline import Pipeline

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_EMBEDDING = "account_for_embedding_in_pipeline_split"
_LOSS = "account_for_loss_in_pipeline_split"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_LAYOUT = "pipeline_model_parallel_layout"


def read(args: Mapping[str, object], layers: int, ranks: int) -> Pipeline:
    """The stages of a run's ``ranks`` pipeline ranks; CheckpointError for an impossible split."""
    said = args.get(_LAYOUT)
    if said:
        return pipeline.parse(_text(said), ranks, layers, f"args say {_LAYOUT}")
    vpp = args.get(_VIRTUAL)
    vpp = vpp if type(vpp) is int and vpp > 1 else 1
    if ranks * vpp > pipeline.MAX_STAGES:
        raise CheckpointError(f"args say {ranks} pipeline ranks of {vpp} virtual stages")
    if args.get(_EMBEDDING) or args.get(_LOSS):
        short = bool(args.get(_EMBEDDING)), bool(args.get(_LOSS))
        return Pipeline(pipeline.shortened(layers, ranks, vpp, *short), None)
    if ranks * vpp > layers:
        raise CheckpointError(
            f"args say {ranks * vpp} pipeline stages, the model has {layers} layers"
        )
    first, last = (args.get(key) for key in (_FIRST, _LAST))
    ends = [n for n in (first, last) if type(n) is int]
    if not ends:
        return Pipeline(pipeline.interleaved(layers, ranks, vpp), None)
    between = ranks - len(ends)
    middle = pipeline.split_evenly(layers - sum(ends), between) if between > 0 else ()
    counts = [len(m) for m in middle]
    if type(first) is int:
        counts.insert(0, first)
    if type(last) is int:
        counts.append(last)
    return Pipeline(pipeline.interleaved(layers, ranks, vpp, counts), None)


def _text(said: object) -> str:
    """A layout is a string, or a list with the words of each stage."""
    if isinstance(said, str):
        return said
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    if isinstance(said, list) and all(isinstance(stage, list) for stage in said):
        words = [letters.get(word, "?") for stage in said for word in map(str, stage)]
        if "?" not in words:
            return "|".join("".join(letters[str(word)] for word in stage) for stage in said)
    raise CheckpointError(f"args say {_LAYOUT}={said!r:.200}, no layout of stages")


def written(mesh: Mesh, layers: int, mtp_layers: int = 0) -> dict[str, object]:
    """The args of a mesh's stages; CheckpointError where none say them.

    Layout strings are known since megatron-core 0.13, so what older args can say, they say.
    """
    stages = mesh.stages["pp"]
    ranks, vpp = len(stages), len(stages[0])
    args: dict[str, object] = {
        _VIRTUAL: vpp if vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        _LAYOUT: None,
        _FIRST: None,
        _LAST: None,
        _EMBEDDING: False,
        _LOSS: False,
    }
    counts = pipeline.counts_of(stages)
    if counts is None:
        raise CheckpointError(
            f"stages of the layers {_listed(stages)}: Megatron-LM numbers layers through the first "
            "virtual stage of all ranks, then through the next; choose others with --pp-layers"
        )
    ends = mesh.place("pp", "last") if mtp_layers else None
    moved = mtp_layers and mesh.place("pp", "mtp") != ends
    if len(set(counts)) == 1 and not moved:
        if vpp > 1:
            args["num_layers_per_virtual_pipeline_stage"] = counts[0]
        return args
    each = [sum(map(len, rank)) for rank in stages]
    even = all(len(part) == len(rank[0]) for rank in stages for part in rank)
    if even and len(set(each[1:-1])) < 2 and 0 not in each and ranks > 1 and not moved:
        args |= {_FIRST: each[0], _LAST: each[-1]}
        return args
    args[_LAYOUT] = pipeline.text_of(stages, mesh.mtp, mtp_layers)
    return args


def _listed(stages: Stages) -> str:
    return "; ".join(",".join(map(str, layers)) for rank in stages for layers in rank)[:200]
