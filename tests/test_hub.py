"""Models of the hub: cached, fetched, uploaded; by the real client against a server on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, serving
from safetensors.numpy import load, load_file
from strategies import raw, write_hf

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.hub import HubName

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    """A hub with one model, which has a second revision and files that nobody here reads."""
    case = raw("llama", heads=(4, 4), head_dim=4, layers=2, vocab=24)
    write_hf(tmp_path / "source", case)
    files = {f.name: f.read_bytes() for f in (tmp_path / "source").iterdir()}
    files |= {"tokenizer.json": b"{}", "model.gguf": b"x" * 64, "pytorch_model.bin": b"y" * 64}
    hub = Hub({"org/tiny": {"main": files, "v1": {**files, "tokenizer.json": b'{"v": 1}'}}})
    with serving(hub):
        yield hub


@pytest.fixture
def run(hub, tmp_path) -> Run:
    """A command of ours in its own process, in an empty folder, with a cache of its own."""
    here = tmp_path / "here"
    here.mkdir()
    root = Path(__file__).resolve().parent.parent
    keep = {"HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE"}
    base = {k: v for k, v in os.environ.items() if k not in keep}

    def call(*words: object, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **base, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(root), base.get("PYTHONPATH", "")]), **more,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "shardwright", *map(str, words)], cwd=here,
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


def test_a_model_is_fetched_once_and_then_taken_from_the_cache(run, hub, tmp_path):
    said = run("reshard", "org/tiny", "--tp", "2", code=1).stderr
    assert "fetch it with --download, or with: hf download org/tiny" in said
    assert hub.asked == [], "nothing is asked of the hub unless it is allowed"
    done = run("reshard", "org/tiny", "--tp", "2", "--download")
    here = tmp_path / "here"
    assert [path.name for path in here.iterdir()] == ["tiny-tp2-pp1"], "in the current folder"
    assert "wrote " in done.stdout
    fetched = [line for line in hub.asked if line.startswith("GET org/tiny/resolve/")]
    assert not [line for line in fetched if "gguf" in line or "pytorch_model" in line]
    hub.asked.clear()
    run("merge", "org/tiny", "--output", "merged")
    assert "\nequal: " in run("verify", "org/tiny", "tiny-tp2-pp1").stdout
    assert "family llama" in run("inspect", "org/tiny").stdout
    assert hub.asked == []
    truth = load_file(tmp_path / "source" / "model.safetensors")
    made = load_file(tmp_path / "here" / "merged" / "model.safetensors")
    assert all((truth[name] == made[name]).all() for name in truth)
    cache = tmp_path / "cache" / "hub" / "models--org--tiny" / "snapshots"
    assert len(list(cache.iterdir())) == 1, "nothing was written beside the snapshot"


def test_a_revision_is_its_own_snapshot(run, tmp_path):
    run("reshard", "org/tiny", "--tp", "1", "--pp", "2", "--download")
    assert "hf download org/tiny --revision v1" in run("inspect", "org/tiny@v1", code=1).stderr
    run("merge", "org/tiny@v1", "--download", "--output", "v1")
    assert (tmp_path / "here" / "v1" / "tokenizer.json").read_bytes() == b'{"v": 1}'
    run("merge", "org/tiny", "--output", "main")
    assert (tmp_path / "here" / "main" / "tokenizer.json").read_bytes() == b"{}"


def test_a_part_in_the_cache_is_no_model(run, hub, tmp_path):
    run("inspect", "org/tiny", "--download")
    for file in (tmp_path / "cache").rglob("model.safetensors"):
        file.unlink()
    said = run("inspect", "org/tiny", code=1).stderr
    assert "the cache holds a part of it only; get the rest with --download" in said
    run("inspect", "org/tiny", "--download")
    assert "family llama" in run("inspect", "org/tiny").stdout


def test_a_path_that_is_there_comes_before_the_hub(run, hub, tmp_path):
    (tmp_path / "here" / "org").mkdir()
    (tmp_path / "source").rename(tmp_path / "here" / "org" / "tiny")
    run("reshard", "org/tiny", "--tp", "2", "--download")
    assert (tmp_path / "here" / "org" / "tiny-tp2-pp1").is_dir(), "beside the folder"
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/absent", "the hub has no such model, or it is private"),
        ("org/tiny@v9", "the hub has no revision v9 of it"),
        ("org/gated", "accept its terms, and log in here with: hf auth login"),
    ],
)
def test_what_the_hub_refuses_is_one_line(name, says, run, hub):
    hub.repos["org/gated"] = hub.repos["org/tiny"]
    hub.gated.add("org/gated")
    said = run("inspect", name, "--download", code=1).stderr
    assert said.startswith(f"error: {name}: ")
    assert says in said
    assert said.count("\n") == 1


def test_offline_mode_is_said(run, hub):
    said = run("inspect", "org/tiny", "--download", code=1, HF_HUB_OFFLINE="1").stderr
    assert "HF_HUB_OFFLINE is set" in said
    assert hub.asked == []


@pytest.mark.slow  # the client tries five times
def test_a_hub_that_does_not_answer_is_one_line_after_those_of_the_client(run):
    done = run("inspect", "org/tiny", "--download", code=1, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.stderr.splitlines()[-1].startswith("error: org/tiny: the hub, or the disk, failed")


def test_a_merge_is_uploaded_with_a_card_into_a_private_repository(run, hub, tmp_path):
    run("reshard", "org/tiny", "--tp", "2", "--download")
    words = ("merge", "tiny-tp2-pp1", "--output", "merged", "--verify", "--push-to-hub", "me/made")
    assert "hf auth login" in run(*words, code=1).stderr
    assert not (tmp_path / "here" / "merged").exists(), "refused before anything is written"
    done = run(*words, HF_TOKEN=TOKEN)
    assert f"uploaded to {hub.endpoint}/me/made/commit/" in done.stdout
    assert hub.private["me/made"]
    files = hub.repos["me/made"]["main"]
    merged = tmp_path / "here" / "merged"
    assert {n: d for n, d in files.items() if n != "README.md"} == {
        f.name: f.read_bytes() for f in merged.iterdir()
    }
    assert not (merged / "README.md").exists()
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# made" in card
    assert load(files["model.safetensors"]).keys() == load_file(merged / "model.safetensors").keys()


def test_a_card_of_the_model_itself_is_kept_and_a_dry_run_uploads_nothing(run, hub):
    hub.repos["org/tiny"]["main"]["README.md"] = b"# its own\n"
    run("merge", "org/tiny", "--download", "--output", "a", "--push-to-hub", "me/b", HF_TOKEN=TOKEN)
    assert hub.repos["me/b"]["main"]["README.md"] == b"# its own\n"
    run("merge", "org/tiny", "--dry-run", "--push-to-hub", "me/c", code=2, HF_TOKEN=TOKEN)
    assert "me/c" not in hub.repos
    said = run("merge", "org/tiny", "--output", "b", "--push-to-hub", "a/b/c", code=1).stderr
    assert "write it as ORGANIZATION/NAME" in said


def test_only_names_are_taken_for_names():
    assert HubName.of("meta-llama/Llama-3.1-8B") == HubName("meta-llama/Llama-3.1-8B")
    assert HubName.of("gpt2@refs/pr/3") == HubName("gpt2", "refs/pr/3")
    for text in ("/abs/path", "./x", "a/b/c", "../x", "a/../b", "x.safetensors", "", "a b", "~/x"):
        assert HubName.of(text) is None, text


def test_without_the_library_the_line_to_type_is_said(tmp_path, monkeypatch):
    from shardwright.ckpt import open_checkpoint

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"hf download org/x.*pip install 'shardwright\[hub\]'"
    ):
        open_checkpoint("org/x")
