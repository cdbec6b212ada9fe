"""States what a run has shown, requirement by requirement."""

from collections import Counter

from tests.chaos import drills
from tests.chaos.cluster import Cluster
from tests.chaos.history import CANCELLED, FINISHED, Disturbance, failed_in, is_about_ending, judge, percentile
from tests.chaos.load import Load
from tests.chaos.samples import Sample, keys_have_grown, longest_lives
from tests.chaos.watch import (
    CapWatch,
    complaints,
    in_background,
    late_statuses,
    log_entries,
    replayed,
    resume_gaps,
)
from tests.evidence import Evidence

Causes = Counter[tuple[str, ...]]

_FLOOD_ENDINGS = ("left after a token", "left while waiting", "finished", "Overloaded")
_SLOPE_MIB_PER_MIN = 1.0
# Below this a growth says more about the warm-up than about leaks, and is only printed.
MIN_SLOPE_S = 600.0
_SOAK_COUNTS = (
    FINISHED,
    CANCELLED,
    "out of their own time",
    "ended with an error",
    "errors put down to the busy machine",
    "faults struck",
)
_SOAK_ZEROS = (
    ("R1", "streams without exactly one ending"),
    ("R1", "errors no fault excuses"),
    ("R2", "streams not token-exact"),
    ("R1", "faults that were not recovered from"),
    ("R7", "processes that died by themselves"),
)


def state_load(evidence: Evidence, load: Load) -> None:
    """R1, R2 and R6: how all streams ended, what was in them, and how long they paused."""
    histories = load.histories
    verdict = judge(histories, load.disturbances)
    wrong = [fault for history in histories for fault in history.faults]
    endings = Counter(history.ending for history in histories)
    count = len(histories)
    terminal = [fault for fault in wrong if is_about_ending(fault)]
    late = sum(history.is_late for history in histories)
    measured = ", ".join(f"{number} {ending}" for ending, number in endings.items())
    evidence("R1", f"{count} requests under faults", measured, target="all end", ok=True)
    evidence("R1", "streams without exactly one terminal event", _few(terminal), target="0", ok=not terminal)
    evidence("R1", "ended later than deadline + 1 s", late, target="0", ok=late == 0, is_reported_only=True)
    evidence("R1", "errors no fault excuses", _few(verdict.unexcused), target="0", ok=not verdict.unexcused)
    evidence("R1", "errors faults excuse", _by_fault(verdict.excused), target="within budgets", ok=True)
    evidence("R2", "wrong tokens, texts, log-probs or usages under faults", _few(wrong), target="0", ok=not wrong)
    gaps = resume_gaps(histories, replayed(load.cluster))
    p50, p95 = percentile(gaps, 50), percentile(gaps, 95)
    measured = f"p50 {p50:.2f} s, p95 {p95:.2f} s, most {max(gaps, default=0):.2f} s"
    # A worker that is cut off is noticed after 5 s without a heartbeat, and a killed one at once (R6: p95 <= 5 s).
    evidence(
        "R6", f"gaps of {len(gaps)} resumed streams", measured, target="p95 <= 7 s", ok=p95 <= 7, is_reported_only=True
    )


def state_redis(evidence: Evidence, load: Load) -> None:
    """R9: what Redis's absences did."""
    others = [disturbance for disturbance in load.disturbances if "redis" not in disturbance.name]
    for disturbance in load.disturbances:
        if "redis" not in disturbance.name:
            continue
        began_s, failed = disturbance.began_s, failed_in(disturbance, load.histories, others)
        broken = [history for history in failed if history.started_s < began_s]
        num_refused = len(failed) - len(broken)
        num_new = sum(disturbance.meets(history) and history.started_s >= began_s for history in load.histories)
        served = f"{num_new - num_refused} of {num_new}"
        is_served = num_refused <= max(disturbance.budget or 0, num_new // 1000)
        evidence("R9", f"{disturbance.name}: new requests served", served, target=">= 99.9 %", ok=is_served)
        evidence("R9", f"{disturbance.name}: streams broken", len(broken), target="0", ok=not broken)


def state_log_rate(evidence: Evidence, before: Causes, after: Causes, lasted_s: float) -> None:
    """R26: a peer that is away is not complained about all the time."""
    rates = {cause: (count - before[cause]) / lasted_s for cause, count in after.items()}
    cause, rate = max(rates.items(), key=lambda item: item[1], default=(("",), 0.0))
    measured = f"{rate:.2f} lines/s ({' '.join(filter(None, cause))})"
    evidence(
        "R26", f"most warnings of one cause, peer away {lasted_s:.0f} s", measured, target="<= 1 line/s", ok=rate <= 1
    )


def state_processes(evidence: Evidence, cluster: Cluster) -> None:
    """R7, R9, R17: nobody dies but who was killed, and nobody is surprised."""
    died = [f"{end.name} ({end.status})" for end in cluster.exits(wanted=False)]
    evidence("R7", "processes that died by themselves", _few(died), target="0", ok=not died)
    lines = complaints(cluster)
    evidence("R17", "errors and tracebacks in all logs", _few(lines), target="0", ok=not lines)
    late = late_statuses(cluster)
    evidence("R17", "tracebacks of statuses that came too late", late, target="0", ok=not late)


def state_cap(evidence: Evidence, watch: CapWatch, disturbances: list[Disturbance], requirement: str) -> None:
    """No more in service at both routers together than the cap says."""
    breaches = watch.breaches(disturbance for disturbance in disturbances if "redis" in disturbance.name)
    measured = (
        f"{len(breaches)} of {len(watch.samples)} samples, at most {watch.most_held} of {watch.cluster.shape.cap}"
    )
    evidence(requirement, "looks that found the shared cap exceeded", measured, target="0", ok=not breaches)


def num_refused(cluster: Cluster) -> int:
    """Transfers that decode workers have refused because a chunk did not verify."""
    return sum(
        "checksum" in entry["error"]
        for name in cluster.of_role("decode")
        for entry in log_entries(cluster, name, "transfer_failed")
    )


def state_soak(evidence: Evidence, samples: list[Sample]) -> None:
    """R1, R2, R23: how the streams of a long run ended, and that memory, descriptors, threads and keys do not grow."""
    counts, notes = samples[-1].counts, samples[-1].notes
    measured = ", ".join(f"{count} {what}" for what, count in counts.items() if what in _SOAK_COUNTS)
    evidence("R1", f"{counts['requests']} requests of the soak", measured, target="all end", ok=counts["requests"] > 0)
    for requirement, what in _SOAK_ZEROS:
        evidence(requirement, f"soak: {what}", counts[what], target="0", ok=not counts[what])
    lives = {name: life for name, life in longest_lives(samples).items() if name != "redis"}
    shortest_s = min(life.lasted_s for life in lives.values())
    for name, life in lives.items():
        rate = life.slope_per_min(lambda held: held.rss_mib)
        what = f"RSS slope of {name} over the second half of {life.lasted_s:.0f} s"
        is_reported_only, ok = life.lasted_s < MIN_SLOPE_S, rate <= _SLOPE_MIB_PER_MIN
        evidence("R23", what, f"{rate:.2f} MiB/min", target="<= 1 MiB/min", ok=ok, is_reported_only=is_reported_only)
    grown = [name for name, life in lives.items() if life.has_grown]
    what, is_reported_only = "processes with more files or threads at the end", shortest_s < MIN_SLOPE_S
    evidence("R23", what, grown or 0, target="0", ok=not grown, is_reported_only=is_reported_only)
    evidence("R23", "keys in Redis", samples[-1].num_keys, target="flat", ok=not keys_have_grown(samples))
    assert not notes, notes


def state_pressure(evidence: Evidence, watch: CapWatch, disturbances: list[Disturbance]) -> None:
    """R28: the cap while routers and Redis go and come back, with more asked than it allows."""
    state_cap(evidence, watch, disturbances, "R28")
    redis = [disturbance for disturbance in disturbances if "redis" in disturbance.name]
    held = [
        sample.held or 0
        for sample in watch.samples
        if any(disturbance.began_s <= sample.at_s <= disturbance.ended_s for disturbance in redis)
    ]
    # Shares are half of the cap each; one router may go into the outage holding all of it.
    most, bound = max(held, default=0), watch.cluster.shape.cap * 3 // 2
    evidence("R28", "most in service while Redis is away", most, target=f"<= {bound}", ok=most <= bound)


def state_killed(evidence: Evidence, kills: list[drills.Killed]) -> None:
    """State the figures of R6 over all kills of decode workers."""
    num_streams, num_exact = sum(kill.num_streams for kill in kills), sum(kill.num_exact for kill in kills)
    num_replayed = sum(kill.num_replayed for kill in kills)
    measured, ok = f"{num_exact} of {num_streams}, {num_replayed} replayed", num_exact >= 0.99 * num_streams
    evidence(
        "R6", "streams token-exact over SIGKILL", measured, target=">= 99 %, some replayed", ok=ok and num_replayed > 0
    )
    p95 = percentile([gap_s for kill in kills for gap_s in kill.gaps_s], 95)
    evidence("R6", "longest wait for a token, p95", f"{p95:.2f} s", target="<= 5 s", ok=p95 <= 5, is_reported_only=True)
    most = max((count for kill in kills for count in kill.failed_new.values()), default=0)
    num_new = sum(kill.num_new for kill in kills) // (2 * len(kills))
    measured = f"{most} of {num_new}, {len(kills)} kills"
    evidence("R6", "most failed new requests at a router for a kill", measured, target="<= 1", ok=most <= 1)


def state_prefill_killed(evidence: Evidence, kills: list[drills.PrefillKilled]) -> None:
    """State the figures of R7 over all kills of prefill workers."""
    num_prompts, num_exact = sum(kill.num_prompts for kill in kills), sum(kill.num_exact for kill in kills)
    num_replayed = sum(kill.num_replayed for kill in kills)
    errors = sum((kill.errors for kill in kills), Counter[str]())
    measured, ok = f"{num_exact} of {num_prompts}, {num_replayed} replayed", num_exact == num_prompts
    measured += f", {dict(errors)}" if errors else ""
    evidence(
        "R7", "prompts answered exactly over SIGKILL", measured, target="all, some replayed", ok=ok and num_replayed > 0
    )
    slowest_s = max(kill.at_rest_s for kill in kills)
    evidence("R7", "blocks back", f"{slowest_s:.1f} s", target="<= 10 s", ok=slowest_s <= 10, is_reported_only=True)


async def check_flips(evidence: Evidence, cluster: Cluster, count: int) -> None:
    """R3: every transfer that is hit is refused and replayed."""
    before = num_refused(cluster)
    flipped = await drills.flip_transfers(cluster, count)
    refused = num_refused(cluster) - before
    measured = f"{refused} refused of {flipped.num_flips}"
    ok = refused == flipped.num_flips > 0
    evidence("R3", "transfers with a flipped byte", measured, target="all refused, and some", ok=ok)
    measured = f"{flipped.num_wrong} of {flipped.num_answers}"
    evidence("R3", "wrong answers after flips", measured, target="0", ok=not flipped.num_wrong)


async def check_flood(evidence: Evidence, cluster: Cluster, count: int) -> None:
    """R28: open, leave, and look whether everything is back. AssertionError if it is not."""
    cap = CapWatch(cluster)
    async with in_background(cap.run()):
        endings = await drills.flood(cluster, count)
    broken = {name: number for name, number in endings.items() if name not in _FLOOD_ENDINGS}
    measured = ", ".join(f"{number} {name}" for name, number in endings.items())
    evidence("R28", f"{count} streams opened and left", measured, target="0 broken", ok=not broken)
    state_cap(evidence, cap, [], "R28")
    returned_s = await drills.permits_return_s(cluster)
    await cluster.wait_at_rest()
    evidence("R28", "permits back after the flood", f"{returned_s:.1f} s", target="all", ok=True)


def _few(found: list[str]) -> str:
    return f"{len(found)}: {'; '.join(found[:3])}" if found else "0"


def _by_fault(excused: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {count} {kind}" for (name, kind), count in sorted(excused.items())) or "none"
