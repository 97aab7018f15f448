"""A small Hub on this machine: serves repositories of files as ``huggingface_hub`` asks for them, and logs who asks."""

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"first").hexdigest()
NEWER = hashlib.sha1(b"second").hexdigest()


@dataclass
class Repository:
    """The files of each commit, and what its branches and tags are."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    is_gated: bool = False
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of files that are said to be larger than they are."""


@dataclass
class Request:
    """What somebody asked for."""

    method: str
    path: str
    authorization: str | None


class ToyHub:
    """The repositories of a Hub, by ``models/org/name`` or ``datasets/org/name``, and the requests so far."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.endpoint = ""

    def add(self, name: str, files: dict[str, bytes], **options) -> Repository:
        """Add a repository with one commit."""
        self.repositories[name] = Repository({COMMIT: files}, **options)
        return self.repositories[name]

    def downloaded(self) -> list[str]:
        """Return the names of the files whose contents were sent, and forget all requests."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        self.requests.clear()
        return sorted(path.partition("/resolve/")[2].partition("/")[2] for path in paths if "/resolve/" in path)

    @contextmanager
    def serving(self):
        """Answer requests inside the block."""
        hub = self

        class Handler(_Handler):
            def log_message(self, *words: object) -> None:
                hub.requests.append(Request(self.command, self.path, self.headers.get("Authorization")))

        Handler.hub = self
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ToyHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/"):
            status, headers, body = self._about(path.removeprefix("/api/"))
        else:
            status, headers, body = self._file(path.removeprefix("/"))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _about(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.count("/") < 4:
            return _refusal(404, "NotFound")
        kind, owner, name, what, *rest = path.split("/")
        repository = self.hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return _refusal(404, "RepoNotFound")
        revision, folder = _revision(rest)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return _refusal(404, "RevisionNotFound")
        files = repository.commits[commit]
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return _json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "gated": repository.is_gated})
        return _json(
            [
                {
                    "type": "file",
                    "path": name,
                    "size": repository.claimed_sizes.get(name, len(content)),
                    "oid": _oid(content),
                }
                for name, content in files.items()
                if name.startswith(folder)
            ]
        )

    def _file(self, path: str) -> tuple[int, dict[str, str], bytes]:
        repository_path, _, rest = path.partition("/resolve/")
        kind = "" if repository_path.startswith("datasets/") else "models/"
        repository = self.hub.repositories.get(f"{kind}{repository_path}")
        if repository is None:
            return _refusal(404, "RepoNotFound")
        if repository.is_gated and self.headers.get("Authorization") is None:
            return _refusal(401, "GatedRepo")
        revision, name = _revision(rest.split("/"))
        commit = repository.branches.get(revision, revision)
        content = repository.commits.get(commit, {}).get(name)
        if content is None:
            return _refusal(404, "EntryNotFound")
        return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}, content


def _revision(parts: list[str]) -> tuple[str, str]:
    """Return the revision at the beginning of a path, and the rest of the path."""
    length = 3 if parts[0] == "refs" else 1
    return "/".join(parts[:length]), "/".join(parts[length:])


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _refusal(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code, "Content-Type": "application/json"}, b"{}"
