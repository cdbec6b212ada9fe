"""What AWS's SDKs call: /endpoints/NAME/invocations and .../invocations-response-stream.

SageMaker passes a container's answer on; its errors become a ModelError with the container's words inside. NAME is the
served model's.
"""

from collections.abc import AsyncIterator, Mapping

from starlette.responses import JSONResponse, Response, StreamingResponse

import tandem
from gateway.errors import Problem
from gateway.exchange import Exchange
from gateway.lmi import errors as lmi_errors
from gateway.lmi.eventstream import MEDIA_TYPE, model_stream_error, payload_part
from gateway.lmi.invocations import invocations
from gateway.streaming import Json, encode

_MODEL_ERROR = 424
_VARIANT = {"x-amzn-invoked-production-variant": "tandem"}
# Kinds that SageMaker itself answers, before a container is asked.
_OWN_ERRORS = {401: "UnrecognizedClientException", 403: "AccessDeniedException", 404: "ValidationError"}


class SageMakerDialect:
    """What boto3's sagemaker-runtime understands."""

    name = "sagemaker"

    def error_response(self, problem: Problem) -> Response:
        """The kind of error is in a header."""
        status = problem.row.lmi.status
        if status in _OWN_ERRORS:
            content: Json = {"Message": problem.message}
            return JSONResponse(content, 400 if status == 404 else status, {"x-amzn-errortype": _OWN_ERRORS[status]})
        original = encode(lmi_errors.error_body(problem)).decode()
        return _model_error(status, problem.message, original, problem.headers)


async def invoke(exchange: Exchange) -> Response:
    """The whole answer, also of a stream."""
    response = await invocations(exchange)
    if response.status_code >= 400:  # as a custom handler has it
        original = (await _content(response)).decode(errors="replace")
        return _model_error(response.status_code, original, original, {})
    response.headers.update(_VARIANT)
    return response


async def invoke_stream(exchange: Exchange) -> Response:
    """Whatever /invocations answers, in pieces of an event stream."""
    response = await invoke(exchange)
    if response.status_code >= 400:
        return response
    headers = {"x-amzn-sagemaker-content-type": response.headers.get("content-type", ""), **_VARIANT}
    if not isinstance(response, StreamingResponse):
        return Response(payload_part(bytes(response.body)), media_type=MEDIA_TYPE, headers=headers)
    response.body_iterator = _parts(response, exchange)
    response.headers["content-type"] = MEDIA_TYPE
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


def _parts(response: StreamingResponse, exchange: Exchange) -> AsyncIterator[bytes]:
    chunks = response.body_iterator

    async def framed() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield payload_part(_bytes(chunk))
        except tandem.TandemError as error:
            exchange.arrival.progress.failed(Problem.of(error))
        if exchange.arrival.progress.failure:
            said = {"Message": "the model failed while it answered", "ErrorCode": "ModelInvocationFailed"}
            yield model_stream_error(encode(said))

    return framed()


def _bytes(chunk: str | bytes | memoryview) -> bytes:
    return chunk.encode() if isinstance(chunk, str) else bytes(chunk)
