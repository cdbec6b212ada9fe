"""docs/http.md and docs/members.md tell the truth about routes, settings and members."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from gateway.app import build_app
from gateway.openai.foreign_members import OTHER_NAMES, REFUSED, WITHOUT_EFFECT
from gateway.openai.requests import ChatBody, CompletionBody
from gateway.settings import GatewaySettings

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "http.md").read_text()
MEMBERS = (DOCS / "members.md").read_text()


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


def test_members_that_other_servers_know_are_those_of_the_code() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", MEMBERS, re.MULTILINE)) == OTHER_NAMES
    refused = {name: instead for name, (_, instead) in REFUSED.items()}
    assert dict(re.findall(r"^\| `(\w+)` \| ([^`].*) \|$", MEMBERS, re.MULTILINE)) == refused
    sentence = MEMBERS[MEMBERS.index("Without effect") : MEMBERS.index("The id of")]
    assert set(re.findall(r"`(\w+)`", sentence)) == WITHOUT_EFFECT


def test_a_member_has_one_meaning() -> None:
    ours = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert set(OTHER_NAMES.values()) <= ours
    assert not ours & {*OTHER_NAMES, *WITHOUT_EFFECT}
    assert ours & REFUSED.keys() == {"echo", "best_of", "suffix"}  # of completions
    assert not OTHER_NAMES.keys() & REFUSED.keys()
    assert not WITHOUT_EFFECT & {*OTHER_NAMES, *REFUSED}
