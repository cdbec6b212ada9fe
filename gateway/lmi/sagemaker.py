"""SageMaker's runtime API, as AWS SDKs call it: /endpoints/NAME/invocations and .../invocations-response-stream.

Like SageMaker, it forwards the answer of /invocations and wraps errors in a ModelError. NAME is the served model.
"""

import struct
import zlib
from collections.abc import AsyncIterator, Mapping

from starlette.responses import JSONResponse, Response, StreamingResponse

import tandem
from gateway.answers import encode
from gateway.errors import Dialect, Problem, lmi_error_body
from gateway.exchange import Exchange
from gateway.schema import Json

EVENT_STREAM = "application/vnd.amazon.eventstream"
_MODEL_ERROR = 424
_VARIANT = {"x-amzn-invoked-production-variant": "tandem"}
# Types that clients read line by line: without a newline after the last line they would wait for ever.
_TEXTS = ("application/json", "application/jsonlines", "text/plain")
# The end of a line or an event, by media type. Clients such as litellm expect one of them in each part.
_ENDS = {"application/jsonlines": b"\n", "text/event-stream": b"\n\n"}
# Errors that SageMaker itself returns, before it calls a container.
_OWN_ERRORS = {401: "UnrecognizedClientException", 403: "AccessDeniedException", 404: "ValidationError"}

_PRELUDE = struct.Struct(">II")
_CRC = struct.Struct(">I")
_VALUE_LENGTH = struct.Struct(">H")
_STRING = b"\x07"
_OVERHEAD_BYTES = _PRELUDE.size + 2 * _CRC.size


def _error_response(problem: Problem) -> Response:
    """Errors as boto3's sagemaker-runtime reads them: the error type is in a header."""
    status = problem.row.lmi.status
    if status in _OWN_ERRORS:
        content: Json = {"Message": problem.message}
        return JSONResponse(content, 400 if status == 404 else status, {"x-amzn-errortype": _OWN_ERRORS[status]})
    original = encode(lmi_error_body(problem)).decode()
    return _model_error(status, problem.message, original, problem.headers)


SAGEMAKER = Dialect("sagemaker", _error_response)


async def forward(response: Response) -> Response:
    """Return the answer of /invocations as InvokeEndpoint does, a stream included."""
    if response.status_code >= 400:  # from a custom handler
        original = (await _content(response)).decode(errors="replace")
        return _model_error(response.status_code, original, original, {})
    response.headers.update(_VARIANT)
    return response


async def forward_as_event_stream(response: Response, exchange: Exchange) -> Response:
    """Return the answer of /invocations as InvokeEndpointWithResponseStream does: messages of an event stream."""
    response = await forward(response)
    if response.status_code >= 400:
        return response
    content_type = response.headers.get("content-type", "")
    media_type = content_type.partition(";")[0]
    headers = {"x-amzn-sagemaker-content-type": content_type, **_VARIANT}
    ending = b"\n" if media_type in _TEXTS else b""
    if not isinstance(response, StreamingResponse):
        content = bytes(response.body)
        content += b"" if content.endswith(ending) else ending
        return Response(payload_part(content), media_type=EVENT_STREAM, headers=headers)
    response.body_iterator = _parts(response, exchange, ending, _ENDS.get(media_type))
    response.headers["content-type"] = EVENT_STREAM
    response.headers.update(headers)
    return response


def _model_error(status: int, message: str, original: str, headers: Mapping[str, str]) -> Response:
    content = {
        "Message": f"Received error ({status}) from the model: {message}",
        "OriginalStatusCode": status,
        "OriginalMessage": original,
    }
    return JSONResponse(content, _MODEL_ERROR, {"x-amzn-errortype": "ModelError", **headers})


async def _content(response: Response) -> bytes:
    if not isinstance(response, StreamingResponse):
        return bytes(response.body)
    return b"".join([_bytes(chunk) async for chunk in response.body_iterator])


def _parts(response: StreamingResponse, exchange: Exchange, ending: bytes, end: bytes | None) -> AsyncIterator[bytes]:
    """Wrap each chunk in a message or, if an `end` of lines is given, each line of it. `ending`: the bytes with which
    the last chunk must end.
    """
    chunks = response.body_iterator

    async def framed() -> AsyncIterator[bytes]:
        last = ending
        try:
            async for chunk in chunks:
                last = _bytes(chunk) or last
                yield b"".join(map(payload_part, _lines(_bytes(chunk), end)))
            if not last.endswith(ending):
                yield payload_part(ending)
        except tandem.TandemError as error:
            exchange.progress.failed(Problem.of(error))
        if exchange.progress.failure:
            body = {"Message": "the model failed while it answered", "ErrorCode": "ModelInvocationFailed"}
            yield model_stream_error(encode(body))

    return framed()


def _lines(chunk: bytes, end: bytes | None) -> list[bytes]:
    if end is None:
        return [chunk]
    *lines, rest = chunk.split(end)
    return [*(line + end for line in lines), *([rest] if rest else [])]


def _bytes(chunk: str | bytes | memoryview) -> bytes:
    return chunk.encode() if isinstance(chunk, str) else bytes(chunk)


def payload_part(content: bytes) -> bytes:
    """Encode a part of the container's answer as one message of AWS's binary event stream.

    A message is: total length, length of the headers (both u32), CRC-32 of these eight bytes, headers, payload, CRC-32
    of all before it. A header is: length of its name (u8), name, 7 for "string", length of its value (u16), value.
    """
    return _message(
        {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}, content
    )


def model_stream_error(content: bytes) -> bytes:
    """Encode the exception message that ends a failed stream. SDKs raise it."""
    return _message(
        {":message-type": "exception", ":exception-type": "ModelStreamError", ":content-type": "application/json"},
        content,
    )


def _message(headers: dict[str, str], payload: bytes) -> bytes:
    block = b"".join(_header(name, value) for name, value in headers.items())
    prelude = _PRELUDE.pack(_OVERHEAD_BYTES + len(block) + len(payload), len(block))
    body = prelude + _CRC.pack(zlib.crc32(prelude)) + block + payload
    return body + _CRC.pack(zlib.crc32(body))


def _header(name: str, value: str) -> bytes:
    name_bytes, value_bytes = name.encode(), value.encode()
    return bytes([len(name_bytes)]) + name_bytes + _STRING + _VALUE_LENGTH.pack(len(value_bytes)) + value_bytes
