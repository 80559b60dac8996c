"""What users of other tools reported about models with experts does not happen here.

Most of these reports are silent successes: a run ends well and weights are lost, turned or random.
Reports that other tests show already:

=======================================  ===========================================================
report                                   test
=======================================  ===========================================================
NVIDIA/Megatron-LM#1836, #1719           test_experts: each_rank_has_its_slice_of_its_experts;
                                         test_megatron_experts: every_oracle_with_experts (moeetp)
NVIDIA/Megatron-LM#4200 (reading)        test_megatron_experts: shards_that_megatron_core_never_...
NVIDIA-NeMo/Megatron-Bridge#1716, #1871  test_megatron_experts: hugging_face_experts_go_to_megatron_
                                         and_back, a_lost_folder_of_experts_is_named
vllm-project/vllm#23640                  test_expert_families: a_cast_leaves_the_routers_bias_...
modelscope/ms-swift#6644, #9504          test_expert_families: mtp_layers_and_their_copies_are_kept;
                                         test_megatron_experts: every_oracle_with_experts (mtp)
alibaba/Pai-Megatron-Patch#638           test_expert_families: transformers_files_come_back_...,
                                         megatron_core_computes_from_our_args
MXFP4 of the GPT-OSS reports below       test_dequantize: mxfp4_is_that_of_transformers_and_turned
=======================================  ===========================================================

No test: ROCm/Megatron-LM#63 under FSDP (experts cut by FSDP are not read), and
huggingface/nanotron#107 (that format is not read, and the trainer trains no experts).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from independent import Tensors, load_hf
from safetensors.torch import load_file, save_file
from test_expert_families import LAYERS, TINY, Tiny, with_mtp
from test_experts import QUIET, E, L, X, back, glu, made, write
from test_megatron_experts import files
from test_megatron_out import _same

from shardwright.ckpt import CheckpointError, merge, reshard

FC = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc{}.weight"


def expert(state: Tensors, layer: int, number: int) -> list[torch.Tensor]:
    """Gate, up and down of an expert of a Mixtral."""
    name = f"model.layers.{layer}.block_sparse_moe.experts.{number}."
    return [state[f"{name}{w}.weight"] for w in ("w1", "w3", "w2")]


def megatron(source: Path, out: Path, **options: object) -> dict[str, Tensors]:
    """The weights in each rank folder that is written for a source."""
    made(source, out, to="megatron", **options)
    return {rank: file["model"] for rank, file in files(out).items()}


def test_every_expert_of_a_mixtral_reaches_megatron_with_its_values(tmp_path):
    """Experts of a converted Mixtral kept random values, and no error was raised.

    NVIDIA/Megatron-LM#5844.
    """
    state = write(tmp_path / "hf", "mixtral")
    held = megatron(tmp_path / "hf", tmp_path / "out", tp=1)["mp_rank_00"]
    for layer in range(L):
        for number in range(E):
            gate, up, down = expert(state, layer, number)
            assert torch.equal(held[FC.format(layer, number, 1)], torch.cat([gate, up]))
            assert torch.equal(held[FC.format(layer, number, 2)], down)


@pytest.mark.parametrize("to", ["shards", "megatron", "torch_dist"])
def test_an_expert_that_the_source_lacks_is_named(to, tmp_path):
    """The other side of the same report: what has no source must not be left to chance.

    NVIDIA/Megatron-LM#5844.
    """
    state = write(tmp_path / "hf", "mixtral")
    lost = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    del state[lost]
    save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        made(tmp_path / "hf", tmp_path / "out", to=to, ep=2)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen2", "olmoe"])
def test_stacked_experts_reach_megatron_as_single_ones_do(kind, tmp_path):
    """Experts stored in one tensor were skipped, and the model kept its random ones.

    NVIDIA-NeMo/Megatron-Bridge#4706.
    """
    single = write(tmp_path / "single", kind)
    write(tmp_path / "stacked", kind, stacked=True)
    together: Tensors = {}
    for name, value in single.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            together[name] = value
        elif tail.startswith("0.") and tail.endswith(("w2.weight", "down_proj.weight")):
            alone = [single[f"{head}.experts.{e}.{tail[2:]}"] for e in range(E)]
            first, second = ("w1", "w3") if "w2" in tail else ("gate_proj", "up_proj")
            pairs = [
                [single[f"{head}.experts.{e}.{n}.weight"] for n in (first, second)]
                for e in range(E)
            ]
            together[head + ".experts.down_proj"] = torch.stack(alone)
            together[head + ".experts.gate_up_proj"] = torch.stack([torch.cat(p) for p in pairs])
    save_file(together, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    options: dict[str, object] = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    options |= {"allow_incomplete_args": kind == "olmoe"}  # args cannot say its norms of all heads
    wanted = megatron(tmp_path / "single", tmp_path / "a", **options)
    assert list(_same(megatron(tmp_path / "stacked", tmp_path / "b", **options), wanted, "")) == []
    assert any(".local_experts." in name for name in wanted["mp_rank_00_000_000"])


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (4, 2), (2, 1)])
def test_dense_slices_of_all_ranks_are_written_where_tp_exceeds_the_ranks_of_experts(
    tp, ep, tmp_path
):
    """With more tensor-parallel ranks than expert ranks some dense slices were never saved.

    NVIDIA/Megatron-LM#4200.
    """
    state = write(tmp_path / "hf", "mixtral")
    held = megatron(tmp_path / "hf", tmp_path / "out", tp=tp, ep=ep, etp=1)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    wanted = state["model.layers.0.self_attn.o_proj.weight"].chunk(tp, 1)
    seen = set()
    for rank, model in held.items():
        t = int(rank.split("_")[2])
        assert torch.equal(model[name], wanted[t])
        seen.add(t)
    assert seen == set(range(tp))


def test_an_uneven_split_keeps_every_layer_with_its_own_experts(tmp_path):
    """Layers were lost in a conversion to stages of unequal length.

    NVIDIA/Megatron-LM#1304.
    """
    state = write(tmp_path / "hf", "mixtral")
    held = megatron(tmp_path / "hf", tmp_path / "out", tp=1, pp_layers=(1, 3))
    layer = 0
    for rank, count in (("mp_rank_00_000", 1), ("mp_rank_00_001", 3)):
        routers = [name for name in held[rank] if name.endswith("router.weight")]
        assert len(routers) == count
        for local in range(count):
            wanted = state[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            assert torch.equal(held[rank][f"decoder.layers.{local}.mlp.router.weight"], wanted)
            for number in range(E):
                *_, down = expert(state, layer, number)
                assert torch.equal(held[rank][FC.format(local, number, 2)], down)
            layer += 1
    assert layer == L


@pytest.mark.parametrize("name", ["moe_bf16_tp1pp1ep2_torch", "moe_bf16_tp1pp1ep2_distopt_torch"])
def test_optimizer_state_survives_other_numbers_of_expert_ranks(name, golden, tmp_path):
    """A change of expert parallelism failed where the checkpoint has optimizer state.

    NVIDIA/Megatron-LM#1517.
    """
    data: list[dict[str, int]] = [{"dp": 4}, {"dp": 2}] if "distopt" in name else [{}, {}]
    reshard(golden / name, tmp_path / "one", ep=1, run=QUIET)
    reshard(tmp_path / "one", tmp_path / "four", ep=4, **data[0], run=QUIET)
    reshard(tmp_path / "four", tmp_path / "again", ep=2, **data[1], run=QUIET)
    for file in ("model_optim_rng.pt", "distrib_optim.pt"):
        ours, theirs = files(tmp_path / "again", file), files(golden / name, file)
        assert ours.keys() == theirs.keys()
        for rank, content in theirs.items():
            pairs = tensors(content), tensors(ours[rank])
            assert pairs[0].keys() == pairs[1].keys()
            for key, value in pairs[0].items():
                # between the parameters of a flat buffer are gaps of any value
                filled = pairs[1][key] != 0 if "distrib" in file else torch.ones_like(value) > 0
                assert filled.float().mean() > 0.9, key
                assert torch.equal(value[filled], pairs[1][key][filled]), key
    assert files(golden / name)["mp_rank_00_000"]["optimizer"]


def tensors(tree: object, at: str = "") -> Tensors:
    """Weights and moments of a rank file by their way through it; no random states."""
    if isinstance(tree, torch.Tensor):
        return {at: tree} if tree.ndim else {}
    parts = tree.items() if isinstance(tree, dict) else (
        enumerate(tree) if isinstance(tree, (list, tuple)) else ())  # fmt: skip
    found: Tensors = {}
    for key, value in parts:
        if key not in ("rng_state", "rerun_state_machine", "args"):
            found |= tensors(value, f"{at}.{key}")
    return found


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss"])
def test_a_model_without_a_table_is_refused_and_not_cut_by_guess(kind, tmp_path):
    """Linear attention was cut wrongly for tensor parallelism, and down projections of GPT-OSS
    were turned. No table here knows these models, so that nothing is written.

    NVIDIA/Megatron-LM#1989; NVIDIA-NeMo/Megatron-Bridge#3743, #3753, #3162, #3271.
    """
    write(tmp_path / "hf", "mixtral")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(CheckpointError, match=kind):
        made(tmp_path / "hf", tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


def test_square_experts_are_turned_by_their_names_and_not_by_their_shapes(tmp_path):
    """Down projections as wide as they are high were turned, or not, and the shapes said nothing.

    NVIDIA-NeMo/Megatron-Bridge#3743, #3753, #3162, #3271.
    """
    turned = Tiny("llama4_text", {**TINY["llama4"].config, "intermediate_size": 24})
    state = turned.save(tmp_path / "turned")
    made(tmp_path / "turned", tmp_path / "a", tp=1, ep=1, etp=1)
    held = load_file(tmp_path / "a" / "experts_tp_0_pp_0_ep_0.safetensors")
    down = state["model.layers.1.feed_forward.experts.down_proj"]
    both = state["model.layers.1.feed_forward.experts.gate_up_proj"]
    for e in range(4):
        assert torch.equal(held[FC.format(1, e, 2)], down[e].T)
        assert torch.equal(held[FC.format(1, e, 1)], both[e].T)
    state = write(tmp_path / "straight", "mixtral", stacked=True, intermediate_size=8)
    made(tmp_path / "straight", tmp_path / "b", tp=1, ep=1, etp=1)
    held = load_file(tmp_path / "b" / "experts_tp_0_pp_0_ep_0.safetensors")
    down = state["model.layers.1.block_sparse_moe.experts.down_proj"]
    assert down.shape[1] == down.shape[2]
    for e in range(E):
        assert torch.equal(held[FC.format(1, e, 2)], down[e])


def test_the_routers_bias_is_in_the_export_of_a_megatron_checkpoint(golden_moe, tmp_path):
    """The bias that corrects the routers' choice was missing after an export.

    NVIDIA-NeMo/Megatron-Bridge#4199.
    """
    source = golden_moe / "deepseek_fp32_tp2pp2ep1_torch"
    merge(source, tmp_path / "out", run=QUIET)
    exported = {n: x for n, x in load_hf(tmp_path / "out").items() if "correction_bias" in n}
    wanted = [
        value
        for rank, file in files(source).items()
        if rank.startswith("mp_rank_00")
        for name, value in file["model"].items()
        if name.endswith("expert_bias")
    ]
    assert len(wanted) == len(exported) > 0
    for bias, name in zip(wanted, sorted(exported), strict=True):
        assert torch.equal(exported[name], bias)
        assert exported[name].dtype == bias.dtype == torch.float32


@pytest.mark.parametrize("ep", [1, 2, 6])
def test_experts_of_a_rank_have_their_own_numbers_in_megatron_and_the_models_in_exports(
    ep, tmp_path
):
    """Numbers of experts were taken for those of a rank, two digits were mixed up, and experts of
    further ranks were not saved.

    verl-project/verl#2319, #2086.
    """
    state = write(tmp_path / "hf", "mixtral", experts=102)
    held = megatron(tmp_path / "hf", tmp_path / "out", tp=1, ep=ep)
    share = 102 // ep
    for number in (0, 9, 10, 11, 50, 51, 99, 100, 101):
        e, local = divmod(number, share)
        model = held["mp_rank_00" if ep == 1 else f"mp_rank_00_{e:03d}"]
        assert FC.format(3, share, 2) not in model
        gate, up, down = expert(state, 3, number)
        assert torch.equal(model[FC.format(3, local, 1)], torch.cat([gate, up]))
        assert torch.equal(model[FC.format(3, local, 2)], down)
    exported = back(tmp_path / "out", tmp_path / "back")
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], value) for name, value in state.items())


def test_stacked_experts_of_an_mtp_layer_are_those_that_lie_alone(tmp_path):
    """Experts of an MTP layer were looked for one by one where the file has them in one tensor.

    THUDM/slime#1904, NVIDIA-NeMo/Automodel#2595.
    """
    state = with_mtp(tmp_path / "single")
    stacked: Tensors = {n: x for n, x in state.items() if ".experts." not in n}
    for layer in range(1, LAYERS + 1):
        m = f"model.layers.{layer}.mlp.experts."
        each = [[state[f"{m}{e}.{n}_proj.weight"] for n in ("gate", "up", "down")]
                for e in range(4)]  # fmt: skip
        stacked[m + "gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        stacked[m + "down_proj"] = torch.stack([one[2] for one in each])
    (tmp_path / "stacked").mkdir()
    config = (tmp_path / "single" / "config.json").read_text()
    (tmp_path / "stacked" / "config.json").write_text(config)
    save_file(stacked, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    for source in ("single", "stacked"):
        made(tmp_path / source, tmp_path / f"{source} made", tp=2, pp=2, ep=2, etp=2)
    shards = sorted((tmp_path / "single made").glob("*.safetensors"))
    assert any(n.startswith("mtp.") for file in shards for n in load_file(file))
    for file in shards:
        wanted, found = load_file(file), load_file(tmp_path / "stacked made" / file.name)
        assert list(_same(found, wanted, "")) == []
    exported = back(tmp_path / "stacked made", tmp_path / "back")
    assert exported.keys() == stacked.keys()
    assert all(torch.equal(exported[name], value) for name, value in stacked.items())


@pytest.mark.parametrize("etp", [2, 3, 4])
def test_gate_and_up_halves_of_an_expert_stay_apart_in_every_slice(etp, tmp_path):
    """A packed tensor was cut straight through, so that a rank got rows of the gate alone.

    ROCm/Megatron-LM#63, for slices of tensor parallelism.
    """
    state = write(tmp_path / "hf", "mixtral", stacked=True)
    made(tmp_path / "hf", tmp_path / "out", tp=1, ep=1, etp=etp)
    both = state["model.layers.2.block_sparse_moe.experts.gate_up_proj"]
    for t in range(etp):
        held = load_file(tmp_path / "out" / f"experts_tp_{t}_pp_0_ep_0.safetensors")
        for e in range(E):
            wanted = glu(both[e, :X], both[e, X:], etp)[t]
            assert torch.equal(held[FC.format(2, e, 1)], wanted)
