"""What the supervisor hears of a worker whose actor does this or that. No Ray runs: the actor is a fake."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from mesh.domain.errors import ConfigurationError
from tandem_cli.local_mesh.deployment import Service
from tandem_cli.local_mesh.launcher import ServiceEvent
from tandem_cli.on_ray import launch
from tandem_cli.on_ray.handover import Handover
from tandem_cli.on_ray.launch import RayWorker
from tandem_cli.on_ray.node import LOG_LINE, News
from tests.waiting import until

HANDOVER = Handover("decode-0", "decode", (), {}, {}, {})
READY = ("ready", {})


def news(*events: tuple[str, dict[str, Any]]) -> News:
    return News(77, events)


class FakeActor:
    """Answers calls of `follow` with `answers`, one by one, and then with no news."""

    def __init__(self, *answers: News | RayError) -> None:
        self.answers = list(answers)
        self.num_stops = 0
        self.is_removed = False

    @property
    def actor(self) -> "FakeActor":
        return self

    def remove(self) -> None:
        self.is_removed = True

    def is_waiting(self) -> bool:
        return True

    @property
    def follow(self) -> Any:
        async def answer(handover: Handover) -> News:
            assert handover is HANDOVER
            if not self.answers:
                await asyncio.sleep(0.01)
                return news()
            found = self.answers.pop(0)
            if isinstance(found, RayError):
                raise found
            return found

        return _Method(answer)

    @property
    def stop(self) -> Any:
        async def answer(limit_s: float) -> News:
            self.num_stops += 1
            return news((LOG_LINE, {"line": b"the last line\n"}), ("exited", {"status": 0}))

        return _Method(answer)


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Watched:
    """A worker with the fake actor, and what it has told the supervisor."""

    def __init__(self, folder: Path, *answers: News | RayError, restarts: bool = True) -> None:
        self.events: list[ServiceEvent] = []
        self.warnings: list[str] = []
        self.actor = FakeActor(*answers)
        self.worker = RayWorker(
            Service("decode-0", "decode", ()),
            self.actor,  # type: ignore[arg-type]
            folder / "decode-0.log",
            restarts=restarts,
            on_event=self.events.append,
            on_warning=lambda name, text: self.warnings.append(text),
        )
        self.worker.follow(HANDOVER, waiting_for="1 CPU")

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "_RETRY_S", 0.0)
    monkeypatch.setattr(launch, "_REFUSED_RETRY_S", 0.0)
    return


def refusal(error: Exception) -> RayTaskError:
    """The error that Ray raises when a method of an actor has raised `error`."""
    found = RayTaskError("follow", f"traceback\n{error}", error).as_instanceof_cause()
    assert isinstance(found, RayTaskError)
    return found


def unavailable() -> RayError:
    return ActorUnavailableError("its node is gone", None)


async def test_announcements_and_logs_arrive(tmp_path: Path) -> None:
    warning = b'{"event": "slow", "level": "warning"}\n'
    watched = Watched(
        tmp_path,
        news(("listening", {"address": "10.0.0.7:5000"}), ("metrics", {"address": "10.0.0.7:9000"})),
        news((LOG_LINE, {"line": b'{"event": "hello", "level": "info"}\n'}), (LOG_LINE, {"line": warning}), READY),
    )
    await until(lambda: "ready" in watched.kinds)
    worker = watched.worker
    assert (worker.pid, worker.address, worker.metrics_address) == (77, "10.0.0.7:5000", "10.0.0.7:9000")
    assert watched.warnings == ["warning: slow"]
    assert list(worker.tail) == ["info: hello", "warning: slow"]
    await worker.stop(1.0)
    assert (watched.actor.num_stops, watched.actor.is_removed) == (1, True)
    assert worker.log_path.read_text().splitlines()[-1] == "the last line"


async def test_an_end_while_starting_is_reported(tmp_path: Path) -> None:
    watched = Watched(tmp_path, news(("exited", {"status": 2})))
    await until(lambda: watched.events)
    assert (watched.kinds, watched.events[0].fields) == (["exited"], {"status": 2})
    await watched.worker.stop(1.0)


async def test_ray_starts_a_ready_worker_again(tmp_path: Path) -> None:
    """Whatever befalls it: the supervisor would start it twice."""
    end = news(("exited", {"status": -9}))
    watched = Watched(tmp_path, news(READY), end, ActorDiedError(), unavailable(), unavailable(), news(READY))
    await until(lambda: watched.kinds.count("ready") == 2)
    assert watched.kinds == ["ready", "ready"]
    assert watched.warnings == ["ended with status -9; Ray starts it again"]
    await watched.worker.stop(1.0)


async def test_a_lost_node_is_told_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, news(READY), ActorDiedError(), unavailable(), unavailable(), news(READY))
    await until(lambda: watched.kinds.count("ready") == 2)
    assert watched.warnings == ["its actor or its node is gone; Ray places it anew"]
    await watched.worker.stop(1.0)


async def test_without_restarts_an_end_is_the_end(tmp_path: Path) -> None:
    end = news(("exited", {"status": 1}))
    watched = Watched(tmp_path, news(READY), end, *[ActorDiedError()] * 3, restarts=False)
    await until(lambda: not watched.actor.answers)
    await asyncio.sleep(0)
    assert watched.kinds == ["ready", "exited"]
    await watched.worker.stop(1.0)


async def test_an_actor_that_is_dead_for_good_is_placed_by_the_supervisor(tmp_path: Path) -> None:
    watched = Watched(tmp_path, news(READY), *[ActorDiedError()] * 3)
    await until(lambda: "exited" in watched.kinds)
    await watched.worker.stop(1.0)
    assert (watched.actor.num_stops, watched.actor.is_removed) == (0, True)


async def test_a_node_that_refuses_is_quoted(tmp_path: Path) -> None:
    watched = Watched(tmp_path, refusal(ConfigurationError("on the Ray node 10.0.0.7, there is no model")))
    await until(lambda: watched.events)
    assert watched.events[0].fields == {"status": 2}
    assert list(watched.worker.tail) == ["on the Ray node 10.0.0.7, there is no model"]
    await watched.worker.stop(1.0)


async def test_a_node_without_the_package_is_named(tmp_path: Path) -> None:
    text = (
        "The actor with name WorkerActor failed to import on the worker. This may be because needed library "
        "dependencies are not installed in the worker environment:\n\nModuleNotFoundError: No module named 'tandem_cli'"
    )
    watched = Watched(tmp_path, refusal(RuntimeError(text)))
    await until(lambda: watched.events)
    assert "a Ray node cannot import tandem-serve (ModuleNotFoundError" in watched.worker.tail[-1]
    await watched.worker.stop(1.0)


async def test_a_wait_for_resources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_WAIT_HINT_S", 0.0)
    watched = Watched(tmp_path, *[unavailable()] * 3, news(READY))
    await until(lambda: "ready" in watched.kinds)
    assert watched.warnings == ["Ray has found no place for it yet: it waits for 1 CPU on one node"]
    await watched.worker.stop(1.0)
