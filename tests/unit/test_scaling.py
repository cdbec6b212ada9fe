"""What the queries of deploy/kubernetes/components/autoscaling answer, by Prometheus itself if there is a promtool."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.manifests import KUBERNETES, of_kind, read

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool")

QUERIES = {
    role: [
        trigger["metadata"]["query"]
        for scaled in of_kind(read(KUBERNETES / "components" / "autoscaling" / f"{role}.yaml"), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    ]
    for role in ("prefill", "decode")
}
TWO_BUSY_PREFILL_WORKERS = {
    # Half of their time, 1,000 tokens in a busy second.
    'tandem_engine_step_seconds_sum{role="prefill",pod="prefill-0"}': "0+30x30",
    'tandem_engine_step_seconds_sum{role="prefill",pod="prefill-1"}': "0+30x30",
    'tandem_engine_prompt_tokens_total{role="prefill",pod="prefill-0"}': "0+30000x30",
    'tandem_engine_prompt_tokens_total{role="prefill",pod="prefill-1"}': "0+30000x30",
    'tandem_engine_pending_tokens{role="prefill",pod="prefill-0"}': "1000x30",
    'tandem_engine_pending_tokens{role="prefill",pod="prefill-1"}': "1000x30",
    # Not theirs.
    'tandem_engine_step_seconds_sum{role="decode",pod="decode-0"}': "0+60x30",
    'tandem_engine_pending_tokens{role="decode",pod="decode-0"}': "5000x30",
}
DECODE_WORKERS = {
    'tandem_engine_kv_cache_usage_ratio{role="decode",pod="decode-0"}': "0.9x30",
    'tandem_engine_kv_cache_usage_ratio{role="decode",pod="decode-1"}': "0.5x30",
    'tandem_engine_kv_cache_usage_ratio{role="prefill",pod="prefill-0"}': "1x30",
    'tandem_engine_requests_running{role="decode",pod="decode-0"}': "32x30",
    'tandem_engine_requests_running{role="decode",pod="decode-1"}': "60x30",
    'tandem_engine_requests_waiting{role="decode",pod="decode-0"}': "0x30",
    'tandem_engine_requests_waiting{role="decode",pod="decode-1"}': "4x30",
    'tandem_engine_max_num_seqs{role="decode",pod="decode-0"}': "64x30",
    'tandem_engine_max_num_seqs{role="decode",pod="decode-1"}': "64x30",
    'tandem_engine_ready{role="decode",pod="decode-0"}': "1x30",
    'tandem_engine_ready{role="decode",pod="decode-1"}': "1x30",
}


def waiting(**tokens: int) -> dict[str, str]:
    """The queues of two routers."""
    return {
        f'tandem_prompt_tokens_waiting{{role="{role}",pod="router-{number}"}}': f"{num_tokens // 2}x30"
        for role, num_tokens in tokens.items()
        for number in range(2)
    }


IDLE = {name: values.replace("+30000", "+0").replace("+30", "+0") for name, values in TWO_BUSY_PREFILL_WORKERS.items()}


@pytest.mark.parametrize(
    ("role", "series", "workers"),
    [
        # 8,000 tokens wait, 1 ms each: 8 s of work, in 2 s. One worker's worth of time is spent.
        ("prefill", TWO_BUSY_PREFILL_WORKERS | waiting(prefill=6000, decode=0), [4, 1]),
        ("prefill", TWO_BUSY_PREFILL_WORKERS | waiting(prefill=0, decode=6000), [1, 1]),
        ("prefill", IDLE | waiting(prefill=0, decode=0), [0, 0]),
        ("decode", DECODE_WORKERS | waiting(prefill=6000, decode=0), [1.4, 1.5, 0]),
        ("decode", DECODE_WORKERS | waiting(prefill=0, decode=10), [1.4, 1.5, 3]),
    ],
)
def test_workers_wanted(role: str, series: dict[str, str], workers: list[float], tmp_path: Path) -> None:
    asked = [
        {"expr": f"round({query}, 0.001)", "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in zip(QUERIES[role], workers, strict=True)
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": asked}
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    ran = subprocess.run(("promtool", "test", "rules", file), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_are_rules_of_prometheus() -> None:
    alerts = KUBERNETES.parent / "prometheus" / "alerts.yml"
    ran = subprocess.run(("promtool", "check", "rules", alerts), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
