"""Grafana's dashboard and the alerts over figures that a real Prometheus has scraped from a real mesh."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import tandem
from tests.e2e.mesh_process import mesh
from tests.waiting import until_told

PROMETHEUS = shutil.which("prometheus")
ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
QUESTION = [{"role": "user", "content": "Show me the 7 times table."}]
SCRAPES = 15
# Figures of what this mesh does not do: no drafts, ranks, disk or revisions; nothing is refused or given up.
ABSENT = {
    "Requests refused per second",
    "Share of guessed tokens that were right",
    "CPU of ranks",
    "KV on disk, blocks/s",
    "Traffic by revision: the share of each, and what it gets",
    "The router's advice: workers to add or remove",
    "Sequences given up per second",
    "Failures per second",
}
# Parts of a panel that are there only while something is amiss.
ABSENT_PARTS = ('tandem_workers{state!="ready"}', "tandem_request_failure_total")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the PATH (apt-get install prometheus)"),
]


async def test_every_panel_shows_figures_of_a_mesh(tmp_path: Path) -> None:
    first, port = random.randint(20_000, 30_000), random.randint(30_001, 32_000)
    flags = ("--decode=2", "--http-port=0", f"--metrics-port={first}")
    async with mesh("tandem-small", tmp_path / "logs", *flags) as running:
        targets = {
            "router": [first],
            "prefill": [first + 1],
            "decode": [first + 2, first + 3],
            "gateway": [int(running.http.rpartition(":")[2])],
        }
        async with scraping(tmp_path, port, targets) as prometheus, tandem.AsyncClient(running.address) as client:
            busy = asyncio.create_task(keep_busy(client, running.http))
            try:
                await scraped(prometheus, SCRAPES)
                running.signal("decode_worker", signal.SIGKILL)
                await until_told(lambda: value(prometheus, "sum(tandem_replays_total)"), lambda replays: replays > 0)
                await scraped(prometheus, SCRAPES)
                assert await wrong_panels(prometheus) == []
                assert await wrong_alerts(prometheus) == []
            finally:
                busy.cancel()


@asynccontextmanager
async def scraping(folder: Path, port: int, targets: dict[str, list[int]]) -> AsyncIterator[httpx2.AsyncClient]:
    """A Prometheus with the project's alerts that asks the services each second."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}]}
        for job, ports in targets.items()
    ]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps({"global": every, "rule_files": [str(ALERTS)], "scrape_configs": jobs})
    )  # JSON is YAML
    url = f"127.0.0.1:{port}"
    storage = f"--storage.tsdb.path={folder / 'tsdb'}"
    assert PROMETHEUS is not None
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        *(f"--config.file={config}", storage, f"--web.listen-address={url}", "--log.level=error"),
        env=os.environ | {"GOMAXPROCS": "1"},
    )
    try:
        async with httpx2.AsyncClient(base_url=f"http://{url}", timeout=30, verify=False) as http:
            yield http
    finally:
        process.terminate()
        await process.wait()


async def keep_busy(client: tandem.AsyncClient, url: str) -> None:
    """A few clients, over gRPC and HTTP, one request after the other."""

    async def ask() -> None:
        while True:
            await client.generate(messages=QUESTION, max_new_tokens=100)

    async def post(http: httpx2.AsyncClient) -> None:
        while True:
            await http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 50})

    async with httpx2.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        await asyncio.gather(*(ask() for _ in range(3)), post(http))


async def query(prometheus: httpx2.AsyncClient, expression: str) -> list[Any]:
    try:
        response = await prometheus.get("/api/v1/query", params={"query": expression})
    except httpx2.RequestError:
        return []  # it starts
    if response.status_code == 503:
        return []
    answer = response.json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    found: list[Any] = answer["data"]["result"]
    return found


async def value(prometheus: httpx2.AsyncClient, expression: str) -> float:
    found = await query(prometheus, expression)
    return float(found[0]["value"][1]) if found else 0.0


async def scraped(prometheus: httpx2.AsyncClient, times: int) -> None:
    """Wait until every service that is there has been asked `times` more."""
    up = "min(sum_over_time(up[1h]))"
    before = await value(prometheus, up)
    await until_told(lambda: value(prometheus, up), lambda count: count >= before + times)


async def wrong_panels(prometheus: httpx2.AsyncClient) -> list[str]:
    """Panels without figures that should have some, or the other way round."""
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    assert {panel["title"] for panel in panels} >= ABSENT
    wrong = []
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "30s")
            figures = [each["value"][1] for each in await query(prometheus, expression)]
            is_expected = panel["title"] not in ABSENT and not any(part in expression for part in ABSENT_PARTS)
            if is_expected and (not figures or all(figure == "NaN" for figure in figures)):
                wrong.append(f"{panel['title']}: {expression}: {figures}")
            names = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            labels = [set(each["metric"]) for each in await query(prometheus, expression)]
            wrong += [f"{panel['title']}: no label {names - each}" for each in labels if not names <= each]
    return wrong


async def wrong_alerts(prometheus: httpx2.AsyncClient) -> list[str]:
    """Rules that Prometheus could not evaluate, and alerts without words."""
    answer = (await prometheus.get("/api/v1/rules")).json()
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
