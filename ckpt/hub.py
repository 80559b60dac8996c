"""Models of the Hugging Face hub: found in the local cache, fetched where allowed, and uploaded.

All of it is huggingface_hub's own work: where its cache lies, what a revision is, tokens, progress
bars. It is imported only for a name that is no local path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import CheckpointError, install
from .move.storage import StoragePath, Where, storage_path

# meta-llama/Llama-3.2-1B, gpt2, org/name@revision
_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"({_WORD}(?:/{_WORD})?)(?:@(\w[\w./-]{{0,250}}))?")
# Other forms of the same weights, which nobody here reads.
_OTHERS = (
    "*.gguf", "*.onnx", "onnx/*", "openvino/*", "coreml/*", "*.msgpack", "*.h5", "*.ot", "*.tflite",
    "*.mlmodel", "original/*", "*.pth", "consolidated*",
)  # fmt: skip
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".txt", ".yaml")
_BIN, _SAFE = ("*.bin", "*.bin.index.json"), ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub, perhaps at a revision."""

    repo: str
    revision: str | None = None

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """The name that a text spells; None if it cannot be one."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or "--" in match[1] or text.endswith(_FILES):
            return None
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    def command(self) -> str:
        """The line that fetches it into the cache."""
        return f"hf download {self.repo}" + (
            f" --revision {self.revision}" if self.revision else ""
        )


def local_path(text: str, *, download: bool = False) -> StoragePath:
    """Where the files of a hub's model lie, a path that does not exist being taken as its name.

    Without ``download`` only the cache is looked at. CheckpointError says what to type.
    """
    name = HubName.of(text)
    if name is None:
        raise CheckpointError(f"{text!r}: there is no such file or folder")
    return _fetched(name) if download else _cached(name)


def model_path(text: str) -> StoragePath:
    """A local path, or the snapshot of a hub's model that is in the cache."""
    path = storage_path(os.path.expanduser(text))
    if path.exists() or HubName.of(text) is None:
        return path
    return local_path(text)


def _has_library() -> bool:
    from importlib.util import find_spec

    return find_spec("huggingface_hub") is not None


def _cached(name: HubName) -> StoragePath:
    """The snapshot in the cache."""
    absent = (
        f"{str(name)!r}: there is no such file or folder; if it is a model of the Hugging Face "
        f"hub, fetch it with --download, or with: {name.command()}"
    )
    if not _has_library():
        raise CheckpointError(f"{absent} (and {install('huggingface_hub')})")
    from huggingface_hub import errors, snapshot_download

    partial = ""
    for kept, others in ((_SAFE, _BIN), (_BIN, _SAFE)):
        try:
            with _told(name):
                found = storage_path(snapshot_download(
                    name.repo, revision=name.revision, local_files_only=True,
                    ignore_patterns=[*_OTHERS, *others],
                ))  # fmt: skip
        except errors.LocalEntryNotFoundError as error:
            if type(error) is not errors.LocalEntryNotFoundError:
                partial = "the cache holds a part of it only; "
            continue
        if any(found.glob(pattern) for pattern in kept):
            return found
    if partial:
        raise CheckpointError(
            f"{str(name)!r}: {partial}get the rest with --download, or with: {name.command()}"
        )
    raise CheckpointError(absent)


def _fetched(name: HubName) -> StoragePath:
    """The snapshot, fetched where the cache lacks a part of it."""
    if not _has_library():
        raise CheckpointError(f"--download: {install('huggingface_hub')}")
    from huggingface_hub import HfApi, errors, snapshot_download

    with _told(name):
        try:
            files = HfApi().list_repo_files(name.repo, revision=name.revision)
        except errors.OfflineModeIsEnabled:
            raise CheckpointError(
                f"{str(name)!r}: HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or "
                "leave --download out"
            ) from None
        safe = any(file.endswith(".safetensors") for file in files)
        others = [*_OTHERS, *(_BIN if safe else ())]
        try:
            return storage_path(
                snapshot_download(name.repo, revision=name.revision, ignore_patterns=others)
            )
        except errors.LocalEntryNotFoundError as error:
            raise CheckpointError(f"{name}: cannot be fetched: {error}") from error


@contextmanager
def _told(name: HubName) -> Iterator[None]:
    """What the hub refuses, as our error with the next step."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError:  # before 1.0 an answer of the hub, by its class
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: access is granted on request: open its page on the hub, accept its terms, "
            "and log in here with: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the hub has no revision {name.revision} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: the hub has no such model, or it is private and needs: hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name}: the hub answered: {first}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name}: no name of the hub: {error}") from error
    except Exception as error:
        client = type(error).__module__.partition(".")[0] in _CLIENTS
        if not client and not isinstance(error, OSError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{name}: the hub, or the disk, failed: {first}") from error


_CLIENTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # whose errors are no OSErrors


# --- uploads --------------------------------------------------------------------------------------


def check_push(repo: str) -> None:
    """Raise unless an upload can be tried: the library, a name and a token are there."""
    if not _has_library():
        raise CheckpointError(f"--push-to-hub: {install('huggingface_hub')}")
    from huggingface_hub import constants, get_token

    name = HubName.of(repo)
    if name is None or name.revision:
        raise CheckpointError(f"--push-to-hub {repo}: write it as ORGANIZATION/NAME")
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError("--push-to-hub: HF_HUB_OFFLINE is set; unset it")
    if not get_token():
        raise CheckpointError("--push-to-hub: there is no token; log in with: hf auth login")


def push(output: Where, repo: str, source: str) -> str:
    """Upload a Hugging Face checkpoint as one commit; the address of the commit.

    A repository that is not there is created, for its owner alone. ``source`` is what the model
    card says it was made from; a README.md of the checkpoint itself is kept.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = _files(storage_path(output))
    with _told(HubName(repo)):
        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        added = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        if "README.md" not in files:
            added.append(CommitOperationAdd("README.md", model_card(repo, source).encode()))
        said = f"Upload of {len(files)} files by shardwright"
        made = api.create_commit(repo, added, commit_message=said)
    return str(made.commit_url)


def _files(output: StoragePath) -> dict[str, StoragePath]:
    """Name in the repository -> file."""
    if output.is_file():
        return {output.name: output}
    found = [file for _, _, files in output.walk() for file in files]
    return {str(file.relative_to(output)): file for file in sorted(found, key=str)}


def model_card(repo: str, source: str) -> str:
    """The stub of a model card."""
    return (
        "---\nlibrary_name: transformers\ntags:\n- shardwright\n---\n\n"
        f"# {repo.rpartition('/')[2]}\n\n"
        f"Made from `{source}` by `merge-ckpt` of Shardwright. It has not been described yet.\n"
    )
