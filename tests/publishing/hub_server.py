"""A server on loopback that speaks the Hub's protocol, as far as publishing and loading a model need it.

It keeps revisions, knows users and organisations by their tokens, checks what it is sent as the Hub does, and has
accidents on demand.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass
class Repository:
    private: bool
    # Files of every commit by path: their content, or the digest of a large file.
    commits: dict[str, dict[str, bytes | str]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict, message: str, deleted: tuple[str, ...] = ()) -> str:
        parent = self.branches.get(branch, "")
        name = hashlib.sha1(f"{parent} {message} {len(self.commits)}".encode()).hexdigest()
        kept = {path: content for path, content in self.commits.get(parent, {}).items() if path not in deleted}
        self.commits[name] = {**kept, **files}
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def resolve(self, revision: str) -> str | None:
        names = {**self.tags, **self.branches}
        return names.get(revision, revision if revision in self.commits else None)


@dataclass
class Accident:
    """What happens to the next requests.

    A status, or the connection is cut before or after the work is done, or it is held and never answered.
    """

    method: str
    path: str
    kind: int | str
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str
    token: str | None
    status: int | None = None


class HubServer:
    """The server; `with` starts and stops it."""

    def __init__(self, tokens: dict[str, list[str]]):
        # Names that each token may write to, the user's own first.
        self.tokens = tokens
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        # Larger objects than this are sent in parts of so many bytes, and put together when all have arrived.
        self.part_size: int | None = None
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[Request] = []
        self.accidents: list[Accident] = []
        self.lock = threading.RLock()
        # Requests for large files wait while it is cleared.
        self.open = threading.Event()
        self.open.set()
        # Set at the end; nobody hears from silent requests before.
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Another host to the client, as the Hub's storage is: tokens must not go there.
        self.storage = f"http://localhost:{self._server.server_port}/storage"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def fail(self, method: str, path: str, kind: int | str, times: int = 1, **headers: str) -> None:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.accidents.append(Accident(method, path, kind, times, names))

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo]
        entries = repository.commits[repository.resolve(revision)]
        return {
            path: self.objects[content] if isinstance(content, str) else content for path, content in entries.items()
        }

    def count(self, method: str, path: str) -> int:
        return sum(request.method == method and bool(re.search(path, request.path)) for request in self.requests)


class _Answer(Exception):
    def __init__(self, status: int, body: object = None, **headers: str):
        self.status, self.body = status, body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self):
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        self.token = token if scheme == "Bearer" else None
        path = urlsplit(self.path).path
        request = Request(self.command, path, self.token)
        with self.hub.lock:
            self.hub.requests.append(request)
            accident = next(
                (
                    accident
                    for accident in self.hub.accidents
                    if accident.times > 0 and accident.method == self.command and re.search(accident.path, path)
                ),
                None,
            )
            if accident is not None:
                accident.times -= 1
        if accident is not None and accident.kind == "cut before":
            return self._cut()
        if accident is not None and accident.kind == "silence":
            self.hub.over.wait(60)
            return self._cut()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            body = self._chunks()
        if path.startswith("/storage/"):
            self.hub.open.wait(60)
        if accident is not None and isinstance(accident.kind, int):
            answer = _Answer(accident.kind, {"error": "an accident"}, **accident.headers)
        else:
            try:
                with self.hub.lock:
                    answer = self._route(path, body)
            except _Answer as raised:
                answer = raised
        if accident is not None and accident.kind == "cut after":
            return self._cut()
        request.status = answer.status
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _cut(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _route(self, path: str, body: bytes) -> _Answer:
        for method, pattern, action in (
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate),
            ("GET", r"/api/models/([^/]+/[^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/auth-check/write", self._check_writing),
            ("GET", r"/api/models/([^/]+/[^/]+)/refs", self._refs),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?", self._tree),
            ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", self._branch),
            ("POST", r"/api/models/([^/]+/[^/]+)/tag/([^/]+)", self._tag),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/storage/([0-9a-f]{64})", self._store),
            ("PUT", r"/storage/([0-9a-f]{64})/([0-9]+)", self._store_part),
            ("POST", r"/api/complete_multipart", self._complete),
            ("POST", r"/api/verify", self._verify),
            ("GET", r"/storage/([0-9a-f]{64})", self._fetch),
            ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                return action(body, *map(unquote, match.groups()))
        raise _Answer(404, {"error": f"no such place: {self.command} {path}"})

    def _names(self) -> list[str]:
        if self.token is None:
            raise _Answer(401, {"error": "Invalid username or password."})
        if self.token not in self.hub.tokens:
            message = "Invalid credentials in Authorization header"
            raise _Answer(401, {"error": message}, X_Error_Message=message)
        return self.hub.tokens[self.token]

    def _repository(self, name: str, *, write: bool = False) -> Repository:
        repository = self.hub.repositories.get(name)
        names = self.hub.tokens.get(self.token, [])
        is_member = name.split("/")[0] in names
        if repository is None or (repository.private and not is_member):
            raise _Answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if write:
            self._names()
            if not is_member:
                raise _Answer(403, {"error": "You have no write access."}, X_Error_Message="You have no write access.")
        return repository

    def _revision(self, repository: Repository, revision: str) -> str:
        commit = repository.resolve(revision)
        if commit is None:
            raise _Answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        return commit

    def _create(self, body: bytes) -> _Answer:
        values = json.loads(body)
        owner = values.get("organization") or self._names()[0]
        if owner not in self._names():
            message = "You don't have the rights to create a model under this namespace"
            return _Answer(403, {"error": message}, X_Error_Message=message)
        name = f"{owner}/{values['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            return _Answer(409, {"error": "You already created this model repo", "url": url})
        repository = Repository(values.get("visibility") == "private" or values.get("private", False))
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.hub.repositories[name] = repository
        return _Answer(200, {"url": url, "name": name})

    def _validate(self, body: bytes) -> _Answer:
        match = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], flags=re.DOTALL)
        try:
            values = yaml.safe_load(match[1])
            errors = [] if isinstance(values, dict) else ["no mapping"]
        except (yaml.YAMLError, TypeError) as error:
            errors = [str(error)]
        for result in [] if errors else values.get("model-index", [{"results": []}])[0]["results"]:
            if not {"type", "name"} <= result["dataset"].keys() or not all("value" in m for m in result["metrics"]):
                errors.append("model-index")
        return _Answer(400 if errors else 200, {"errors": [{"message": error} for error in errors], "warnings": []})

    def _info(self, _: bytes, name: str, revision: str = "main") -> _Answer:
        repository = self._repository(name)
        commit = self._revision(repository, revision)
        files = [{"rfilename": path} for path in repository.commits[commit]]
        return _Answer(200, {"id": name, "sha": commit, "private": repository.private, "siblings": files, "tags": []})

    def _check_writing(self, _: bytes, name: str) -> _Answer:
        self._repository(name, write=True)
        return _Answer(200, {})

    def _refs(self, _: bytes, name: str) -> _Answer:
        repository = self._repository(name)
        kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
        refs = {
            kind: [{"name": key, "ref": f"refs/{place}/{key}", "targetCommit": value} for key, value in items.items()]
            for kind, (place, items) in kinds.items()
        }
        return _Answer(200, {**refs, "converts": []})

    def _tree(self, _: bytes, name: str, revision: str) -> _Answer:
        repository = self._repository(name)
        entries = repository.commits[self._revision(repository, revision)]
        return _Answer(200, [self._entry(path, content) for path, content in entries.items()])

    def _entry(self, path: str, content: bytes | str) -> dict:
        if isinstance(content, bytes):
            return {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
        size = len(self.hub.objects[content])
        return {
            "type": "file", "path": path, "size": size, "oid": content[:40],
            "lfs": {"oid": content, "size": size, "pointerSize": 134},
        }  # fmt: skip

    def _branch(self, body: bytes, name: str, branch: str) -> _Answer:
        repository = self._repository(name, write=True)
        if branch in repository.branches:
            return _Answer(409, {"error": "Reference already exists"})
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[branch] = self._revision(repository, start)
        return _Answer(200, {})

    def _tag(self, body: bytes, name: str, revision: str) -> _Answer:
        repository = self._repository(name, write=True)
        tag = json.loads(body)["tag"]
        if tag in repository.tags:
            return _Answer(409, {"error": "Tag reference exists already"})
        repository.tags[tag] = self._revision(repository, revision)
        return _Answer(200, {})

    def _preupload(self, body: bytes, name: str, revision: str) -> _Answer:
        repository = self._repository(name, write=True)
        entries = repository.commits[self._revision(repository, revision)]
        files = []
        for file in json.loads(body)["files"]:
            base64.b64decode(file["sample"], validate=True)
            present = entries.get(file["path"])
            oid = present if isinstance(present, str) or present is None else _git_hash(present)
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return _Answer(200, {"files": files})

    def _batch(self, body: bytes, name: str) -> _Answer:
        self._repository(name, write=True)
        values = json.loads(body)
        assert values["operation"] == "upload" and "basic" in values["transfers"]
        objects = []
        for item in values["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                entry["actions"] = {
                    "upload": self._upload_action(item["oid"], item["size"]),
                    "verify": {"href": f"{self.hub.url}/api/verify"},
                }
            objects.append(entry)
        return _Answer(200, {"transfer": "basic", "objects": objects})

    def _upload_action(self, oid: str, size: int) -> dict:
        place, signature, part_size = f"{self.hub.storage}/{oid}", "X-Amz-Signature=signed", self.hub.part_size
        if part_size is None or size <= part_size:
            return {"href": f"{place}?{signature}"}
        urls = {str(n): f"{place}/{n}?{signature}" for n in range(1, -(-size // part_size) + 1)}
        # A client that forgets to sort them as numbers puts 10 before 2.
        urls = dict(sorted(urls.items()))
        return {
            "href": f"{self.hub.url}/api/complete_multipart?{signature}",
            "header": {"chunk_size": str(part_size), **urls},
        }

    def _check_signature(self) -> None:
        if parse_qs(urlsplit(self.path).query).get("X-Amz-Signature") != ["signed"]:
            raise _Answer(403, {})

    def _store(self, body: bytes, digest: str) -> _Answer:
        self._check_signature()
        if hashlib.sha256(body).hexdigest() != digest:
            return _Answer(400, {"error": "digest"})
        self.hub.objects[digest] = body
        return _Answer(200, {})

    def _store_part(self, body: bytes, digest: str, number: str) -> _Answer:
        self._check_signature()
        self.hub.parts[digest, int(number)] = body
        return _Answer(200, {}, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _complete(self, body: bytes) -> _Answer:
        self._check_signature()
        values = json.loads(body)
        parts = [self.hub.parts.get((values["oid"], part["partNumber"]), b"") for part in values["parts"]]
        if [part["etag"] for part in values["parts"]] != [f'"{hashlib.md5(part).hexdigest()}"' for part in parts]:
            return _Answer(400, {"error": "etag"})
        return self._store(b"".join(parts), values["oid"])

    def _verify(self, body: bytes) -> _Answer:
        values = json.loads(body)
        content = self.hub.objects.get(values["oid"])
        return _Answer(200 if content is not None and len(content) == values["size"] else 404, {})

    def _commit(self, body: bytes, name: str, revision: str) -> _Answer:
        repository = self._repository(name, write=True)
        present = repository.commits[self._revision(repository, revision)]
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files: dict[str, bytes | str] = {}
        deleted = []
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return _Answer(400, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = value["oid"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                if value["path"] not in present:
                    return _Answer(400, {"error": f"{value['path']} is not there"})
                deleted.append(value["path"])
            else:
                return _Answer(400, {"error": operation["key"]})
        commit = repository.commit(revision, files, header["value"]["summary"], tuple(deleted))
        return _Answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def _resolve(self, _: bytes, name: str, revision: str, path: str) -> _Answer:
        repository = self._repository(name)
        commit = self._revision(repository, revision)
        content = repository.commits[commit].get(path)
        if content is None:
            raise _Answer(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if isinstance(content, bytes):
            return _Answer(200, content, X_Repo_Commit=commit, ETag=f'"{_git_hash(content)}"')
        size = str(len(self.hub.objects[content]))
        return _Answer(
            302, b"", Location=f"{self.hub.storage}/{content}", X_Repo_Commit=commit,
            X_Linked_ETag=f'"{content}"', X_Linked_Size=size,
        )  # fmt: skip

    def _fetch(self, _: bytes, digest: str) -> _Answer:
        return _Answer(200, self.hub.objects[digest], ETag=f'"{digest}"')


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
