"""A loopback HTTP server over a table of files: what the stand-ins for S3 and the Hugging Face hub have in common."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Self


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
