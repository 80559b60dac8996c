"""Megatron-LM's own checkpoints with experts, latent attention and MTP layers: read, resharded to
every oracle bit for bit, and written again; what no reader can complete is named.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from independent import _Unpickler, assert_same, load_hf
from test_experts import write
from test_megatron_out import _same

from shardwright.ckpt import CheckpointError, ReadOptions, RunOptions, merge, reshard, verify
from shardwright.ckpt.formats.megatron.args import config_from_args, says
from shardwright.ckpt.formats.megatron.classic.grid import Grid
from shardwright.ckpt.formats.megatron.optimizer import registration_key
from shardwright.ckpt.reader import read_checkpoint

MOE, FP32 = "moe_bf16_tp1pp1ep2", "moe_fp32_tp2pp1ep2"
ETP, DEEPSEEK = "moeetp_fp32_tp2pp1ep2etp1", "deepseek_fp32_tp2pp2ep1"
QWEN, MTP = "qwenmoe_bf16_tp1pp2ep2_distopt", "mtp_fp32_tp1pp2"
# source, oracle, options; without options the source's own layout
PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    (f"{MOE}_torch", f"{MOE}_torch", {}),
    (f"{MOE}_torch_dist", f"{MOE}_torch", {}),
    (f"{MOE}_torch", f"{MOE}_torch_dist__to_tp1pp1ep1_torch", {"ep": 1, "weights_only": True}),
    (f"{MOE}_distopt_torch", f"{MOE}_distopt_torch", {}),
    (f"{FP32}_torch", f"{FP32}_torch", {}),
    (f"{FP32}_torch_dist", f"{FP32}_torch", {}),
    (f"{FP32}_torch_dist", f"{FP32}_torch_dist__to_tp1pp1ep1_torch",
     {"tp": 1, "ep": 1, "weights_only": True}),
    (f"{FP32}_torch", f"{FP32}_torch_dist__to_tp1pp2ep2_torch", {"tp": 1, "pp": 2}),
    (f"{FP32}_torch_dist", f"{FP32}_torch_dist__to_tp1pp2ep2_torch", {"tp": 1, "pp": 2}),
    (f"{FP32}_torch", f"{FP32}_torch_dist__to_tp2pp1ep1_torch", {"ep": 1, "weights_only": True}),
    ("moemix_fp32_tp1pp2_torch_dist", "moemix_fp32_tp1pp2_torch_dist__to_tp1pp1_torch", {"pp": 1}),
    (f"{ETP}_torch", f"{ETP}_torch", {}),
    (f"{ETP}_torch_dist", f"{ETP}_torch", {}),
    (f"{ETP}_torch_dist", f"{ETP}_torch_dist__to_tp1pp1ep2_torch", {"tp": 1}),
    (f"{ETP}_torch", f"{ETP}_torch_dist__to_tp2pp1ep1etp1_torch", {"ep": 1}),
    (f"{DEEPSEEK}_torch", f"{DEEPSEEK}_torch", {}),
    (f"{DEEPSEEK}_torch", f"{DEEPSEEK}_torch_dist__to_tp1pp1ep1_torch", {"tp": 1, "pp": 1}),
    (f"{QWEN}_torch", f"{QWEN}_torch", {}),
    (f"{QWEN}_fullyreshard_torch_dist", f"{QWEN}_torch", {}),
    (f"{QWEN}_dpreshard_torch_dist", f"{QWEN}_torch", {}),
    (f"{QWEN}_torch", f"{QWEN}_fullyreshard_torch_dist__to_tp1pp1ep1_torch", {"pp": 1, "ep": 1}),
    (f"{QWEN}_dpreshard_torch_dist", f"{QWEN}_fullyreshard_torch_dist__to_tp1pp1ep1_torch",
     {"pp": 1, "ep": 1}),
    (f"{MTP}_torch", f"{MTP}_torch", {}),
    (f"{MTP}_torch", f"{MTP}_torch_dist__to_tp2pp1_torch", {"tp": 2, "pp": 1}),
    ("mtpmoe_fp32_tp1pp2ep2_noopt_torch", "mtpmoe_fp32_tp1pp2ep2_noopt_torch", {}),
]  # fmt: skip


@pytest.fixture(scope="session")
def sources(golden: Path, golden_moe: Path) -> dict[str, Path]:
    """Every golden checkpoint with experts, latent attention or MTP layers, by name."""
    names = ("moe", "deepseek", "qwenmoe", "mtp")
    found = [*golden.iterdir(), *golden_moe.iterdir()]
    return {path.name: path for path in found if path.name.startswith(names)}


def files(folder: Path, name: str = "model_optim_rng.pt") -> dict[str, Any]:
    """The content of a file of each rank folder."""
    stubs = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    return {
        path.parent.name: torch.load(path, pickle_module=stubs, weights_only=False)
        for path in sorted(folder.glob(f"*/mp_rank_*/{name}"))
    }


def groups_of(optimizer: object) -> list[dict]:
    """The groups of flat optimizers, which only a fused Adam can load."""
    chain = optimizer if isinstance(optimizer, list) else [optimizer]
    inner = [one["optimizer"] for one in chain if isinstance(one, dict) and "optimizer" in one]
    return [group for one in inner if "state" not in one for group in one["param_groups"]]


@pytest.mark.parametrize(("source", "oracle", "options"), PAIRS)
def test_every_oracle_with_experts_is_met_bit_for_bit(
    source, oracle, options, sources, tmp_path
) -> None:
    made = tmp_path / "made"
    reshard(sources[source], made, to="megatron", **options)
    ours, theirs = files(made), files(sources[oracle])
    assert set(ours) >= set(theirs) > set()
    found: list[str] = []
    for rank, file in theirs.items():
        for group in groups_of(file.get("optimizer")):
            group.setdefault("bias_correction", True)
        for key in (k for k in file if k.startswith("model") or k == "optimizer"):
            if key == "optimizer" and options.get("weights_only"):
                continue
            found += _same(ours[rank][key], file[key], f"{rank}.{key}")
        assert vars(ours[rank]["args"])["rank"] == vars(file["args"])["rank"]
    same_step = (".step: 3.0 and 3", ".step: 3 and 3.0")
    assert [line for line in found if not line.endswith(same_step)] == []
    # an oracle of Megatron-Core 0.16 may lack the shards that it never writes
    assert set(ours) - set(theirs) <= ({"mp_rank_01"} if "ep1etp1" in oracle else set())


FLAT_TWINS = [pair for pair in PAIRS if pair[1].endswith("distopt_torch")]


@pytest.mark.parametrize(("source", "oracle", "options"), FLAT_TWINS)
def test_flat_buffers_of_experts_are_those_of_the_oracle(
    source, oracle, options, sources, tmp_path
) -> None:
    """Values at every place where the oracle has one; between parameters there are gaps."""
    reshard(sources[source], tmp_path / "made", to="megatron", **options)
    ours = files(tmp_path / "made", "distrib_optim.pt")
    theirs = files(sources[oracle], "distrib_optim.pt")
    assert ours.keys() == theirs.keys() != set()
    for rank, wanted in theirs.items():
        chain = list(zip(ours[rank], wanted, strict=True)) if isinstance(wanted, list) else [
            (ours[rank], wanted)]  # fmt: skip
        for mine, one in chain:
            assert (mine is None) == (one is None)
            for pair, values in (one or {}).get(0, {}).items():
                assert mine[0][pair]["numel_unpadded"] == values["numel_unpadded"]
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    filled = mine[0][pair][key] != 0
                    assert filled.any()
                    assert torch.equal(mine[0][pair][key][filled], values[key][filled])


KEPT = [f"{MOE}_torch", f"{ETP}_torch", f"{DEEPSEEK}_torch", f"{QWEN}_torch", f"{MTP}_torch",
        "deepseek_fp32_tp1pp2ep2_torch_dist", "mtpmoe_fp32_tp1pp2ep2_noopt_torch",
        "moemix_fp32_tp1pp2_torch_dist"]  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_way_over_every_format_keeps_every_element(name, sources, tmp_path) -> None:
    source = sources[name]
    reshard(source, tmp_path / "a", to="torch_dist", tp=1)
    reshard(tmp_path / "a", tmp_path / "b", to="shards", tp=2, pp=1)
    reshard(tmp_path / "b", tmp_path / "c", to="megatron", tp=2, pp=2)
    for folder in "abc":
        said = verify(source, tmp_path / folder).differences
        assert [line for line in said if "state" not in line] == [], folder


@pytest.mark.parametrize("name", [f"{FP32}_torch_dist", "deepseek_fp32_tp1pp2ep2_torch_dist",
                                  f"{QWEN}_fullyreshard_torch_dist",
                                  "moemix_fp32_tp1pp2_torch_dist"])  # fmt: skip
def test_keys_shapes_and_objects_of_torch_dist_are_megatrons(name, sources, tmp_path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    reshard(sources[name], tmp_path / "made")
    ours, theirs = (
        FileSystemReader(str(folder / "iter_0000003")).read_metadata().state_dict_metadata
        for folder in (tmp_path / "made", sources[name])
    )
    own = {key for key in theirs if not key.startswith(("rng_state", "rerun_state"))}
    assert set(ours) == own
    for key in own:
        assert getattr(ours[key], "size", None) == getattr(theirs[key], "size", None), key


# --- what is not whole ---------------------------------------------------------------------------


def test_shards_that_megatron_core_never_saved_are_named(sources) -> None:
    with pytest.raises(CheckpointError, match=r"tp ranks 1, 2, 3 were never saved.*4200"):
        read_checkpoint(sources["moeetp_fp32_tp4pp1ep1etp1_incomplete_torch"])


@pytest.mark.parametrize("lost", ["mp_rank_00_000", "mp_rank_01_001"])
def test_a_lost_folder_of_experts_is_named(lost, sources, tmp_path) -> None:
    shutil.copytree(sources[f"{ETP}_torch"], tmp_path / "in")
    shutil.rmtree(tmp_path / "in" / "iter_0000003" / lost)
    with pytest.raises(CheckpointError, match=f"{lost}: is missing"):
        read_checkpoint(tmp_path / "in")


def rewritten(source: Path, folder: Path, change: Callable[[str, dict], None]) -> Path:
    """A copy of a checkpoint whose rank files went through ``change(folder name, content)``."""
    shutil.copytree(source, folder)
    for path in folder.rglob("*.pt"):
        path.chmod(0o644)
        path.parent.chmod(0o755)
    for name, content in files(source).items():
        plain = (int, float, str, list, tuple, type(None))
        said = {k: v for k, v in vars(content["args"]).items() if isinstance(v, plain)}
        content = {k: v for k, v in content.items() if k not in ("args", "rng_state")}
        content["args"] = argparse.Namespace(**said)
        change(name, content)
        torch.save(content, next(folder.glob(f"*/{name}")) / "model_optim_rng.pt")
    return folder


def test_a_dense_replica_that_differs_is_an_error(sources, tmp_path) -> None:
    def change(name: str, content: dict) -> None:
        if name == "mp_rank_00_001":
            content["model"]["decoder.layers.0.mlp.router.weight"][0, 0] += 1

    made = rewritten(sources[f"{MOE}_torch"], tmp_path / "in", change)
    with pytest.raises(CheckpointError, match=r"replicas differ.*gate\.weight"):
        reshard(made, tmp_path / "out", to="shards", weights_only=True)


def te_grouped(name: str, content: dict) -> None:
    """TransformerEngine's names where it computes all experts at once."""
    pattern = r"local_experts\.(\d+)\.(linear_fc[12])\.weight"
    model = {re.sub(pattern, r"\2.weight\1", k): v for k, v in content["model"].items()}
    content["model"] = model


def legacy_grouped(name: str, content: dict) -> None:
    """megatron-core's GroupedMLP: one tensor for each linear layer of all experts, in weights and
    in each optimizer state.
    """
    model, order, found = content["model"], [], {}
    for key, value in model.items():
        match = re.fullmatch(r"(.*mlp\.experts\.)local_experts\.\d+\.linear_fc(\d)\.(.*)", key)
        if match is None:
            order.append((key, value))
        elif match[3] == "weight":
            kind = f"{match[1]}weight{match[2]}"
            if kind not in found:
                order.append((kind, None))
            found.setdefault(kind, []).append(value)
    content["model"] = {key: merged(key, found[key]) if key in found else value
                        for key, value in order}  # fmt: skip
    experts = content["optimizer"][1]
    state, joined = experts["state"], {}
    count = len(found["decoder.layers.0.mlp.experts.weight1"])
    for layer in range(4):  # experts of a layer: fc1 and fc2 of each in turn
        base = layer * 2 * count
        for number in (0, 1):
            parts = [state[base + 2 * e + number] for e in range(count)]
            kind = f"weight{number + 1}"
            joined[2 * layer + number] = {"step": parts[0]["step"]} | {
                key: merged(kind, [part[key] for part in parts])
                for key in ("exp_avg", "exp_avg_sq")
            }
    experts["state"] = joined
    experts["param_groups"][0]["params"] = list(range(len(joined)))


def merged(kind: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Transposed experts, one after another in memory, under the shape that Megatron gives."""
    memory = torch.stack([part.T.contiguous() for part in parts]).reshape(-1)
    out, inside = parts[0].shape
    return memory.reshape(inside, -1) if kind.endswith("1") else memory.reshape(-1, out)


@pytest.mark.parametrize("change", [te_grouped, legacy_grouped])
@pytest.mark.parametrize("name", [f"{FP32}_torch", f"{ETP}_torch"])
def test_experts_that_lie_together_are_read_as_those_that_lie_alone(
    change, name, sources, tmp_path
) -> None:
    made = rewritten(sources[name], tmp_path / "in", change)
    found = verify(sources[name], made)
    assert [line for line in found.differences if "state" not in line] == []
    assert read_checkpoint(made).unread_optimizer == ""
    assert any(name.startswith("exp_avg/") for name in read_checkpoint(made).manifest.tensors)


def te_ordered(name: str, content: dict) -> None:
    """The same as TransformerEngine's module registers them: the first linear layer of all experts,
    then the second, in weights and in the experts' optimizer.
    """
    model, layers, first = content["model"], 4, r".*experts\.local_experts\.\d+\.linear_fc1\.weight"
    count = sum(re.fullmatch(first, key) is not None for key in model) // layers
    te_grouped(name, content)

    def place(item: tuple[int, str]) -> tuple:
        at, key = item
        match = re.fullmatch(r"(.*mlp\.experts\.)linear_fc(\d)\.weight(\d+)", key)
        return (firsts[match[1]], int(match[2]), int(match[3])) if match else (at, 0, 0)

    firsts: dict[str, int] = {}
    for at, key in enumerate(content["model"]):
        if ".mlp.experts." in key:
            firsts.setdefault(key[: key.index("experts.") + len("experts.")], at)
    keys = [key for _, key in sorted(enumerate(content["model"]), key=place)]
    content["model"] = {key: content["model"][key] for key in keys}
    state = content["optimizer"][1]["state"]
    order = [
        layer * 2 * count + 2 * expert + linear
        for layer in range(layers)
        for linear in (0, 1)
        for expert in range(count)
    ]
    content["optimizer"][1]["state"] = {i: state[at] for i, at in enumerate(order)}
    said = content["args"]
    said.transformer_impl, said.moe_grouped_gemm = "transformer_engine", True


def test_grouped_experts_are_written_in_the_order_of_their_module(sources, tmp_path) -> None:
    made = rewritten(sources[f"{FP32}_torch"], tmp_path / "in", te_ordered)
    reshard(made, tmp_path / "out", to="megatron")
    ours, theirs = files(tmp_path / "out"), files(made)
    for rank, file in theirs.items():
        mine, wanted = (
            [key for key in content["model"] if re.search(r"experts\.linear_fc\d\.weight", key)]
            for content in (ours[rank], file)
        )
        assert mine == wanted != []
        states = (content["optimizer"][1]["state"] for content in (ours[rank], file))
        assert list(_same(*states, "")) == []


def test_registration_of_grouped_experts_is_that_of_a_module_with_a_weight_for_each() -> None:
    experts = torch.nn.Module()
    for linear in ("linear_fc1", "linear_fc2"):
        layer = torch.nn.Module()
        for i in range(11):
            layer.register_parameter(f"weight{i}", torch.nn.Parameter(torch.zeros(1)))
        experts.add_module(linear, layer)
    names = [
        re.sub(r"(.*)\.weight(\d+)", r"local_experts.\2.\1.weight", name)
        for name, _ in experts.named_parameters()
    ]
    for head in ("decoder.layers.3.", "mtp.layers.0.transformer_layer."):
        full = [f"{head}mlp.experts.{name}" for name in names]
        assert sorted(full, key=lambda name: registration_key(name, True, True)) == full


@pytest.mark.parametrize("fused", [False, True])
def test_flat_buffers_of_experts_in_one_tensor_are_not_read_in_another_order(
    fused, sources, tmp_path
) -> None:
    """bf16 masters would show it, fp32 weights have none."""
    shutil.copytree(sources[f"{QWEN}_dpreshard_torch_dist"], tmp_path / "in")
    common = next((tmp_path / "in").glob("iter_*/common.pt"))
    common.parent.chmod(0o755)
    common.chmod(0o644)
    stubs = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    content = torch.load(common, pickle_module=stubs, weights_only=False)
    plain = (int, float, str, list, tuple, type(None))
    said = {k: v for k, v in vars(content["args"]).items() if isinstance(v, plain)}
    said |= {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": fused}
    said |= {"transformer_impl": "transformer_engine"} if fused else {}
    torch.save({**content, "args": argparse.Namespace(**said)}, common)
    found = read_checkpoint(tmp_path / "in")
    assert "experts that lie in one tensor" in found.unread_optimizer


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "written"),
    [
        (2, 2, 2, {(0, 0), (1, 0), (0, 1), (1, 1)}),
        (2, 2, 1, {(0, 0), (1, 1)}),
        (4, 2, 1, {(0, 0), (1, 1), (2, 0), (3, 1)}),
        (4, 1, 1, {(0, 0), (1, 0), (2, 0), (3, 0)}),
        (4, 2, 2, {(0, 0), (1, 0), (2, 1), (3, 1)}),
        (2, 4, 1, {(0, 0), (0, 2), (1, 1), (1, 3)}),
        (4, 4, 1, {(0, 0), (1, 1), (2, 2), (3, 3)}),
        (4, 8, 2, {(t, e) for t in range(4) for e in range(8) if t // 2 == e % 2}),
    ],
)
def test_the_folders_of_a_grid_are_those_that_megatron_core_writes(tp, ep, etp, written) -> None:
    """The table of facts about expert parallelism on disk, of Megatron-Core from 0.18 on."""
    assert set(Grid(tp, 1, ep, etp, True).cells()) == written


def test_ranks_of_experts_that_share_a_name_are_refused(tmp_path) -> None:
    write(tmp_path / "hf", "mixtral")
    with pytest.raises(CheckpointError, match=r"etp=2 does not divide tp=1.*last one written"):
        reshard(tmp_path / "hf", tmp_path / "out", to="megatron", tp=1, etp=2, run=RunOptions())
    reshard(tmp_path / "hf", tmp_path / "dist", to="torch_dist", tp=1, etp=2, run=RunOptions())
    assert verify(tmp_path / "hf", tmp_path / "dist", weights_only=True).same


# --- from and to Hugging Face --------------------------------------------------------------------


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_hugging_face_experts_go_to_megatron_and_back(kind, to, tmp_path) -> None:
    state = write(tmp_path / "hf", kind)
    reshard(tmp_path / "hf", tmp_path / "out", to=to, tp=2, pp=2, ep=2, etp=1,
            make_vocab_size_divisible_by=1)  # fmt: skip
    assert read_checkpoint(tmp_path / "out").mesh.experts.axes == (("tp", 1), ("pp", 2), ("ep", 2))
    merge(tmp_path / "out", tmp_path / "back")
    assert_same(load_hf(tmp_path / "back"), state)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == {"mixtral": "mixtral", "qwen3": "qwen3_moe"}[kind]


# --- the optimizer in native shards --------------------------------------------------------------


@pytest.mark.parametrize(("dp", "ep", "shares"), [(2, 2, 1), (4, 2, 2), (4, 1, 4), (2, 4, None)])
def test_the_state_of_experts_is_cut_over_their_own_data_parallel_ranks(
    dp, ep, shares, sources, tmp_path
) -> None:
    """tp x dp ranks of a stage are etp x ep ranks of experts, times their replicas."""
    source, out = sources[f"{QWEN}_torch"], tmp_path / "out"
    options = {"to": "shards", "tp": 1, "pp": 1, "dp": dp, "ep": ep}
    if shares is None:
        with pytest.raises(CheckpointError, match=r"dp=2 are 2 ranks.*etp=1 x ep=4.*multiple of 4"):
            reshard(source, out, **options)
        return
    reshard(source, out, **options)
    named = {f"experts_optimizer_tp_0_pp_0_ep_{e}_dp_{d}.safetensors"
             for e in range(ep) for d in range(shares)}  # fmt: skip
    assert {file.name for file in out.glob("experts_optimizer_*")} == named
    assert len(list(out.glob("optimizer_*"))) == dp
    assert [line for line in verify(source, out).differences if "state" not in line] == []
    reshard(out, tmp_path / "back", to="megatron", pp=2, dp=2, ep=2)
    assert [d for d in verify(source, tmp_path / "back").differences if "state" not in d] == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_layers": 10**9}, "args say 1000000000 layers; the limit is 10000"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq .* no list of 4 layers"),
        ({"moe_layer_freq": "all"}, "moe_layer_freq"),
        ({"multi_latent_attention": True, "kv_lora_rank": -3}, "kv_lora_rank -3, no whole number"),
        ({"add_bias_linear": True, "add_qkv_bias": True}, "add_bias_linear"),
    ],
)
def test_args_of_experts_that_cannot_be_are_refused_by_name(more, says, sources) -> None:
    args = read_checkpoint(sources[f"{FP32}_torch"]).manifest.state["megatron"]["args"]
    with pytest.raises(CheckpointError, match=says):
        config_from_args({**args, **more}, "args.pt")


def test_groups_scored_as_no_model_of_transformers_does_are_a_model_of_their_own(
    sources, tmp_path
) -> None:
    """megatron-core scores a group by topk / group_topk experts, DeepSeek's model by two."""
    grouped = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    for best, kind in ((2, "deepseek_v3"), (4, "megatron_gpt")):

        def change(name: str, content: dict, best: int = best) -> None:
            vars(content["args"]).update(grouped, moe_router_topk=best)

        made = rewritten(sources[f"{DEEPSEEK}_torch"], tmp_path / f"in{best}", change)
        assert read_checkpoint(made).model.config["model_type"] == kind
        reshard(made, tmp_path / f"out{best}", to="megatron", tp=1, pp=1)
        found = verify(made, tmp_path / f"out{best}").differences
        assert [line for line in found if "state" not in line] == []
        (content,) = files(tmp_path / f"out{best}").values()
        assert vars(content["args"])["moe_router_group_topk"] == 1


def test_yarn_of_args_begins_at_the_length_that_megatron_core_takes(sources) -> None:
    """transformers takes max_position_embeddings where a config does not say it."""
    args = read_checkpoint(sources[f"{DEEPSEEK}_torch"]).manifest.state["megatron"]["args"]
    yarn = {**args, "rope_type": "yarn", "rotary_scaling_factor": 40.0}
    yarn.pop("original_max_position_embeddings", None)
    for said, length in (({}, 4096), ({"original_max_position_embeddings": 512}, 512)):
        config = config_from_args({**yarn, **said}, "args.pt")
        for key in ("rope_scaling", "rope_parameters"):
            assert config[key]["original_max_position_embeddings"] == length


def test_args_of_latent_attention_may_lack_what_it_does_not_use(sources) -> None:
    args = read_checkpoint(sources[f"{DEEPSEEK}_torch"]).manifest.state["megatron"]["args"]
    fewer = {key: args[key] for key in args if key not in ("num_query_groups", "kv_channels")}
    assert not says(fewer).keys() & {"key and value heads", "head size"}
    assert not says({**fewer, "num_attention_heads": None}).keys() & {"head size"}


@pytest.mark.parametrize(
    ("said", "config"), [("HuggingFaceTokenizer", None), (4, "dense"), (1, None)]
)
def test_args_of_experts_and_a_model_without_are_refused_with_both(
    said, config, golden, tmp_path
) -> None:
    """Found by ``make torture``: it ended with a KeyError."""

    def change(name: str, content: dict) -> None:
        content["args"].num_experts = said

    made = rewritten(golden / "gpt2_fp32_tp2pp2_torch", tmp_path / "in", change)
    dense = None
    if config:
        dense = tmp_path / "hf"
        merge(golden / "gpt2_fp32_tp2pp2_torch", dense)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(made, ReadOptions(config=dense))
    assert repr(said) in str(error.value)
    assert "experts" in str(error.value)
