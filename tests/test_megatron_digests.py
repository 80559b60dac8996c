"""Digests of files in sub-folders are recorded and checked; a list of them is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from test_megatron import CONFIG, _llama

from shardwright.ckpt import CheckpointError, merge, reshard, verify
from shardwright.ckpt.jobs import RunOptions
from shardwright.ckpt.verifier import Verdict
from shardwright.tools import verify_ckpt

CHECKED = RunOptions(checksum=True)
LLAMA, FLAT = "llama_bf16_tp2pp2_torch", "llama_bf16_tp2pp1dp2_distopt_torch"
ITERATION = "iter_0000003"
# what is written -> source, options, and the paths of its files
WRITTEN: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "classic": (LLAMA, {"to": "megatron", "tp": 2, "pp": 1},
                [f"{ITERATION}/mp_rank_0{t}/model_optim_rng.pt" for t in (0, 1)]),
    "flat": (FLAT, {"to": "megatron", "tp": 1, "pp": 2},
             [f"{ITERATION}/mp_rank_00_00{p}/{name}" for p in (0, 1)
              for name in ("distrib_optim.pt", "model_optim_rng.pt")]),
    "torch_dist": (LLAMA, {"to": "torch_dist"},
                   [f"{ITERATION}/{name}" for name in (".metadata", "__0_0.distcp", "common.pt")]),
}  # fmt: skip


def _made(golden: Path, into: Path, kind: str) -> Path:
    source, options, _ = WRITTEN[kind]
    reshard(golden / source, into / "made", run=CHECKED, **options)
    return into / "made"


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _said(verdict: Verdict) -> str:
    (line,) = [line for line in verdict.notes if line.startswith("digests: ")]
    return line


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_file_of_an_iteration_is_recorded_by_its_path(
    golden: Path, tmp_path: Path, kind: str
) -> None:
    made, paths = _made(golden, tmp_path, kind), WRITTEN[kind][2]
    table = json.loads((made / "checksums.json").read_text())["files"]
    assert sorted(table) == paths
    for path, row in table.items():
        data = (made / path).read_bytes()
        assert row == {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    verdict = verify(made)
    assert verdict.same, verdict.differences
    assert f"{len(paths)} of {len(paths)} files" in _said(verdict)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_flipped_bit_of_any_file_is_found_and_named(
    golden: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing else would notice."""
    made = _made(golden, tmp_path, kind)
    for path in WRITTEN[kind][2]:
        at = _harmless(made / path)
        _flip(made / path, at)
        assert verify_ckpt.main([str(made)]) == 1
        shown = capsys.readouterr().out
        assert f"{made / path}: xxh3-128" in shown
        assert "is recorded" in shown
        (found,) = [d for d in verify(made).differences if "is recorded" in d]
        assert str(made / path) in found
        _flip(made / path, at)
        assert verify(made).same


def _harmless(path: Path) -> int:
    """A byte whose change leaves the file readable: only a digest tells."""
    data = path.read_bytes()
    if path.name == ".metadata":
        return data.index(b"checkpoint_id")  # a key that nobody asks for
    return data.rindex(b"PK\x01\x02") + 12  # the time in a row of the zip's directory


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_folder_of_the_iteration_is_checked_alone_as_well(
    golden: Path, tmp_path: Path, kind: str
) -> None:
    made, paths = _made(golden, tmp_path, kind), WRITTEN[kind][2]
    assert f"{len(paths)} of {len(paths)} files" in _said(verify(made / ITERATION))
    _flip(made / paths[-1], _harmless(made / paths[-1]))
    (found,) = verify(made / ITERATION).differences
    assert str(made / paths[-1]) in found


def test_digests_of_another_iteration_are_left_alone(golden: Path, tmp_path: Path) -> None:
    made = _made(golden, tmp_path, "torch_dist")
    (made / ITERATION).rename(made / "iter_0000009")
    (made / "latest_checkpointed_iteration.txt").write_text("9")
    verdict = verify(made)
    assert verdict.same
    assert "0 of 0 files" in _said(verdict)


@pytest.mark.parametrize("kind", ["classic", "torch_dist"])
def test_digests_do_not_travel(golden: Path, tmp_path: Path, kind: str) -> None:
    """They are of the source's files."""
    made = _made(golden, tmp_path, kind)
    merge(made, tmp_path / "hf")
    reshard(made, tmp_path / "again", to="megatron", tp=1, pp=1)
    reshard(made, tmp_path / "shards", to="shards", tp=1, pp=1)
    assert not list(tmp_path.glob("[!m]*/**/checksums.json"))


def test_none_are_recorded_unless_asked(golden: Path, tmp_path: Path) -> None:
    for to in ("megatron", "torch_dist"):
        reshard(golden / LLAMA, tmp_path / to, to=to)
        assert not (tmp_path / to / "checksums.json").exists()


# --- lists that are not what we wrote -----------------------------------------------------------


def _listing(made: Path, name: object) -> None:
    file = made / "checksums.json"
    table = json.loads(file.read_text())
    table["files"] = {name: {"size": 4, "xxh3_128": "0" * 32}}
    file.write_text(json.dumps(table))


OUTSIDE = ("/etc/passwd", "../secret", f"{ITERATION}/../../secret", f"{ITERATION}//common.pt",
           f"{ITERATION}/./common.pt", f"{ITERATION}/", "", "..", ".", f"{ITERATION}\\common.pt",
           "..\\secret", f"{ITERATION}/a\0b", f"/{ITERATION}/common.pt", "\ud800/x")  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_is_no_path_below_is_refused(golden: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("1234")
    made = _made(golden, tmp_path, "torch_dist")
    _listing(made, name)
    with pytest.raises(CheckpointError, match=r"checksums\.json: files names .* not a file below"):
        verify(made)


def _folder(made: Path, outside: Path) -> str:
    (made / ITERATION / "more").symlink_to(outside, target_is_directory=True)
    return f"{ITERATION}/more/secret"


def _file(made: Path, outside: Path) -> str:
    (made / ITERATION / "link").symlink_to(outside / "secret")
    return f"{ITERATION}/link"


def _twice(made: Path, outside: Path) -> str:
    (made / ITERATION / "one").symlink_to("two")
    (made / ITERATION / "two").symlink_to(outside / "secret")
    return f"{ITERATION}/one"


@pytest.mark.parametrize("link", [_folder, _file, _twice])
def test_a_link_that_leads_out_is_not_followed_for_a_digest(
    golden: Path, tmp_path: Path, link: Callable[[Path, Path], str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("1234")
    made = _made(golden, tmp_path, "torch_dist")
    name = link(made, outside)
    _listing(made, name)
    (found,) = verify(made).differences
    assert found == f"{made / name}: is {outside / 'secret'}, outside of {made}; not read"
    assert "0 of 0 files" in _said(verify(made))


def test_an_iteration_that_is_a_link_itself_is_checked(golden: Path, tmp_path: Path) -> None:
    """Reading the checkpoint enters that folder in any case."""
    made = _made(golden, tmp_path, "torch_dist")
    (made / ITERATION).rename(tmp_path / "elsewhere")
    (made / ITERATION).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    verdict = verify(made)
    assert verdict.same, verdict.differences
    assert "3 of 3 files" in _said(verdict)


def test_linked_files_of_a_hugging_face_cache_are_checked(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(_llama(), source / "model.safetensors")
    merge(source, tmp_path / "made", run=CHECKED)
    (tmp_path / "made" / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "made" / "model.safetensors").symlink_to(tmp_path / "blob")
    verdict = verify(tmp_path / "made")
    assert verdict.same
    assert "1 of 1 files" in _said(verdict)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_recorded_and_is_no_file_is_named(golden: Path, tmp_path: Path, kind: str) -> None:
    import os

    made = _made(golden, tmp_path, "classic")
    path = made / ITERATION / "odd"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    _listing(made, f"{ITERATION}/odd")
    assert verify(made).differences == [f"{path}: no file is there, 4 bytes are recorded"]
