"""Routes of LMI's and SageMaker's APIs."""

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import LmiDialect
from gateway.exchange import Endpoint, Exchange
from gateway.lmi.invocations import invocations
from gateway.lmi.sagemaker import SageMakerDialect, invoke, invoke_stream

_INVOKE = Endpoint(LmiDialect(), invocations, generates=True)
_SAGEMAKER = SageMakerDialect()


async def _options(exchange: Exchange) -> Response:
    return JSONResponse({})


def routes() -> list[Route]:
    """LMI's routes; /ping is in probes.py."""
    return [
        Route("/invocations", _INVOKE, methods=["POST"]),
        Route("/invocations", Endpoint(LmiDialect(), _options), methods=["OPTIONS"]),
        Route("/predictions/{model}", _INVOKE, methods=["POST"]),
        Route("/predictions/{model}/{version}", _INVOKE, methods=["POST"]),
        Route("/models/{model}/invoke", _INVOKE, methods=["POST"]),
        Route("/endpoints/{model}/invocations", Endpoint(_SAGEMAKER, invoke, generates=True), methods=["POST"]),
        Route(
            "/endpoints/{model}/invocations-response-stream",
            Endpoint(_SAGEMAKER, invoke_stream, generates=True),
            methods=["POST"],
        ),
    ]
