"""A model.py of the user's: called as LMI calls it, answered as LMI answers, and no harm done by a bad one."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from gateway.handler import process as handler_process
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from tests.captured_log import InstallLog, install_log
from tests.defects import Repaired
from tests.e2e.mesh_process import is_alive
from tests.processes import running_process
from tests.service.gateway.http import RunningGateway, running_gateway
from tests.waiting import until
from tests.warm import forks

__all__ = ["forks", "install_log"]

SYNC = """
import gzip
import os
import subprocess
import time
import numpy as np
from djl_python import Input, Output

loaded = []

def handle(inputs: Input):
    if inputs.is_empty():
        loaded.append(inputs.get_properties())
        return None
    assert inputs.get_batch_size() == 1 and inputs.get_batches()[0] is inputs
    asked = inputs.get_as_json()
    kind = asked["kind"]
    if kind == "echo":
        answer = {
            "loaded": len(loaded), "dir": os.path.basename(loaded[0]["model_dir"]),
            "text": inputs.get_as_string("kind"), "secrets": [name for name in os.environ if "MESH_KEY" in name],
            "header": inputs.get_property("X-Mine"), "model": inputs.get_property("model_name"),
        }
        return Output(code=201).add_as_json(answer).add_property("X-Answer", "yes")
    if kind == "stream":
        return Output().add_stream_content(str(i) for i in range(3))
    if kind == "formatted":
        return Output().add_stream_content(iter([1, 2]), output_formatter=lambda item: f"<{item}>")
    if kind == "arrays":
        first = inputs.get_as_json("values")
        file = Output().add_as_npz([np.array(first), np.ones(2)]).content[0][1]
        arrays = Input({}, file).get_as_npz() + [Input({}, Output().add_as_numpy(np.zeros(1)).body()).get_as_numpy()]
        return Output().add_as_json([array.tolist() for array in arrays])
    if kind == "error":
        return Output().error("no such thing")
    if kind == "type":
        return "a text"
    if kind == "raise":
        raise ValueError("bad input")
    if kind == "next":
        return next(iter([]))
    if kind == "half":
        raise ValueError("\\ud800")
    if kind == "memory":
        raise MemoryError
    if kind == "child":
        child = subprocess.Popen(["sleep", "120"])
        return Output().add_as_json(child.pid)
    if kind == "die":
        os._exit(9)
    if kind == "hang":
        while True:
            pass
    if kind == "slow stream":
        return Output().add_stream_content(slow())
    if kind == "encoded":
        output = Output().add(gzip.compress(b"x")).add_property("content-encoding", "gzip")
        return output.add_property("set-cookie", "a=b")
    if kind == "own":
        return Output().add_as_json({name: inputs.get_property(name) for name in ("router", "cookie", "x-mine")})
    if kind == "wait":
        called.append(1)
        time.sleep(0.5)
        return Output().add_as_json(len(called))
    if kind == "broken stream":
        return Output().add_stream_content(broken())

called = []

def slow():
    yield 1
    while True:
        time.sleep(1)

def broken():
    yield 1
    raise ValueError("no more")
"""

ASYNC = """
import asyncio
from djl_python import Output
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output

async def handle(inputs):
    if inputs.is_empty():
        return None
    asked = inputs.get_as_json()
    if asked.get("wait"):
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
    if asked.get("cancelled"):
        await cancelled.wait()
    if asked.get("waiting"):
        await waiting.wait()
    if asked["stream"]:
        return parts()
    return create_non_stream_output({"text": "whole"})

waiting, cancelled = asyncio.Event(), asyncio.Event()

async def parts():
    yield create_stream_chunk_output("one ")
    yield create_stream_chunk_output("two", last_chunk=True)
"""

FORMATTERS = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def before(payload, tokenizer, **kwargs):
    return {"inputs": payload["question"], "parameters": {"max_new_tokens": 3}}

@output_formatter
def after(answer):
    return {"answer": answer["generated_text"]}
"""

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "http" / "handler" / "model.py"
Make = Callable[..., AbstractAsyncContextManager[RunningGateway]]


@pytest.fixture
def with_handler(tmp_path: Path) -> Make:
    @asynccontextmanager
    async def make(source: str, **settings: object) -> AsyncIterator[RunningGateway]:
        file = tmp_path / "model.py"
        file.write_text(source)
        async with running_gateway(handler=str(file), **settings) as gateway:
            assert gateway.backend.handler is not None
            async with gateway.backend.handler.running():
                yield gateway

    return make


async def until_back(gateway: RunningGateway) -> None:
    """Return when the handler answers again."""
    handler = gateway.backend.handler
    assert handler is not None
    async with asyncio.timeout(60):
        while (await gateway.post("/invocations", {"kind": "none"})).status_code != 204:
            await handler.ready.wait()


async def test_answers_and_failures_are_those_of_lmi(
    with_handler: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_MESH_KEY", "secret")
    async with with_handler(SYNC) as gateway:
        echo = await gateway.post("/predictions/some", {"kind": "echo"}, **{"X-Mine": "1"})
        assert (echo.status_code, echo.headers["x-answer"]) == (201, "yes")
        assert echo.json() == {"loaded": 1, "dir": tmp_path.name, "text": "echo", "secrets": []} | {
            "header": "1",
            "model": "some",
        }
        lines = await gateway.lines("/invocations", {"kind": "stream"})
        assert [json.loads(line) for line in lines] == [{"outputs": str(i)} for i in range(3)]
        arrays = await gateway.post("/invocations", {"kind": "arrays", "values": [1, 2]})
        assert arrays.json() == [[1, 2], [1.0, 1.0], [0.0]]
        assert (await gateway.post("/invocations", {"kind": "formatted"})).text == "<1><2>"
        assert (await gateway.post("/invocations", {"kind": "none"})).status_code == 204
        for kind, code, error in (
            ("error", 424, "no such thing"),
            ("type", 424, "handle returned str, not Output or None"),
            ("raise", 424, "bad input"),
            ("memory", 507, "MemoryError"),
            ("next", 424, "handle raised StopIteration"),
            ("half", 424, "\\ud800"),
        ):
            failed = await gateway.post("/invocations", {"kind": kind})
            assert failed.status_code == code
            assert failed.json() == {"code": code, "message": "invoke handler failure", "error": error}
        assert (await gateway.post("/v1/completions", {"prompt": "x"})).status_code == 200, "other routes are built in"


async def test_the_operators_properties_reach_the_handler(with_handler: Make) -> None:
    source = """
from djl_python import Output

loaded = {}

def handle(inputs):
    if inputs.is_empty():
        loaded.update(inputs.get_properties())
        return None
    return Output().add_as_json({"loaded": loaded["my_key"], "asked": inputs.get_property("MY_KEY"),
                                 "dir": loaded["model_dir"] == inputs.get_property("model_dir") != "/"})
"""
    given = json.dumps({"my_key": "1", "model_dir": "/"})
    async with with_handler(source, handler_properties=given) as gateway:
        answer = await gateway.post("/invocations?my_key=evil", {}, my_key="evil")
        assert answer.json() == {"loaded": "1", "asked": "1", "dir": True}


@pytest.mark.parametrize("given", ["{", "[]", '{"a": 1}'])
def test_properties_are_strings(given: str) -> None:
    with pytest.raises(ConfigurationError, match="JSON object of strings"):
        GatewaySettings(handler_properties=given)


def test_a_file_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for handler in (tmp_path / "model.py", tmp_path):
        with pytest.raises(ConfigurationError, match=f"handler must be a file with Python code, and {handler} is none"):
            GatewaySettings(handler=str(handler))


async def test_requirements_are_not_installed(
    with_handler: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requirements.txt").write_text("nothing")
    async with with_handler(SYNC):
        pass
    assert "requirements of the custom handler are not installed" in "".join(capfd.readouterr())


@pytest.mark.parametrize("decorator", ["init_handler", "prediction_handler"])
async def test_handlers_for_models_that_lmi_loads_are_refused(
    with_handler: Make, decorator: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = f"from djl_python.anywhere import {decorator}\n\n@{decorator}\ndef mine(*given):\n    return None\n"
    with pytest.raises(ConfigurationError, match="does not start"):
        async with with_handler(source + SYNC):
            pass
    assert f"@{decorator} is for models that LMI loads itself" in "".join(capfd.readouterr())


async def test_a_handler_that_dies_is_restarted(with_handler: Make) -> None:
    async with with_handler(SYNC) as gateway:
        died = await gateway.post("/invocations", {"kind": "die"})
        assert (died.status_code, died.json()["type"]) == (503, "WlmException")
        assert (await gateway.post("/v1/completions", {"prompt": "x"})).status_code == 200
        assert (await gateway.post("/invocations", {"kind": "none"})).status_code in (503, 204)
        await until_back(gateway)


async def test_a_handler_whose_children_outlive_it_is_restarted(with_handler: Make) -> None:
    """They hold its output. So do those of one that stops with its gateway."""
    async with with_handler(SYNC) as gateway:
        children = [(await gateway.post("/invocations", {"kind": "child"})).json()]
        await gateway.post("/invocations", {"kind": "die"})
        await until_back(gateway)
        children.append((await gateway.post("/invocations", {"kind": "child"})).json())
        stops_s = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - stops_s < handler_process._STOP_S
    for child in children:
        psutil.Process(child).kill()


async def test_a_handler_that_hangs_is_killed(with_handler: Make) -> None:
    async with with_handler(SYNC, request_timeout_s=1.0) as gateway:
        assert (await gateway.post("/invocations", {"kind": "hang"})).status_code == 504
        assert (await gateway.post("/invocations", {"kind": "none"})).status_code in (503, 204)
        await until_back(gateway)


async def test_asynchronous_handlers(with_handler: Make) -> None:
    async with with_handler(ASYNC) as gateway:
        assert (await gateway.post("/invocations", {"stream": False})).json() == {"text": "whole"}
        assert (await gateway.post("/invocations", {"stream": True})).text == "one two"


async def test_formatters_around_the_built_in_answer(with_handler: Make) -> None:
    async with with_handler(FORMATTERS) as gateway:
        plain = await gateway.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 3}})
        formatted = await gateway.post("/invocations", {"question": "hello"})
        assert formatted.json() == {"answer": plain.json()["generated_text"]}
        failed = await gateway.post("/invocations", {"inputs": "hello"})
        assert (failed.status_code, failed.json()["error"]) == (
            424,
            "Input Parsing failed. input_formatter: 'question'",
        )


@pytest.mark.parametrize(
    "source", ["x = 1", "def handle(inputs):\n    raise ValueError('no weights')", "import nothing_"]
)
async def test_a_handler_that_does_not_load_stops_the_start(with_handler: Make, source: str) -> None:
    with pytest.raises(ConfigurationError, match="does not start"):
        async with with_handler(source):
            pass


async def test_the_example(with_handler: Make) -> None:
    """It asks the mesh through the SDK, whole and streamed."""
    async with with_handler(EXAMPLE.read_text()) as gateway:
        answer = (await gateway.post("/invocations", {"question": "hello"})).json()
        assert 0 < answer["confidence"] <= 1
        lines = await gateway.lines("/invocations", {"question": "hello", "stream": True})
        assert "".join(json.loads(line)["outputs"] for line in lines) == answer["answer"]


async def test_requests_are_forwarded_unchanged(with_handler: Make) -> None:
    """Nothing of theirs replaces the operator's, stays for others, or ends the process."""
    async with with_handler(SYNC) as gateway:
        encoded = await gateway.post("/invocations", {"kind": "encoded"})
        assert (encoded.content, encoded.headers["set-cookie"]) == (b"x", "a=b")
        gateway.http.cookies.clear()
        own = await gateway.http.post(
            "/invocations?Router=evil",
            json={"kind": "own"},
            headers=[(b"ROUTER", b"evil"), (b"x-mine", "é".encode("latin-1")), (b"x-request-id", b"a" * 127 + b" b")],
        )
        assert own.json() == {"router": gateway.router.address, "cookie": None, "x-mine": "é"}
        for path, model in (("a%0Ab", "a\nb"), ("b%20", "b "), ("%C3%A9", "é")):
            echo = await gateway.post(f"/predictions/{path}?model_name=other", {"kind": "echo"})
            assert (echo.status_code, echo.json()["model"]) == (201, model)


async def test_queued_calls_of_a_disconnected_client_are_dropped(with_handler: Make) -> None:
    async with with_handler(SYNC) as gateway:
        first = asyncio.create_task(gateway.post("/invocations", {"kind": "wait"}))
        await asyncio.sleep(0.25)  # it is being answered when the others come
        left = [asyncio.create_task(gateway.post("/invocations", {"kind": "wait"})) for _ in range(4)]
        await asyncio.wait([first])
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        assert (await gateway.post("/invocations", {"kind": "wait"})).json() < 6


async def test_the_coroutine_of_a_disconnected_client_is_cancelled(with_handler: Make) -> None:
    async with with_handler(ASYNC, request_timeout_s=20.0) as gateway:
        leaving = asyncio.create_task(gateway.post("/invocations", {"wait": True}))
        assert (await gateway.post("/invocations", {"waiting": True, "stream": False})).status_code == 200
        leaving.cancel()
        assert (await gateway.post("/invocations", {"cancelled": True, "stream": False})).status_code == 200


async def test_a_busy_handler_is_not_killed(with_handler: Make) -> None:
    """Some of those that queue wait for too long, while others are answered."""
    async with with_handler(SYNC, request_timeout_s=2.0) as gateway:
        answers = await asyncio.gather(*(gateway.post("/invocations", {"kind": "wait"}) for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200, 504}
        assert (await gateway.post("/invocations", {"kind": "echo"})).json()["loaded"] == 1


@pytest.mark.parametrize("kind", ["slow stream", "broken stream"])
async def test_an_incomplete_stream_of_a_handler(with_handler: Make, kind: str) -> None:
    async with with_handler(SYNC, request_timeout_s=1.0) as gateway:
        with pytest.raises(httpx2.RemoteProtocolError):
            await gateway.post("/invocations", {"kind": kind})
        await until_back(gateway)
        events = await gateway.post("/endpoints/a/invocations-response-stream", {"kind": kind})
        assert b"PayloadPart" in events.content
        assert b"ModelStreamError" in events.content


@pytest.mark.parametrize("route", ["invocations", "invocations-response-stream"])
async def test_failures_are_errors_of_sagemakers_model(with_handler: Make, route: str) -> None:
    async with with_handler(SYNC) as gateway:
        failed = await gateway.post(f"/endpoints/a/{route}", {"kind": "memory"})
        assert (failed.status_code, failed.headers["x-amzn-errortype"]) == (424, "ModelError")
        assert failed.json()["OriginalStatusCode"] == 507
        assert json.loads(failed.json()["OriginalMessage"])["error"] == "MemoryError"


async def test_a_formatter_that_does_not_return_an_object(with_handler: Make) -> None:
    source = FORMATTERS.replace('{"inputs": payload["question"], "parameters": {"max_new_tokens": 3}}', "[1]")
    async with with_handler(source) as gateway:
        failed = await gateway.post("/invocations", {"question": "hello"})
        assert "input_formatter returned list, not a dict" in failed.json()["error"]


async def test_a_handler_that_hangs_while_it_loads(with_handler: Make) -> None:
    with pytest.raises(ConfigurationError, match="does not start"):
        async with with_handler("while True:\n    pass", handler_start_s=1.0):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
@pytest.mark.parametrize(
    "source", ["{told}\nwhile True: pass", "def handle(inputs):\n    {told}\n    while True: pass"]
)
async def test_a_handler_that_hangs_ends_with_its_gateway(tmp_path: Path, source: str) -> None:
    pid_file, model = tmp_path / "pid", tmp_path / "model.py"
    told = f"__import__('pathlib').Path({str(pid_file)!r}).write_text(str(__import__('os').getpid()))"
    model.write_text(source.format(told=told))
    command = (sys.executable, "-m", "gateway", "--port=0", f"--handler={model}", "--router=127.0.0.1:1")
    async with running_process(*command, stdout=DEVNULL, stderr=DEVNULL) as gateway:
        await until(lambda: pid_file.exists() and pid_file.read_text())
        handler = psutil.Process(int(pid_file.read_text()))
        gateway.kill()
        try:
            await until(lambda: not is_alive(handler))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                handler.kill()


async def test_a_handler_whose_first_start_is_cancelled(with_handler: Make, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    told = f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    source = f"import os, pathlib, time\n{told}\ntime.sleep(600)"
    starting = asyncio.create_task(with_handler(source).__aenter__())
    await until(lambda: pid_file.exists() and pid_file.read_text())
    process = psutil.Process(int(pid_file.read_text()))
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert not process.is_running()


async def test_a_handler_may_print_much(with_handler: Make) -> None:
    async with with_handler("print('x' * (3 << 20))\n" + SYNC) as gateway:
        assert (await gateway.post("/invocations", {"kind": "none"})).status_code == 204


async def test_a_failed_start_is_retried(with_handler: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    start, failures = loop.subprocess_exec, [OSError("too many processes")]

    async def start_at_last(*command: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await start(*command, **options)

    async with with_handler(SYNC) as gateway:
        monkeypatch.setattr(loop, "subprocess_exec", start_at_last)
        assert (await gateway.post("/invocations", {"kind": "die"})).status_code == 503
        await until_back(gateway)
        assert not failures


async def test_the_output_of_a_handler_is_logged(
    with_handler: Make, install_log: InstallLog, repaired: Repaired
) -> None:
    source = """
import sys
from djl_python import Output

print("loading")

def handle(inputs):
    if inputs.is_empty():
        return None
    print("asked \x1b[2J " + inputs.get_as_string())
    sys.stderr.write("a warning of its own\\n")
    for number in range(20_000):
        print("number", number)
    sys.stderr.write('{"event": "made up", "level": "error"}\\n')
    return Output().add("done")
"""
    read = install_log()
    async with with_handler(source) as gateway:
        assert (await gateway.post("/invocations", {})).text == "done"
    lines = [json.loads(line) for line in (await asyncio.to_thread(read)).splitlines()]
    printed = [(line["stream"], line["line"]) for line in lines if line["event"] == "custom handler printed"]
    assert printed[0] == ("stdout", "loading")
    assert ("stdout", "asked \x1b[2J {}") in printed
    assert ("stderr", "a warning of its own") in printed
    assert ("stdout", "number 0") in printed
    left_out = sum(line.get("suppressed", 0) + line.get("num_lines_left_out", 0) for line in lines)
    assert 20_003 <= len(printed) + left_out <= 20_004
    assert len(printed) < 1000
    repaired("M14", f"20,000 lines printed: {len(printed)} in the gateway's log, the others counted")


async def test_a_handler_sees_its_properties_and_no_other_secret(
    with_handler: Make, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    source = """
import os
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    own = open("/proc/self/environ").read() + str(os.environ)
    return Output().add_as_json({"environ": own, "password": inputs.get_property("db_password")})
"""
    members = ("TANDEM_MESH_KEY", "TANDEM_REGISTRY_URL", "TANDEM_HANDLER_PROPERTIES")
    for name in (*members, "TANDEM_API_KEY", "TANDEM_OPENAI_API_KEY", "OPENAI_API_KEY", "OPTION_API_KEY", "API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    async with with_handler(source, handler_properties='{"db_password": "hunter3"}') as gateway:
        answer = (await gateway.post("/invocations", {})).json()
    assert answer["password"] == "hunter3"
    assert "hunter" not in answer["environ"]
    repaired("D17", "a custom handler's environment has no mesh key, registry URL or properties")
