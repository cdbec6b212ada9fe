"""The two files of a batch: requests and answers, one JSON object a line, as in OpenAI's batch API.

    in:   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out:  {"id": ..., "custom_id": "a", "error": null, "response": {"status_code": 200, ..., "body": {...}}}
Answers are in the order of their ends. A line is written at once, so a run that is interrupted can go on.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from uuid import uuid4

from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_LOWEST_PRIORITY = "batch"
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that JSON has in texts, and at which Python's `splitlines` cuts a file of answers."""


class BatchRefused(Exception):
    """A batch cannot be answered, for a reason that its caller can repair."""


class BadLine(BatchRefused):
    """A line of the input is no request. `line` counts from 1, `reason` says what is wrong with it."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input. `content` is the body as it is sent, with a priority."""

    custom_id: str
    url: str
    content: bytes


def read_requests(path: Path, done: Collection[str] = (), *, keeps_priority: bool = True) -> Iterator[BatchRequest]:
    """Yield the requests whose ids are not `done`. Raises BadLine, or ConfigurationError if the file cannot be read.

    The priority is the lowest, unless the line sets another one and `keeps_priority` holds.
    """
    for _, request in _numbered(path, keeps_priority=keeps_priority):
        if request.custom_id not in done:
            yield request


def _numbered(
    path: Path, max_line_bytes: int | None = None, *, keeps_priority: bool = True
) -> Iterator[tuple[int, BatchRequest]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if max_line_bytes is not None and len(line) > max_line_bytes:
                raise BadLine(path, number, f"longer than {max_line_bytes:,} bytes")
            try:
                yield number, _parse(line, keeps_priority)
            except ValueError as error:
                raise BadLine(path, number, str(error)) from None


def check_requests(
    path: Path, *, url: str | None = None, max_requests: int | None = None, max_line_bytes: int | None = None
) -> set[str]:
    """Read the whole input before anything is sent. Return its ids.

    Raises BadLine, also for an id that is there twice, for another route than `url`, and beyond the limits.
    """
    ids: set[str] = set()
    for line, request in _numbered(path, max_line_bytes):
        if request.custom_id in ids:
            raise BadLine(path, line, f"custom_id {request.custom_id[:64]!r} is there twice")
        if url is not None and request.url != url:
            raise BadLine(path, line, f"url must be the batch's endpoint, {url}")
        if max_requests is not None and len(ids) == max_requests:
            raise BadLine(path, line, f"a batch may have {max_requests:,} requests at most")
        ids.add(request.custom_id)
    if not ids:
        raise BadLine(path, 1, "there are no requests")
    return ids


def _parse(line: bytes, keeps_priority: bool) -> BatchRequest:
    """Parse a line of the input. Raises ValueError."""
    try:
        members = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(members, dict):
        raise ValueError("not a JSON object")
    custom_id, url, body = members.get("custom_id"), members.get("url"), members.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text")
    if members.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("a batch cannot stream: remove stream from the body")
    priority = body.get("priority") if keeps_priority else None
    priority = _LOWEST_PRIORITY if priority is None else priority
    return BatchRequest(custom_id, url, _sendable(custom_id, body | {"priority": priority}))


def _sendable(custom_id: str, body: dict[str, Any]) -> bytes:
    """Encode the body. Raises ValueError: Python reads halves of surrogate pairs, and numbers that JSON cannot have."""
    try:
        custom_id.encode()
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be sent as JSON: {error}") from None


class AnswerFile:
    """The output, open for appending. A last line that was cut off is removed.

    `done` has the ids that it holds, `refused` those of them whose answers are errors.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError if another run has the file open, or it is no output of a batch."""
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.done: set[str] = set()
            self.refused: set[str] = set()
            num_bytes = self._read(path)
        except BlockingIOError:
            self._file.close()
            raise ConfigurationError(f"{path}: another run is writing to it") from None
        except ConfigurationError:
            self._file.close()
            raise
        os.ftruncate(self._file.fileno(), num_bytes)

    def _read(self, path: Path) -> int:
        """Note the ids of all whole lines; return the bytes of these lines."""
        num_bytes = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
                self._note(answer["custom_id"], answer["response"]["status_code"])
            except (ValueError, TypeError, KeyError):
                raise ConfigurationError(f"{path}:{number}: not an answer of a batch") from None
            num_bytes += len(line)
        return num_bytes

    def _note(self, custom_id: str, status: int) -> None:
        self.done.add(custom_id)
        if status >= 400:
            self.refused.add(custom_id)

    def write(self, custom_id: str, status: int, request_id: str, body: object) -> int:
        """Append an answer; return its bytes. Raises OSError."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
        text = json.dumps(answer, ensure_ascii=False).translate(_LINE_ENDS)
        line = text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair: \udXXX
        self._append(line)
        self._note(custom_id, status)
        return len(line)

    def _append(self, line: bytes) -> None:
        """Raises OSError, as on a full disk, and leaves no part of the line: clients read the file as it is."""
        fd = self._file.fileno()
        num_bytes, left = os.fstat(fd).st_size, memoryview(line)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            os.ftruncate(fd, num_bytes)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
