"""What deploy/ asks Prometheus for is what the services tell."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.exposition import documented

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "tandem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = [
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]
TYPES = {name: kind for service in ("Router", "Workers", "Gateway") for name, kind in documented(service).items()}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "up"}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_asks_for_what_there_is(title: str, query: str) -> None:
    """Names are documented, which the services' tests hold them to; histograms are asked for by their parts."""
    asked = re.findall(r"\b(?:tandem|tgi|process)_\w+|\bup\b", query)
    assert asked
    for name in asked:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in PROCESS or TYPES.get(name) in ("gauge", "counter") or TYPES.get(base) == "histogram", name


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(query for _, query in QUERIES)
    plain = {"tgi_request_count", "tgi_request_success"} | {name for name in TYPES if name.startswith("tgi_request_")}
    assert {name for name in TYPES if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)} == plain - {
        "tgi_request_failure"
    }


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_scrapes_what_compose_runs() -> None:
    services = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = {t for job in config["scrape_configs"] for each in job["static_configs"] for t in each["targets"]}
    ports = {
        name: service["environment"].get("TANDEM_METRICS_PORT", service["environment"]["TANDEM_PORT"])
        for name, service in services.items()
        if "tandem" in service["image"]
    }
    assert targets == {f"{name}:{port}" for name, port in ports.items()}
    assert services["grafana"]["ports"][0].startswith("127.0.0.1:")
    assert all("ports" not in services[name] for name in services.keys() - {"router", "gateway", "grafana"})
