"""One line for each choice, with its lifetime in milliseconds."""

from typing import Any

import structlog

from tests.evidence import Evidence

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
