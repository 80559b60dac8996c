"""plan-layout: estimates against measurements and published formulas, its choices, its errors."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.tools import plan_layout, train_ckpt
from shardwright.train.errors import TrainError
from shardwright.train.patches.megatron import import_megatron
from shardwright.train.planning import estimate, hardware, pictures, report
from shardwright.train.planning import search as planning
from shardwright.train.planning.estimate import GIB, Cluster, RunLayout

DOCS = Path(__file__).resolve().parent.parent / "docs"
# The model of tests/bench/bench_gpu.py.
BENCH = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32768, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
DP, SP = {"dp": 2, "distributed": True}, {"tp": 2, "sequence_parallel": True}
# layout, micro-batch, micro-batches, GiB of max_memory_allocated on rank 0, ms of a step
MEASURED: list[tuple[dict[str, Any], int, int, float, float]] = [
    (DP, 4, 4, 23.39, 441), (DP, 8, 2, 34.35, 432),
    ({"tp": 2}, 4, 4, 15.86, 258), ({"tp": 2}, 8, 4, 22.37, 498),
    (SP, 4, 4, 14.86, 271), (SP, 8, 4, 20.36, 505),
    ({"pp": 2}, 2, 8, 14.43, 252), ({"pp": 2}, 4, 8, 19.5, 491),
]  # fmt: skip


def _gpt(dropout: float = 0.1, h: int = 2048) -> estimate.Shape:
    config = {
        "model_type": "gpt2", "n_embd": h, "n_layer": 24, "n_head": 16, "vocab_size": 50257,
        "n_positions": 2048, "resid_pdrop": dropout,
    }  # fmt: skip
    return estimate.shape_of(model_from(config, "gpt"), "gpt")


# --- estimates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "micro", "count", "gib", "ms"), MEASURED)
def test_memory_and_time_are_within_a_tenth_of_what_was_measured(
    layout: dict[str, Any], micro: int, count: int, gib: float, ms: float
) -> None:
    model = model_from(BENCH, "bench")
    shape, run = estimate.shape_of(model, "bench"), RunLayout(**layout, micro=micro, count=count)
    weights = estimate.weights_of(model, run.tp)
    found = estimate.memory(shape, weights, run).allocated / GIB
    assert found == pytest.approx(gib, rel=0.1)
    step = estimate.time(shape, weights, run, Cluster(hardware.find("H200"), 2)).step
    assert 1e3 * step == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_gelu_layer_with_dropout_keeps_what_korthikanti_says(tp: int) -> None:
    shape = _gpt()
    sums = 4 * shape.heads / tp  # of the softmax, which the formula has no term for
    h = shape.h
    assert estimate.layer_bytes(shape, tp) - sums == pytest.approx(h * (10 + 24 / tp))
    assert estimate.layer_bytes(shape, tp, True) - sums == pytest.approx(34 * h / tp)


@pytest.mark.parametrize("tp", [1, 4])
def test_recomputation_keeps_what_korthikanti_says(tp: int) -> None:
    shape = _gpt()
    parallel = tp > 1
    full = RunLayout(tp, recompute="full", sequence_parallel=parallel)
    selective = RunLayout(tp, recompute="selective", sequence_parallel=parallel)
    assert estimate.saved_layer_bytes(shape, full) == 2 * shape.h / tp
    assert estimate.saved_layer_bytes(shape, selective) == pytest.approx(34 * shape.h / tp)


def test_without_dropout_there_are_no_masks() -> None:
    assert estimate.layer_bytes(_gpt()) - estimate.layer_bytes(_gpt(0.0)) == 2 * 2048


def test_parameters_are_those_of_the_models() -> None:
    for size, count in (("7B", 6.738e9), ("13B", 13.016e9), ("70B", 68.98e9), ("175B", 174.6e9)):
        model, name = planning.read_model(None, size)
        shape, weights = estimate.shape_of(model, name), estimate.weights_of(model, 1)
        assert estimate.parameters(shape, weights) == pytest.approx(count, rel=0.005)


def test_stages_hold_the_whole_model_once_but_for_a_tied_head() -> None:
    for size in ("7B", "175B"):
        model, name = planning.read_model(None, size)
        shape, weights = estimate.shape_of(model, name), estimate.weights_of(model, 1)
        run = RunLayout(pp=4)
        held = sum(estimate.stage_parameters(shape, weights, run, s) for s in range(4))
        assert held == estimate.parameters(shape, weights) + shape.tied * weights.head


@pytest.mark.parametrize(("pp", "count", "chunks"), [(2, 8, 1), (4, 8, 1), (4, 2, 1), (4, 8, 2),
                                                     (2, 4, 3)])  # fmt: skip
def test_micro_batches_under_way_are_those_of_the_simulated_schedule(
    pp: int, count: int, chunks: int
) -> None:
    spans = pictures.timeline(pp, count, chunks)
    for stage, row in enumerate(spans):
        held = most = 0
        for kind, *_ in row:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        run = RunLayout(pp=pp, count=count, chunks=chunks)
        assert estimate.in_flight(run, stage, chunks) == most


@pytest.mark.parametrize(("pp", "count", "chunks"), [(2, 4, 1), (4, 8, 1), (4, 8, 2), (4, 16, 4)])
def test_the_simulated_schedule_waits_as_long_as_the_formula_says(
    pp: int, count: int, chunks: int
) -> None:
    spans = pictures.timeline(pp, count, chunks)
    assert all(len(row) == 2 * count * chunks for row in spans)
    end = max(row[-1][4] for row in spans)
    assert end == pytest.approx(3 * (count + (pp - 1) / chunks))


@pytest.mark.parametrize(("pp", "count", "chunks"), [(4, 8, 2), (2, 4, 3), (8, 8, 5), (4, 16, 4)])
def test_the_order_of_an_interleaved_stage_is_megatrons(pp: int, count: int, chunks: int) -> None:
    schedules = import_megatron("pipeline_parallel.schedules")
    table = schedules.get_schedule_table(count, chunks, pp)
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        ranks = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        total, _, warm, _ = schedules.get_pp_rank_microbatches(
            count, chunks, pp, p2p_communicator=ranks
        )
        found = pictures.order(pp, stage, count, chunks)
        assert [u[0] for u in found[:warm]] == ["F"] * warm
        assert [u[0] for u in found[warm:]] == ["F", "B"] * (total - warm) + ["B"] * warm
        assert [u[1:] for u in found if u[0] == "F"] == table
        backward = [(micro, chunks - 1 - chunk) for micro, chunk in table]
        assert [u[1:] for u in found if u[0] == "B"] == backward


# --- choices -----------------------------------------------------------------------------------


def test_the_guides_layouts_fit_and_are_found_or_nearly_as_fast() -> None:
    rows = report.guide()
    assert [(r.size, r.gpus) for r in rows] == [g[:2] for g in report.GUIDE]
    assert all(row.fits for row in rows)
    for row, (size, _, split) in zip(rows, report.GUIDE, strict=True):
        found = (row.best.layout.tp, row.best.layout.pp, row.best.layout.dp)
        if size != "70B":
            assert found == split
        assert row.guide.time.step / row.best.time.step < 1.1


def test_every_layout_obeys_the_rules() -> None:
    model, name = planning.read_model(None, "70B")
    result = planning.search(model, name, planning.Request(Cluster(hardware.find("H100"), 32)))
    for c in (*result.fitting, *result.over):
        p = c.layout
        assert p.tp * p.pp * p.dp == 32
        assert p.dp * p.micro * p.count == 512
        assert 64 % p.tp == 0
        assert p.tp <= 8
        assert sum(p.layers(80)) == 80
        assert p.chunks == 1 or (p.count % p.pp == 0 and 80 % (p.pp * p.chunks) == 0)
    room = result.request.cluster.gpu.memory
    assert all(c.memory.total <= room for c in result.fitting)
    assert all(c.memory.total > room for c in result.over)


def test_without_nvlink_tensor_parallelism_is_avoided() -> None:
    model, name = planning.read_model(None, "13B")
    slow = planning.search(model, name, planning.Request(Cluster(hardware.find("A100-PCIe"), 8)))
    assert slow.best.layout.tp == 1


# --- the command -------------------------------------------------------------------------------


def _fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert plan_layout.main(words) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def test_a_config_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BENCH))
    assert plan_layout.main(["--model", str(tmp_path), "--gpus", "2", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert "1.11B parameters on 2 x H200" in " ".join(out.split())  # folded to the terminal
    assert f"train-ckpt --model {tmp_path}" in out
    assert f"reshard {tmp_path} --tp" in out


def test_the_parts_of_memory_in_the_json_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_layout.main(["--params", "70B", "--gpus", "64", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["layouts"]:
        assert row["memory_total"] == pytest.approx(sum(row["memory"].values()))


# a size, GPUs, further options of plan-layout
RUNNABLE = {
    "data parallel": "--params 7B --gpus 8",
    "several machines": "--params 70B --gpus 64",
    "sequence parallel": "--params 40B --gpus 32",
    "interleaved": "--params 70B --gpus 64 --pp 8 --global-batch-size 64",
    "uneven stages": "--params 7B --gpus 6 --pp 3 --global-batch-size 480",
    "full recomputation": "--params 70B --gpus 32 --recompute full",
    "sgd": "--params 7B --gpus 16 --tp 2 --optimizer sgd --seq-length 1024",
}


@pytest.fixture(params=RUNNABLE)
def printed(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str, str]:
    """The planned layout, its command, and the command beside its YAML."""
    words = [*shlex.split(RUNNABLE[request.param]), "--output", str(tmp_path / "a plan.yaml")]
    assert plan_layout.main([*words, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    (beside,) = (line for line in said.err.splitlines() if "train-ckpt --config" in line)
    return found["layouts"][0] | {"words": words}, found["commands"][0], beside


def _parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What train-ckpt makes of a printed line, up to where it would look for the model."""
    from shardwright.train.run import trainer as loop

    seen = []

    def stop(config: Any) -> None:
        seen.append(config)
        raise TrainError("enough")

    monkeypatch.setattr(loop, "check", stop)
    words = shlex.split(line.replace("RANK", "0").replace("ADDRESS", "127.0.0.1"))
    assert words[0] == "train-ckpt"
    assert train_ckpt.main(words[1:]) == 1
    return seen[0]


@pytest.mark.parametrize("which", ["command", "command beside the YAML"])
def test_what_is_printed_runs_as_the_planned_layout(
    which: str, printed: tuple[dict[str, Any], str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, command, beside = printed
    config = _parsed(command if which == "command" else beside, monkeypatch)
    p, b = config.parallelism, config.batch
    world = best["tp"] * best["pp"] * best["dp"]
    assert (p.tp, p.pp, b.data_parallel, config.world_size) == (
        best["tp"], best["pp"], best["dp"], world,
    )  # fmt: skip
    assert (b.micro_batch_size, b.num_micro_batches) == (
        best["micro_batch_size"], best["num_micro_batches"],
    )  # fmt: skip
    assert p.sequence_parallel == best["sequence_parallel"]
    assert p.distributed_optimizer == best["distributed_optimizer"]
    assert config.recompute.granularity == best["recompute"]
    assert config.precision.name == "bf16"
    layers = {"7B": 32, "40B": 48, "70B": 80}[best["words"][1]]
    per_chunk = layers // best["pp"] // best["vpp"] if best["vpp"] > 1 else None
    assert p.virtual_pp_layers == per_chunk
    assert p.stages(layers) == (tuple(best["pp_layers"]) if best["pp_layers"] else None)
    given = dict(itertools.pairwise(best["words"]))
    assert config.data.seq_length == int(given.get("--seq-length", 2048))
    assert config.optimizer.name == given.get("--optimizer", "adamw")
    assert config.launch.nproc == min(world, 8)
    assert config.launch.num_machines == -(-world // 8)


def test_the_yaml_says_that_it_lacks_the_micro_batch_and_how_to_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    words = ["--params", "13B", "--gpus", "8", "--micro-batch-size", "2", "--output", str(path)]
    assert plan_layout.main(words) == 0
    for text in (capsys.readouterr().err, path.read_text()):
        assert "cannot store the micro-batch size; also pass --micro-batch-size 2" in text
        assert f"train-ckpt --config {path}" in text
        assert "--micro-batch-size 2" in text
        assert "batch_size=2" in text
    without = f"train-ckpt --config {path} --model M --data D --steps 1"
    assert _parsed(without, monkeypatch).batch.micro_batch_size == 1, "that is why it is said"


def test_the_yaml_is_read_back_as_the_layout(tmp_path: Path) -> None:
    from shardwright.train.config.accelerate_yaml import read_accelerate

    path = tmp_path / "plan.yaml"
    words = ["--params", "40B", "--gpus", "32", "--output", str(path), "--json"]
    assert plan_layout.main(words) == 0
    file = read_accelerate(path)
    assert file.num_processes == 32
    assert file.plugin["tp_degree"][0] == 4
    assert file.plugin["pp_degree"][0] == 2
    assert plan_layout.main(words) == 1  # it is not replaced unasked
    assert plan_layout.main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    words = ["--params", "70B", "--gpus", "64", "--plot", str(path), "--top", "4"]
    assert plan_layout.main(words) == 0
    assert path.read_bytes()[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[suffix]


def _planned(size: str, gpus: int, **asked: Any) -> planning.Result:
    model, name = planning.read_model(None, size)
    cluster = Cluster(hardware.find("A100-80GB"), gpus)
    return planning.search(model, name, planning.Request(cluster, **asked))


PICTURED = {
    "no pipeline": ("7B", 8, {}),
    "two stages": ("7B", 8, {"pp": 2}),
    "many micro-batches": ("70B", 64, {}),
    "two chunks": ("175B", 128, {}),
    "five chunks": ("70B", 64, {"pp": 8, "global_batch": 64}),
    "many stages": ("175B", 128, {"pp": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURED)
def test_every_word_of_a_picture_is_inside_it_and_labels_are_apart(name: str) -> None:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    size, gpus, asked = PICTURED[name]
    made = pictures.figure(_planned(size, gpus, **asked))
    made.canvas.draw()
    whole = made.bbox
    beyond = {  # labels of ticks outside the axes, which are not drawn
        label
        for axes in made.findobj(Axes)
        for limits, axis in ((axes.get_xlim(), axes.xaxis), (axes.get_ylim(), axes.yaxis))
        for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        if not min(limits) <= at <= max(limits)
    }
    words = [t for t in made.findobj(Text) if t.get_text() and t.get_visible() and t not in beyond]
    assert len(words) > 20
    boxes = {t: t.get_window_extent() for t in words}
    for text, box in boxes.items():
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert inside, (text.get_text(), box)
    inner = [boxes[text].padded(-1) for text in words]
    for a, b in itertools.combinations(range(len(words)), 2):
        assert not inner[a].overlaps(inner[b]), (words[a].get_text(), words[b].get_text())
    units = {t.get_text() for t in words if "[" in t.get_text()}
    assert "memory of the fullest GPU [GiB]" in units
    assert ("time [forward passes of a whole stage]" in units) == (name != "no pipeline")


def test_the_page_shows_the_picture_that_its_command_draws(tmp_path: Path) -> None:
    from matplotlib.image import imread

    page = (DOCS / "planning.md").read_text()
    (line,) = (line for line in page.splitlines() if " --plot docs/" in line)
    *words, target = line.split()[1:]
    assert f"]({target.removeprefix('docs/')})" in page
    kept = DOCS.parent / target
    assert kept.stat().st_size < 80_000
    drawn = tmp_path / "drawn.png"
    assert plan_layout.main([*words, str(drawn)]) == 0
    a, b = imread(kept), imread(drawn)
    assert a.shape == pytest.approx(b.shape, rel=0.02), "it is another picture: draw it again"
    rows, columns = (min(x, y) for x, y in zip(a.shape[:2], b.shape[:2], strict=True))
    # fonts and palettes differ a little between versions
    assert abs(a[:rows, :columns] - b[:rows, :columns]).mean() < 0.05, "draw it again"


@pytest.mark.parametrize("chunks", range(1, 9))
def test_in_grey_forward_passes_are_lighter_than_backward_ones(chunks: int) -> None:
    def grey(colour: tuple[float, float, float]) -> float:
        return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]

    forward = [grey(c) for c in pictures._shades(pictures._FORWARD, chunks)]
    backward = [grey(c) for c in pictures._shades(pictures._BACKWARD, chunks)]
    assert max(forward) < 0.95, "white is waiting"
    assert min(forward) > max(backward) + 0.15
    for shades in (forward, backward):
        assert shades == sorted(shades, reverse=True)
        assert len(set(shades)) == chunks


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    text = _fails(capsys, "--params", "70B", "--gpus", "8")
    assert "does not fit on 8 x A100-80GB" in text
    assert "too many" in text
    assert "16 such GPUs" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--params", "7B", "--gpus", "12"], "8 or 16 would"),
        (["--params", "7B", "--gpus", "8", "--tp", "3"], "--gpus 8 does not divide"),
        (["--params", "7B", "--gpus", "8", "--gpu", "X9"], "--gpu-memory, --gpu-bandwidth"),
        (["--params", "9X", "--gpus", "8"], "write it as 8B"),
        (["--gpus", "8"], "--params 7B"),
        (["--params", "7B", "--model", "x", "--gpus", "8"], "say one of them"),
        (["--params", "7B", "--gpus", "8", "--global-batch-size", "0"], "at least 1"),
        (["--params", "7B", "--gpus", "8", "--seq-length", "9000"], "4096 positions"),
        (["--params", "7B", "--gpus", "8", "--tp", "1", "--sequence-parallel"], "drop one"),
        (["--params", "7B", "--gpus", "8", "--optimizer", "sgd", "--distributed-optimizer"], "sgd"),
        (["--params", "7B", "--gpus", "8", "--tp", "1", "--pp", "1", "--global-batch-size", "9"],
         "16 would"),
        (["--guide", "--gpus", "8"], "leave one out"),
        (["--params", "7B", "--gpus", "8", "--plot", "x.pdf"], ".png or .svg"),
        (["--params", "7B", "--gpus", "8", "--overwrite"], "no --output to replace"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in _fails(capsys, *words)


def test_a_described_gpu_needs_no_name_in_the_table() -> None:
    gpu = hardware.find("X9", 64 * GIB, 2e12, 400e12)
    assert (gpu.memory, gpu.link) == (64 * GIB, "PCIe")
    with pytest.raises(TrainError, match="--gpu-peak"):
        hardware.find("X9", 64 * GIB, 2e12)
    assert hardware.find("NVIDIA A100 80GB").name == "A100-80GB"


def test_alike_names_are_not_taken_for_each_other() -> None:
    names = {"NVIDIA A10G": "A10G", "A10": "A10", "NVIDIA H200": "H200", "H20": "H20"}
    assert {name: hardware.find(name).name for name in names} == names
    assert hardware.find("A10G").peak < 0.6 * hardware.find("A10").peak


# --- what is printed --------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["100M", "350M", "1.5b", "4B", "8B", "14B", "32B", "72b", "120B",
                                  "405B", "1T", "8e9", "10T"])  # fmt: skip
def test_any_size_has_a_shape_of_about_that_size(size: str) -> None:
    units = {"M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(size[-1].upper())
    wanted = float(size[:-1]) * unit if unit else float(size)
    model, name = planning.read_model(None, size)
    shape, weights = estimate.shape_of(model, name), estimate.weights_of(model, 1)
    assert estimate.parameters(shape, weights) == pytest.approx(wanted, rel=0.07)
    assert model.sizes["layer"] % 2 == 0
    assert model.sizes["h"] % 64 == 0
    assert name.startswith(f"{size.upper()}, taken as ")


@pytest.mark.parametrize("size", ["", "B", "big", "-3B", "1e99", "99M", "11T", "nan", "8BB"])
def test_what_is_no_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_layout.main([f"--params={size}", "--gpus", "8"]) == 1
    assert "write it as 8B" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_fits_the_terminal_and_explains_its_codes(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_layout.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    assert plan_layout.main(["--params", "70B", "--gpus", "64"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    assert ("sent per GPU" in said) == (width > 100)
    plain = " ".join(said.split())
    for code in ("tp, pp, dp:", "vpp:", "sp:", "mbs:", "alloc.:", "bubble:", "*:"):
        assert code in plain
    assert "e+" not in said, "no exponents"


def test_a_slower_first_row_is_explained_where_it_stands() -> None:
    model, name = planning.read_model(None, "13B")
    cluster = estimate.Cluster(hardware.find("A100-80GB"), 16)
    result = planning.search(model, name, planning.Request(cluster))
    fastest = min(result.fitting, key=lambda c: c.time.step)
    assert fastest is not result.best, "else this shows nothing"
    text = report.legend(result, 8)
    assert f"{fastest.layout.short} is " in text
    assert f"{result.best.time.step / fastest.time.step - 1:.1%} faster" in text
    (marked,) = (line for line in report.table(result, 8) if line.startswith("* "))
    assert result.best.layout.short in marked


def test_a_folded_command_is_the_same_to_a_shell() -> None:
    command = "train-ckpt --model 'a b --c' --tp 2 --sequence-parallel --steps 1000 --save-dir run"
    for width in (20, 40, 200):
        folded = report.folded(command, width)
        assert shlex.split(folded.replace("\\\n", "")) == shlex.split(command)


def test_the_picture_says_the_bubble_as_a_number() -> None:
    model, name = planning.read_model(None, "70B")
    cluster = estimate.Cluster(hardware.find("A100-80GB"), 64)
    result = planning.search(model, name, planning.Request(cluster))
    made = pictures.figure(result)
    titles = [axes.get_title() for part in made.subfigs for axes in part.axes]
    assert any(f"{result.best.time.bubble:.1%} of all" in title for title in titles)
