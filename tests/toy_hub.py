"""A small Hub on this machine: serves and takes repositories of files, for ``huggingface_hub``, and logs who asks."""

import base64
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
    is_private: bool = False
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
        self.contents: dict[str, bytes] = {}
        """What was uploaded so far, by its SHA-256, whether or not it is in a commit."""
        self.most_uploads: int | None = None
        """How many it still takes before it refuses one; None for any number."""

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

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(*self._taken(unquote(urlsplit(self.path).path), content))

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hub.most_uploads == 0:
            self._send(*_refusal(400, "Interrupted"))
            return
        if self.hub.most_uploads is not None:
            self.hub.most_uploads -= 1
        self.hub.contents[hashlib.sha256(content).hexdigest()] = content
        self._send(*_json({}))

    def _taken(self, path: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        """Take what somebody writes, and return the answer."""
        if not (self.headers.get("Authorization") or "").endswith(" may-write"):
            return _refusal(401 if self.headers.get("Authorization") is None else 403, "Forbidden")
        if path.endswith("/commit/main"):
            return self._commit(path, [json.loads(line) for line in content.splitlines()])
        asked = json.loads(content)
        if path == "/api/repos/create":
            return self._created(f"{asked['organization']}/{asked['name']}", asked["visibility"])
        if path == "/api/validate-yaml":
            wrong = ['"license" must be one of those known'] if "license: none-such" in asked["content"] else []
            return _json({"errors": [{"message": message} for message in wrong]}, 400 if wrong else 200)
        if "/preupload/" in path:
            names = [file["path"] for file in asked["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            answers = zip(names, modes, strict=True)
            return _json(
                {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in answers]}
            )
        for one in asked["objects"]:
            if one["oid"] not in self.hub.contents:
                one["actions"] = {"upload": {"href": f"{self.hub.endpoint}/put/{one['oid']}"}}
        return _json({"objects": asked["objects"]})

    def _created(self, name: str, visibility: str) -> tuple[int, dict[str, str], bytes]:
        is_new = f"models/{name}" not in self.hub.repositories
        if is_new:
            self.hub.add(f"models/{name}", {}, is_private=visibility == "private")
        return _json({"url": f"{self.hub.endpoint}/{name}"}, 200 if is_new else 409)

    def _commit(self, path: str, lines: list[dict]) -> tuple[int, dict[str, str], bytes]:
        name = path.removeprefix("/api/").removesuffix("/commit/main")
        repository = self.hub.repositories[name]
        files = dict(repository.commits[repository.branches["main"]])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.contents[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches["main"] = commit
        url = f"{self.hub.endpoint}/{name.removeprefix('models/')}/commit/{commit}"
        return _json({"success": True, "commitOid": commit, "commitUrl": url})

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/"):
            answer = self._about(path.removeprefix("/api/"))
        else:
            answer = self._file(path.removeprefix("/"))
        self._send(*answer, with_body=with_body)

    def _send(self, status: int, headers: dict[str, str], body: bytes, *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _about(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.count("/") == 2:
            path += "/revision/main"
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
            about = {"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}
            return _json(about | {"gated": repository.is_gated, "private": repository.is_private})
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


def _json(value: object, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _refusal(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code, "Content-Type": "application/json"}, b"{}"
