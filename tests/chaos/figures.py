"""States what a run has shown, requirement by requirement."""

from collections import Counter

from tests.chaos import drills
from tests.chaos.cluster import Cluster
from tests.chaos.history import Disturbance, judge, percentile
from tests.chaos.load import Load
from tests.chaos.watch import (
    CapWatch,
    UsageWatch,
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
# Below this a slope says more about the warm-up than about leaks, and is only printed.
MIN_SLOPE_S = 600.0


def state_load(evidence: Evidence, load: Load) -> None:
    """R1 and R2: how all streams ended, and what was in them."""
    histories = load.histories
    verdict = judge(histories, load.disturbances)
    wrong = [fault for history in histories for fault in history.faults]
    endings = Counter(history.ending for history in histories)
    count = len(histories)
    terminal = [fault for fault in wrong if "ended" in fault or "terminal" in fault]
    late = sum(history.is_late for history in histories)
    said = ", ".join(f"{number} {ending}" for ending, number in endings.items())
    evidence("R1", f"{count} requests under faults", said, target="all end", ok=True)
    evidence("R1", "streams without exactly one terminal event", _few(terminal), target="0", ok=not terminal)
    evidence("R1", "ended later than deadline + 1 s", late, target="0", ok=late == 0, is_time=True)
    evidence("R1", "errors no fault excuses", _few(verdict.unexcused), target="0", ok=not verdict.unexcused)
    evidence("R1", "errors faults excuse", _by_fault(verdict.excused), target="within budgets", ok=True)
    evidence("R2", "wrong tokens, texts, log-probs or usages under faults", _few(wrong), target="0", ok=not wrong)
    gaps = resume_gaps(histories, replayed(load.cluster))
    p50, p95 = percentile(gaps, 50), percentile(gaps, 95)
    said = f"p50 {p50:.2f} s, p95 {p95:.2f} s, most {max(gaps, default=0):.2f} s"
    evidence("R1", f"gaps of {len(gaps)} resumed streams", said, target="p95 <= 7 s", ok=p95 <= 7, is_time=True)


def state_redis(evidence: Evidence, load: Load) -> None:
    """R9: what Redis's absences did."""
    for each in load.disturbances:
        if "redis" not in each.name:
            continue
        met = [history for history in load.histories if each.meets(history)]
        new = [history for history in met if history.started_s >= each.began_s]
        failed = [history for history in new if history.has_failed]
        broken = [history for history in met if history.started_s < each.began_s and history.has_failed]
        served = f"{len(new) - len(failed)} of {len(new)}"
        is_served = len(failed) <= max(each.budget or 0, len(new) // 1000)
        evidence("R9", f"{each.name}: new requests served", served, target=">= 99.9 %", ok=is_served)
        evidence("R9", f"{each.name}: streams broken", len(broken), target="0", ok=not broken)


def state_log_rate(evidence: Evidence, before: Causes, after: Causes, lasted_s: float) -> None:
    """R26: a peer that is away is not complained about all the time."""
    rates = {cause: (count - before[cause]) / lasted_s for cause, count in after.items()}
    cause, rate = max(rates.items(), key=lambda item: item[1], default=(("",), 0.0))
    said = f"{rate:.2f} lines/s ({' '.join(filter(None, cause))})"
    evidence("R26", f"most warnings of one cause, peer away {lasted_s:.0f} s", said, target="<= 1 line/s", ok=rate <= 1)


def state_processes(evidence: Evidence, cluster: Cluster) -> None:
    """R7, R9, R17: nobody dies but who was killed, and nobody is surprised."""
    died = [f"{end.name} ({end.status})" for end in cluster.exits(wanted=False)]
    evidence("R7", "processes that died by themselves", _few(died), target="0", ok=not died)
    found = complaints(cluster)
    evidence("R17", "errors and tracebacks in all logs", _few(found), target="0", ok=not found)
    late = late_statuses(cluster)
    evidence("R17", "tracebacks of statuses that came too late", late, target="0", ok=not late, is_time=True)


def state_cap(evidence: Evidence, watch: CapWatch, disturbances: list[Disturbance], requirement: str) -> None:
    """No more in service at both routers together than the cap says."""
    breaches = watch.breaches(each for each in disturbances if "redis" in each.name)
    said = f"{len(breaches)} of {len(watch.samples)} samples, at most {watch.most_held} of {watch.cluster.shape.cap}"
    evidence(requirement, "looks that found the shared cap exceeded", said, target="0", ok=not breaches)


def num_refused(cluster: Cluster) -> int:
    """Transfers that decode workers have refused because a chunk did not verify."""
    return sum(
        "checksum" in entry["error"]
        for name in cluster.of_role("decode")
        for entry in log_entries(cluster, name, "transfer_failed")
    )


def state_usage(evidence: Evidence, watch: UsageWatch) -> None:
    """R23: memory, files and keys do not grow."""
    lasted_s = watch.samples[-1][0]
    worst = max(watch.cluster.nodes, key=watch.rss_slope_mib_per_min)
    for name in (worst, *watch.cluster.routers):
        rate = watch.rss_slope_mib_per_min(name)
        what = f"RSS slope of {name} over the second half of {lasted_s:.0f} s"
        is_told_only = lasted_s < MIN_SLOPE_S
        ok = rate <= _SLOPE_MIB_PER_MIN
        evidence("R23", what, f"{rate:.2f} MiB/min", target="<= 1 MiB/min", ok=ok, is_time=is_told_only)
    fds = {name: watch.fds(name) for name in watch.cluster.nodes}
    grown = {name: counts for name, counts in fds.items() if counts[1] > counts[0] + 2}
    evidence("R23", "processes with more open files at the end", grown or 0, target="0", ok=not grown)
    keys = [num_keys for _, _, num_keys in watch.second_half()]
    said = f"{min(keys)} to {max(keys)}"
    evidence("R23", "keys in Redis over the second half", said, target="flat", ok=max(keys) - min(keys) <= 4)


def state_pressure(evidence: Evidence, watch: CapWatch, disturbances: list[Disturbance]) -> None:
    """R28: the cap while routers and Redis go and come back, with more asked than it allows."""
    state_cap(evidence, watch, disturbances, "R28")
    redis = [each for each in disturbances if "redis" in each.name]
    held = [
        sample.held or 0
        for sample in watch.samples
        if any(each.began_s <= sample.at_s <= each.ended_s for each in redis)
    ]
    # Shares are half of the cap each; one router may go into the outage holding all of it.
    most, bound = max(held, default=0), watch.cluster.shape.cap * 3 // 2
    evidence("R28", "most in service while Redis is away", most, target=f"<= {bound}", ok=most <= bound)


def state_killed(evidence: Evidence, kills: list[drills.Killed]) -> None:
    """R6, over all kills."""
    num_streams, num_exact = sum(each.num_streams for each in kills), sum(each.num_exact for each in kills)
    num_replayed = sum(each.num_replayed for each in kills)
    said, ok = f"{num_exact} of {num_streams}, {num_replayed} replayed", num_exact >= 0.99 * num_streams
    evidence(
        "R6", "streams token-exact over SIGKILL", said, target=">= 99 %, some replayed", ok=ok and num_replayed > 0
    )
    p95 = percentile([gap_s for each in kills for gap_s in each.gaps_s], 95)
    evidence("R6", "longest wait for a token, p95", f"{p95:.2f} s", target="<= 5 s", ok=p95 <= 5, is_time=True)
    most = max((count for each in kills for count in each.failed_new.values()), default=0)
    num_new = sum(each.num_new for each in kills) // (2 * len(kills))
    said = f"{most} of {num_new}, {len(kills)} kills"
    evidence("R6", "most failed new requests at a router for a kill", said, target="<= 1", ok=most <= 1)


def state_prefill_killed(evidence: Evidence, kills: list[drills.PrefillKilled]) -> None:
    """R7, over all kills."""
    num_prompts, num_exact = sum(each.num_prompts for each in kills), sum(each.num_exact for each in kills)
    num_replayed = sum(each.num_replayed for each in kills)
    errors = sum((each.errors for each in kills), Counter[str]())
    said, ok = f"{num_exact} of {num_prompts}, {num_replayed} replayed", num_exact == num_prompts
    said += f", {dict(errors)}" if errors else ""
    evidence(
        "R7", "prompts answered exactly over SIGKILL", said, target="all, some replayed", ok=ok and num_replayed > 0
    )
    slowest_s = max(each.at_rest_s for each in kills)
    evidence("R7", "blocks back", f"{slowest_s:.1f} s", target="<= 10 s", ok=slowest_s <= 10, is_time=True)


async def check_flips(evidence: Evidence, cluster: Cluster, count: int) -> None:
    """R3: every transfer that is hit is refused and replayed."""
    before = num_refused(cluster)
    flipped = await drills.flip_transfers(cluster, count)
    refused = num_refused(cluster) - before
    said = f"{refused} refused of {flipped.num_flips}"
    ok = refused == flipped.num_flips > 0
    evidence("R3", "transfers with a flipped byte", said, target="all refused, and some", ok=ok)
    said = f"{flipped.num_wrong} of {flipped.num_answers}"
    evidence("R3", "wrong answers after flips", said, target="0", ok=not flipped.num_wrong)


async def check_flood(evidence: Evidence, cluster: Cluster, count: int) -> None:
    """R28: open, leave, and look whether everything is back. AssertionError if it is not."""
    cap = CapWatch(cluster)
    async with in_background(cap.run()):
        endings = await drills.flood(cluster, count)
    broken = {name: number for name, number in endings.items() if name not in _FLOOD_ENDINGS}
    said = ", ".join(f"{number} {name}" for name, number in endings.items())
    evidence("R28", f"{count} streams opened and left", said, target="0 broken", ok=not broken)
    state_cap(evidence, cap, [], "R28")
    returned_s = await drills.permits_return_s(cluster)
    await cluster.wait_at_rest()
    evidence("R28", "permits back after the flood", f"{returned_s:.1f} s", target="all", ok=True)


def _few(found: list[str]) -> str:
    return f"{len(found)}: {'; '.join(found[:3])}" if found else "0"


def _by_fault(excused: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {count} {kind}" for (name, kind), count in sorted(excused.items())) or "none"
