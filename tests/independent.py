"""What the shards of a model must hold, said a second time with plain torch ops.

Nothing here imports the code under test. The packing follows the formulas of megatron-core
(see docs/format.md): QKV rows interleave per KV group, gated MLP rows are [gate; up] of their
rank, vocabularies are padded, GPT-2's Conv1D weights are transposed, the last stage of a tied
model repeats the embedding. Files are written and read with safetensors.torch, torch.save,
torch.load and json alone.

``Ranks`` maps (tp rank, pp rank) to the tensors of that rank's file.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import types
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Ranks = dict[tuple[int, int], Tensors]

# --- packing ----------------------------------------------------------------------------------


def _whole(x: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return [x] * tp


def _cut(x: torch.Tensor, tp: int, dim: int) -> list[torch.Tensor]:
    assert x.shape[dim] % tp == 0
    return [part.contiguous() for part in torch.chunk(x, tp, dim)]


def pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, tp: int, tag: str
) -> list[torch.Tensor]:
    """The ranks' fused rows; q, k and v are [rows, H] or, for biases, [rows]."""
    if tag == "per_group":
        blocks = [x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in (q, k, v)]
        return _cut(torch.cat(blocks, 1).flatten(0, 1), tp, 0)
    if tag == "per_rank":
        parts = [_cut(x, tp, 0) for x in (q, k, v)]
        return [torch.cat(rank) for rank in zip(*parts, strict=True)]
    if tag == "per_row":
        return _cut(torch.stack((q, k, v), 1).flatten(0, 1), tp, 0)
    assert tag == "flat"
    return _cut(torch.cat((q, k, v)), tp, 0)


def pack_glu(gate: torch.Tensor, up: torch.Tensor, tp: int, tag: str) -> list[torch.Tensor]:
    """The ranks' rows of a gated MLP's first layer, weights or biases."""
    if tag == "per_rank":
        return [torch.cat(rank) for rank in zip(_cut(gate, tp, 0), _cut(up, tp, 0), strict=True)]
    assert tag == "flat"
    return _cut(torch.cat((gate, up)), tp, 0)


def padded_rows(vocab: int, multiple: int, tp: int) -> int:
    """Rows of a padded vocabulary, by counting up."""
    rows = vocab
    while rows % (multiple * tp):
        rows += 1
    return rows


def stored(
    config: Mapping[str, object],
    hf: Mapping[str, torch.Tensor],
    tp: int,
    pp: int,
    *,
    pp_layers: Sequence[int] | None = None,
    multiple: int = 128,
    padding: Mapping[str, torch.Tensor] | None = None,
    qkv: str = "per_group",
    glu: str = "per_rank",
) -> Ranks:
    """Every rank's tensors of the model that ``hf`` holds under its disk names.

    ``padding`` holds trained rows after the real ones; further rows are zero, rows too many are
    dropped. A tensor whose parts are absent from ``hf`` is left out, as optimizer states may be.
    """
    gpt2 = config["model_type"] == "gpt2"
    layers = int(config["n_layer" if gpt2 else "num_hidden_layers"])
    counts = list(pp_layers) if pp_layers else [layers // pp] * pp
    assert sum(counts) == layers
    assert len(counts) == pp
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    ranks: Ranks = {(t, p): {} for t in range(tp) for p in range(pp)}

    def put(stage: int, name: str, parts: list[torch.Tensor]) -> None:
        for t, part in enumerate(parts):
            ranks[t, stage][name] = part

    def rows(name: str) -> list[torch.Tensor]:
        x, extra = hf[name], (padding or {}).get(name)
        if extra is not None:
            x = torch.cat((x, extra))
        total = padded_rows(hf[name].shape[0], multiple, tp)
        new = torch.zeros(max(0, total - x.shape[0]), x.shape[1], dtype=x.dtype)
        return _cut(torch.cat((x, new))[:total], tp, 0)

    table = "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"
    tied = bool(config.get("tie_word_embeddings", gpt2))
    if table in hf:
        put(0, "embedding.word_embeddings.weight", rows(table))
    head = table if tied else "lm_head.weight"
    if head in hf and (pp > 1 or not tied):
        put(pp - 1, "output_layer.weight", rows(head))
    if "transformer.wpe.weight" in hf:
        put(0, "embedding.position_embeddings.weight", _whole(hf["transformer.wpe.weight"], tp))
    for kind in ("weight", "bias"):
        final = f"transformer.ln_f.{kind}" if gpt2 else f"model.norm.{kind}"
        if final in hf:
            put(pp - 1, f"decoder.final_layernorm.{kind}", _whole(hf[final], tp))
    for layer, stage in enumerate(stage_of):
        pack = _gpt2_layer if gpt2 else _llama_layer
        for name, parts in pack(config, hf, layer, tp, qkv, glu).items():
            put(stage, f"decoder.layers.{layer}.{name}", parts)
    return ranks


def _llama_layer(
    config: Mapping[str, object],
    hf: Mapping[str, torch.Tensor],
    layer: int,
    tp: int,
    qkv: str,
    glu: str,
) -> dict[str, list[torch.Tensor]]:
    m = f"model.layers.{layer}."
    groups = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    gemma2 = config["model_type"] == "gemma2"
    norms = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    }
    if gemma2:
        norms["self_attention.linear_proj.post_layernorm.weight"] = (
            "post_attention_layernorm.weight"
        )
        norms["pre_mlp_layernorm.weight"] = "pre_feedforward_layernorm.weight"
        norms["mlp.linear_fc2.post_layernorm.weight"] = "post_feedforward_layernorm.weight"
    else:
        norms["pre_mlp_layernorm.weight"] = "post_attention_layernorm.weight"
    out = {ours: _whole(hf[m + hfs], tp) for ours, hfs in norms.items() if m + hfs in hf}
    for ours, hfs in (("self_attention.linear_proj", "self_attn.o_proj"),
                      ("mlp.linear_fc2", "mlp.down_proj")):  # fmt: skip
        if f"{m}{hfs}.weight" in hf:
            out[f"{ours}.weight"] = _cut(hf[f"{m}{hfs}.weight"], tp, 1)
    for kind in ("weight", "bias"):
        fused = hf.get(f"{m}self_attn.qkv_proj.{kind}")
        split = [hf.get(f"{m}self_attn.{x}_proj.{kind}") for x in "qkv"]
        if fused is not None:
            kv = groups * int(config["head_dim"])
            split = list(fused.split((fused.shape[0] - 2 * kv, kv, kv)))
        if None not in split:
            out[f"self_attention.linear_qkv.{kind}"] = pack_qkv(*split, groups, tp, qkv)
        fused = hf.get(f"{m}mlp.gate_up_proj.{kind}")
        pair = [hf.get(f"{m}mlp.{x}_proj.{kind}") for x in ("gate", "up")]
        if fused is not None:
            pair = list(fused.chunk(2))
        if None not in pair:
            out[f"mlp.linear_fc1.{kind}"] = pack_glu(*pair, tp, glu)
    return out


def _gpt2_layer(
    config: Mapping[str, object],
    hf: Mapping[str, torch.Tensor],
    layer: int,
    tp: int,
    qkv: str,
    glu: str,
) -> dict[str, list[torch.Tensor]]:
    m, heads = f"transformer.h.{layer}.", int(config["n_head"])
    get = {name.removeprefix(m): x for name, x in hf.items() if name.startswith(m)}.get
    out: dict[str, list[torch.Tensor]] = {}
    for ours, hfs in (("input_layernorm.weight", "ln_1.weight"),
                      ("input_layernorm.bias", "ln_1.bias"),
                      ("pre_mlp_layernorm.weight", "ln_2.weight"),
                      ("pre_mlp_layernorm.bias", "ln_2.bias"),
                      ("self_attention.linear_proj.bias", "attn.c_proj.bias"),
                      ("mlp.linear_fc2.bias", "mlp.c_proj.bias")):  # fmt: skip
        if get(hfs) is not None:
            out[ours] = _whole(get(hfs), tp)
    for ours, hfs in (("self_attention.linear_proj.weight", "attn.c_proj.weight"),
                      ("mlp.linear_fc2.weight", "mlp.c_proj.weight")):  # fmt: skip
        if get(hfs) is not None:
            out[ours] = _cut(get(hfs).T, tp, 1)
    for ours, hfs in (("mlp.linear_fc1.weight", "mlp.c_fc.weight"),
                      ("mlp.linear_fc1.bias", "mlp.c_fc.bias")):  # fmt: skip
        if get(hfs) is not None:
            out[ours] = _cut(get(hfs).T if get(hfs).dim() == 2 else get(hfs), tp, 0)
    for kind in ("weight", "bias"):
        fused = get(f"attn.c_attn.{kind}")
        if fused is not None:
            split = (fused.T if kind == "weight" else fused).chunk(3)
            out[f"self_attention.linear_qkv.{kind}"] = pack_qkv(*split, heads, tp, qkv)
    return out


# --- comparing --------------------------------------------------------------------------------


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Type, shape and every bit; NaN payloads and the sign of zero count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names with the same bytes."""
    assert sorted(found) == sorted(wanted)
    wrong = [name for name, x in wanted.items() if not same_bytes(found[name], x)]
    assert not wrong, f"these differ: {wrong}"


def assert_same_ranks(found: Ranks, wanted: Ranks) -> None:
    """The same ranks, each with the same names and bytes."""
    assert sorted(found) == sorted(wanted)
    for rank, tensors in wanted.items():
        assert_same(found[rank], tensors)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, whole."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- reading ----------------------------------------------------------------------------------


def load_tensors(path: Path) -> Tensors:
    """A weights file by its own library, every tensor copied out of the file."""
    if path.suffix == ".safetensors":
        return {k: x.clone() for k, x in load_file(path).items()}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "a CRC-32 is wrong"
    return {k: x.clone() for k, x in torch.load(path, weights_only=True, mmap=True).items()}


def load_metadata(path: Path) -> dict[str, str]:
    """The texts beside the tensors: the header's, or the record in a torch zip."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return dict(file.metadata())
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/shardwright.json"))
        return json.loads(archive.read(name))


def rank_files(folder: Path, kind: str) -> dict[tuple[int, ...], Path]:
    """(tp, pp[, dp]) -> file, for ``kind`` model or optimizer."""
    pattern = re.compile(rf"(?:pytorch_)?{kind}_tp_(\d+)_pp_(\d+)(?:_dp_(\d+))?\.(safetensors|bin)")
    found = {}
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            found[tuple(int(n) for n in match.groups()[:3] if n is not None)] = path
    return found


def load_ranks(folder: Path) -> Ranks:
    """Every rank's weights."""
    return {rank: load_tensors(path) for rank, path in rank_files(folder, "model").items()}


def load_optimizer(folder: Path) -> Ranks:
    """Every rank's optimizer state as 1-D tensors; the shares of dp ranks are put together.

    The shares must lie end to end, without gap or overlap.
    """
    pieces: dict[tuple[int, int], dict[str, list[tuple[int, int, torch.Tensor]]]] = {}
    for rank, path in rank_files(folder, "optimizer").items():
        ranges = json.loads(load_metadata(path)["ranges"]) if len(rank) == 3 else {}
        tensors = load_tensors(path)
        assert len(rank) == 2 or set(ranges) == set(tensors)
        for key, x in tensors.items():
            start, stop = ranges.get(key, (0, x.numel()))
            assert x.numel() == stop - start
            assert len(rank) == 2 or x.dim() == 1
            here = pieces.setdefault(rank[:2], {})
            here.setdefault(key, []).append((start, stop, x.reshape(-1)))
    found: Ranks = {}
    for rank, by_key in pieces.items():
        for key, parts in by_key.items():
            parts.sort(key=lambda part: part[:2])
            stops = [0, *(stop for _, stop, _ in parts)]
            assert [start for start, _, _ in parts] == stops[:-1], f"{key}: gap or overlap"
            found.setdefault(rank, {})[key] = torch.cat([x for _, _, x in parts])
    return found


def load_hf(path: Path) -> Tensors:
    """A Hugging Face folder or file; with an index, every part that it names."""
    if path.is_file():
        return load_tensors(path)
    for index in path.glob("*.index.json"):
        table = json.loads(index.read_text())["weight_map"]
        found: Tensors = {}
        for name in sorted(set(table.values())):
            found |= load_tensors(path / name)
        return found
    (single,) = [p for p in (path / "model.safetensors", path / "pytorch_model.bin") if p.exists()]
    return load_tensors(single)


# --- writing ----------------------------------------------------------------------------------


def pack_states(
    config: Mapping[str, object],
    states: Mapping[str, Mapping[str, torch.Tensor]],
    tp: int,
    pp: int,
    **options: object,
) -> Ranks:
    """Optimizer states ({"exp_avg": {fqn: tensor}}) as every rank's ``state/stored name``."""
    padding = dict(options.pop("padding", None) or {})
    ranks: Ranks = {(t, p): {} for t in range(tp) for p in range(pp)}
    for state, tensors in states.items():
        packed = stored(config, tensors, tp, pp, padding=padding.get(state), **options)
        for rank, rows in packed.items():
            ranks[rank].update({f"{state}/{name}": x for name, x in rows.items()})
    return ranks


def write_native(
    folder: Path,
    config: Mapping[str, object],
    weights: Ranks,
    optimizer: Ranks | None = None,
    *,
    dp: int = 1,
    sharded: bool = False,
    safe: bool = True,
    step: int | None = 1000,
    pp_layers: Sequence[int] | None = None,
    multiple: int = 128,
    seed: int = 0,
    state: Mapping[str, object] | None = None,
    random_states: int = 0,
    **table: object,
) -> Path:
    """A checkpoint as a trainer would save it; ``sharded`` cuts the optimizer over ``dp``.

    ``state`` holds param_groups, schedule and data for checkpoint.json, ``table`` any other key
    of it. Every dp rank's range of a tensor is cut at a random place, in the middle of rows too.
    """
    folder.mkdir(parents=True)
    gpt2 = config["model_type"] == "gpt2"
    tp, pp = (1 + max(rank[axis] for rank in weights) for axis in (0, 1))
    layers = int(config["n_layer" if gpt2 else "num_hidden_layers"])
    mesh = {"tp": tp, "pp": pp, "dp": dp}
    (folder / "config.json").write_text(json.dumps(config))
    for (t, p), tensors in weights.items():
        _save_rank(folder, "model", {"tp": t, "pp": p}, mesh, step, tensors, safe)
    rng = random.Random(seed)
    for (t, p), tensors in (optimizer or {}).items():
        if not sharded:
            _save_rank(folder, "optimizer", {"tp": t, "pp": p}, mesh, step, tensors, safe)
            continue
        cuts = {
            key: [0, *sorted(rng.randint(0, x.numel()) for _ in range(dp - 1)), x.numel()]
            for key, x in tensors.items()
        }
        for d in range(dp):
            ranges = {key: [c[d], c[d + 1]] for key, c in cuts.items() if c[d] < c[d + 1]}
            share = {key: tensors[key].reshape(-1)[a:b].clone() for key, (a, b) in ranges.items()}
            ranks = {"tp": t, "pp": p, "dp": d}
            texts = {"ranges": json.dumps(ranges)}
            _save_rank(folder, "optimizer", ranks, mesh, step, share, safe, texts)
    for rank in range(random_states):
        data = {"torch": torch.arange(rank, rank + 40, dtype=torch.uint8)}
        save_file(data, folder / f"random_states_{rank}.safetensors", {"format": "pt"})
    head = {
        "format_version": "1.0",
        "step": step,
        "mesh": mesh,
        "pp_layers": list(pp_layers) if pp_layers else [layers // pp] * pp,
        "family": config["model_type"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": multiple,
        **(state or {}),
        **table,
    }
    (folder / "checkpoint.json").write_text(json.dumps(head))
    return folder


def _save_rank(
    folder: Path,
    kind: str,
    ranks: Mapping[str, int],
    mesh: Mapping[str, int],
    step: int | None,
    tensors: Tensors,
    safe: bool,
    texts: Mapping[str, str] | None = None,
) -> None:
    said = {"ranks": json.dumps(ranks), "mesh": json.dumps(mesh), "step": json.dumps(step),
            **(texts or {})}  # fmt: skip
    stem = "pytorch_model" if kind == "model" and not safe else kind
    name = stem + "".join(f"_{axis}_{rank}" for axis, rank in ranks.items())
    if safe:
        # The library refuses tensors that share memory, as replicas of one tensor do not here.
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt", **said})
        return
    path = folder / f"{name}.bin"
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as archive:
        prefix = archive.namelist()[0].partition("/")[0]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{prefix}/shardwright.json", json.dumps(said))


def poke(path: Path, name: str, index: int, value: float | torch.Tensor) -> None:
    """Change one element of a safetensors file in place; no length changes."""
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    start = 8 + header + json.loads(data[8 : 8 + header])[name]["data_offsets"][0]
    x = load_file(path)[name].reshape(-1)
    x[index] = value
    raw = x.view(torch.uint8).numpy().tobytes()
    data[start : start + len(raw)] = raw
    path.write_bytes(data)


def write_foreign(folder: Path, ranks: Ranks, *, wrap: bool = False) -> Path:
    """``pytorch_model_tp_X_pp_Y.bin`` files as a third party would save them, and nothing else."""
    folder.mkdir(parents=True)
    for (t, p), tensors in ranks.items():
        content: object = {"model": tensors, "args": {"tp": t}} if wrap else tensors
        torch.save(content, folder / f"pytorch_model_tp_{t}_pp_{p}.bin")
    return folder


def renumbered(ranks: Ranks) -> Ranks:
    """Layer numbers that start at 0 on each stage, as megatron's own modules count."""
    out: Ranks = {}
    for rank, tensors in ranks.items():
        numbers = [int(m[1]) for k in tensors if (m := re.search(r"layers\.(\d+)\.", k))]
        first = min(numbers, default=0)
        out[rank] = {
            re.sub(r"layers\.(\d+)\.", lambda m, f=first: f"layers.{int(m[1]) - f}.", k): x
            for k, x in tensors.items()
        }
    return out


def engine_names(ranks: Ranks) -> Ranks:
    """TransformerEngine's names for norms that it fuses, with its ``_extra_state`` entries."""
    swaps = {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }
    out: Ranks = {}
    for rank, tensors in ranks.items():
        out[rank] = {}
        for name, x in tensors.items():
            new = name
            for ours, theirs in swaps.items():
                new = new.replace(ours, theirs)
            out[rank][new] = x
            if name.endswith("linear_qkv.weight"):
                out[rank][name.replace("weight", "_extra_state")] = torch.zeros(
                    3, dtype=torch.uint8
                )
    return out


# --- Megatron-LM's own files --------------------------------------------------------------------

# Checkpoints that Megatron-LM trained, and what its own tools made of them on another mesh.
ORACLES = {
    "llama_bf16_tp2pp2_torch": {
        (1, 1): "_dist__to_tp1pp1_torch",
        (4, 1): "_dist__to_tp4pp1_torch",
        (1, 4): "_dist__to_tp1pp4_torch",
    },
    "gpt2_fp32_tp2pp2_torch": {
        (1, 1): "_dist__to_tp1pp1_torch",
        (4, 1): "_dist__to_tp4pp1_torch",
    },
}
CONVERTED = {  # by its tools/checkpoint/convert.py, weights alone
    "llama_bf16_tp2pp2_torch": {(2, 1): "__convertpy_to_tp2pp1_torch"},
    "gpt2_fp32_tp2pp2_torch": {(1, 4): "__convertpy_to_tp1pp4_torch"},
}
GOLDEN_MULTIPLES = {"llama_bf16_tp2pp2_torch": 16, "gpt2_fp32_tp2pp2_torch": 8}
GOLDEN_CONFIGS = {
    "llama": {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 4,
              "vocab_size": 251, "rms_norm_eps": 1e-5, "max_position_embeddings": 32,
              "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "n_inner": 96,
             "n_positions": 32, "vocab_size": 234, "activation_function": "gelu",
             "torch_dtype": "float32"},
}  # fmt: skip


class _Stub:
    """Stands for Megatron's classes, which are not installed."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        return _Stub if module.startswith("megatron") else super().find_class(module, name)


def megatron_files(folder: Path) -> dict[tuple[int, int], dict]:
    """The whole content of each rank's file."""
    stubs = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    found = {}
    for path in folder.glob("*/mp_rank_*/model_optim_rng.pt"):
        ranks = [int(n) for n in path.parent.name.removeprefix("mp_rank_").split("_")]
        content = torch.load(path, pickle_module=stubs, weights_only=False)
        found[ranks[0], ranks[1] if len(ranks) > 1 else 0] = content
    assert found, f"no rank folder in {folder}"
    return found


def megatron_weights(folder: Path) -> Ranks:
    """The ranks' weights as they are: layers count from 0 on each stage, _extra_state is None."""
    return {rank: dict(content["model"]) for rank, content in megatron_files(folder).items()}


def megatron_optimizer(folder: Path) -> Ranks:
    """The ranks' moments and masters under ``state/stored name``.

    Megatron numbers parameters group by group: first those that decay (matrices), then the
    rest (vectors, biases), each in the order of the model's own names.
    """
    found: Ranks = {}
    for rank, content in megatron_files(folder).items():
        weights = {k: x for k, x in content["model"].items() if isinstance(x, torch.Tensor)}
        optimizer = content["optimizer"]
        masters = optimizer.get("fp32_from_fp16_params")
        inner = optimizer["optimizer"] if masters else optimizer
        rows: Tensors = {}
        for number, group in enumerate(inner["param_groups"]):
            decays = group["wd_mult"] == 1.0
            names = [k for k, x in weights.items() if (x.dim() > 1 and k[-5:] != ".bias") == decays]
            assert len(names) == len(group["params"])
            for at, (name, index) in enumerate(zip(names, group["params"], strict=True)):
                for state in ("exp_avg", "exp_avg_sq"):
                    rows[f"{state}/{name}"] = inner["state"][index][state]
                if masters:
                    rows[f"master/{name}"] = masters[number][at]
                assert rows[f"exp_avg/{name}"].shape == weights[name].shape
        found[rank] = rows
    return found


def numbered_globally(ranks: Ranks, layers: int) -> Ranks:
    """Equal stages with the layer numbers of the whole model, and without ``_extra_state``."""
    per_stage = layers // (1 + max(p for _, p in ranks))
    return {
        (t, p): {
            re.sub(r"layers\.(\d+)", lambda m, p=p: f"layers.{int(m[1]) + p * per_stage}", k): x
            for k, x in tensors.items()
            if not k.endswith("_extra_state")
        }
        for (t, p), tensors in ranks.items()
    }
