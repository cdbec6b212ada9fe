"""States what a run has shown, requirement by requirement."""

from collections import Counter

from tests.chaos.cluster import Cluster
from tests.chaos.history import Disturbance, judge, percentile
from tests.chaos.load import Load
from tests.chaos.watch import CapWatch, UsageWatch, complaints, log_entries, replayed, resume_gaps
from tests.evidence import Evidence

_SOON_S = 5.0
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
    evidence("R1", "requests under faults, by ending", f"{count}: {dict(endings)}", target="as many as asked", ok=True)
    evidence("R1", "streams without exactly one terminal event", _few(terminal), target="0", ok=not terminal)
    evidence("R1", "ended later than deadline + 1 s", late, target="0", ok=late == 0, is_time=True)
    evidence("R1", "errors no fault excuses", _few(verdict.unexcused), target="0", ok=not verdict.unexcused)
    evidence("R1", "errors faults excuse", _by_fault(verdict.excused), target="within budgets", ok=True)
    evidence("R2", "wrong tokens, texts, log-probs or usages under faults", _few(wrong), target="0", ok=not wrong)
    gaps = resume_gaps(histories, replayed(load.cluster))
    p50, p95 = percentile(gaps, 50), percentile(gaps, 95)
    said = f"p50 {p50:.2f} s, p95 {p95:.2f} s, most {max(gaps, default=0):.2f} s"
    target = "p95 <= 5 s where a worker dies; <= 7 s where it freezes"
    evidence("R1", f"resume gaps of {len(gaps)} replayed streams", said, target=target, ok=p95 <= 7, is_time=True)


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


def state_processes(evidence: Evidence, cluster: Cluster) -> None:
    """R7, R9, R17: nobody dies but who was killed, and nobody is surprised."""
    died = [f"{end.name} ({end.status})" for end in cluster.exits(wanted=False)]
    evidence("R7", "processes that died by themselves", _few(died), target="0", ok=not died)
    found = complaints(cluster)
    evidence("R17", "errors and tracebacks in all logs", _few(found), target="0", ok=not found)


def state_cap(evidence: Evidence, watch: CapWatch, disturbances: list[Disturbance], requirement: str) -> None:
    """No more in service at both routers together than the cap says."""
    breaches = watch.breaches(each for each in disturbances if "redis" in each.name)
    said = f"{len(breaches)} of {len(watch.samples)} samples, at most {watch.most_held} of {watch.cluster.shape.cap}"
    evidence(requirement, "looks at both routers that found the cap exceeded", said, target="0", ok=not breaches)


def state_flips(evidence: Evidence, cluster: Cluster) -> None:
    """R3: each transfer that was hit was refused."""
    flipped = sum(proxy.num_flipped for proxy in cluster.proxies.values())
    refused = num_refused(cluster)
    said = f"{refused} transfers refused after {flipped} flips"
    evidence("R3", "bytes of KV flipped on the way", said, target="a refusal each", ok=flipped > 0 and refused > 0)


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


def _few(found: list[str]) -> str:
    return f"{len(found)}: {'; '.join(found[:3])}" if found else "0"


def _by_fault(excused: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {count} {kind}" for (name, kind), count in sorted(excused.items())) or "none"
