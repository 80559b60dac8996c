"""A hub on loopback: what huggingface_hub asks of the real one to list, fetch and upload files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """Repositories: name -> revision -> file -> bytes."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)  # method and path of each request
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS objects
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def commit(self, repo: str, revision: str) -> str:
        """The hash of a revision; a hash stands for itself."""
        return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()

    def files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision, by name or by hash."""
        known = self.repos.get(repo, {})
        found = {self.commit(repo, name): files for name, files in known.items()} | known
        return found.get(revision)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, answering on a port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """No lines on stderr."""

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, table: object, status: int = 200, **headers: str) -> None:
        kind = {"Content_Type": "application/json"}
        self._send(status, json.dumps(table).encode(), **{**kind, **headers})

    def _refuse(self, status: int, code: str) -> None:
        self._json({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.split("/")
        if path.startswith("api/models/"):
            repo, rest = "/".join(parts[2:4]), parts[4:]
            if not self._allowed(repo):
                return
            revision = rest[1] if len(rest) > 1 else "main"
            files = self.hub.files(repo, revision)
            if files is None:
                self._refuse(404, "RevisionNotFound")
            elif rest[:1] == ["tree"]:
                self._json([self._entry(name, data) for name, data in files.items()])
            else:
                sha = revision if len(revision) == 40 else self.hub.commit(repo, revision)
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings,
                            "private": False, "tags": [], "downloads": 0})  # fmt: skip
            return
        repo, kind, revision, name = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        assert kind == "resolve", path
        if not self._allowed(repo):
            return
        data = (self.hub.files(repo, revision) or {}).get(name)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        digest = hashlib.sha256(data).hexdigest()
        sha = revision if len(revision) == 40 else self.hub.commit(repo, revision)
        self._send(200, data, ETag=f'"{digest}"', X_Repo_Commit=sha,
                   Content_Length=str(len(data)), Accept_Ranges="bytes")  # fmt: skip

    def _allowed(self, repo: str) -> bool:
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.hub.repos or (self.hub.private.get(repo) and not authorized):
            self._refuse(401, "RepoNotFound")
            return False
        if repo in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return False
        return True

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(data),
                "oid": hashlib.sha1(data).hexdigest()}  # fmt: skip

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"POST {path}")
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Unauthorized")
            return
        if path == "api/repos/create":
            table = json.loads(body)
            repo = "/".join(filter(None, [table.get("organization"), table["name"]]))
            if repo in self.hub.repos:
                self._json({"url": f"{self.hub.endpoint}/{repo}"}, 409)
                return
            self.hub.repos[repo] = {"main": {}}
            self.hub.private[repo] = table.get("private") or table.get("visibility") == "private"
            self._json({"url": f"{self.hub.endpoint}/{repo}"})
        elif path == "api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self._json({"files": [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]})  # fmt: skip
        elif path.endswith("info/lfs/objects/batch"):
            self._json({"transfer": "basic", "objects": [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {
                    "href": f"{self.hub.endpoint}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]}, Content_Type="application/vnd.git-lfs+json")  # fmt: skip
        else:
            repo, kind = "/".join(path.split("/")[2:4]), path.split("/")[4]
            assert kind == "commit", path
            self._commit(repo, body)

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.hub.repos[repo]["main"]
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        oid = self.hub.commit(repo, "main")
        self._json({"success": True, "commitOid": oid,
                    "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}"})  # fmt: skip

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.hub.asked.append(f"PUT {path}")
        data = self._body()
        oid = path.split("/")[1]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.stored[oid] = data
        self._send(200)
