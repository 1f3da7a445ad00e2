"""A hub on loopback: the part of huggingface.co's HTTP protocol that downloads use, from dictionaries of bytes.

Files stored with LFS are redirected to another origin, as on the real hub. Written from the protocol (docs of the hub's
API and headers that its clients read), not from the client under test.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import pytest


@dataclass(slots=True)
class Repo:
    """files: bytes by path; those in `plain` are stored in git, the others with LFS. access: public, gated, private."""

    files: dict[str, bytes]
    plain: frozenset[str] = frozenset()
    access: str = "public"
    commit: str = "1" * 40
    revisions: dict[str, str] = field(default_factory=dict)

    def etag(self, path: str) -> str:
        data = self.files[path]
        if path in self.plain:
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def sibling(self, path: str) -> dict[str, Any]:
        size = len(self.files[path])
        if path in self.plain:
            return {"rfilename": path, "size": size, "blobId": self.etag(path)}
        lfs = {"sha256": self.etag(path), "size": size, "pointerSize": 134}
        return {"rfilename": path, "size": size, "blobId": "0" * 40, "lfs": lfs}


@dataclass(slots=True)
class Request:
    """method and path as they came, the Range header, and whether a token came with it; is_storage: not the hub."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    is_storage: bool
    sent: int = 0


class HubServer:
    """Serves `repos`. cut_after: bytes of one body after which the connection breaks; corrupt: paths sent wrongly.

    failures: statuses that requests for bytes get first.
    """

    TOKEN = "hf_test"

    def __init__(self, repos: dict[str, Repo]):
        self.repos = repos
        self.requests: list[Request] = []
        self.cut_after: list[int] = []  # one number for each connection to break, the first next
        self.corrupt: set[str] = set()
        self.failures: list[int] = []  # statuses to answer the next requests for bytes with
        self.has_ranges = True
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, is_storage)) for is_storage in (0, 1)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage_url(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def bodies(self, path: str) -> list[Request]:
        """Requests that were for the bytes of a file, in order."""
        return [r for r in self.requests if r.method == "GET" and r.sent and unquote(r.path).endswith(path)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


def _handler(hub: HubServer, is_storage: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            self.note = Request(
                self.command, path, self.headers["Range"], self.headers["Authorization"], bool(is_storage)
            )
            hub.requests.append(self.note)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._list(match[1], unquote(match[2] or "main"))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(match[1], unquote(match[2]), unquote(match[3]))
            else:
                self._send(404, b"{}")

        def _repo(self, repo_id: str, *, for_listing: bool) -> Repo | None:
            repo = hub.repos.get(repo_id)
            has_token = self.headers["Authorization"] == f"Bearer {hub.TOKEN}"
            if repo is None or (repo.access == "private" and not has_token):
                self._send(404 if has_token else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
                return None
            if repo.access == "gated" and not has_token and not for_listing:
                self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
                return None
            return repo

        def _commit(self, repo: Repo, revision: str) -> str | None:
            commit = {"main": repo.commit, repo.commit: repo.commit, **repo.revisions}.get(revision)
            if commit is None:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return commit

        def _list(self, repo_id: str, revision: str) -> None:
            repo = self._repo(repo_id, for_listing=True)
            if repo is None or (commit := self._commit(repo, revision)) is None:
                return
            siblings = [repo.sibling(path) for path in sorted(repo.files)]
            answer = {"id": repo_id, "sha": commit, "private": False, "siblings": siblings}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _resolve(self, repo_id: str, revision: str, path: str) -> None:
            repo = hub.repos[repo_id] if is_storage else self._repo(repo_id, for_listing=False)
            if repo is None or (commit := self._commit(repo, revision)) is None:
                return
            if path not in repo.files:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{repo.etag(path)}"', "X-Repo-Commit": commit}
            if path in repo.plain or is_storage:
                self._send_file(path, repo.files[path], headers)
            else:
                headers |= {
                    "X-Linked-Size": str(len(repo.files[path])),
                    "X-Linked-Etag": headers["ETag"],
                    "Location": f"{hub.storage_url}/{repo_id}/resolve/{commit}/{quote(path)}",
                }
                self._send(302, b"", headers)

        def _send_file(self, path: str, data: bytes, headers: dict[str, str]) -> None:
            if hub.failures:
                self._send(hub.failures.pop(0), b"busy")
                return
            if path in hub.corrupt:
                data = bytes([data[0] ^ 1]) + data[1:]
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.note.range or "")
            if match is None or not hub.has_ranges:
                self._send(200, data, headers)
                return
            begin = int(match[1])
            end = min(int(match[2]) + 1 if match[2] else len(data), len(data))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            self._send(206, data[begin:end], headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            is_file = status in (200, 206) and "/resolve/" in self.note.path
            if is_file and hub.cut_after and hub.cut_after[0] < len(body):
                body = body[: hub.cut_after.pop(0)]
                self.close_connection = True
            self.note.sent = len(body) if is_file else 0
            self.wfile.write(body)
            self.wfile.flush()

    return Handler


@contextmanager
def hub_on_loopback(repos: dict[str, Repo], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server of `repos` that huggingface_hub takes for the hub, with an empty cache in the folder `cache`."""
    from huggingface_hub import close_session, constants

    with HubServer(repos) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        close_session()
        yield hub
        close_session()


def main() -> None:
    """Serve folders: `python -m tests.support.servers.hub_server org/name=FOLDER ...`; prints HF_ENDPOINT."""
    import sys

    repos = {}
    for argument in sys.argv[1:]:
        repo_id, _, folder = argument.partition("=")
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        repos[repo_id] = Repo({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})
    with HubServer(repos) as hub:
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
