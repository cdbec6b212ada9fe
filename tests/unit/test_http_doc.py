"""docs/http.md tells the truth about routes and settings."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from gateway.app import build_app
from gateway.settings import GatewaySettings

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()


def test_every_route_is_in_the_table_and_every_entry_is_a_route() -> None:
    backend: Any = SimpleNamespace(allowed_origins=frozenset())
    served = {
        (method, re.sub(r"\{(id|model:path)\}", "{}", route.path))
        for route in build_app(backend).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told: set[tuple[str, str]] = set()
    for row in re.findall(r"^\| `(?:GET|POST|DELETE|OPTIONS) .*$", TEXT, re.MULTILINE):
        cell = row.split("|")[1]
        method = re.findall(r"GET|POST|DELETE|OPTIONS", cell)[0]
        told |= {(method, path.replace("{id}", "{}")) for path in re.findall(r"(/[^`,\s]*)", cell)}
    assert told - served == set()
    short = {(method, path.removeprefix("/v1")) for method, path in told}
    assert served - told - short - {("GET", "/")} == set()


def test_limits_are_the_settings_defaults() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\S+)(?: MiB)? \|", TEXT[TEXT.index("## Limits") :], re.MULTILINE)
    assert rows
    for names, shown in rows:
        for name in re.findall(r"\w+", names):
            default = getattr(GatewaySettings(), name)
            assert float(shown) == (default >> 20 if name.endswith("_bytes") else default), name
