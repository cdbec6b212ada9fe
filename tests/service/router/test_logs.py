"""The log of a router: one line for each choice, with its lifetime; few lines while a peer is dead (R26)."""

import asyncio
from collections import Counter
from typing import Any

import structlog

from tests.evidence import Evidence
from tests.fakes.router_workers import FakeWorker, expected_tokens
from tests.service.conftest import Mesh
from tests.service.router.test_canaries import SICK, fails

EVENTS = (
    "queued",
    "prefill_started",
    "transfer_started",
    "prefill_finished",
    "first_token",
    "transfer_finished",
    "decode_started",
    "finished",
)
PROMPT = [65, 66, 67, 68, 69]
WATCHED_S = 12.0


async def test_a_finished_line_has_all_phases_in_order(make_mesh: Any, evidence: Evidence) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.pace_s = 0.1  # so that the answer cannot be complete before the transfer is heard to be
    with structlog.testing.capture_logs() as logs:
        await mesh.generate(token_ids=list(range(65, 97)), max_new_tokens=8)
        await mesh.until(lambda: any(line["event"] == "finished" for line in logs))
    (line,) = [line for line in logs if line["event"] == "finished"]
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (32, 8, "length")
    times_ms = {event: line[f"{event}_ms"] for event in EVENTS}
    assert times_ms["queued"] <= times_ms["prefill_started"] <= times_ms["prefill_finished"] <= times_ms["finished"]
    assert times_ms["transfer_started"] <= times_ms["transfer_finished"] <= times_ms["finished"]
    assert max(times_ms.values()) == times_ms["finished"]
    evidence("R25", "phases in the access log's line", f"{len(times_ms)} of {len(EVENTS)}", target="all", ok=True)


async def beat(*workers: FakeWorker) -> None:
    """Also the dead ones say that they live: the worst a router can meet."""
    while True:
        for worker in workers:
            worker.beat()
        await asyncio.sleep(0.2)


async def generate_for(mesh: Mesh, duration_s: float) -> int:
    """Requests one after another, each exact; returns how many."""
    loop = asyncio.get_running_loop()
    count, until_s = 0, loop.time() + duration_s
    while loop.time() < until_s:
        result = await mesh.generate(token_ids=[*PROMPT, count % 100], max_new_tokens=4)
        assert result.ids() == expected_tokens([*PROMPT, count % 100], 4)
        count += 1
        await asyncio.sleep(0.02)
    return count


async def test_dead_peers_cost_few_lines(make_mesh: Any, evidence: Evidence) -> None:
    """A decode and a prefill worker nobody can reach, two that fail whatever they get, and requests all the time."""
    mesh = await make_mesh()
    decode, prefill = await mesh.decode("decode-0"), await mesh.prefill("prefill-0")
    failing, cut = await mesh.decode("decode-1"), await mesh.prefill("prefill-1")
    well = await mesh.decode("decode-2")
    failing.canary, cut.canary = SICK, fails()
    failing.scripts, cut.scripts = [SICK for _ in range(999)], [fails() for _ in range(999)]
    await asyncio.gather(decode.server.stop(0), prefill.server.stop(0))
    beats = asyncio.create_task(beat(decode, prefill, failing, cut, well))
    with structlog.testing.capture_logs() as lines:
        num_requests = await generate_for(mesh, WATCHED_S)
    beats.cancel()
    causes = Counter((line["event"], line.get("worker")) for line in lines if line["event"] != "finished")
    assert sum(line["event"] == "finished" for line in lines) == num_requests
    assert {"decode link broken", "canary failed"} <= {event for event, _ in causes}
    (cause, most), *_ = causes.most_common(1)
    evidence(
        "R26",
        f"lines of the loudest cause beside {num_requests} requests",
        f"{most} in {WATCHED_S:g} s ({cause[0]}, {cause[1]})",
        target="<= 1 per s",
        ok=most <= WATCHED_S,
    )
