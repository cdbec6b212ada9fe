"""The gateway's /metrics in both of Prometheus's formats, as its own parsers read them."""

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.service.gateway.http import running_gateway

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def counted(families: list[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in families for sample in family.samples if "http" in sample.name}


async def test_metrics_are_openmetrics_if_asked_for() -> None:
    async with running_gateway() as gateway:
        await gateway.post("/generate", {"inputs": "One fine"})
        plain = await gateway.http.get("/metrics")
        opened = await gateway.http.get("/metrics", headers={"accept": OPENMETRICS})
        odd = await gateway.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.x"})
    assert plain.headers["content-type"] == odd.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    texts, opens = list(parse_text(plain.text)), list(parse_openmetrics(opened.text))
    assert counted(texts) == counted(opens)
    assert counted(texts)["tandem_http_requests_total"] == 1
    counts = [sample.value for family in opens for sample in family.samples if sample.name == "tgi_request_count"]
    assert counts == [1], "TGI's name, which has no suffix"
    assert all(family.documentation for family in (*texts, *opens))
