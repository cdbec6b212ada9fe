"""The bottleneck of a mesh, in a few words for operators. Pure: from the SDK's Mesh."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem import Mesh, Worker

_NEARLY_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The limit of the mesh. `level`: ok, busy or down. `side`: prefill or decode, or "" for neither."""

    level: str
    side: str
    headline: str
    detail: str


def find_bottleneck(mesh: Mesh) -> Bottleneck:
    """Find the bottleneck: what the queue waits for, or, without a queue, the fuller side."""
    decode = [worker for worker in mesh.workers if worker.role == "decode"]
    serving = [worker for worker in decode if worker.serving]
    prefill = [worker for worker in mesh.workers if worker.role == "prefill" and worker.serving]
    if not serving:
        return Bottleneck(
            "down", "decode", "No model is served: no decode worker takes requests", _worker_states(decode)
        )
    # The shortage is of one model, and the mesh does not say of which: sums over the workers of all would mislead.
    has_several_models = len({worker.model for worker in mesh.workers}) > 1
    if mesh.shortage == "decode worker":
        return Bottleneck(
            "down", "decode", "A model has no decode worker that takes requests", f"{_waiting(mesh)} for one."
        )
    if mesh.shortage == "decode capacity":
        waiting = f"{_waiting(mesh)} for a batch slot or KV memory"
        detail = f"{waiting}: {_decode_load(serving)}. {_more_decode(mesh, serving)}"
        return Bottleneck("busy", "decode", "Decode is the bottleneck", f"{waiting}." if has_several_models else detail)
    if mesh.shortage == "prefill capacity":
        waiting = f"{_waiting(mesh)} for prefill"
        detail = f"{waiting}: {_prefill_load(prefill)}. {_more_prefill(prefill)}"
        return Bottleneck(
            "busy", "prefill", "Prefill is the bottleneck", f"{waiting}." if has_several_models else detail
        )
    return _without_queue(mesh, prefill, serving)


def _without_queue(mesh: Mesh, prefill: list[Worker], decode: list[Worker]) -> Bottleneck:
    load = f"Decode: {_decode_load(decode)}. Prefill: {_prefill_load(prefill)}."
    away = [f"{worker.worker_id} is {worker.state}" for worker in mesh.workers if worker.state in ("lost", "stalled")]
    if away:
        return Bottleneck("busy", "", f"{', '.join(away)}; no request waits", load)
    if not prefill:
        return Bottleneck("ok", "prefill", "No prefill worker serves: decode workers run prefill themselves", load)
    if max(_slot_use(decode), _kv_use(decode)) >= _NEARLY_FULL:
        return Bottleneck("busy", "decode", "Decode is nearly full, but no request waits", load)
    num_waiting = sum(worker.load.num_waiting for worker in prefill)
    if num_waiting:
        return Bottleneck(
            "busy", "prefill", f"Prefill is the busier side: {_count(num_waiting, 'prompt')} in its queue", load
        )
    headline = "No bottleneck: no request waits" if mesh.active_requests else "Idle: ready for requests"
    return Bottleneck("ok", "", headline, load)


def _worker_states(decode: Iterable[Worker]) -> str:
    states = [
        f"{worker.worker_id} is {worker.state if worker.state != 'ready' else 'not proven yet'}" for worker in decode
    ]
    return "; ".join(states) + "." if states else "None has registered."


def _waiting(mesh: Mesh) -> str:
    return f"{_count(mesh.queued_requests, 'request')} {'waits' if mesh.queued_requests == 1 else 'wait'}"


def _decode_load(workers: list[Worker]) -> str:
    running = sum(worker.load.num_running for worker in workers)
    slots = sum(worker.max_num_seqs for worker in workers)
    used = f"{running} of {slots} slots taken, {100 * _kv_use(workers):.0f} % of KV memory in use"
    return used + _draft_acceptance(workers)


def _draft_acceptance(workers: list[Worker]) -> str:
    drafted = sum(worker.load.drafted_tokens for worker in workers)
    accepted = sum(worker.load.accepted_tokens for worker in workers)
    return f", {100 * accepted / drafted:.0f} % of draft tokens accepted" if drafted else ""


def _prefill_load(workers: list[Worker]) -> str:
    if not workers:
        return "no worker serves"
    return f"{_count(sum(worker.prefilling_tokens for worker in workers), 'prompt token')} to compute"


def _more_decode(mesh: Mesh, full: list[Worker]) -> str:
    """Say what one more decode worker would change: it would hold as many answers as a full one does now."""
    num_answers = min(mesh.queued_requests, sum(worker.load.num_running for worker in full) // len(full))
    if num_answers == 0:
        return "More decode workers would help."
    return f"One more decode worker, on cores of its own, would take about {num_answers:,} of them now."


def _more_prefill(busy: list[Worker]) -> str:
    """Say what one more prefill worker would change, if all are alike."""
    if not busy:
        return "Prefill workers would help."
    share = 100 * len(busy) / (len(busy) + 1)
    return f"One more prefill worker, on cores of its own, would compute them in about {share:.0f} % of the time."


def _slot_use(workers: list[Worker]) -> float:
    return sum(worker.load.num_running for worker in workers) / max(1, sum(worker.max_num_seqs for worker in workers))


def _kv_use(workers: list[Worker]) -> float:
    total = sum(worker.num_blocks for worker in workers)
    return 1 - sum(worker.load.free_blocks for worker in workers) / total if total else 0.0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
