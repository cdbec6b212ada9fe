"""Loopback HTTP servers over tables of files, which stand in for the Hugging Face hub and for S3."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import md5, sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FileServer(ThreadingHTTPServer):
    """Files by name. `reads` counts the GETs of each file's first byte, `ranges` all its GETs."""

    daemon_threads = True
    handler: ClassVar[type["FileHandler"]]

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), self.handler)
        self.files = dict(files)
        self.reads: Counter[str] = Counter()
        self.ranges: Counter[str] = Counter()
        self.cut_off: set[str] = set()
        """Files whose bodies end in the middle, with the connection."""
        self.stalled: set[str] = set()
        """Files whose bodies stop in the middle, and the connection stays."""
        self._is_over = threading.Event()

    def stall(self) -> None:
        """Wait until the server ends."""
        self._is_over.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @classmethod
    @contextmanager
    def serving(cls, files: Mapping[str, bytes]) -> Iterator[Self]:
        """Serve while the block runs."""
        server = cls(files)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server._is_over.set()
            server.shutdown()
            server.server_close()
            thread.join()


class FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def send_file(self, name: str, headers: Mapping[str, str]) -> None:
        """A file, or the range of it that is asked for."""
        body = self.server.files[name]
        first, last = self._range(len(body))
        self.send_response(206 if "range" in self.headers else 200)
        if "range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        for key, value in {"Content-Length": str(last + 1 - first), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.reads[name] += first == 0
        self.server.ranges[name] += 1
        if name in self.server.cut_off:
            self.wfile.write(body[first : (first + last) // 2])
            self.close_connection = True
            return
        if name in self.server.stalled:
            self.wfile.write(body[first : (first + last) // 2])
            self.server.stall()
            self.close_connection = True
            return
        self.wfile.write(body[first : last + 1])

    def send_text(self, status: int, body: str, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body.encode() if self.command != "HEAD" else b"")

    def _range(self, size: int) -> tuple[int, int]:
        first, _, last = self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), min(int(last), size - 1) if last else size - 1

    def log_message(self, *arguments: object) -> None:
        """Requests are not logged."""


class _HubHandler(FileHandler):
    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), *parts[4:])
        elif parts[2:3] == ["resolve"] and (name := "/".join((*parts[:2], *parts[4:]))) in self.server.files:
            body = self.server.files[name]
            self.send_file(name, {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": COMMIT})
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET

    def _describe(self, model: str, kind: str = "", revision: str = "", *rest: str) -> None:
        files = {
            name.removeprefix(f"{model}/"): body
            for name, body in self.server.files.items()
            if name.startswith(f"{model}/")
        }
        if not files:
            self._missing("RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._missing("RevisionNotFound")
        elif kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(body), "oid": _oid(body)} for path, body in files.items()
            ]
            self.send_text(200, json.dumps(entries), "application/json")
        else:
            siblings = [{"rfilename": path} for path in files]
            self.send_text(200, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}), "application/json")

    def _missing(self, code: str) -> None:
        self.send_text(404, "{}", "application/json", {"X-Error-Code": code, "X-Error-Message": "there is none"})


class HubServer(FileServer):
    handler = _HubHandler


def _oid(body: bytes) -> str:
    return sha1(body, usedforsecurity=False).hexdigest()


class _S3Handler(FileHandler):
    server: "S3Server"

    def do_GET(self) -> None:
        target = urlsplit(self.path)
        name = unquote(target.path).strip("/")
        query = parse_qs(target.query)
        if "list-type" in query:
            self._list(name, query.get("prefix", [""])[0])
        elif name in self.server.files:
            self.send_file(name, {"ETag": _etag(self.server.files[name])})
        else:
            self.send_text(404, "<Error><Code>NoSuchKey</Code></Error>", "application/xml")

    do_HEAD = do_GET

    def _list(self, bucket: str, prefix: str) -> None:
        if not any(name.startswith(f"{bucket}/") for name in self.server.files):
            error = "<Error><Code>NoSuchBucket</Code><Message>There is none</Message></Error>"
            self.send_text(404, error, "application/xml")
            return
        self.server.listings.append(prefix)
        keys = {name.removeprefix(f"{bucket}/"): body for name, body in sorted(self.server.files.items())}
        below = {key: body for key, body in keys.items() if key.startswith(prefix)}
        folders = {prefix + rest.partition("/")[0] + "/" for key in below if "/" in (rest := key.removeprefix(prefix))}
        entries = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size><ETag>{escape(_etag(body))}</ETag></Contents>"
            for key, body in [*below.items(), *((stray, b"") for stray in self.server.strays)]
            if "/" not in key.removeprefix(prefix) or key in self.server.strays
        ]
        entries += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        self.send_text(
            200,
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>",
            "application/xml",
        )


class S3Server(FileServer):
    """`listings` are the prefixes that were listed, `strays` keys that each listing has besides."""

    handler = _S3Handler

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self.listings: list[str] = []
        self.strays: list[str] = []


def _etag(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"'
