# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A server on this machine that answers the requests of huggingface_hub as the Hub does."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"


@dataclass
class Hub:
    """The models of the server, and how it fails."""

    models: dict[str, Path]
    """``org/name`` -> folder."""
    gated: set[str] = field(default_factory=set)
    """Models that ask for TOKEN."""
    cut: dict[str, int] = field(default_factory=dict)
    """Name of a file -> bytes after which the connection breaks, once."""
    stalled: dict[str, int] = field(default_factory=dict)
    """Name of a file -> bytes after which nothing more comes; ``waiting`` is then set."""
    waiting: Event = field(default_factory=Event)
    damaged: set[str] = field(default_factory=set)
    """Names of files that arrive with another last byte."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range header of every request for a file."""
    url: str = ""

    def commit(self, model: str) -> str:
        return hashlib.sha1(model.encode()).hexdigest()

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of a program that asks this server, and has its cache in ``cache``."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        here = {"HF_HOME": str(cache), "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}
        return kept | here | {"NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block is left; ``hub.url`` is the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    (thread := Thread(target=server.serve_forever, daemon=True)).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        model = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if model not in self.hub.models:
            self._fail(401, "RepoNotFound")
        elif model in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "GatedRepo")
        elif len(rest) > 1 and rest[1] not in ("main", self.hub.commit(model)):
            self._fail(404, "RevisionNotFound")
        elif not is_api:
            self._file(model, "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            self._json([self._entry(self.hub.models[model], path) for path in _files(self.hub.models[model])])
        else:
            names = [{"rfilename": path} for path in _files(self.hub.models[model])]
            self._json({"id": model, "modelId": model, "sha": self.hub.commit(model), "siblings": names})

    do_HEAD = do_GET

    def _entry(self, folder: Path, path: str) -> dict[str, object]:
        size = (folder / path).stat().st_size
        entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": _etag(folder / path)}
        if path.endswith(".safetensors"):
            entry["lfs"] = {"oid": _etag(folder / path), "size": size, "pointerSize": 134}
        return entry

    def _file(self, model: str, name: str) -> None:
        path, wanted = self.hub.models[model] / name, self.headers.get("Range", "")
        self.hub.requests.append((self.command, f"{model}/{name}", wanted))
        if not path.is_file():
            return self._fail(404, "EntryNotFound")
        content = path.read_bytes()
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        headers = {"X-Repo-Commit": self.hub.commit(model), "ETag": f'"{_etag(path)}"'}
        headers["Accept-Ranges"] = "bytes"
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._begin(206 if wanted else 200, headers | {"Content-Length": str(len(content) - start)})
        if self.command == "HEAD":
            return
        if name in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if (stop := self.hub.stalled.get(name)) is not None:
            self.wfile.write(content[start:stop])
            self.wfile.flush()
            self.hub.waiting.set()
            self.rfile.read(1)  # returns when the client is gone
            self.close_connection = True
            return
        end = self.hub.cut.pop(name, len(content))
        self.wfile.write(content[start:end])
        self.close_connection = end < len(content)

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._begin(200, {"Content-Type": "application/json", "Content-Length": len(body)})
        self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._begin(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": 0})

    def _begin(self, status: int, headers: Mapping[str, object]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _etag(path: Path) -> str:
    """Return what the Hub names a file by: the SHA-256 of a large one, a hash as git's of others."""
    kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
    return kind(path.read_bytes()).hexdigest()
