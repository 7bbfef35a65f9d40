"""Hugging Face's hub on this machine: repositories, large files elsewhere, and troubles on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

LARGE = 1 << 20  # bytes: what is larger lies where a redirection leads


@dataclass
class Repository:
    """Files by their names, all of one commit."""

    files: dict[str, bytes]
    commit: str = "c0ffee" * 6 + "c0ff"
    gated: bool = False
    token: str = ""  # that is asked for
    lies: list[dict[str, object]] | None = None  # what is said of the files instead of the truth

    def siblings(self) -> list[dict[str, object]]:
        return self.lies or [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": git_sha1(data),
                **(
                    {"lfs": {"size": len(data), "sha256": sha256(data), "pointerSize": 134}}
                    if large(data)
                    else {}
                ),
            }
            for name, data in self.files.items()
        ]


def large(data: bytes) -> bool:
    return len(data) >= LARGE


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """What is there, what shall go wrong, and what was asked."""

    url: str = ""
    elsewhere: str = ""  # the same by another name, to which no token may go
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: list[int] = field(
        default_factory=list
    )  # bytes behind which a large file breaks off, one after another
    status: int = 0  # of every answer, if not 0
    wrong: bool = False  # large files come with a byte that is another
    served: int = 0  # bytes of large files
    asked: list[str] = field(default_factory=list)
    tokens: set[tuple[str, str]] = field(default_factory=set)  # by the name that they were sent to
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub, as long as it is looked at."""
    hub = Hub()

    class Answers(_Answers):
        pass

    Answers.hub = hub
    server = _Server(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.elsewhere = hub.url.replace("127.0.0.1", "localhost")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of tests may be killed."""


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub.lock:
            hub.asked.append(f"{self.command} {path}")
            if self.headers.get("authorization"):
                hub.tokens.add((self.headers["host"].partition(":")[0], self.headers["authorization"]))
        if hub.status:
            self._send(hub.status, b"{}", {"X-Error-Message": "trouble"})
        elif path.startswith("/cdn/"):
            self._large(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        else:
            self._resolve(path)

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found.token and self.headers.get("authorization") != f"Bearer {found.token}":
            code = "GatedRepo" if found.gated else "RepoNotFound"
            self._send(403 if found.gated else 401, b"{}", {"X-Error-Code": code})
        else:
            return found
        return None

    def _info(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        if repository := self._repository(name):
            if revision not in ("", "main", repository.commit):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            info = {"id": name, "modelId": name, "sha": repository.commit, "siblings": repository.siblings()}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str) -> None:
        name, _, rest = path[1:].partition("/resolve/")
        _, _, file = rest.partition("/")
        repository = self._repository(name)
        if repository is None:
            return
        data = repository.files.get(file)
        head = {"X-Repo-Commit": repository.commit}
        if data is None:
            self._send(404, b"{}", head | {"X-Error-Code": "EntryNotFound"})
        elif large(data):
            head |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"'}
            self._send(302, b"", head | {"Location": f"{self.hub.elsewhere}/cdn/{name}/{quote(file)}"})
        else:
            self._send(200, data, head | {"ETag": f'"{git_sha1(data)}"'})

    def _large(self, path: str) -> None:
        name = "/".join(path.split("/")[:2])
        data = self.hub.repositories[name].files[path[len(name) + 1 :]]
        if self.hub.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        part = data[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{sha256(data)}"')
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.hub.lock:
            cut = self.hub.cuts.pop(0) if self.hub.cuts else len(part)
            self.hub.served += min(cut, len(part))
        self.wfile.write(part[:cut])
        self.wfile.flush()
        if cut < len(part):
            self.close_connection = True
            self.connection.close()

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
