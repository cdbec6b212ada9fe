"""The scaling rules against figures worked out by hand, and against the manifests."""

import re

import pytest

from mesh.domain.worker import WorkerRole
from tandem_cli.simulation import scaling_rules
from tandem_cli.simulation.observed import RoleSample, Sample
from tandem_cli.simulation.scaling_rules import Replicas, ScaleLimits, Triggers
from tests.manifests import KUBERNETES, of_kind, read

LIMITS = ScaleLimits(min_workers=1, max_workers=20)


def sample(at_s: float, *, busy_s: float = 0.0, prompt_tokens: int = 0, pending: int = 0, **decode: float) -> Sample:
    values = {"kv": 0.0, "slots": 0.0, "waiting_tokens": 0.0, "prefill_waiting": 0.0} | decode
    prefill = RoleSample(2, 0.0, 0.0, busy_s, prompt_tokens, pending, values["prefill_waiting"])
    return Sample(
        at_s,
        0,
        {
            WorkerRole.PREFILL: prefill,
            WorkerRole.DECODE: RoleSample(2, values["kv"], values["slots"], 0.0, 0, 0, values["waiting_tokens"]),
        },
    )


def test_prefill_workers_wanted() -> None:
    triggers = Triggers()
    for minute in range(11):  # 1 worker's worth of time, 1,000 tokens in a busy second
        now = sample(
            60.0 * minute, busy_s=60.0 * minute, prompt_tokens=60_000 * minute, pending=2000, prefill_waiting=6000
        )
        wanted = triggers.wanted(now)
    # 8,000 tokens wait, 1 ms each: 8 s of work, in 2 s.
    assert wanted[WorkerRole.PREFILL] == pytest.approx([4.0, 1.25])


def test_a_prompt_that_takes_as_long_as_the_target_wants_no_worker_of_its_own() -> None:
    """2,000 tokens of 1 ms wait at one of four looks: half a second of work on average, a quarter of a worker's."""
    triggers = Triggers()
    for quarter in range(41):
        at_s = 15.0 * quarter
        pending = 2000 if quarter % 4 == 0 else 0
        wanted = triggers.wanted(sample(at_s, busy_s=at_s / 2, prompt_tokens=round(500 * at_s), pending=pending))
    assert wanted[WorkerRole.PREFILL] == pytest.approx([0.25, 0.625])


def test_decode_workers_wanted() -> None:
    assert Triggers().wanted(sample(0, kv=1.6, slots=0.4))[WorkerRole.DECODE] == pytest.approx([2.0, 0.5, 0])
    assert Triggers().wanted(sample(0, waiting_tokens=10))[WorkerRole.DECODE] == [0, 0, 3]


def test_a_role_without_workers_gets_the_fewest_at_once() -> None:
    assert Replicas(ScaleLimits(2, 8), 0).decide(0.0, [0.0]) == 2
    assert Replicas(ScaleLimits(3, 8), 1).decide(0.0, [0.5]) == 3
    assert Replicas(LIMITS, 0).decide(0.0, [6.0]) == 1


def test_scaling_out_doubles_each_minute() -> None:
    replicas = Replicas(LIMITS, 2)
    counts = {at_s: replicas.decide(at_s, [12.0]) for at_s in (0, 15, 30, 45, 60, 75, 120)}
    assert counts == {0: 4, 15: 4, 30: 4, 45: 4, 60: 8, 75: 8, 120: 12}


def test_a_tenth_more_or_less_changes_nothing() -> None:
    replicas = Replicas(LIMITS, 10)
    assert [replicas.decide(at_s, [wanted]) for at_s, wanted in ((0, 10.9), (15, 9.1), (30, 11.2))] == [10, 10, 12]


def test_scaling_in_waits_ten_minutes_and_takes_one_each_two_minutes() -> None:
    replicas = Replicas(LIMITS, 5)
    replicas.decide(0, [5.0])
    counts = {at_s: replicas.decide(at_s, [0.5]) for at_s in range(15, 1000, 15)}
    changes = [at_s for at_s in counts if counts[at_s] < counts.get(at_s - 15, 5)]
    assert changes == [600, 720, 840, 960]
    assert replicas.count == 1


def test_limits_are_kept() -> None:
    replicas = Replicas(ScaleLimits(min_workers=2, max_workers=3), 2)
    assert replicas.decide(0, [100.0]) == 3
    assert min(replicas.decide(at_s, [0.0]) for at_s in range(15, 3000, 15)) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_constants_are_those_of_the_manifests(role: str) -> None:
    file = KUBERNETES / "components" / "autoscaling" / f"{role}.yaml"
    [scaled] = of_kind(read(file), "ScaledObject")
    spec = scaled["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scale_out = {
        "type": "Percent",
        "value": 100 * scaling_rules.SCALE_OUT_SHARE,
        "periodSeconds": scaling_rules.SCALE_OUT_S,
    }
    assert behavior["scaleUp"]["policies"] == [scale_out]
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": scaling_rules.STABILISE_S,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": scaling_rules.SCALE_IN_S}],
    }
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (ScaleLimits().min_workers, ScaleLimits().max_workers)
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]]
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    if role == "prefill":
        assert thresholds == [1, scaling_rules.MAX_BUSY]
        assert re.search(r"/ (\d+)$", queries[0].strip()).group(1) == f"{scaling_rules.TTFT_TARGET_S:g}"  # type: ignore[union-attr]
        windows = [60 * float(minutes) for query in queries for minutes in re.findall(r"\[(\d+)m\]", query)]
        waiting, tokens = [scaling_rules.WAIT_WINDOW_S] * 2, [scaling_rules.TOKEN_WINDOW_S] * 2
        assert windows == [*waiting, *tokens, scaling_rules.BUSY_WINDOW_S]
    else:
        assert thresholds == [scaling_rules.MAX_KV, scaling_rules.MAX_SLOTS, 1]
