"""Figures as Prometheus would read them, and what docs/observability.md says about them."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx2
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]

_TEXT = (Path(__file__).resolve().parents[1] / "docs" / "observability.md").read_text()


def parse(text: str) -> Samples:
    """Values by sample name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("process_")
    }


async def scrape(registry: CollectorRegistry) -> Samples:
    """On another thread, as the port for figures does it."""
    return parse((await asyncio.to_thread(generate_latest, registry)).decode())


async def fetch(url: str) -> Samples:
    async with httpx2.AsyncClient(timeout=30) as http:
        response = await http.get(url)
        assert response.status_code == 200
        return parse(response.text)


def metrics(names: Iterable[str]) -> set[str]:
    """Documented names of samples: the parts of a histogram have that of the whole."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) if name != "tgi_request_count" else name for name in names}


def names_of(samples: Samples) -> set[str]:
    return metrics(name for name, _ in samples)


def changed(*scrapes: Samples) -> set[str]:
    """The metrics whose values differ between the expositions."""
    everything = {sample for samples in scrapes for sample in samples}
    return metrics(sample[0] for sample in everything if len({samples.get(sample, 0.0) for samples in scrapes}) > 1)


def documented(service: str) -> dict[str, str]:
    """Types of a service's metrics by name."""
    return dict(re.findall(r"^\| `(\w+)[^|]*\| (\w+) \|", _section(service), re.MULTILINE))


def documented_labels(service: str) -> dict[str, set[str]]:
    """Labels of a service's metrics by name. All but two of the workers' have the role, as the text above them says."""
    rows = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \|", _section(service), re.MULTILINE)
    everywhere = {"role"} if service == "Workers" else set()
    without = {"tandem_kv_sent_bytes_total", "tandem_decode_sequences_total"}
    return {
        name: {label for label in labels.split(",") if label} | (everywhere if name not in without else set())
        for name, labels in rows
    }


def _section(service: str) -> str:
    return _TEXT.split(f"### {service}\n")[1].split("\n#")[0]
