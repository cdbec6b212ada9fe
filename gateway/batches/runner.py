"""Runs the batches that the gateway keeps.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
         │              ├──▶ cancelling ──▶ cancelled
         └──▶ failed ◀──┴──▶ expired
Requests go to the gateway's own application, as a client's would, with the caller's key and the priority `batch`. The
key is in memory only: a batch that was running when the gateway stopped goes on once its caller asks for batches
again. Answers that are there already are not asked for a second time.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import chain, islice
from pathlib import Path

import httpx2
import structlog
from starlette.types import ASGIApp

import tandem
from gateway.batches.files import AnswerFile, BadLine, check_requests, read_requests
from gateway.batches.send import KeyRefused, Sender
from gateway.batches.store import ENDED, CallerStore, Store, new_id
from gateway.errors import NotStored
from gateway.schema import Json
from gateway.settings import GatewaySettings
from mesh.tasks import cancel_all, until_ended

log = structlog.get_logger(__name__)

MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 1 << 20  # what the event loop reads and writes at a time
MAX_OPEN = 8
WINDOW_S = 24 * 3600
_RECOUNT_BYTES = 1 << 20


class StorageFull(Exception):
    """The caller's files have no room for the next answer."""


class Batches:
    """All callers' batches. Together they have `batch_concurrency` requests under way."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.store = Store(Path(settings.batch_folder), settings.batch_max_bytes)
        self._concurrency = settings.batch_concurrency
        self._slots = asyncio.Semaphore(settings.batch_concurrency)
        self._runs: dict[str, Run] = {}
        self._resumed: set[CallerStore] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let batches run while the block does; at its end they stop where they are."""
        try:
            yield
        finally:
            await cancel_all(run.task for run in self._runs.values())
            self.store.close()

    async def create(
        self, store: CallerStore, app: ASGIApp, key: str | None, endpoint: str, file_id: str, metadata: Json
    ) -> Json:
        """Begin a batch. Raises Overloaded if the caller has too many that have not ended."""
        await self.resume(store, app, key)
        await asyncio.to_thread(store.forget_old_batches)
        # From here to the start nothing waits, so batches that are begun together are counted.
        if sum(run.store is store for run in self._runs.values()) >= MAX_OPEN:
            raise tandem.Overloaded(f"you may have {MAX_OPEN} batches that have not ended")
        batch = _new_batch(endpoint, file_id, metadata)
        store.save_batch(batch)
        self._start(store, app, key, batch)
        return batch

    async def resume(self, store: CallerStore, app: ASGIApp, key: str | None) -> None:
        """Resume the caller's unfinished batches, which an earlier gateway process or a full disk left."""
        if store in self._resumed:
            return
        for listed in await asyncio.to_thread(store.batches):
            if listed["status"] in ENDED or listed["id"] in self._runs:
                continue
            batch = store.batch(listed["id"])  # another call may have resumed it, to its end, since it was listed
            if batch["status"] not in ENDED:
                self._start(store, app, key, batch)
        self._resumed.add(store)

    def cancel(self, store: CallerStore, batch_id: str) -> Json:
        """Give up a batch that runs; answers that are there are kept. A batch that has ended stays as it is."""
        batch = store.batch(batch_id)
        run = self._runs.get(batch_id)
        if run is not None:
            run.cancel()
        return self.state(batch)

    def state(self, batch: Json) -> Json:
        """The batch with its present counts, which reach the disk only when it ends or the gateway stops."""
        run = self._runs.get(batch["id"])
        return batch if run is None else run.batch

    def _start(self, store: CallerStore, app: ASGIApp, key: str | None, batch: Json) -> None:
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://127.0.0.1",
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        run = Run(store, batch, http, self._slots, self._concurrency)
        self._runs[batch["id"]] = run
        run.task.add_done_callback(lambda task: self._stopped(run, task))

    def _stopped(self, run: "Run", task: asyncio.Task[None]) -> None:
        """The run has ended. If that could not be written, the batch resumes when its caller asks for batches."""
        del self._runs[run.batch["id"]]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a batch cannot be written", batch=run.batch["id"], exc_info=error)
            self._resumed.discard(run.store)


class Run:
    def __init__(
        self, store: CallerStore, batch: Json, http: httpx2.AsyncClient, slots: asyncio.Semaphore, concurrency: int
    ) -> None:
        self.store = store
        self.batch = batch
        self._http = http
        self._slots = slots
        self._concurrency = concurrency
        self._has_begun = False
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        if self.batch["status"] in ENDED | {"cancelling"}:
            return
        self._enter("cancelling")
        if self._has_begun:  # a task that has not would end without writing a status
            self.task.cancel()

    async def _run(self) -> None:
        """The final status is written last, so nothing is written after it."""
        self._has_begun = True
        self._end("cancelled" if self.batch["status"] == "cancelling" else await self._run_to_status())

    async def _run_to_status(self) -> str:
        try:
            async with self._http, asyncio.timeout(self.batch["expires_at"] - time.time()):
                await self._answer_all()
            return "completed"
        except asyncio.CancelledError:
            if self.batch["status"] != "cancelling":  # the gateway stops
                with contextlib.suppress(OSError):
                    self.store.save_batch(self.batch)  # with the counts so far: the time may end before it goes on
                raise
            return "cancelled"
        except TimeoutError:
            return "expired"
        except BadLine as error:
            return self._failed("invalid_request", error.reason, error.line)
        except NotStored as error:
            return self._failed("invalid_request", str(error))
        except StorageFull:
            return self._failed("storage_limit", "your files have no room for more answers: delete some")
        except KeyRefused:
            return self._failed("invalid_api_key", "the API key of this batch is not accepted any more")
        except Exception:
            log.exception("a batch failed", batch=self.batch["id"])
            return self._failed("server_error", "something went wrong; the gateway's log has the details")

    async def _answer_all(self) -> None:
        batch, store = self.batch, self.store
        store.file(batch["input_file_id"])  # its owner may have deleted it in the moment in which the batch was made
        path = store.path_of(batch["input_file_id"])
        limits = {"max_requests": MAX_REQUESTS, "max_line_bytes": MAX_LINE_BYTES}
        ids = await asyncio.to_thread(check_requests, path, url=batch["endpoint"], **limits)
        batch["request_counts"]["total"] = len(ids)
        if batch["status"] == "validating":
            self._enter("in_progress")
        with contextlib.closing(await _open_answers(store, batch)) as answers:
            patience_s = max(0.0, batch["expires_at"] - time.time())
            sender = Sender(self._http, patience_s=patience_s, on_wait=self._say_why, slots=self._slots)
            requests = read_requests(path, answers.done, keeps_priority=False)
            first = await asyncio.to_thread(lambda: list(islice(requests, 1)))  # behind all that are answered
            await sender.send_all(chain(first, requests), answers, self._concurrency, lambda: None)
        if sender.tally.num_left:
            raise TimeoutError
        self._enter("finalizing")

    def _say_why(self, problem: str) -> None:
        log.info("a batch waits for capacity", batch=self.batch["id"], problem=problem)

    def _enter(self, status: str) -> None:
        """Raises OSError, and the batch stays as it was."""
        changes = {"status": status, f"{status}_at": int(time.time())}
        self.store.save_batch(self.batch | changes)
        self.batch.update(changes)

    def _failed(self, code: str, message: str, line: int | None = None) -> str:
        error = {"code": code, "message": message, "line": line, "param": None}
        self.batch["errors"] = {"object": "list", "data": [error]}
        return "failed"

    def _end(self, status: str) -> None:
        """Publish the files that have answers, and write the final status."""
        for member, name in (("output_file_id", "output"), ("error_file_id", "errors")):
            file_id = self.batch.pop(f"_{member}", None)
            if file_id is None:
                continue
            path = self.store.path_of(file_id)
            if path.exists() and path.stat().st_size:
                self.store.describe_file(file_id, f"{self.batch['id']}_{name}.jsonl", "batch_output")
                self.batch[member] = file_id
            else:
                path.unlink(missing_ok=True)
        self._enter(status)
        log.info("a batch has ended", batch=self.batch["id"], status=status, **self.batch["request_counts"])


class AnswerFiles:
    """The two files of a batch: answers, and errors. Answers that they hold already count, and are in `done`."""

    def __init__(self, store: CallerStore, batch: Json) -> None:
        self._counts = batch["request_counts"]
        with contextlib.ExitStack() as opened:
            self._output = opened.enter_context(AnswerFile(store.path_of(batch["_output_file_id"])))
            self._errors = opened.enter_context(AnswerFile(store.path_of(batch["_error_file_id"])))
            self._opened = opened.pop_all()
        self._store = store
        self._bytes_left = self._bytes_uncounted = 0
        self._count()

    @property
    def done(self) -> frozenset[str]:
        return frozenset(self._output.done | self._errors.done)

    def write(self, custom_id: str, status: int, request_id: str, body: object) -> None:
        if self._bytes_uncounted <= 0:  # other batches of the caller fill the same store
            self._bytes_left = self._store.bytes_left()
            self._bytes_uncounted = _RECOUNT_BYTES
        if self._bytes_left <= 0:
            raise StorageFull
        file = self._output if status < 400 else self._errors
        num_bytes = file.write(custom_id, status, request_id, body)
        self._bytes_left -= num_bytes
        self._bytes_uncounted -= num_bytes
        self._count()

    def _count(self) -> None:
        self._counts["completed"] = len(self._output.done)
        self._counts["failed"] = len(self._errors.done)

    def close(self) -> None:
        self._opened.close()


async def _open_answers(store: CallerStore, batch: Json) -> AnswerFiles:
    """Open the files on a thread. A cancel cannot stop the thread, so it waits until they can be closed."""
    opened: list[AnswerFiles] = []
    try:
        await until_ended(asyncio.to_thread(lambda: opened.append(AnswerFiles(store, batch))))
    except asyncio.CancelledError:
        for answers in opened:
            answers.close()
        raise
    return opened[0]


def _new_batch(endpoint: str, file_id: str, metadata: Json) -> Json:
    """Members with an underscore are not shown: the files of answers are named in advance, and appear at the end."""
    now = int(time.time())
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
        "_output_file_id": new_id("file"),
        "_error_file_id": new_id("file"),
    } | {f"{moment}_at": None for moment in moments}
