"""Workers that come and go by the router's advice."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli.configuration.up_settings import UpSettings
from tandem_cli.local_mesh.deployment import Service
from tandem_cli.local_mesh.scaling import Change, Scaler, Scaling
from tests.waiting import until

SPARES = [Service(name, name.partition("-")[0], ()) for name in ("prefill-1", "decode-2", "decode-3")]
STARTED = {"prefill-0": "ready", "decode-0": "ready", "decode-1": "ready"}
ADD = tandem.Advice("add", "decode", "requests waited")
REMOVE = tandem.Advice("remove", "decode", "they are used 10%")


def worker(name: str, state: str) -> tandem.Worker:
    load = tandem.WorkerLoad(0, 0, 0, 0)
    return tandem.Worker(name, "", name.partition("-")[0], state, "", "m", "cpu", 1, 1, load, 0.0)


def follow(scaler: Scaler, states: dict[str, str], *advice: tandem.Advice) -> list[tuple[str, bool]]:
    workers = tuple(worker(name, state) for name, state in states.items())
    changes = scaler.follow(tandem.Mesh(workers, queued_requests=0, active_requests=0, advice=advice))
    return [(change.service.name, change.is_added) for change in changes]


def test_workers_come_one_at_a_time_up_to_the_limit_and_leave_last_first() -> None:
    scaler, states = Scaler(SPARES), dict(STARTED)
    assert follow(scaler, states) == []
    assert follow(scaler, states, ADD) == [("decode-2", True)]
    assert follow(scaler, states, ADD) == []
    assert follow(scaler, {**states, "decode-2": "stalled"}, ADD) == []
    states["decode-2"] = "ready"
    assert follow(scaler, states, ADD) == [("decode-3", True)]
    states["decode-3"] = "ready"
    assert follow(scaler, states, ADD) == []
    assert follow(scaler, states, REMOVE) == [("decode-3", False)]
    assert follow(scaler, {**states, "decode-3": "draining"}, REMOVE) == []
    states["decode-3"] = "stopped"
    assert follow(scaler, states, REMOVE) == [("decode-2", False)]
    del states["decode-2"]
    assert follow(scaler, states, REMOVE) == []
    assert follow(scaler, states, ADD) == [("decode-2", True)]


def test_a_worker_that_finds_no_place_is_withdrawn() -> None:
    scaler = Scaler(SPARES)
    assert follow(scaler, STARTED, ADD) == [("decode-2", True)]
    assert follow(scaler, STARTED, REMOVE) == [("decode-2", False)]
    assert follow(scaler, STARTED, REMOVE) == []
    assert follow(scaler, STARTED, ADD) == [("decode-2", True)]


def test_a_role_does_not_wait_for_the_other() -> None:
    scaler = Scaler(SPARES)
    assert follow(scaler, STARTED, ADD, replace(ADD, role="prefill")) == [("decode-2", True), ("prefill-1", True)]


def test_a_role_without_spares_stays_as_it_is() -> None:
    assert follow(Scaler([]), STARTED, ADD, REMOVE) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_decode": 4}, "max_decode needs --on ray"),
        ({"max_decode": 4, "on": "ray", "switchable": True}, "workers that are not switchable"),
        ({"max_decode": 1, "decode": 2, "on": "ray"}, "max_decode must be >= decode, which is 2 and not 0, got 1"),
        ({"max_prefill": 1, "colocated": True, "on": "ray"}, "max_prefill must be >= prefill, which is 0"),
    ],
)
def test_limits_that_cannot_hold_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        UpSettings(**values)  # type: ignore[arg-type]
    UpSettings(max_decode=4, max_prefill=2, on="ray")


class Router:
    """A client whose router answers as `answers` say, one after the other, and then always as the last."""

    def __init__(self, answers: list[Callable[[], tandem.Mesh]]) -> None:
        self._answers = answers

    async def __aenter__(self) -> "Router":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def mesh(self, *, timeout: float) -> tandem.Mesh:
        return (self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])()


def failing(error: Exception) -> Callable[[], tandem.Mesh]:
    def answer() -> tandem.Mesh:
        raise error

    return answer


def advising(*advice: tandem.Advice) -> tandem.Mesh:
    workers = tuple(worker(name, state) for name, state in STARTED.items())
    return tandem.Mesh(workers, queued_requests=0, active_requests=0, advice=advice)


async def test_failures_are_told_once_and_scaling_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_cli.local_mesh.scaling._ASK_EACH_S", 0)
    away = failing(tandem.ConnectionFailed("the router is away"))
    router = Router([away, away, failing(LookupError("unforeseen")), advising, away, lambda: advising(ADD)])
    num_spare_failures = 2
    asked_at: list[str] = []

    def spares(registry_address: str) -> list[Service]:
        nonlocal num_spare_failures
        asked_at.append(registry_address)
        num_spare_failures -= 1
        if num_spare_failures >= 0:
            raise ConfigurationError("no cluster")
        return SPARES

    changes: list[Change] = []
    warnings: list[str] = []
    scaling = Scaling(spares, lambda addresses: router)  # type: ignore[arg-type,return-value]
    task = asyncio.create_task(
        scaling.run("router:1", "registry:1", on_change=changes.append, on_warning=warnings.append)
    )
    await until(lambda: changes or task.done())
    assert not task.done()
    task.cancel()
    assert [change.service.name for change in changes] == ["decode-2"]
    assert asked_at == ["registry:1"] * 3
    told = [warning.removeprefix("no worker is added or removed: ").partition(";")[0] for warning in warnings]
    assert told[:2] == ["no cluster", "the router is away"]
    assert told[2].startswith("LookupError: unforeseen (")
    assert told[3:] == ["the router is away"]
