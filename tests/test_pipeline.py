"""Layers over pipeline ranks and virtual stages: counts, layout strings, args, and files."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_megatron_out import _same, megatron_files
from test_roundtrip import assert_same, raw, shard, unshard, write_hf

from shardwright.ckpt import CheckpointError, reshard, verify
from shardwright.ckpt.formats.megatron import pipeline as megatron_pipeline
from shardwright.ckpt.model import pipeline
from shardwright.ckpt.model.mesh import Mesh
from shardwright.ckpt.reader import read_checkpoint

DEEPSEEK = "Et*3|(tt|)*29,m|L"
LAYOUTS = {  # text, ranks -> layers of each virtual stage, in the order of the text
    ("Ett|t|t|L", 2): [2, 1, 1, 0],
    ("Et||ttt|ttL", 2): [1, 0, 3, 2],
    ("E|(t|)*6L", 4): [0, 1, 1, 1, 1, 1, 1, 0],
    ("Et|t||tL", 2): [1, 1, 0, 1],
    ("EttttL", 1): [4],
    (DEEPSEEK, 16): [3, *[2] * 29, 0, 0],
    ("E,t*2|(t,|)*2tt|L", 1): [2, 1, 1, 2, 0],
}


def counts(stages) -> list[int]:
    """Layers of each virtual stage, in the order of a layout string."""
    return [len(rank[v]) for v in range(len(stages[0])) for rank in stages]


@pytest.mark.parametrize(("text", "ranks"), LAYOUTS)
def test_a_layout_string_gives_each_virtual_stage_its_layers(text, ranks):
    wanted = LAYOUTS[text, ranks]
    stages = pipeline.parse(text, ranks, sum(wanted), "x").stages
    assert counts(stages) == wanted
    order = [rank[v] for v in range(len(stages[0])) for rank in stages]
    assert list(itertools.chain(*order)) == list(range(sum(wanted)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the import
@pytest.mark.parametrize(("text", "ranks"), LAYOUTS)
def test_a_layout_string_means_what_it_means_to_megatron_core(text, ranks):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout(text, ranks).layout
    ours = pipeline.parse(text, ranks, sum(LAYOUTS[text, ranks]), "x")
    for rank, stages in enumerate(theirs):
        for v, kinds in enumerate(stages):
            assert kinds.count(LayerType.decoder) == len(ours.stages[rank][v])
            assert (LayerType.mtp in kinds) == (ours.mtp == (rank, v))


def test_the_stage_of_further_tokens_and_that_of_the_last_layer_are_known():
    layout = pipeline.parse(DEEPSEEK, 16, 61, "x")
    mesh = Mesh((("tp", 1), ("pp", 16)), {"pp": layout.stages}, layout.mtp)
    assert mesh.place("pp", "first") == (0, 0)
    assert mesh.place("pp", "mtp") == (14, 1)
    assert mesh.place("pp", "last") == (15, 1)
    assert mesh.place("pp", "last_index") == (13, 1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 4))
def test_stages_and_their_layout_string_say_the_same(each, ranks):
    each = each * ranks  # a number of stages that divides
    stages = pipeline.numbered(each, ranks)
    text = pipeline.text_of(stages)
    assert text is not None
    assert pipeline.parse(text, ranks, sum(each), "x").stages == stages


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_args_say_every_split_that_is_numbered_as_megatrons(ranks, vpp, each):
    layers = sum(each[: ranks * vpp])
    assume(layers and (ranks > 1 or vpp == 1))
    stages = pipeline.numbered(each[: ranks * vpp], ranks)
    args = megatron_pipeline.written(Mesh((("pp", ranks),), {"pp": stages}), layers)
    assert megatron_pipeline.read(args, layers, ranks).stages == stages


@pytest.mark.parametrize(
    ("args", "layers", "ranks", "wanted"),
    [
        ({"account_for_embedding_in_pipeline_split": True,
          "account_for_loss_in_pipeline_split": True,
          "virtual_pipeline_model_parallel_size": 2}, 6, 2, [1, 2, 2, 1]),
        ({"account_for_loss_in_pipeline_split": True}, 7, 4, [2, 2, 2, 1]),
        ({"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4,
          "virtual_pipeline_model_parallel_size": 2}, 8, 3, [1, 1, 2, 1, 1, 2]),
        ({"decoder_last_pipeline_num_layers": 1}, 7, 3, [3, 3, 1]),
        ({"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]},
         2, 2, [1, 1]),
    ],
)  # fmt: skip
def test_args_of_uneven_splits_are_read(args, layers, ranks, wanted):
    assert counts(megatron_pipeline.read(args, layers, ranks).stages) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Ett|ttL", "names 4 decoder layers (t), the model has 5"),
        ("tt|tttL", "its only E"),
        ("Ett|ttt", "its only L"),
        ("Ett|EtttL", "its only E"),
        ("Ett|ttt|L", "has 3 stages, which do not divide over pp=2"),
        ("Ettm|tttmL", "all m must be in one stage"),
        ("Ett|xtttL", "'xtttL' is no part"),
        ("Ett|(ttL", "not closed"),
        ("Ett)|tttL", "no part"),
        ("((t))", "'(t))' is no part"),
        ("E(t*9999)*999999|tL", "more than 65536 letters"),
        ("", "its only E"),
    ],
)
def test_other_texts_are_refused_by_name(text, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        pipeline.parse(text, 2 if says != "its only E" or text else 1, 5, "--pp-layout")


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"pp": 2, "pp_layout": "Et|tt||ttL"}, "Et|tt||ttL"),
        ({"pp_layout": "E|t*2|t*2|tL", "vpp": 2}, "E|tt|tt|tL"),
        ({"pp_layers": (2, 3)}, None),
    ],
)
def test_shards_keep_empty_and_adjacent_virtual_stages(options, layout, tmp_path):
    case = raw("llama")
    tp = shard(write_hf(tmp_path / "hf", case), tmp_path / "a", 2, **options)
    assert json.loads((tp / "checkpoint.json").read_text()).get("pp_layout") == layout
    mesh = read_checkpoint(tp).mesh
    if layout is not None:
        assert pipeline.text_of(mesh.stages["pp"]) == layout
    again = shard(tp, tmp_path / "b", 1)  # another tp: the stages stay
    assert read_checkpoint(again).mesh.stages == mesh.stages
    assert_same(unshard(again, tmp_path / "back.safetensors"), case.state)


def test_shards_of_before_have_the_virtual_stages_that_their_numbers_say(tmp_path):
    case = raw("llama", layers=4)
    made = shard(write_hf(tmp_path / "hf", case), tmp_path / "a", 1, 2, vpp=2)
    file = made / "checkpoint.json"
    table = json.loads(file.read_text())
    assert table.pop("pp_layout") == "Et|t|t|tL"
    file.write_text(json.dumps(table))
    assert read_checkpoint(made).mesh.stages["pp"] == (((0,), (2,)), ((1,), (3,)))


def test_a_layout_that_contradicts_the_layers_is_refused(tmp_path):
    made = shard(write_hf(tmp_path / "hf", raw("llama")), tmp_path / "a", 1, 2, vpp=None,
                 pp_layout="Et|tt||ttL")  # fmt: skip
    file = made / "checkpoint.json"
    table = json.loads(file.read_text())
    for text, says in (("Ett|t||ttL", "give the stages other layers"), (7, "pp_layout is 7")):
        file.write_text(json.dumps({**table, "pp_layout": text}))
        with pytest.raises(CheckpointError, match=says):
            read_checkpoint(made)


LLAMAS = {
    "llama_fp32_pp2layout_noopt_torch": [2, 1, 1, 0],
    "llama6_fp32_pp2layoutempty_torch": [1, 0, 3, 2],
    "llama6_fp32_pp2account_noopt_torch": [1, 2, 2, 1],
}


@pytest.mark.parametrize("name", LLAMAS)
def test_megatrons_own_layouts_are_read_and_written_again_bit_for_bit(name, golden_moe, tmp_path):
    source = golden_moe / name
    assert counts(read_checkpoint(source).mesh.stages["pp"]) == LLAMAS[name]
    reshard(source, tmp_path / "one", tp=2, pp=1)
    text = pipeline.text_of(read_checkpoint(source).mesh.stages["pp"])
    reshard(tmp_path / "one", tmp_path / "made", tp=1, pp=2, pp_layout=text)
    ours, theirs = megatron_files(tmp_path / "made"), megatron_files(source)
    for rank, file in theirs.items():
        for key in (k for k in file if k.startswith("model") or k == "optimizer"):
            assert list(_same(ours[rank][key], file[key], f"{rank}.{key}")) == []
        for key in ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"):
            said, wanted = (getattr(f["args"], key) for f in (ours[rank], file))
            assert said == wanted or "account" in name
    reshard(source, tmp_path / "dist", to="torch_dist")
    assert read_checkpoint(tmp_path / "dist").mesh == read_checkpoint(source).mesh
    assert verify(source, tmp_path / "dist").same
