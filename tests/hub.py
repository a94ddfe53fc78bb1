"""A small Hugging Face hub on this machine, over real HTTP, and a user of it in a process of its own.

Repositories are folders of plain files, one per commit. Models and data sets can be listed, downloaded (whole or in
part) and, with a token, created and committed to, large files by Git LFS. Failures are asked for by repository.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

#: Files that the hub keeps in Git LFS.
LARGE = (".safetensors", ".parquet", ".bin")
REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"
KIND = r"(?P<kind>models|datasets)"


class Refused(Exception):
    """An answer with an error status, as the hub words it."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Hub:
    """The repositories in `folder`, and the server while the hub is used in a `with` block."""

    folder: Path
    branches: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)  # token to the one name below which it may write
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    failing: dict[str, int] = field(default_factory=dict)  # repository to the status of every answer about it
    delay_s: dict[str, float] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "METHOD /path" of each request
    uploads: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256

    def __enter__(self) -> "Hub":
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def add(self, kind: str, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commit a whole tree to a branch of "models" or "datasets"; return the commit."""
        blobs = "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(files.items()))
        commit = hashlib.sha1(f"{kind} {repo} {blobs}".encode()).hexdigest()
        for name, content in files.items():
            path = self.folder / kind / repo / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.branches.setdefault((kind, repo), {})[branch] = commit
        return commit

    def files(self, kind: str, repo: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision, by name."""
        root = self.tree(kind, repo, self.commit(kind, repo, revision))
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def tree(self, kind: str, repo: str, commit: str) -> Path:
        return self.folder / kind / repo / commit

    def commit(self, kind: str, repo: str, revision: str) -> str:
        """The commit that a branch or a commit names; raises Refused."""
        if (kind, repo) not in self.branches:
            raise Refused(404, "Repository not found", "RepoNotFound")
        commit = self.branches[kind, repo].get(revision, revision)
        if not re.fullmatch(r"[0-9a-f]{40}", commit) or not self.tree(kind, repo, commit).is_dir():
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as `Hub.add` takes them."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _listed(path: Path, root: Path) -> dict[str, Any]:
    """A file or folder as the hub lists it."""
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
    content = path.read_bytes()
    oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
    if path.suffix in LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    """One request. `ROUTES` maps method and path to the function that answers."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        try:
            for method, pattern, function in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    self.check_access(match.groupdict())
                    function(self, **match.groupdict())
                    return
            raise Refused(404, f"no such page: {path}", "EntryNotFound")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self.send(refused.status, json.dumps({"error": refused.message}).encode(), headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def user(self) -> str | None:
        """Whose token came along; raises Refused for one that nobody has."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def check_access(self, names: Mapping[str, str]) -> None:
        repo = names.get("repo", "")
        time.sleep(self.hub.delay_s.get(repo, 0))
        if repo in self.hub.failing:
            raise Refused(self.hub.failing[repo], "the hub has a problem")
        user = self.user()
        if repo in self.hub.gated and "file" in names and user is None:  # what there is may be seen
            raise Refused(401, f"Access to {repo} is restricted. You must be authenticated.", "GatedRepo")
        if repo in self.hub.private and user != repo.partition("/")[0]:
            raise Refused(404, "Repository not found", "RepoNotFound")

    def may_write(self, owner: str) -> None:
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        if user != owner:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")

    def send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | dict(headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, content: Any) -> None:
        self.send(200, json.dumps(content).encode())

    # --- reading ---

    def info(self, kind: str, repo: str, revision: str = "main") -> None:
        commit = self.hub.commit(kind, repo, revision)
        names = sorted(self.hub.files(kind, repo, commit))
        siblings = [{"rfilename": name} for name in names]
        self.send_json({"id": repo, "sha": commit, "siblings": siblings, "private": repo in self.hub.private})

    def listing(self, kind: str, repo: str, revision: str, below: str | None = None) -> None:
        root = self.hub.tree(kind, repo, self.hub.commit(kind, repo, revision))
        folder = root / (below or "")
        if not folder.is_dir():
            raise Refused(404, f"{below} does not exist", "EntryNotFound")
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        paths = sorted(folder.rglob("*") if recursive else folder.iterdir())
        self.send_json([_listed(path, root) for path in paths])

    def paths_info(self, kind: str, repo: str, revision: str) -> None:
        root = self.hub.tree(kind, repo, self.hub.commit(kind, repo, revision))
        is_json = "json" in self.headers.get("Content-Type", "")
        wanted = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode())["paths"]
        self.send_json([_listed(root / name, root) for name in wanted if (root / name).exists()])

    def resolve(self, repo: str, revision: str, file: str, prefix: str | None = None) -> None:
        kind = "datasets" if prefix else "models"
        commit = self.hub.commit(kind, repo, revision)
        path = self.hub.tree(kind, repo, commit) / file
        headers = {"X-Repo-Commit": commit, "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if not path.is_file():
            raise Refused(404, "Entry not found", "EntryNotFound")
        listed, content = _listed(path, self.hub.tree(kind, repo, commit)), path.read_bytes()
        headers["ETag"] = f'"{listed["oid"]}"'
        if "lfs" in listed:
            headers |= {"X-Linked-Etag": f'"{listed["lfs"]["oid"]}"', "X-Linked-Size": str(len(content))}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.send(200, content, headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(206, content[first : last + 1], headers)

    # --- writing ---

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.failing:
            raise Refused(self.hub.failing[repo], "the hub has a problem")
        self.may_write(asked["organization"])
        if ("models", repo) in self.hub.branches:
            raise Refused(409, "You already created this model repo")
        self.hub.add("models", repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        if asked.get("visibility") == "private" or asked.get("private"):
            self.hub.private.add(repo)
        self.send_json({"url": f"{self.hub.endpoint}/{repo}"})

    def validate_card(self) -> None:
        self.send_json({"errors": [], "warnings": []})

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        self.may_write(repo.partition("/")[0])
        self.hub.commit(kind, repo, revision)
        names = [file["path"] for file in json.loads(self.body)["files"]]
        modes = [{"path": n, "uploadMode": "lfs" if n.endswith(LARGE) else "regular"} for n in names]
        self.send_json({"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})

    def lfs_batch(self, repo: str) -> None:
        self.may_write(repo.partition("/")[0])
        objects = json.loads(self.body)["objects"]
        for one in objects:
            one["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}
        self.send_json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "the content is not that of the SHA-256")
        self.hub.uploads[oid] = self.body
        self.send(200, b"")

    def make_commit(self, kind: str, repo: str, revision: str) -> None:
        self.may_write(repo.partition("/")[0])
        files = self.hub.files(kind, repo, revision)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(kind, repo, files, revision)
        url = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        self.send_json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})


ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), f"/api/{KIND}/{REPOSITORY}", _Handler.info),
    (("GET",), f"/api/{KIND}/{REPOSITORY}/revision/(?P<revision>.+)", _Handler.info),
    (("GET",), f"/api/{KIND}/{REPOSITORY}/tree/(?P<revision>[^/]+)(?:/(?P<below>.+))?", _Handler.listing),
    (("POST",), f"/api/{KIND}/{REPOSITORY}/paths-info/(?P<revision>.+)", _Handler.paths_info),
    (
        ("GET", "HEAD"),
        f"/(?P<prefix>datasets/)?{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)",
        _Handler.resolve,
    ),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate_card),
    (("POST",), f"/api/{KIND}/{REPOSITORY}/preupload/(?P<revision>.+)", _Handler.preupload),
    (("POST",), rf"/{REPOSITORY}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_upload),
    (("POST",), f"/api/{KIND}/{REPOSITORY}/commit/(?P<revision>.+)", _Handler.make_commit),
]


# --- the user -----------------------------------------------------------------------------------------------------

#: Runs command lines that come in one by one, each in a fork that finds the libraries loaded.
USER = """
import importlib, json, os, sys, tempfile
from comlrl_stages import cli

for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    arguments, environment, typed = json.loads(line)
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as keyboard:
        keyboard.write(typed)
        keyboard.seek(0)
        child = os.fork()
        if child == 0:
            for source, target in ((keyboard, 0), (said, 1), (said, 2)):
                os.dup2(source.fileno(), target)
            sys.stdin = open(0, closefd=False)
            os.environ.update(environment)
            sys.argv = ["comlrl-stages", *arguments]
            try:
                cli.main()
            except SystemExit as end:
                sys.stderr.flush()
                os._exit(end.code or 0)  # tidying up takes a second
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read()]), flush=True)
os._exit(0)
"""


@dataclass
class User:
    """Somebody with an HF_HOME of their own who runs `comlrl-stages` while this is used in a `with` block."""

    home: Path
    endpoint: str
    modules: Sequence[str] = ()  # imported before the first command
    environment: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> "User":
        known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = known | hub_environment(self.endpoint, self.home) | dict(self.environment)
        self.home.mkdir(parents=True, exist_ok=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with open(self.home / "stderr.txt", "a") as noise:  # progress bars and warnings
            command = [sys.executable, "-c", USER, *self.modules]
            self.process = subprocess.Popen(command, env=environment, cwd=self.home, text=True, stderr=noise, **pipes)
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def run(self, *arguments: str | Path, typed: str = "", **environment: str) -> tuple[int, str]:
        """Run one command line; return its exit code and what it printed."""
        order = [[str(argument) for argument in arguments], environment, typed]
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, (self.home / "stderr.txt").read_text()
        code, said = json.loads(answer)
        return code, said

    def does(self, *arguments: str | Path, **environment: str) -> str:
        """Run a command line that must succeed."""
        code, said = self.run(*arguments, **environment)
        assert code == 0, said
        return said

    def fails(self, *arguments: str | Path, **environment: str) -> str:
        """Run a command line that must end in one message; return it."""
        code, said = self.run(*arguments, **environment)
        assert code == 1 and "Traceback" not in said, (code, said)
        *_, message = re.split(r"^error: ", said, flags=re.MULTILINE)
        assert message != said, said
        return message


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Environment of a process that uses the hub at `endpoint` and keeps its cache in `home`."""
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ETAG_TIMEOUT": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


#: An address where nobody answers.
CLOSED = "http://127.0.0.1:9"
