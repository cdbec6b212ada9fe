"""Batches that the gateway runs, before an application that answers at once."""

import asyncio
import errno
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import tandem
from gateway.batches import runner
from gateway.batches.runner import Batches
from gateway.batches.store import ENDED, CallerStore, Json
from gateway.settings import GatewaySettings
from tests.waiting import LIMIT_S, until

CHAT = "/v1/chat/completions"
LINE = json.dumps({"custom_id": "a", "url": CHAT, "body": {}}).encode()


class Caller:
    """One caller of kept batches. Each of these requests is answered once `may_answer` is set."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.store: CallerStore = batches.store.of("key")
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.may_answer.wait()
        await JSONResponse({"text": "Fine."})(scope, receive, send)

    async def create(self) -> Json:
        file = self.store.add_file("in.jsonl", LINE)
        return await self.batches.create(self.store, self.app, "key", CHAT, file["id"], {})

    async def create_asked(self) -> Json:
        """A batch whose request is on its way and is not answered yet."""
        self.may_answer.clear()
        batch = await self.create()
        await until(lambda: self.num_asked)
        return batch

    async def poll(self, batch: Json) -> Json:
        await self.batches.resume(self.store, self.app, "key")
        return self.batches.state(self.store.batch(batch["id"]))


@asynccontextmanager
async def caller_of(folder: Path) -> AsyncIterator[Caller]:
    batches = Batches(GatewaySettings(router="127.0.0.1:1", batch_folder=str(folder)))
    async with batches.running():
        yield Caller(batches)


async def ended(caller: Caller, batch: Json) -> Json:
    await until(lambda: caller.store.batch(batch["id"])["status"] in ENDED)
    return caller.store.batch(batch["id"])


async def test_batches_together_keep_to_their_number(tmp_path: Path) -> None:
    async with caller_of(tmp_path) as caller:
        caller.may_answer.clear()
        made = await asyncio.gather(*(caller.create() for _ in range(runner.MAX_OPEN + 4)), return_exceptions=True)
        assert sum(isinstance(each, dict) for each in made) == runner.MAX_OPEN
        assert sum(isinstance(each, tandem.Overloaded) for each in made) == 4
        assert len(caller.store.batches()) == runner.MAX_OPEN


def fail(store: CallerStore, batch: Json) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


async def test_a_batch_goes_on_once_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end cannot be written at first. The answer that there is stays, and is not asked for again."""
    async with caller_of(tmp_path) as caller:
        batch = await caller.create_asked()
        with monkeypatch.context() as full:
            full.setattr(CallerStore, "save_batch", fail)
            caller.may_answer.set()
            await until(lambda: not caller.batches._runs)
            assert caller.store.batch(batch["id"])["status"] == "in_progress"
        await caller.poll(batch)
        batch = await ended(caller, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert caller.num_asked == 1


async def test_a_cancel_that_cannot_be_written_cancels_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with caller_of(tmp_path) as caller:
        batch = await caller.create_asked()
        with monkeypatch.context() as full:
            full.setattr(CallerStore, "save_batch", fail)
            with pytest.raises(OSError, match="no space"):
                caller.batches.cancel(caller.store, batch["id"])
        assert (await caller.poll(batch))["status"] == "in_progress"
        caller.may_answer.set()
        assert (await ended(caller, batch))["status"] == "completed"


async def test_a_batch_that_has_just_ended_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with caller_of(tmp_path) as caller:
        save = CallerStore.save_batch

        def save_and_cancel(store: CallerStore, saved: Json) -> None:
            save(store, saved)
            if saved["status"] == "completed":
                asyncio.get_running_loop().call_soon(caller.batches.cancel, store, saved["id"])

        monkeypatch.setattr(CallerStore, "save_batch", save_and_cancel)
        batch = await caller.create()
        await until(lambda: not caller.batches._runs)
        batch = caller.store.batch(batch["id"])
        assert (batch["status"], batch["cancelling_at"]) == ("completed", None)


@pytest.mark.parametrize("stops", [False, True])
async def test_a_cancel_while_files_are_opened_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Their locks would keep the batch from going on. `stops`: the gateway stops right after the cancel."""
    is_opening, may_open = threading.Event(), threading.Event()
    path_of = CallerStore.path_of

    def open_slowly(store: CallerStore, file_id: str) -> Path:
        if threading.current_thread() is not threading.main_thread():
            is_opening.set()
            assert may_open.wait(LIMIT_S)
        return path_of(store, file_id)

    async with caller_of(tmp_path) as caller:
        monkeypatch.setattr(CallerStore, "path_of", open_slowly)
        batch = await caller.create()
        await until(is_opening.is_set)
        caller.batches.cancel(caller.store, batch["id"])
        asyncio.get_running_loop().call_later(0.02, may_open.set)
        await (asyncio.sleep(0) if stops else ended(caller, batch))
    assert may_open.is_set()  # the batch has waited for the thread
    assert caller.store.batch(batch["id"])["status"] == "cancelled"
    assert caller.num_asked == 0
    opened = [each.path for each in psutil.Process().open_files()]  # also those of earlier tests
    assert not [path for path in opened if path.startswith(str(tmp_path)) and path.endswith(".jsonl")]


async def test_calls_that_resume_together_start_a_batch_once(tmp_path: Path) -> None:
    async with caller_of(tmp_path) as caller:
        batch = await caller.create_asked()
    async with caller_of(tmp_path) as caller:
        listed = caller.store.batches
        asked = 0

        def list_slowly_once() -> list[Json]:
            """The first list is old when it arrives: the batch has ended meanwhile."""
            nonlocal asked
            asked += 1
            found = listed()
            if asked == 1:
                first_is_listed.set()
                assert batch_ended.wait(LIMIT_S)
            return found

        first_is_listed, batch_ended = threading.Event(), threading.Event()
        caller.store.batches = list_slowly_once  # type: ignore[method-assign]
        first = asyncio.create_task(caller.poll(batch))
        await until(first_is_listed.is_set)
        await caller.poll(batch)
        await ended(caller, batch)
        await until(lambda: not caller.batches._runs)
        batch_ended.set()
        await first
        assert not caller.batches._runs


async def test_a_batch_whose_input_has_just_been_deleted_says_so(tmp_path: Path) -> None:
    async with caller_of(tmp_path) as caller:
        batch = await caller.create()
        for path in list(tmp_path.rglob(f"{batch['input_file_id']}.*")):  # noqa: ASYNC240
            path.unlink()
        (error,) = (await ended(caller, batch))["errors"]["data"]
        assert (error["code"], error["message"]) == ("invalid_request", f"there is no '{batch['input_file_id']}'")


async def test_a_batch_whose_time_ends_with_the_gateway_away_counts_its_answers(tmp_path: Path) -> None:
    async with caller_of(tmp_path) as caller:
        is_first = True

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal is_first
            if not is_first:
                await asyncio.Event().wait()
            is_first = False
            await JSONResponse({"text": "Fine."})(scope, receive, send)

        file = caller.store.add_file("in.jsonl", LINE + b"\n" + LINE.replace(b'"a"', b'"b"'))
        batch = await caller.batches.create(caller.store, app, "key", CHAT, file["id"], {})
        await until(lambda: caller.batches.state(batch)["request_counts"]["completed"] == 1)
    async with caller_of(tmp_path) as caller:
        caller.store.save_batch(caller.store.batch(batch["id"]) | {"expires_at": 0})
        await caller.poll(batch)
        batch = await ended(caller, batch)
        assert batch["status"] == "expired"
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
        assert len(caller.store.path_of(batch["output_file_id"]).read_text().splitlines()) == 1
