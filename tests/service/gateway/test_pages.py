"""The pages' files and headers; what they do in a browser is in tests/e2e/test_pages.py."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.web import PAGES
from mesh.domain.worker import WorkerRole
from tests.service.gateway.http import gateway_at, running_gateway
from tests.service.security.keys import KEYS, write_keys

FILES = sorted(path for path in PAGES.iterdir() if path.is_file())
VENDOR = PAGES / "vendor"
PROVENANCE = (VENDOR / "PROVENANCE.md").read_text()
MAX_FILE_LINES = 400
# Ways in which a text could become markup or code.
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|javascript:"


@pytest.mark.parametrize("path", ["/", "/mesh", *(f"/pages/{file.name}" for file in FILES)])
async def test_every_page_and_file_has_the_security_policy(path: str) -> None:
    async with running_gateway() as gateway:
        response = await gateway.http.get(path, headers={"accept": "text/html"})
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    for part in ("default-src 'none'", "script-src 'self'", "trusted-types 'none'", "frame-ancestors 'none'"):
        assert part in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_load_nothing_foreign_and_make_no_markup_of_text(file: Path) -> None:
    text = file.read_text()
    assert re.findall(SINKS, text) == []
    assert set(re.findall(r"(?:https?:)?//[a-z][\w.-]+", text)) <= {"http://www.w3.org"}
    if file.suffix == ".html":
        assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text) == []
        for local in re.findall(r'(?:src|href)="/pages/([^"]+)"', text):
            assert (PAGES / local).is_file()
    for local in re.findall(r'(?:from |import\()"\./([^"]+)"', text):
        assert (PAGES / local).is_file()


def test_our_files_stay_small() -> None:
    lines = {file.name: file.read_text().count("\n") for file in FILES}
    assert {name for name, number in lines.items() if number > MAX_FILE_LINES} == set()


def test_files_of_other_projects_are_what_was_taken() -> None:
    """Every file is named with its licence and its sum, is served, and is part of the wheel (pages/**)."""
    rows = re.findall(r"^\| `([^`]+)` \| .* \| ([\d.]+) \| .* \| `([0-9a-f]{64})` \|$", PROVENANCE, re.M)
    sums = {name: digest for name, _, digest in rows}
    files = {str(path.relative_to(VENDOR)): path for path in VENDOR.rglob("*") if path.is_file()}
    assert sums == {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if path.suffix not in (".txt", ".md")
    }
    assert set(re.findall(r"`([\w/.]+LICENSE\.txt)`", PROVENANCE)) == {name for name in files if name.endswith(".txt")}


async def test_files_of_other_projects_are_served() -> None:
    async with running_gateway() as gateway:
        for name in ("marked.esm.js", "highlight.min.js", "katex/katex.min.js", "katex/katex.min.css"):
            response = await gateway.http.get(f"/pages/vendor/{name}")
            assert response.status_code == 200
            assert "trusted-types 'none'" in response.headers["content-security-policy"]


async def test_alternatives_have_ids_where_token_ids_are_requested() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    plain = {"prompt": "hi", "max_tokens": 2, "logprobs": 2}
    async with running_gateway() as gateway:
        for ids in (True, False):
            body = (await gateway.post("/v1/chat/completions", chat | {"return_token_ids": ids})).json()
            first = body["choices"][0]["logprobs"]["content"][0]
            assert first.get("token_id") == (ord("O") if ids else None)
            assert [each.get("token_id") for each in first["top_logprobs"]] == ([0, 1] if ids else [None, None])
            body = (await gateway.post("/v1/completions", plain | {"return_token_ids": ids})).json()
            top = body["choices"][0]["logprobs"].get("top_tokens")
            assert top == (
                [[{"id": 0, "text": "A", "logprob": -0.5}, {"id": 1, "text": "B", "logprob": -1.5}]] * 2
                if ids
                else None
            )


async def test_the_state_of_the_mesh_needs_an_operators_key(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode(settle=False)
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        statuses = {}
        for name, key in KEYS.items():
            response = await http.get("/mesh/state", headers={"authorization": f"Bearer {key}"})
            statuses[name] = response.status_code
            assert ("workers" in response.json()) is (name == "ops")
        assert statuses == {"alice": 403, "mallory": 403, "ops": 200}
        assert (await http.get("/mesh/state")).status_code == 401
        assert (await http.get("/mesh/history")).status_code == 401


async def test_workers_are_drained_by_operators(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode()
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        for key, status in ((KEYS["alice"], 403), (KEYS["ops"], 200)):
            headers = {"authorization": f"Bearer {key}"}
            for wish in ("drain", "undrain"):
                response = await http.post(f"/mesh/workers/decode-0/{wish}", headers=headers)
                assert response.status_code == status
        assert (await http.post("/mesh/workers/decode-7/drain", headers=headers)).status_code == 400


async def test_roles_are_changed_by_operators(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    worker = await mesh.decode(switchable=True)
    await mesh.decode("decode-1")
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        for key, status in ((KEYS["alice"], 403), (KEYS["ops"], 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = await http.post("/mesh/workers/decode-0/switch/prefill", headers=headers)
            assert response.status_code == status
        assert worker.wanted_roles == [WorkerRole.PREFILL]
        for worker_id, role in (("decode-1", "prefill"), ("decode-0", "router"), ("decode-7", "decode")):
            refused = await http.post(f"/mesh/workers/{worker_id}/switch/{role}", headers=headers)
            assert refused.status_code == 400


async def test_the_history_of_the_mesh() -> None:
    async with running_gateway() as gateway:
        (point,) = (await gateway.http.get("/mesh/history?span_s=600")).json()["points"]
        assert (point["length_s"], point["generated_tokens"], point["kv_used"]) == (600, 50, None)
        for span in ("0", "-1", "nan", "a day", "86401"):
            response = await gateway.http.get("/mesh/history", params={"span_s": span})
            assert response.status_code == 400
            assert "span_s must be a number of seconds up to 86400" in response.json()["error"]["message"]


async def test_token_ids_of_a_streamed_chat_continue_it() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True, "return_token_ids": True}
    async with running_gateway() as gateway:
        whole = (await gateway.post("/v1/chat/completions", body | {"stream": False})).json()
        lines = await gateway.lines("/v1/chat/completions", body)
    streamed = [
        int(each)
        for line in lines
        for ids in re.findall(r'"token_ids":\[([\d,]*)\]', line)
        for each in ids.split(",")
        if each
    ]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == whole["usage"]["completion_tokens"]
