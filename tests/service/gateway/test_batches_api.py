"""/v1/files and /v1/batches, driven by OpenAI's own client before a fake router."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from mesh.domain.errors import ConfigurationError
from tandem.v1 import generation_pb2
from tests.defects import Repaired
from tests.fakes.sdk_router import Refusal, Script
from tests.service.gateway.http import RunningGateway, running_gateway
from tests.waiting import LIMIT_S, until_told

FULL = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"),))
CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **members: Any) -> bytes:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]} | members
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


@asynccontextmanager
async def batches(folder: Path, script: Script | None = None, **settings: Any) -> AsyncIterator[RunningGateway]:
    async with running_gateway(script, batch_folder=str(folder), **settings) as gateway:
        yield gateway


def client_of(gateway: RunningGateway, key: str = "secret-one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def begun(client: openai.AsyncOpenAI, content: bytes) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "tests"}
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    return await until_told(
        lambda: client.batches.retrieve(batch_id), lambda batch: batch.status in ("completed", "failed", "cancelled")
    )


async def answers(client: openai.AsyncOpenAI, file_id: str) -> dict[str, Any]:
    content = await client.files.content(file_id)
    found = [json.loads(each) for each in content.text.strip().split("\n")]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


async def test_a_batch_from_its_file_to_its_answers(tmp_path: Path) -> None:
    script = Script(story="Fine.", refusals=deque([FULL, FULL]))
    async with batches(tmp_path, script) as gateway, client_of(gateway) as client:
        content = line(1) + line(2, priority="interactive") + line(3, temperature=9)
        batch = await ended(client, (await begun(client, content)).id)
        assert (batch.status, batch.endpoint, batch.metadata) == ("completed", CHAT, {"for": "tests"})
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        found = await answers(client, batch.output_file_id)
        assert {name: each["body"]["choices"][0]["message"]["content"] for name, each in found.items()} == {
            "r1": "Fine.",
            "r2": "Fine.",
        }
        refused = await answers(client, batch.error_file_id)
        assert refused["r3"]["status_code"] == 400
        assert "temperature" in refused["r3"]["body"]["error"]["message"]
        assert {each.priority for each in script.requests} == {generation_pb2.PRIORITY_BATCH}
        assert [each.id async for each in client.batches.list()] == [batch.id]
        names = {each.filename async for each in client.files.list()}
        assert names == {"in.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_errors.jsonl"}
        assert (await client.files.delete(batch.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(batch.output_file_id)


async def test_a_file_that_is_wrong_fails_the_batch_and_sends_nothing(tmp_path: Path) -> None:
    wrong = {
        b"": "no requests",
        line(1) + b"{\n": "not JSON",
        b"[" * 100_000 + b"\n": "not JSON",
        line(1, user="x" * (1 << 20)): "longer",
        line(1) + line(1): "twice",
        line(1, "/v1/completions"): "endpoint",
        line(1, stream=True): "stream",
        line(1) + line(2, user="cut: \ud83d"): "cannot be sent as JSON: 'utf-8' codec can't encode character '\\ud83d'",
        line(1) + line(2, temperature=float("nan")): "cannot be sent as JSON: Out of range",
        line(1) + line(2).replace(b'"hi"', b"1e999"): "cannot be sent as JSON: Out of range",
        line(1) + line(2).replace(b"r2", rb"\ud83d"): "cannot be sent as JSON",
    }
    async with batches(tmp_path) as gateway, client_of(gateway) as client:
        for content, reason in wrong.items():
            batch = await ended(client, (await begun(client, content)).id)
            assert batch.status == "failed"
            (error,) = batch.errors.data
            assert reason in error.message
            assert error.line == max(1, content.count(b"\n"))
            assert str(tmp_path) not in batch.errors.data[0].message
        assert gateway.script.requests == []


async def test_callers_do_not_see_each_other(tmp_path: Path) -> None:
    async with batches(tmp_path) as gateway, client_of(gateway) as one, client_of(gateway, "two") as two:
        batch = await ended(one, (await begun(one, line(1))).id)
        for ask in (
            two.batches.retrieve(batch.id),
            two.batches.cancel(batch.id),
            two.files.content(batch.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.NotFoundError):
            await two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert [each.id async for each in two.files.list()] == []
    kept = [each.read_bytes() for each in all_files(tmp_path)]
    assert len(kept) == 5
    assert not [each for each in kept if b"secret-one" in each]


def all_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json*"))


async def test_no_id_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    async with batches(tmp_path / "kept") as gateway:
        for path in ("/v1/files/..%2f..%2f..%2fsecret", "/v1/files/..%2Fx/content", "/v1/batches/%2e%2e%2fx"):
            assert (await gateway.http.get(path)).status_code == 404, path
        assert (await gateway.http.delete("/v1/files/..%2f..%2f..%2fsecret")).status_code == 404
        body = {"input_file_id": "../../../secret", "endpoint": CHAT, "completion_window": "24h"}
        assert (await gateway.post("/v1/batches", body)).status_code == 404


async def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    script = Script(story="Fine.")
    async with batches(tmp_path, script, batch_concurrency=1) as gateway, client_of(gateway) as client:
        held = asyncio.Event()
        script.on_holding = held.set
        batch = await begun(client, b"".join(map(line, range(40))))
        await until_told(lambda: client.batches.retrieve(batch.id), lambda batch: batch.request_counts.completed)
        script.hold_after_messages = 1
        await asyncio.wait_for(held.wait(), LIMIT_S)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        await asyncio.wait_for(script.cancelled.wait(), LIMIT_S)
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert 0 < batch.request_counts.completed < 40
        assert len(await answers(client, batch.output_file_id)) == batch.request_counts.completed


async def test_a_batch_goes_on_behind_a_gateways_end(tmp_path: Path) -> None:
    """Each request is answered once, and only its owner's key starts it again."""
    script = Script(story="Fine.", hold_after_messages=1)
    async with batches(tmp_path, script, batch_concurrency=2) as gateway, client_of(gateway) as client:
        batch = await begun(client, b"".join(map(line, range(6))))
        await asyncio.wait_for(script.holding.wait(), LIMIT_S)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    async with batches(tmp_path) as gateway, client_of(gateway) as client:
        async with client_of(gateway, "two") as other:
            assert [each.id async for each in other.batches.list()] == []
        assert gateway.script.requests == []
        batch = await ended(client, batch.id)
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
        assert len(await answers(client, batch.output_file_id)) == 6


@pytest.mark.parametrize("limit", ["0", "00", "-1", "ten", "٣", "9" * 5000])
async def test_a_page_has_a_limit(tmp_path: Path, limit: str) -> None:
    async with batches(tmp_path) as gateway:
        response = await gateway.http.get("/v1/files", params={"limit": limit})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


async def test_files_are_deleted_as_they_are_listed(tmp_path: Path) -> None:
    """The loop that people write: a page goes on behind a file that is gone by then."""
    async with batches(tmp_path) as gateway, client_of(gateway) as client:
        for _ in range(25):
            await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        async for file in client.files.list():
            await client.files.delete(file.id)
        assert (await client.files.list()).data == []


async def test_files_are_listed_in_either_order(tmp_path: Path) -> None:
    async with batches(tmp_path) as gateway, client_of(gateway) as client:
        for text in (b"{}", b"[]"):
            await client.files.create(file=("a.jsonl", text), purpose="batch")
        newest_first = [file.id for file in (await client.files.list()).data]
        oldest_first = [file.id for file in (await client.files.list(order="asc")).data]
        assert len(oldest_first) == 2
        assert oldest_first == newest_first[::-1]
        assert (await client.files.list(order="desc")).data[0].id == newest_first[0]
        response = await gateway.http.get("/v1/files", params={"order": "size"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "order")


async def test_limits(tmp_path: Path) -> None:
    async with batches(tmp_path, batch_max_bytes=2000) as gateway, client_of(gateway) as client:
        with pytest.raises(openai.APIStatusError, match="2000 bytes") as refused:
            await client.files.create(file=("in.jsonl", b"x" * 3000), purpose="batch")
        assert refused.value.status_code == 413
        batch = await ended(client, (await begun(client, b"".join(map(line, range(10))))).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_limit")
        assert len(await answers(client, batch.output_file_id)) == batch.request_counts.completed > 0
    async with batches(tmp_path, Script(hold_after_messages=1)) as gateway, client_of(gateway) as client:
        for _ in range(8):
            batch = await begun(client, line(1))
        with pytest.raises(openai.RateLimitError, match="8 batches"):
            await begun(client, line(1))
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    ("data", "files", "reason"),
    [
        ({"purpose": "assistants"}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch"}, {"other": b"x"}, "no file"),
        ({"purpose": "batch"}, None, "multipart/form-data"),
    ],
)
async def test_uploads_that_are_refused(tmp_path: Path, data: Any, files: Any, reason: str) -> None:
    async with batches(tmp_path) as gateway:
        response = await gateway.http.post("/v1/files", data=data, files=files)
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


async def test_a_form_that_breaks_off(tmp_path: Path) -> None:
    async with batches(tmp_path) as gateway:
        for kind, reason in (("", "content-type has no boundary"), ("; boundary=x", "purpose must be")):
            headers = {"content-type": f"multipart/form-data{kind}"}
            response = await gateway.http.post("/v1/files", content=b"--x\r\nnonsense", headers=headers)
            assert response.status_code == 400
            assert reason in response.json()["error"]["message"]


async def test_clients_do_not_choose_the_codec(tmp_path: Path, repaired: Repaired) -> None:
    slow_field = "b" * 20_000 + "-" + "a" * 20_000
    body = (
        f'--B\r\nContent-Disposition: form-data; name="x-"\r\n\r\n{slow_field}\r\n'
        '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--B\r\nContent-Disposition: form-data; name="file"; filename="x\\ud800"\r\n\r\n{}\r\n--B--\r\n'
    )
    async with batches(tmp_path) as gateway:
        began_s = time.process_time()
        for codec in ("punycode", "unicode_escape", "undefined", "utf-7"):
            kind = f"multipart/form-data; charset={codec}; boundary=B"
            response = await gateway.http.post("/v1/files", content=body, headers={"content-type": kind})
            assert (response.status_code, response.json().get("filename")) == (200, r"x\ud800"), codec
        took_ms = 1000 * (time.process_time() - began_s)
        assert len((await gateway.http.get("/v1/files")).json()["data"]) == 4
    repaired("D36", f"names and fields are UTF-8 whatever the charset: four files kept in {took_ms:.0f} ms, and listed")


async def test_without_a_folder_both_are_refused() -> None:
    async with running_gateway() as gateway, client_of(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="--batch-folder"):
            await client.batches.list()
        with pytest.raises(openai.BadRequestError, match="--batch-folder"):
            await client.files.create(file=("in.jsonl", b"x"), purpose="batch")


async def test_two_gateways_do_not_share_a_folder(tmp_path: Path) -> None:
    async with batches(tmp_path):
        with pytest.raises(ConfigurationError, match="in use by another gateway"):
            async with batches(tmp_path):
                pass
