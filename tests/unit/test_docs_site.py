"""What the documentation's site is made of. `make docs` builds it and follows its links."""

import ast
import re
from contextlib import nullcontext

import pytest
from mkdocs.exceptions import PluginError

from docs_site.hooks import ROOT, check_loads
from docs_site.pictures import THEMES, measured_throughput
from docs_site.protocol import protocol_page
from tandem.v1 import generation_pb2, mesh_pb2, sampling_pb2


@pytest.fixture(scope="module")
def protocol() -> str:
    return protocol_page(ROOT / "protos")


def test_the_protocol_page_has_everything_public(protocol: str) -> None:
    for module in (generation_pb2, mesh_pb2, sampling_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert f"## {service.full_name}" in protocol
            assert all(f"| `{method.name}` |" in protocol for method in service.methods)
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = protocol.partition(f"### {message.name} {{")[2].partition("###")[0]
            assert all(f"| `{field.name}` |" in section for field in message.fields), message.name


def test_no_entry_of_the_protocol_page_lacks_its_comment(protocol: str) -> None:
    rows = [line for line in protocol.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


def test_links_within_the_protocol_page_hold(protocol: str) -> None:
    anchors = set(re.findall(r"\{ #([\w-]+) \}", protocol))
    assert set(re.findall(r"\]\(#([\w-]+)\)", protocol)) <= anchors


@pytest.mark.parametrize(
    ("html", "is_refused"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img alt="" src="http://example.com/x.png">', True),
        ('<script src="assets/x.js"></script><a href="https://example.com">x</a>', False),
        ('<link rel="canonical" href="https://example.com/">', False),
    ],
)
def test_pages_load_nothing_from_other_sites(html: str, is_refused: bool) -> None:
    with pytest.raises(PluginError, match="loads from another site") if is_refused else nullcontext():
        check_loads(html, "index.md")


def test_the_plot_finds_its_figures() -> None:
    rows = measured_throughput(ROOT / "docs" / "performance.md")
    assert {(row.clients, row.arm) for row in rows} == {
        (clients, arm) for clients in (1, 8, 32) for arm in ("separated", "colocated", "vLLM", "openvino")
    }
    assert all(row.minimum <= row.median <= row.maximum for row in rows)


def test_the_tutorial_shows_the_program_that_it_runs() -> None:
    _, start, program = (ROOT / "examples" / "unnoticed_kill.py").read_text().partition("import os\n")
    assert f"```python\n{start}{program}```" in (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_pictures_that_documents_show_exist(document: str) -> None:
    """mkdocs follows the links of Markdown only."""
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / document).read_text())
    assert [name for name in shown if not (ROOT / document).parent.joinpath(name).exists()] == []


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert {path.stem.rpartition("-")[2] for path in pictures} == set(THEMES)
    assert all(path.stat().st_size <= 200_000 for path in pictures)
    assert sum(path.stat().st_size for path in pictures) <= 1_000_000


@pytest.mark.parametrize("page", ["waits", "glossary", "request", "architecture", "kv-transfer"])
def test_files_have_what_a_page_says_is_in_them(page: str) -> None:
    """As in: `engine/cores.py` (`begin_step`); `KVSpan` in `mesh/domain/kv.py`."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    file, name = r"`([a-z_/]+\.py)`", r"`((?:[A-Z]\w*\.)?\w+)`"
    places = re.findall(rf"{file} \({name}", text)
    places += [(path, what) for what, path in re.findall(rf"{name} (?:in |of |\(){file}", text)]
    assert places
    missing = [(path, what) for path, what in places if what.rpartition(".")[2] not in names_defined_in(path)]
    assert not missing


def names_defined_in(path: str) -> set[str]:
    """Functions, classes, assigned names, and texts, such as the names of encodings; members of classes included."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names
