"""/v1/files and /v1/batches, as OpenAI's clients use them. Without a `batch_folder` both are refused."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse, JSONResponse, Response

from gateway.access import key_in
from gateway.batches.files import URLS
from gateway.batches.runner import Batches
from gateway.batches.store import CallerStore
from gateway.errors import InvalidField
from gateway.exchange import Exchange
from gateway.schema import Body, Json, Name
from tandem import InvalidRequest

_CHUNK_BYTES = 64 << 10
# As many as OpenAI shows at a time. A page has all files of a caller, so clients may delete them as they list them.
_MAX_BATCHES_A_PAGE = 100
_MAX_FILES_A_PAGE = 10_000

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class BatchBody(Body):
    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


async def upload_file(exchange: Exchange) -> Response:
    """Keep the input of a batch. Its lines are checked when a batch reads them."""
    store = _store(exchange)
    content_type = exchange.request.headers.get("content-type", "")
    if not content_type.startswith("multipart/form-data"):
        raise InvalidRequest("send the file as multipart/form-data, with a purpose")
    try:
        headers = _without_charset(content_type)
        form = await MultiPartParser(headers, _in_chunks(exchange.body), max_files=1, max_fields=8).parse()
    except KeyError:
        raise InvalidRequest("the header content-type has no boundary: let the client's library write it") from None
    except MultiPartException as error:
        raise InvalidRequest(f"the body is no form with a file: {error}") from None
    try:
        if form.get("purpose") != "batch":
            raise InvalidField("purpose must be 'batch': files serve batches only here", field="purpose")
        file = form.get("file")
        if file is None or isinstance(file, str):
            raise InvalidField("there is no file", field="file")
        content = await file.read()
    finally:
        await form.close()
    return JSONResponse(await asyncio.to_thread(store.add_file, file.filename or "input.jsonl", content))


def _without_charset(content_type: str) -> Headers:
    """Headers with the boundary only. A client must not choose the codec: some are slow, or decode to text that cannot
    be stored. Raises KeyError without a boundary.
    """
    boundary = parse_options_header(content_type)[1][b"boundary"]
    return Headers(raw=[(b"content-type", b'multipart/form-data; boundary="%b"' % boundary)])


async def list_files(exchange: Exchange) -> Response:
    query = exchange.request.query_params
    purpose, order = query.get("purpose"), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order must be 'asc' or 'desc'", field="order")
    files = await asyncio.to_thread(_store(exchange).files)
    shown = [file for file in files if purpose in (None, file["purpose"])]
    shown = shown if order == "desc" else shown[::-1]
    return _page(exchange, shown, default=_MAX_FILES_A_PAGE, most=_MAX_FILES_A_PAGE)


async def get_file(exchange: Exchange) -> Response:
    return JSONResponse(_store(exchange).file(_id(exchange)))


async def file_content(exchange: Exchange) -> Response:
    store, file_id = _store(exchange), _id(exchange)
    store.file(file_id)
    return FileResponse(store.path_of(file_id), media_type="application/octet-stream")


async def delete_file(exchange: Exchange) -> Response:
    file_id = _id(exchange)
    await asyncio.to_thread(_store(exchange).delete_file, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def create_batch(exchange: Exchange) -> Response:
    """Begin the batch. Faults of its file appear in `errors` of the batch, soon after."""
    body = await exchange.parse(BatchBody)
    if body.endpoint not in URLS:
        raise InvalidField(f"endpoint must be one of {', '.join(URLS)}", field="endpoint")
    store = _store(exchange)
    store.file(body.input_file_id)
    app, key = exchange.request.app, key_in(exchange.request.headers)
    batch = await _batches(exchange).create(store, app, key, body.endpoint, body.input_file_id, body.metadata or {})
    return JSONResponse(_shown(batch))


async def list_batches(exchange: Exchange) -> Response:
    store, batches = await _resumed(exchange)
    shown = [_shown(batches.state(batch)) for batch in await asyncio.to_thread(store.batches)]
    return _page(exchange, shown, default=20, most=_MAX_BATCHES_A_PAGE)


async def get_batch(exchange: Exchange) -> Response:
    store, batches = await _resumed(exchange)
    return JSONResponse(_shown(batches.state(store.batch(_id(exchange)))))


async def cancel_batch(exchange: Exchange) -> Response:
    store, batches = await _resumed(exchange)
    return JSONResponse(_shown(batches.cancel(store, _id(exchange))))


def _batches(exchange: Exchange) -> Batches:
    batches = exchange.backend.batches
    if batches is None:
        message = "this gateway keeps no files and batches: start it with --batch-folder FOLDER, or use tandem batch"
        raise InvalidField(message, code="unsupported")
    return batches


def _store(exchange: Exchange) -> CallerStore:
    return _batches(exchange).store.of(key_in(exchange.request.headers))


async def _resumed(exchange: Exchange) -> tuple[CallerStore, Batches]:
    """Return the caller's store. Resumes batches that an earlier process left: this call brings the key they need."""
    batches, store = _batches(exchange), _store(exchange)
    await batches.resume(store, exchange.request.app, key_in(exchange.request.headers))
    return store, batches


def _id(exchange: Exchange) -> str:
    stored_id: str = exchange.request.path_params["id"]
    return stored_id


def _shown(batch: Json) -> Json:
    return {name: value for name, value in batch.items() if not name.startswith("_")}


def _page(exchange: Exchange, items: Sequence[Json], *, default: int, most: int) -> Response:
    """The items behind `after`, as pages of OpenAI's clients: `limit` of them, `default` without one."""
    query = exchange.request.query_params
    limit = query.get("limit", str(default))
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", limit):
        raise InvalidField("limit must be a number above 0", field="limit")
    start = 0
    if after := query.get("after"):
        start = next((number + 1 for number, item in enumerate(items) if item["id"] == after), len(items))
    page = items[start : start + min(int(limit), most)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, "has_more": start + len(page) < len(items)} | ends)


async def _in_chunks(body: bytes) -> AsyncGenerator[bytes, None]:
    """Parsing a form takes the event loop's time, so it takes it in small pieces."""
    for at in range(0, len(body), _CHUNK_BYTES):
        yield body[at : at + _CHUNK_BYTES]
        await asyncio.sleep(0)
    yield b""
