"""Which side is the bottleneck, in words."""

import json
from typing import Any

import pytest

from gateway.bottleneck import find_bottleneck
from gateway.web import state_json
from tandem import Mesh, Worker, WorkerLoad


def worker(name: str, **changes: Any) -> Worker:
    role = name.split("-")[0]
    load = WorkerLoad(**{"free_blocks": 100} | changes.pop("load", {}))
    facts = {"state": "ready", "serving": True, "model": "m", "num_blocks": 100, "max_num_seqs": 4} | changes
    return Worker(name, name, role, address="", device="cpu", pid=1, load=load, last_seen_s=0.0, **facts)


FULL = {"free_blocks": 10, "num_running": 4}
PREFILL, DECODE = worker("prefill-0"), worker("decode-0")


@pytest.mark.parametrize(
    ("mesh", "expected", "words"),
    [
        (Mesh((), 0, 0), ("down", "decode"), "None has registered"),
        (Mesh((PREFILL, worker("decode-0", serving=False)), 1, 1), ("down", "decode"), "decode-0 is not proven yet"),
        (Mesh((worker("decode-0", serving=False, state="lost"),), 0, 0), ("down", "decode"), "decode-0 is lost"),
        (
            Mesh((PREFILL, worker("decode-0", load=FULL)), 2, 6, shortage="decode capacity"),
            ("busy", "decode"),
            "2 requests wait for a batch slot or KV memory: 4 of 4 slots taken, 90 % of KV",
        ),
        (
            Mesh(
                (PREFILL, worker("decode-0", load=FULL), worker("decode-1", load=FULL)),
                9,
                17,
                shortage="decode capacity",
            ),
            ("busy", "decode"),
            "90 % of KV memory in use. One more decode worker, on cores of its own, would take about 4 of them",
        ),
        (
            Mesh((PREFILL, worker("decode-0", load=FULL)), 2, 6, shortage="decode capacity"),
            ("busy", "decode"),
            "would take about 2 of them",
        ),
        (
            Mesh((PREFILL, worker("decode-0", load={"free_blocks": 10})), 2, 6, shortage="decode capacity"),
            ("busy", "decode"),
            "More decode workers would help",
        ),
        (
            Mesh((worker("prefill-0", prefilling_tokens=4096), DECODE), 1, 3, shortage="prefill capacity"),
            ("busy", "prefill"),
            "1 request waits for prefill: 4,096 prompt tokens to compute. One more prefill worker, on cores of its "
            "own, would compute them in about 50 % of the time.",
        ),
        (Mesh((DECODE,), 1, 3, shortage="prefill capacity"), ("busy", "prefill"), "no worker serves. Prefill workers"),
        (Mesh((PREFILL, worker("decode-0", load=FULL)), 0, 4), ("busy", "decode"), "nearly full"),
        (Mesh((worker("prefill-0", load={"num_waiting": 2}), DECODE), 0, 4), ("busy", "prefill"), "2 prompts in its"),
        (
            Mesh((PREFILL, DECODE, worker("decode-1", serving=False, state="lost")), 0, 1),
            ("busy", ""),
            "decode-1 is lost",
        ),
        (Mesh((DECODE,), 0, 1), ("ok", "prefill"), "run prefill themselves"),
        (Mesh((PREFILL, DECODE), 0, 1), ("ok", ""), "No bottleneck"),
        (
            Mesh((PREFILL, worker("decode-0", load={"drafted_tokens": 8, "accepted_tokens": 6})), 0, 1),
            ("ok", ""),
            "of KV memory in use, 75 % of draft tokens accepted",
        ),
        (Mesh((PREFILL, DECODE), 0, 0), ("ok", ""), "Idle"),
    ],
)
def test_bottlenecks(mesh: Mesh, expected: tuple[str, str], words: str) -> None:
    found = find_bottleneck(mesh)
    assert (found.level, found.side) == expected
    assert words in f"{found.headline}. {found.detail}"


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_with_several_models_no_load_of_all_explains_the_shortage_of_one(side: str) -> None:
    """The full worker's model waits; the other model's worker is idle."""
    workers = (PREFILL, worker("decode-0", load=FULL), worker("decode-1", model="other"))
    found = find_bottleneck(Mesh(workers, 2, 6, shortage=f"{side} capacity"))
    assert (found.level, found.side) == ("busy", side)
    assert found.detail.startswith("2 requests wait for ")
    assert not any(words in found.detail for words in (" of 8", "%", "One more", "to compute"))


def test_the_state_is_json() -> None:
    state = json.loads(json.dumps(state_json(Mesh((PREFILL, DECODE), 0, 0), at_s=5.0)))
    assert state["at_s"] == 5.0
    assert state["workers"][0]["load"]["free_blocks"] == 100
    assert state["verdict"]["headline"].startswith("Idle")
