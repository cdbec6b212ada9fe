"""What the two distributions declare is what they import. tests/wheels builds and installs them."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import tandem

ROOT = Path(__file__).resolve().parents[2]
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())
SERVE = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVE_PACKAGES = [
    name for name in SERVE["tool"]["setuptools"]["packages"]["find"]["include"] if not name.endswith(".*")
]
# Which a user's handler brings, or is given, in its own process: gateway/handler.
OF_HANDLERS = {"djl_python", "PIL"}
# Companions that a declared distribution pins.
PINNED_BY = {"botocore": "boto3", "s3transfer": "boto3", "pydantic_core": "pydantic"}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(project: dict[str, Any], *, with_extras: bool) -> set[str]:
    requirements = list(project["dependencies"])
    if with_extras:
        requirements += [entry for extra in project["optional-dependencies"].values() for entry in extra]
    return {normalised(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}  # type: ignore[index]


def imported(package: Path) -> Iterator[str]:
    """Top-level names that the package's modules import, wherever in the module."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.split(".")[0]


def undeclared(packages: list[Path], names: set[str], own: set[str]) -> dict[str, list[str]]:
    distributions = packages_distributions()
    foreign = {name for package in packages for name in imported(package)} - sys.stdlib_module_names - own - OF_HANDLERS
    needed = {
        name: [normalised(provider) for provider in distributions.get(name, [name])]
        for name in {PINNED_BY.get(name, name) for name in foreign}
    }
    return {name: providers for name, providers in needed.items() if not set(providers) & names}


def test_the_client_declares_what_it_imports() -> None:
    names = declared(CLIENT["project"], with_extras=False)
    assert undeclared([ROOT / "client" / "tandem"], names, {"tandem"}) == {}
    assert names == {"grpcio", "opentelemetry-api", "protobuf"}


def test_the_services_declare_what_they_import() -> None:
    names = declared(SERVE["project"], with_extras=True)
    assert undeclared([ROOT / name for name in SERVE_PACKAGES], names, {"tandem", *SERVE_PACKAGES}) == {}


def test_http_needs_no_extra() -> None:
    """`tandem up` starts the gateway by default."""
    names = declared(SERVE["project"], with_extras=False)
    assert undeclared([ROOT / "gateway"], names, {"tandem", *SERVE_PACKAGES}) == {}


def test_the_two_distributions_have_one_version() -> None:
    version = CLIENT["project"]["version"]
    assert SERVE["project"]["version"] == version == tandem.__version__
    assert f"tandem-client=={version}" in SERVE["project"]["dependencies"]


@pytest.mark.parametrize("project", [CLIENT, SERVE], ids=["client", "serve"])
def test_generated_code_runs_with_the_oldest_declared_runtime(project: dict[str, Any]) -> None:
    text = "".join(path.read_text() for path in (ROOT / "client" / "tandem" / "v1").glob("*.py"))
    text += "".join(path.read_text() for path in (ROOT / "mesh" / "v1").glob("*.py"))
    dependencies = project["project"]["dependencies"]
    (protobuf,) = set(re.findall(r"Protobuf Python Version: ([\d.]+)", text))
    (grpcio,) = set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text))
    assert f"protobuf>={protobuf}" in dependencies
    assert f"grpcio>={grpcio}" in dependencies


def test_clients_get_public_services_only() -> None:
    stubs = {path.stem for path in (ROOT / "client" / "tandem" / "v1").glob("*_pb2.py")}
    assert stubs == {f"{path.stem}_pb2" for path in (ROOT / "protos" / "tandem" / "v1").glob("*.proto")}
    assert stubs == {"cache_pb2", "generation_pb2", "mesh_pb2", "sampling_pb2"}


def test_what_is_installed_runs_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2. A pin that wants a later one ends the first command of the README there.

    Without the pins, a newer Python gets versions that may want it.
    """
    oldest = SERVE["project"]["requires-python"].removeprefix(">=") + ".0"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {normalised(name): version for name, version in pins.items()}
    wanted = {
        found.name: (found.metadata.get_all("Requires-Python") or [""])[0]
        for found in distributions()
        if pins.get(normalised(found.name)) in (None, found.version.split("+")[0])  # PyTorch's CPU build is 2.13.0+cpu
    }
    assert len(wanted) > len(pins) / 4
    assert not {name: python for name, python in wanted.items() if oldest not in SpecifierSet(python)}
