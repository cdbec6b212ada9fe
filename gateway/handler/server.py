"""Loads a user's model.py, and calls its handler for each request. Statuses and bodies of failures are LMI's:

    None ─▶ 204    Output ─▶ its code    another type, an exception ─▶ 424    out of memory ─▶ 507
Functions run one call at a time, on one thread, as under LMI; coroutines and asynchronous generators run concurrently.
If a client disconnects, its call is cancelled, unless it is a function that already runs.
"""

import ast
import asyncio
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.handler.djl_python import FORMATTER_MARK, Function, Input, Output, install_djl_python
from gateway.server import cancel_on_disconnect
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

STREAM_MARK = "x-tandem-stream"
_FAILURE = "invoke handler failure"
_CLIENT_GONE = 499
_EXHAUSTED = object()
_LMIS_MODELS = ("init_handler", "prediction_handler")


@dataclass(frozen=True, slots=True)
class UserCode:
    """The functions of model.py: `handle`, or formatters around the built-in answer."""

    handle: Function | None
    input_formatter: Function | None
    output_formatter: Function | None

    @property
    def parts(self) -> list[str]:
        """Names of the functions that model.py has."""
        return [name for name in ("handle", "input_formatter", "output_formatter") if getattr(self, name) is not None]


def load_user_code(path: Path, function_name: str) -> UserCode:
    """Import the file. Raises ConfigurationError if it has no function to call, or whatever the file raises."""
    install_djl_python()
    spec = importlib.util.spec_from_file_location("model", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"the handler {path} does not exist")
    _refuse_handlers_of_lmis_models(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    marked = {
        getattr(value, FORMATTER_MARK): value for value in vars(module).values() if hasattr(value, FORMATTER_MARK)
    }
    handle = getattr(module, function_name, None)
    code = UserCode(handle, marked.get("input_formatter"), marked.get("output_formatter"))
    if not code.parts:
        raise ConfigurationError(f"{path} has no function {function_name}, and no formatter")
    return code


def _refuse_handlers_of_lmis_models(path: Path) -> None:
    """Refuse LMI's decorators by name, before the file runs: the modules that they come from vary."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            name = ast.unparse(decorator).rpartition(".")[2]
            if name in _LMIS_MODELS:
                raise ConfigurationError(
                    f"{path}: @{name} is for models that LMI loads itself, such as scikit-learn's: write a handle"
                )


class HandlerServer:
    """Answers HTTP requests with one user's code."""

    def __init__(self, code: UserCode, properties: Mapping[str, str]) -> None:
        self._code = code
        self._properties = dict(properties)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="handler")

    async def load(self) -> None:
        """Make the first call, with an empty Input. Raises whatever the handler raises."""
        if self._code.handle is not None:
            await self._call(self._code.handle, Input(self._properties))

    def app(self) -> Starlette:
        formatters = [
            Route(f"/{name}", _endpoint(self._formatter(name)), methods=["POST"])
            for name in ("input_formatter", "output_formatter")
        ]
        return Starlette(routes=[Route("/handle", _endpoint(self._handle), methods=["POST"]), *formatters])

    async def _handle(self, request: Request) -> Response:
        assert self._code.handle is not None
        inputs = Input(self._properties_of(request), await request.body())
        result = await self._call(self._code.handle, inputs)
        if isinstance(result, AsyncIterable):
            return await self._respond_parts(aiter(result))
        return self._respond(result)

    def _properties_of(self, request: Request) -> dict[str, str]:
        """Return the properties of a request. Headers and query cannot override the operator's properties."""
        request_properties = dict(request.headers) | dict(request.query_params)
        operator_keys = {key.lower() for key in self._properties}
        return {
            key: value for key, value in request_properties.items() if key.lower() not in operator_keys
        } | self._properties

    def _formatter(self, name: str) -> "_RequestHandler":
        async def answer(request: Request) -> Response:
            function = getattr(self._code, name)
            arguments = (None,) if name == "input_formatter" else ()  # a tokenizer, in LMI
            return JSONResponse(await self._call(function, await request.json(), *arguments))

        return answer

    async def _call(self, function: Function, *arguments: object) -> object:
        """Return the function's result; for an asynchronous generator, the generator."""
        if inspect.isasyncgenfunction(function):
            return function(*arguments)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._pool, _called, function, *arguments)

    def _respond(self, result: object) -> Response:
        if result is None:
            return Response(status_code=204)
        if not isinstance(result, Output):
            raise TypeError(f"handle returned {type(result).__name__}, not Output or None")
        ending = BackgroundTask(result.on_end) if result.on_end is not None else None
        if result.stream is None:
            return Response(result.body(), result.code, dict(result.properties), background=ending)
        headers = {**result.properties, STREAM_MARK: "1"}
        return StreamingResponse(self._stream(result), result.code, headers, background=ending)

    async def _respond_parts(self, parts: AsyncIterator[Output]) -> Response:
        """Respond with an asynchronous generator of Output, whose first one decides the status."""
        first = await anext(parts, None)
        if not isinstance(first, Output):
            return self._respond(first)

        async def bodies() -> AsyncIterator[bytes]:
            yield first.body()
            async for part in parts:
                yield part.body()

        return StreamingResponse(bodies(), first.code, {**first.properties, STREAM_MARK: "1"})

    async def _stream(self, output: Output) -> AsyncIterator[bytes]:
        assert output.stream is not None
        async for item in self._items(output.stream):
            line = output.stream_formatter(item)
            yield line.encode() if isinstance(line, str) else line

    async def _items(self, stream: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
        if isinstance(stream, AsyncIterable):
            async for item in stream:
                yield item
            return
        items, loop = iter(stream), asyncio.get_running_loop()
        while (item := await loop.run_in_executor(self._pool, next, items, _EXHAUSTED)) is not _EXHAUSTED:
            yield item


def _called(function: Function, *arguments: object) -> object:
    try:
        return function(*arguments)
    except StopIteration as error:  # no future can hold it, so that the call would never end
        raise RuntimeError(f"{function.__name__} raised StopIteration") from error


_RequestHandler = Callable[[Request], Coroutine[object, object, Response]]


def _endpoint(answer: _RequestHandler) -> _RequestHandler:
    """Wrap a handler so that its failures become responses."""

    async def endpoint(request: Request) -> Response:
        try:
            await request.body()
            return await cancel_on_disconnect(answer(request), request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)  # the client is gone: nothing is sent
        except Exception as error:
            return _error_response(error)

    return endpoint


def _error_response(error: Exception) -> Response:
    log.error("the custom handler failed", exc_info=error)
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    code = 507 if is_memory else 424
    text = str(error).encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be sent
    return JSONResponse({"code": code, "message": _FAILURE, "error": text or type(error).__name__}, code)
