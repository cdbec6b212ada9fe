"""What deploy/ asks Prometheus for is what the services tell."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.defects import Repaired
from tests.evidence import Evidence
from tests.exposition import documented, documented_labels
from tests.manifests import SETTINGS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "tandem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = [
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]
TYPES = {name: kind for service in ("Router", "Workers", "Gateway") for name, kind in documented(service).items()}
LABELS = {name: labels for each in ("Router", "Workers", "Gateway") for name, labels in documented_labels(each).items()}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "up"}
OF_EACH_SERVICE = {"tandem_event_loop_stop_seconds": "histogram", "process_log_lines_dropped_total": "counter"}
SIGNS = (DEPLOY.parent / "docs" / "operations.md").read_text().split("## What to watch\n")[1].split("\n#")[0]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_asks_for_what_there_is(title: str, query: str) -> None:
    """Names are documented, which the services' tests hold them to; histograms are asked for by their parts."""
    asked = re.findall(r"\b(?:tandem|tgi|process)_\w+|\bup\b", query)
    assert asked
    for name in asked:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        types = TYPES | OF_EACH_SERVICE
        assert name in PROCESS or types.get(name) in ("gauge", "counter") or types.get(base) == "histogram", name


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_asks_for_labels_that_its_figures_have(title: str, query: str) -> None:
    there = {"job", "instance", "le"}  # Prometheus's own, and that of histograms
    for name, matchers in re.findall(r"\b((?:tandem|tgi)_\w+)(?:\{([^}]*)\})?", query):
        labels = there | LABELS.get(name, LABELS.get(re.sub(r"_(bucket|sum|count)$", "", name), set()))
        assert set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", matchers)) <= labels, name
        for grouping in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", query):
            assert set(re.findall(r"\w+", grouping)) <= labels, name


def test_every_label_of_a_legend_and_of_an_alert_is_left_by_its_query() -> None:
    shown = [(target["expr"], target.get("legendFormat", "")) for panel in PANELS for target in panel["targets"]]
    shown += [(rule["expr"], " ".join(rule["annotations"].values())) for rule in ALERTS]
    for query, text in shown:
        wanted = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
        groupings = re.findall(r"\bby\s*\(([^)]*)\)", query)
        if groupings or re.search(r"\b(?:sum|max|min|avg)\s*\(", query):
            assert wanted <= {label for each in groupings for label in re.findall(r"\w+", each)}, query


def test_figures_that_call_for_an_alert_always_have_one() -> None:
    rows = [row.split(" | ") for row in SIGNS.splitlines() if row.startswith("| ")]
    always = [name for row in rows if "always" in row[2:] for name in re.findall(r"`(\w+_\w+)`", "".join(row))]
    assert {*OF_EACH_SERVICE} <= {*always}
    alerts = " ".join(rule["expr"] for rule in ALERTS)
    assert [name for name in always if name not in alerts] == []


def test_an_idle_worker_hides_no_full_one() -> None:
    """Figures of workers do not name their model: that of the least or of all says nothing of one model."""
    assert [rule["alert"] for rule in ALERTS if re.search(r"\b(min|avg)\b.*tandem_engine_", rule["expr"])] == []


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


COMPOSE = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
ROUTERS = ("router-0", "router-1")
WORKERS = ("prefill", "decode")
OURS = {name: service for name, service in SERVICES.items() if "tandem" in service["image"]}
OVERLAYS = {
    path.stem: yaml.safe_load(path.read_text())["services"] for path in sorted((DEPLOY / "compose").glob("*.yml"))
}


def module_of(service: Mapping[str, Any]) -> str:
    """The module of ours that it runs."""
    return " ".join(service["command"]).partition("python -m ")[2].split()[0]


def has_compose() -> bool:
    """True if `docker compose` is there; it needs no engine to read files."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(("docker", "compose", "version"), capture_output=True, check=False).returncode == 0


def networks_of(name: str) -> set[str]:
    return set(SERVICES[name]["networks"])


@pytest.mark.parametrize("name", SERVICES)
def test_containers_may_and_use_no_more_than_they_need(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
    assert service["pids_limit"] <= 512
    assert service["mem_limit"].startswith("${TANDEM_")
    assert service["ulimits"] == {"nofile": "${TANDEM_NOFILE:-16384}"}
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
    assert service["restart"] == "unless-stopped"


def test_only_what_clients_call_is_on_the_edge(repaired: Repaired) -> None:
    on_edge = {name for name in SERVICES if "edge" in networks_of(name)}
    assert on_edge == {*ROUTERS, "gateway", "grafana"}
    for router in map(SERVICES.get, ROUTERS):
        assert router["environment"]["TANDEM_METRICS_HOST"] in router["networks"]["mesh"]["aliases"]
        assert not (router["networks"]["edge"] or {}).get("aliases")
    assert {name for name, network in COMPOSE["networks"].items() if not (network or {}).get("internal")} == {"edge"}
    assert networks_of("redis") == {"mesh"}
    hung = "a service whose event loop hangs for 60 s ends and is started again"
    repaired(
        "S2",
        f"{len(SERVICES)} of {len(SERVICES)} services without capabilities, read-only, with limits and rotated logs; "
        f"figures and registry off the edge; Redis with a password; {hung}",
    )


def test_published_ports_are_on_loopback(evidence: Evidence) -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {*ROUTERS, "gateway", "grafana"}
    reachable = [port for ports in published.values() for port in ports if not port.startswith("127.0.0.1:")]
    evidence(
        "R16", "published ports of the compose cluster beyond loopback", len(reachable), target="0", ok=not reachable
    )


def test_redis_asks_for_a_password_and_everybody_has_it() -> None:
    redis = SERVICES["redis"]
    script = redis["command"][-1].replace("$$", "$")
    assert re.search(r"^\s*requirepass \$REDISCLI_AUTH$", script, re.MULTILINE)
    password = redis["environment"]["REDISCLI_AUTH"]
    assert password.startswith("${TANDEM_REDIS_PASSWORD:?")
    for name, service in SERVICES.items():
        if "tandem" in service["image"] and name != "gateway":
            assert service["environment"]["TANDEM_REGISTRY_URL"] == f"redis://:{password}@redis:6379/0"


def test_the_gateway_knows_both_routers() -> None:
    assert SERVICES["gateway"]["environment"]["TANDEM_ROUTER"] == ",".join(f"{name}:50051" for name in ROUTERS)
    assert len({SERVICES[name]["ports"][0] for name in ROUTERS}) == 2


def test_prometheus_scrapes_what_compose_runs() -> None:
    """Workers by the name of their service, because there may be any number of them."""
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for each in job.get("static_configs", ()) for target in each["targets"]}
    scaled = {
        f"{name}:{each['port']}" for job in jobs for each in job.get("dns_sd_configs", ()) for name in each["names"]
    }
    ports = {
        name: service["environment"].get("TANDEM_METRICS_PORT", service["environment"]["TANDEM_PORT"])
        for name, service in OURS.items()
    }
    assert targets | scaled == {f"{name}:{port}" for name, port in ports.items()}
    assert scaled == {f"{name}:{ports[name]}" for name in WORKERS}
    assert SERVICES["grafana"]["ports"][0].startswith("127.0.0.1:")
    assert all("ports" not in SERVICES[name] for name in SERVICES.keys() - {*ROUTERS, "gateway", "grafana"})


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting_of_its_service(name: str) -> None:
    for service in (OURS[name], *(overlay[name] for overlay in OVERLAYS.values() if name in overlay)):
        own = {variable.removeprefix("TANDEM_") for variable in service.get("environment", ()) if "TANDEM_" in variable}
        assert own <= {each.name.upper() for each in fields(SETTINGS[module_of(OURS[name])])}


@pytest.mark.parametrize("name", WORKERS)
def test_there_can_be_any_number_of_workers(name: str) -> None:
    """Nothing of a worker is the same in all its containers that would have to differ."""
    worker = SERVICES[name]
    assert not {"TANDEM_WORKER_ID", "TANDEM_ADVERTISE_HOST"} & worker["environment"].keys()
    assert f'--worker-id "{name}-$$HOSTNAME" --advertise-host "$$HOSTNAME"' in worker["command"][-1]
    assert "ports" not in worker
    assert "container_name" not in worker


def test_overlays_change_services_that_there_are() -> None:
    assert all(overlay.keys() <= SERVICES.keys() for overlay in OVERLAYS.values())
    keys = OVERLAYS["keys"]
    assert keys.keys() == {*ROUTERS, "gateway"}
    assert {service["environment"]["TANDEM_ALLOW_ANONYMOUS"] for service in keys.values()} == {"false"}
    for name in ROUTERS:
        mounted = keys[name]["volumes"][0].split(":")[-2]
        assert keys[name]["environment"]["TANDEM_API_KEYS_FILE"].startswith(f"{mounted}/")
    assert OVERLAYS["gpu"].keys() == OURS.keys()
    assert {service["image"] for service in OVERLAYS["gpu"].values()} == {"tandem-serve-cuda"}
    for name in WORKERS:
        (device,) = OVERLAYS["gpu"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert len(device["device_ids"]) == 1


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.skipif(not has_compose(), reason="needs Docker's compose plugin")
def test_compose_takes_the_overlay(name: str) -> None:
    files = (f"--file={DEPLOY.parent / 'docker-compose.yml'}", f"--file={DEPLOY / 'compose' / f'{name}.yml'}")
    secrets = {"TANDEM_MESH_KEY": "k", "TANDEM_REDIS_PASSWORD": "p"}
    subprocess.run(("docker", "compose", *files, "config", "--quiet"), env=os.environ | secrets, check=True)
