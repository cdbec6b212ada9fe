"""What AWS's SDKs call: /endpoints/NAME/invocations and .../invocations-response-stream.

SageMaker passes a container's answer on; its errors become a ModelError with the container's words inside. NAME is the
served model's.
"""

from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.errors import Problem
from gateway.exchange import Exchange
from gateway.lmi import errors as lmi_errors
from gateway.lmi.eventstream import MEDIA_TYPE, model_stream_error, payload_part
from gateway.lmi.invocations import invocations
from gateway.streaming import Json, encode

_MODEL_ERROR = 424
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
        content = {
            "Message": f"Received error ({status}) from the model: {problem.message}",
            "OriginalStatusCode": status,
            "OriginalMessage": original,
        }
        return JSONResponse(content, _MODEL_ERROR, {"x-amzn-errortype": "ModelError", **problem.headers})


async def invoke(exchange: Exchange) -> Response:
    """The whole answer, also of a stream."""
    response = await invocations(exchange)
    response.headers["x-amzn-invoked-production-variant"] = "tandem"
    return response


async def invoke_stream(exchange: Exchange) -> Response:
    """Whatever /invocations answers, in pieces of an event stream."""
    response = await invocations(exchange)
    inner_type = response.headers.get("content-type", "")
    headers = {"x-amzn-sagemaker-content-type": inner_type, "x-amzn-invoked-production-variant": "tandem"}
    if not isinstance(response, StreamingResponse):
        return Response(payload_part(bytes(response.body)), media_type=MEDIA_TYPE, headers=headers)
    response.body_iterator = _parts(response, exchange)
    response.headers["content-type"] = MEDIA_TYPE
    response.headers.update(headers)
    return response


def _parts(response: StreamingResponse, exchange: Exchange) -> AsyncIterator[bytes]:
    chunks = response.body_iterator

    async def framed() -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield payload_part(chunk.encode() if isinstance(chunk, str) else bytes(chunk))
        if exchange.arrival.progress.failure:
            error = {"Message": "the model failed while it answered", "ErrorCode": "ModelInvocationFailed"}
            yield model_stream_error(encode(error))

    return framed()
