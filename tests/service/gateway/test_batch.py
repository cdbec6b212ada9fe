"""`tandem batch` through a real gateway before a fake router."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.batches.files import AnswerFile
from tandem.v1 import generation_pb2
from tandem_cli.main import main
from tests.fakes.sdk_router import Refusal, Script
from tests.service.gateway.http import RunningGateway, running_gateway

USER = {"messages": [{"role": "user", "content": "hi"}]}
FULL = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"),))
LINES: list[dict[str, Any]] = [
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": USER},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One fine", "max_tokens": 4}},
    {"custom_id": "items", "url": "/v1/responses", "body": {"input": "hi"}},
    {"custom_id": "blocks", "url": "/v1/messages", "body": USER | {"max_tokens": 4, "priority": "standard"}},
]


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(Script(story="Fine.")) as running:
        yield running


class Batch:
    """Input and output files, and the command on them."""

    def __init__(self, folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self._url = url
        self._capsys = capsys

    async def run(self, lines: list[Any], *flags: str) -> tuple[int, str]:
        """Status and stderr. The command has an event loop of its own, so it runs on a thread."""
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["batch", str(self.input), str(self.output), "--url", self._url, *flags]
        status = await asyncio.to_thread(main, command)
        return status, self._capsys.readouterr().err

    def answers(self) -> dict[str, Any]:
        answers = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({answer["custom_id"] for answer in answers}) == len(answers)
        return {answer["custom_id"]: answer["response"] for answer in answers}


@pytest.fixture
def batch(tmp_path: Path, gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> Batch:
    return Batch(tmp_path, gateway.url, capsys)


async def test_every_kind_of_request_at_the_lowest_priority(batch: Batch, gateway: RunningGateway) -> None:
    gateway.script.refusals.extend([FULL, FULL])
    status, err = await batch.run(LINES)
    assert (status, err.splitlines()[-1]) == (0, "4 answered")
    assert err.count("waiting for capacity: HTTP ") == 1
    bodies = {custom_id: answer["body"] for custom_id, answer in batch.answers().items()}
    assert {answer["status_code"] for answer in batch.answers().values()} == {200}
    assert all(answer["request_id"] for answer in batch.answers().values())
    assert bodies["chat"]["choices"][0]["message"]["content"] == "Fine."
    assert bodies["text"]["object"] == "text_completion"
    assert (bodies["items"]["object"], bodies["blocks"]["type"]) == ("response", "message")
    sent = [
        (request.priority, request.WhichOneof("input") == "chat" and request.sampling.max_new_tokens == 4)
        for request in gateway.script.requests
    ]
    assert len(sent) == 4 + 2, "two were sent again"
    own, lowest = generation_pb2.PRIORITY_STANDARD, generation_pb2.PRIORITY_BATCH
    assert all(priority == (own if has_priority else lowest) for priority, has_priority in sent)


async def test_a_run_that_was_cut_off_goes_on(batch: Batch, gateway: RunningGateway) -> None:
    await batch.run(LINES[:2])
    whole = batch.output.read_bytes()
    batch.output.write_bytes(whole[:-9])  # the end of the second answer
    cut = whole[:-9].rpartition(b"\n")[2]
    num_before = len(gateway.script.requests)
    status, err = await batch.run(LINES)
    assert (status, err.splitlines()[-1]) == (0, "3 answered; 1 were answered before")
    assert len(gateway.script.requests) == num_before + 3
    assert batch.answers().keys() == {line["custom_id"] for line in LINES}
    assert cut not in batch.output.read_bytes()
    assert (await batch.run(LINES))[1].splitlines()[-1] == "0 answered; 4 were answered before"


async def test_refusals_are_answers_and_overload_is_not(batch: Batch, gateway: RunningGateway) -> None:
    wrong = {"custom_id": "wrong", "url": "/v1/completions", "body": {"prompt": "x", "n": 99}}
    gateway.script.refusals.append(FULL)
    status, err = await batch.run([wrong, LINES[0]], "--patience", "0", "--concurrency", "1")
    assert status == 1
    assert "1 refused" in err
    assert "1 left, run it again: HTTP 429" in err
    assert batch.answers()["wrong"]["body"]["error"]["param"] == "n"
    for num_answered, num_before in ((1, 1), (0, 2)):
        status, err = await batch.run([wrong, LINES[0]])
        said = f"{num_answered} answered; {num_before} were answered before, 1 of them refused"
        assert (status, err.splitlines()[-1]) == (1, said)


async def test_a_missing_model_is_an_answer(batch: Batch, gateway: RunningGateway) -> None:
    """Of either API; a missing route is none."""
    gone = Refusal(grpc.StatusCode.NOT_FOUND, "no model", (("tandem-error", "ModelNotFound"),))
    gateway.script.refusals.extend([gone] * 4)
    assert (await batch.run(LINES))[0] == 1
    assert {answer["status_code"] for answer in batch.answers().values()} == {404}


async def test_a_url_that_is_no_gateway_leaves_no_answers(batch: Batch, gateway: RunningGateway) -> None:
    for wrong in (f"{gateway.url}/api", f"{gateway.url}/v1/v2"):
        status, err = await batch.run(LINES, "--url", wrong)
        assert (status, f"{wrong}/v1/" in err, "is not served, HTTP 404" in err) == (2, True, True), err
        assert batch.answers() == {}
    assert (await batch.run(LINES))[0] == 0


async def test_a_url_without_a_scheme_is_refused(batch: Batch, gateway: RunningGateway) -> None:
    for wrong in (gateway.url.removeprefix("http://"), "localhost:8080", ""):
        status, err = await batch.run(LINES, "--url", wrong)
        assert (status, "--url must begin with http:// or https://" in err) == (2, True), err
    assert not batch.output.exists()


async def test_a_full_disk_is_named(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(AnswerFile, "write", fail)
        status, err = await batch.run(LINES)
    assert (status, f"{batch.output}: No space left on device" in err) == (2, True), err
    assert (await batch.run(LINES))[0] == 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "in.jsonl:2: not a JSON object"),
        ({"custom_id": "b", "url": "/v1/embeddings", "body": {}}, "in.jsonl:2: url must be one of"),
        ({"url": "/v1/messages", "body": {}}, "in.jsonl:2: custom_id must be a text"),
        ({"custom_id": "b", "url": "/v1/messages", "body": {"stream": True}}, "in.jsonl:2: a batch cannot stream"),
        (LINES[0], "custom_id 'chat' is there twice"),
    ],
)
async def test_nothing_is_sent_of_a_file_with_an_error(
    batch: Batch, gateway: RunningGateway, line: Any, complaint: str
) -> None:
    status, err = await batch.run([LINES[0], line])
    assert (status, complaint in err) == (2, True), err
    assert gateway.script.requests == []
    assert not batch.output.exists()


async def test_a_file_of_something_else_is_left_alone(batch: Batch) -> None:
    batch.output.write_text("my notes\n")
    status, err = await batch.run(LINES)
    assert (status, "out.jsonl:1: not an answer of a batch" in err) == (2, True)
    assert batch.output.read_text() == "my notes\n"
