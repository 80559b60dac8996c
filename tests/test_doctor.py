"""``train-ckpt doctor`` and the trainer's advice: every common trouble finds its fix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from train_runs import SIZES, Launch, Run, make_place

from shardwright.ckpt.checkpoint.config import load_model
from shardwright.tools import train_ckpt
from shardwright.train.config.schema import BatchSizes, Parallelism, Recompute, TrainConfig
from shardwright.train.doctor import findings as advice
from shardwright.train.doctor import layout, links, lost_ranks, measured, pipeline, topology
from shardwright.train.doctor import memory as device_memory
from shardwright.train.doctor.nvidia_smi import parse_gpus
from shardwright.train.errors import LOST_A_RANK, WAITED_TOO_LONG, TrainError
from shardwright.train.planning import pipeline as pipeline_arithmetic

RECORDED = Path(__file__).parent / "topologies"
GIB = 2**30


def _recorded(name: str) -> topology.Topology:
    return topology.parse((RECORDED / f"{name}.txt").read_text())


def _said(finding: advice.Finding) -> str:
    return "\n".join(finding.lines())


# name -> (GPUs, cards, islands of NVLink, phrase)
KINDS = {
    "nvswitch-8xh100-nics": (8, 8, [tuple(range(8))], "NVLink between all 8 GPUs (NV18)"),
    "nvswitch-8xa100": (8, 0, [tuple(range(8))], "NVLink between all 8 GPUs (NV12)"),
    "direct-4xh100-nics": (4, 4, [(0, 1, 2, 3)], "NVLink between all 4 GPUs (NV6)"),
    "bridged-6xa100": (6, 1, [(0, 3), (1, 2), (4, 5)], "some of 6 GPUs only: 0+3 1+2 4+5"),
    "pcie-4xa100": (4, 1, [(0,), (1,), (2,), (3,)], "PCIe between 4 GPUs, at worst SYS"),
    "pcie-switched-8xp40": (8, 1, [(i,) for i in range(8)], "at worst PXB"),
    "pcie-2xrtx5090": (2, 0, [(0,), (1,)], "at worst PHB"),
}


def test_every_recorded_machine_has_a_case() -> None:
    assert {file.stem for file in RECORDED.glob("*.txt")} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_recorded_topology_is_read(name: str) -> None:
    gpus, cards, islands, phrase = KINDS[name]
    found = _recorded(name)
    assert (len(found.gpus), len(found.nics)) == (gpus, cards)
    assert found.islands() == islands
    assert phrase in found.kind()
    for a in found.gpus:
        assert all(found.link(a, b) == found.link(b, a) for b in found.gpus if a != b)


def test_cards_near_a_gpu_are_those_behind_its_switch() -> None:
    assert _recorded("nvswitch-8xh100-nics").near_cards(0) == ("NIC4",)
    assert _recorded("direct-4xh100-nics").near_cards(2) == ("NIC2",)


@pytest.mark.parametrize("text", ["", "command not found", "GPU0 GPU1\nGPU0 X NV?\nGPU1 NV1 X\n"])
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(TrainError, match="topology"):
        topology.parse(text)


@pytest.mark.parametrize(
    ("name", "tp", "nproc", "level", "parts"),
    [
        ("nvswitch-8xh100-nics", 8, 8, "ok", ["stays on NVLink (NV18"]),
        ("pcie-4xa100", 2, 4, "warning", ["crosses a slow link", "no TP without NVLink", "--pp 2"]),
        ("pcie-switched-8xp40", 8, 8, "warning", ["PXB", "no TP without NVLink", "--tp 1"]),
        ("bridged-6xa100", 2, 6, "warning", ["CUDA_VISIBLE_DEVICES=0,3,1,2,4,5"]),
        ("bridged-6xa100", 3, 6, "warning", ["no TP without NVLink", "--tp 2"]),
        ("nvswitch-8xa100", 16, 8, "warning", ["crosses machines", "--tp 8"]),
        ("pcie-2xrtx5090", 2, 4, "problem", ["4 processes on 2 GPUs"]),
    ],
)
def test_tensor_parallelism_over_slow_links_is_advised_against(
    name: str, tp: int, nproc: int, level: str, parts: list[str]
) -> None:
    found = links.links(_recorded(name), tp, nproc)
    assert found.level == level, _said(found)
    assert [part for part in parts if part not in _said(found)] == [], _said(found)


def test_gpus_are_read_from_nvidia_smi() -> None:
    (gpu,) = parse_gpus("0, NVIDIA H200, 143771, 512, 570.86.15\nnonsense\n")
    assert (gpu.index, gpu.name, gpu.driver) == (0, "NVIDIA H200", "570.86.15")
    assert (gpu.total, gpu.used) == (143771 * 2**20, 512 * 2**20)


# --- common issues -----------------------------------------------------------------------------

PIPED = TrainConfig(
    parallelism=Parallelism(tp=2, pp=4), batch=BatchSizes(4, 4, 2), world_size=16
)  # fmt: skip


def test_memory_under_a_pipeline_is_answered_with_more_micro_batches() -> None:
    memory = device_memory.DeviceMemory(80 * GIB, 70 * GIB, 79 * GIB, 2 * GIB)
    said = device_memory.out_of_memory(
        PIPED, memory, rank=3, stage=0, step=7, where="forward and backward"
    )
    for part in ("step 7: rank 3 (stage 1 of 4)", "70.00 GiB of 80.00 GiB in use, 2.00 GiB more",
                 "more, smaller micro-batches: --micro-batch-size 2", "holds 4 at a time",
                 "--sequence-parallel", "--distributed-optimizer",
                 "expandable_segments"):  # fmt: skip
        assert part in said, part
    calm = replace(PIPED, recompute=Recompute("full"), batch=BatchSizes(1, 4, 2))
    assert "--recompute" not in " ".join(device_memory.memory_fixes(calm))
    assert "micro-batch-size" not in " ".join(device_memory.memory_fixes(calm))


def test_a_large_bubble_is_answered_with_micro_batches_or_fewer_stages() -> None:
    assert pipeline_arithmetic.bubble_share(4, 4) == pytest.approx(3 / 7)
    assert pipeline_arithmetic.bubble_share(4, 4, 2) == pytest.approx(3 / 11)
    said = _said(pipeline.bubble(PIPED, 16, measured=0.5))
    for part in ("waited 50%", "43%", "more micro-batches: 27", "less PP: --pp 2",
                 "--virtual-pp-layers"):  # fmt: skip
        assert part in said, said
    assert pipeline.bubble(replace(PIPED, batch=BatchSizes(1, 64, 2))).level == "ok"


def test_uneven_stages_are_answered_with_a_split_that_is_lighter() -> None:
    said = _said(pipeline.stages((4, 4, 4, 4), 4.0))
    assert "stage 4" in said
    assert "--pp-layers 5,5,5,1" in said
    assert pipeline.stages((5, 5, 5, 1), 4.0).level == "ok"


def test_a_vocabulary_that_does_not_divide_is_padded_and_said() -> None:
    assert layout.vocabulary(50257, 8, 128).level == "note"
    assert "padded to 51200" in layout.vocabulary(50257, 8, 128).what
    assert layout.vocabulary(51200, 8, 128).level == "ok"


def test_what_a_collectives_error_means_is_told_by_its_words() -> None:
    late = lost_ranks.lost(RuntimeError("Timed out waiting 600000ms for recv"), 10, "step 3, data")
    assert str(late) == "step 3, data: waited 10 minutes for another rank (Timed out waiting " \
                        "600000ms)"  # fmt: skip
    nccl = lost_ranks.lost(RuntimeError("Watchdog caught collective operation timeout: x"), 10)
    assert str(nccl).startswith("waited 10 minutes for another rank")
    gone = lost_ranks.lost(RuntimeError("Connection closed by peer [10.0.0.1]:5"), 10)
    assert (late.code, nccl.code, gone.code) == (WAITED_TOO_LONG, WAITED_TOO_LONG, LOST_A_RANK)
    assert lost_ranks.lost(RuntimeError("shapes differ"), 10) is None


def _times(rank: int, step: float, compute: float, data: float = 0.0) -> measured.StepTimes:
    return measured.StepTimes(rank, 0, step, data, step - data, step - data, compute)


def test_a_rank_alone_is_slow_by_itself() -> None:
    usual = measured.StepTimes(0, 0, 1.0, 0.0, 0.8, 0.8, 0.8, 0.2)
    slow = measured.StepTimes(0, 0, 4.0, 0.0, 0.8, 0.8, 0.8, 3.2)
    found = measured.report(TrainConfig(), 9, [slow], 4, measured.Slow(9, 1.0, [usual]))
    assert "3 s of it more in the optimizer" in "\n".join(found.lines)
    assert "network" not in "\n".join(found.lines)


def test_a_smaller_micro_batch_divides_the_one_that_is() -> None:
    config = TrainConfig(batch=BatchSizes(5, 2), parallelism=Parallelism(pp=2))
    assert any("--micro-batch-size 1 instead of 5" in x for x in device_memory.memory_fixes(config))
    assert any("--micro-batch-size 1 at the same" in x for x in pipeline.bubble(config, 4).fixes)


@pytest.mark.parametrize(("seconds", "says"), [
    ((2.0, 1.0), "--pp-layers 3,5 instead of 4,4"), ((1.24, 1.0), ""), ((1.0, 1.24), ""),
])  # fmt: skip
def test_layers_move_only_where_that_gains(seconds: tuple[float, ...], says: str) -> None:
    config = TrainConfig(parallelism=Parallelism(pp=2), batch=BatchSizes(1, 64), world_size=2)
    times = [measured.StepTimes(i, i, 2.2, 0.0, 2.0, 2.0, s, 0.1) for i, s in enumerate(seconds)]
    lines = "\n".join(measured.report(config, 5, times, 8, None).lines)
    assert says in lines if says else "--pp-layers" not in lines


def test_what_tensor_parallel_ranks_have_beyond_the_least_of_them_is_waiting() -> None:
    times = [
        _times(0, 4.0, 3.9),
        _times(1, 4.0, 0.9, 3.0),
        _times(2, 4.0, 0.8),
        _times(3, 4.0, 0.9),
    ]
    assert [w.total for w in measured.work(times, 2)] == pytest.approx([0.9, 3.9, 0.8, 0.8])
    assert [w.total for w in measured.work(times, 1)] == pytest.approx([3.9, 3.9, 0.8, 0.9])


def test_ranks_that_are_slow_at_once_are_all_named_and_usual_steps_say_nothing() -> None:
    config = TrainConfig(batch=BatchSizes(1, 1, 2), world_size=2)
    usual = [_times(0, 1.0, 0.9), _times(1, 1.0, 0.8)]
    slow = measured.Slow(9, 1.0, usual)
    both = measured.report(config, 9, [_times(0, 4.0, 3.9), _times(1, 4.0, 3.8)], 4, slow)
    assert "ranks: each of ranks 0,1 worked 3.9 s" in "\n".join(both.lines)
    assert measured.report(config, 9, usual, 4, None).lines == ()


def test_stages_that_wait_for_more_than_their_bubble_are_not_told_to_be_fewer() -> None:
    said = _said(pipeline.bubble(replace(PIPED, batch=BatchSizes(1, 64, 2)), 16, measured=0.4))
    assert "waited 40%" in said
    assert "the rest is exchange between stages" in said
    assert "less PP" not in said


# --- in runs -----------------------------------------------------------------------------------


def test_the_allocators_failure_becomes_an_error_with_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from shardwright.train.run.watch import Watch

    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 50)  # more than any host has
    assert device_memory.is_out_of_memory(failed.value)
    assert device_memory.requested_bytes(str(failed.value)) == 4 << 50
    assert not device_memory.is_out_of_memory(RuntimeError("shapes differ"))
    parallel = type("P", (), {"device": torch.device("cpu"), "rank": 1, "pp_rank": 1})()
    watch = Watch(PIPED, parallel, 4, print)  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=r"step 3: rank 1 \(stage 2 of 4\) is out of memory"):  # noqa: SIM117
        with watch.advising(lambda: 3), watch.phase("optimizer"):
            torch.empty(1 << 50)


def test_the_doctor_finds_slow_links_bubble_and_heads_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path / "place")
    argv = Run("out", options={"tp": 2, "pp": 2}).argv(place)
    recorded = str(RECORDED / "pcie-4xa100.txt")
    before = sorted(place.iterdir())
    said = ["doctor", *argv, "--no-exchange", "--topology", recorded]
    assert train_ckpt.main(said) == 0
    text = capsys.readouterr().out
    for part in ("versions:", "devices:", "gloo", "tp=2 crosses a slow link", "bubble:",
                 "vocabulary: 259 rows", "MB/s written"):  # fmt: skip
        assert part in text, text
    assert sorted(place.iterdir()) == before
    assert train_ckpt.main([*said, "--tp", "3", "--global-batch-size", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    problems = {f["subject"]: f["what"] for f in found if f["level"] == "problem"}
    assert "4 query heads do not divide over tp=3" in problems["layout"]
    assert problems["links"] == "6 processes on 4 GPUs"


def test_a_layout_that_does_not_fit_is_a_problem_with_fixes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    wide = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32}
    file.write_text(json.dumps({"model_type": "llama", **SIZES, **wide}))
    model = load_model(file)
    (small,) = layout.fits(TrainConfig(batch=BatchSizes(4)), model, GIB)
    assert small.level == "problem"
    assert "--micro-batch-size 2" in _said(small)
    (large,) = layout.fits(TrainConfig(batch=BatchSizes(4)), model, 200 * GIB)
    assert large.level == "ok"


@pytest.mark.slow
def test_a_pipeline_without_memory_or_with_a_bubble_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    ended = Launch(Run("full", options={"pp": 2}, fault="no memory"), place).end()
    assert ended.code == 1
    for part in ("step 3: rank 1 (stage 2 of 2) is out of memory", "--micro-batch-size 1",
                 "--recompute full", "4194304.00 GiB more asked for"):  # fmt: skip
        assert part in ended.said, ended.said
    assert "Traceback" not in ended.said
    ended = Launch(Run("waits", options={"pp": 2, "global_batch_size": 2}), place).end()
    assert ended.code == 0
    for part in ("forward and backward", "bubble: stages waited", "more micro-batches: 9",
                 "less PP: --pp 1"):  # fmt: skip
        assert part in ended.said, ended.said
