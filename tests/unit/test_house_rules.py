"""Rules of the house that no other tool checks: sizes, unsafe deserialisers, documents that name real files, and a
test for every defect of tests/defects.toml.
"""

import ast
import re
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.defects import ROWS
from tests.evidence import Evidence

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("client/tandem", "router", "prefill_worker", "decode_worker", "rank_worker", "kvtransfer", "engine"),
    "switchable_worker",
    *("mesh", "checkpoint", "worker", "tandem_cli", "bench", "demo_model", "gateway", "docs_site"),
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 8  # without self and cls
MAX_IMPORT_CHAIN = 14  # modules that import each other at their top, from the first to the last
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load", "yaml.load"}

EXCEPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tandem"]["size-exceptions"]
TESTS = Path(__file__).resolve().parents[1]
MAPPED_ROOMS = (
    *("checkpoint", "engine/loading", "kvtransfer", "kvtransfer/transports", "mesh", "mesh/domain", "mesh/rpc"),
    *("rank_worker", "worker", "worker/ranks"),
)
MAY_SUPPRESS_CANCELLATIONS = {"mesh/tasks.py", "bench/modelled_workers.py"}
"""The former raises them afterwards, the latter's process ends."""


def sources() -> list[Path]:
    return sorted(
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.match("v1/*_pb2*.py")
    )


def documents() -> list[str]:
    folders = [ROOT / name for name in ("docs", "tests", "deploy", "examples", "client", *PACKAGES)]
    found = {path for folder in folders for path in folder.rglob("*.md")} | set(ROOT.glob("*.md"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def over_budget(path: Path) -> Iterator[str]:
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    if text.count("\n") > MAX_FILE_LINES:
        yield name
    for function in functions(ast.parse(text)):
        arguments = function.args
        own = [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES or len(own) + len(arguments.kwonlyargs) > MAX_PARAMETERS:
            yield f"{name}::{function.name}"


def test_files_and_functions_stay_small() -> None:
    found = {entry for path in sources() for entry in over_budget(path)}
    assert found - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "an exception that is no longer needed"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("client.")


def imports_at_top(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                if member in modules or node.module in modules:
                    yield member if member in modules else node.module


@pytest.mark.parametrize("of_sdk", [True, False], ids=["SDK", "services"])
def test_import_chains_stay_short(of_sdk: bool) -> None:
    """The SDK is a distribution of its own: a library to the services."""
    of_one = [path for path in sources() if path.is_relative_to(ROOT / "client") == of_sdk]
    trees = {module_name(path): ast.parse(path.read_text()) for path in of_one}
    imports = {name: set(imports_at_top(tree, trees)) - {name} for name, tree in trees.items()}

    @cache
    def longest_chain(name: str) -> tuple[str, ...]:
        return (name, *max((longest_chain(each) for each in imports[name]), key=len, default=()))

    longest = max(map(longest_chain, trees), key=len)
    assert len(longest) <= MAX_IMPORT_CHAIN, " -> ".join(longest)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_unsafe_deserialisers(path: Path, evidence: Evidence) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            if {alias.name for alias in node.names} == {"UnpicklingError"}:
                continue
            assert (node.module or "").split(".")[0] not in FORBIDDEN_IMPORTS
        elif isinstance(node, ast.Call):
            if "weights_only=True" in (ast.unparse(keyword) for keyword in node.keywords):
                continue  # torch's own reader of tensors, which runs no code
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
    evidence("R17", "unsafe deserialisers, by file", 0, target="0", ok=True)


@pytest.mark.parametrize("room", MAPPED_ROOMS)
def test_the_map_of_a_room_names_its_modules(room: str) -> None:
    """The map is the docstring of the package. Names behind a slash are of other rooms."""
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"(?<![/\w])\w+\.py\b", docstring))
    assert named == {path.name for path in (ROOT / room).glob("*.py") if not path.name.startswith("__")}


def test_cancellations_are_not_suppressed() -> None:
    """Around the end of a cancelled task, `suppress` would lose the waiter's own cancellation."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress")
        if "asyncio.CancelledError" in map(ast.unparse, node.args)
    }
    assert found == MAY_SUPPRESS_CANCELLATIONS


@pytest.mark.parametrize("document", documents())
def test_documents_name_real_files(document: str) -> None:
    path = ROOT / document
    text = path.read_text()
    named = {ROOT / name for name in re.findall(r"`([a-z_]+/[\w./-]*\w(?:\.(?:py|proto|md|toml|json|yml)|/))`", text)}
    named |= {path.parent / name for name in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    assert named or path.parent not in (ROOT, ROOT / "docs"), "the pattern finds nothing"
    assert {file for file in named if not file.exists()} == set()


def test_every_defect_is_shown_or_kept() -> None:
    shown = {
        defect
        for path in TESTS.rglob("test_*.py")
        if "repaired(" in (text := path.read_text())
        for defect in re.findall(r'"([DMFS]\d+)"', text)
    }
    kept = {defect for defect, row in ROWS.items() if "kept" in row}
    assert ROWS.keys() - shown - kept == set()
