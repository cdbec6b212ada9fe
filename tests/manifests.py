"""The manifests of deploy/kubernetes, as files and as kustomize renders them, and what pods would get from them."""

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_worker.settings import DecodeSettings
from gateway.settings import GatewaySettings
from mesh.process import ProcessSettings
from prefill_worker.settings import PrefillSettings
from rank_worker.settings import RankSettings
from router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SETTINGS: Mapping[str, type[ProcessSettings]] = {
    "router": RouterSettings,
    "gateway": GatewaySettings,
    "prefill_worker": PrefillSettings,
    "decode_worker": DecodeSettings,
    "rank_worker": RankSettings,
}
SECRETS = {
    "tandem-router": {"TANDEM_MESH_KEY": "k" * 64, "TANDEM_REGISTRY_URL": "redis://tandem-router:p@redis:6379/0"},
    "tandem-worker": {"TANDEM_MESH_KEY": "k" * 64, "TANDEM_REGISTRY_URL": "redis://tandem-worker:p@redis:6379/0"},
}
FIELDS = {"metadata.name": "decode-0", "status.podIP": "10.0.0.1"}
LWS_VARIABLES = {"LWS_LEADER_ADDRESS": "decode-0.decode.tandem", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}

Manifest = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Pod:
    """A pod template of a workload."""

    workload: Manifest
    template: Manifest

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def module(self) -> str:
        """The service of ours that it runs; "" for others."""
        python, _, module = [*self.container.get("command", []), "", "", ""][:3]
        return str(module) if python == "python" else ""

    def environment(self, documents: list[Manifest]) -> dict[str, str]:
        """The variables that Kubernetes and LeaderWorkerSet would set."""
        variables: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            if "secretRef" in source:
                variables |= SECRETS[source["secretRef"]["name"]]
            else:
                variables |= the(documents, "ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in self.container.get("env", []):
            variables[variable["name"]] = variable.get("value") or self._value_from(variable["valueFrom"])
        return variables | LWS_VARIABLES

    def _value_from(self, source: Manifest) -> str:
        if "fieldRef" in source:
            return FIELDS[source["fieldRef"]["fieldPath"]]
        kind, name = source["resourceFieldRef"]["resource"].split(".")
        return str(self.container["resources"][kind][name])


def files() -> list[Path]:
    return sorted(KUBERNETES.rglob("*.yaml"))


def read(path: Path) -> list[Manifest]:
    return [document for document in yaml.load_all(path.read_text(), Loader=LOADER) if document]


def the(documents: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def of_kind(documents: list[Manifest], *kinds: str) -> list[Manifest]:
    return [document for document in documents if document["kind"] in kinds]


def pods(documents: list[Manifest]) -> list[Pod]:
    return [
        Pod(workload, template)
        for workload in of_kind(documents, "StatefulSet", "Deployment", "LeaderWorkerSet")
        for template in _templates(workload["spec"])
    ]


def _templates(spec: Manifest) -> Iterator[Manifest]:
    if "template" in spec:
        yield spec["template"]
        return
    group = spec["leaderWorkerTemplate"]
    yield from (group[name] for name in ("leaderTemplate", "workerTemplate") if name in group)


def documented_kustomization() -> str:
    """The example of docs/kubernetes.md, with paths from anywhere."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"```yaml\n(apiVersion: kustomize.config.k8s.io.*?)```", text, re.DOTALL)
    return str(example)


def as_files() -> list[Manifest]:
    """All objects as they are in the files, before patches, with the settings that kustomize makes a ConfigMap of."""
    documents = [document for path in files() for document in read(path) if "metadata" in document]
    (kustomization,) = read(KUBERNETES / "base" / "kustomization.yaml")
    (generator,) = kustomization["configMapGenerator"]
    settings = dict(literal.split("=", 1) for literal in generator["literals"])
    settings_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": settings}
    return [*documents, settings_map]


@functools.cache
def rendered(name: str) -> list[Manifest]:
    """An overlay, or the "documented" kustomization, with "-ranks" or without, or with "-ranks-gpu" over the other
    overlay, as `kubectl kustomize` prints it; or the "files" as they are.

    Skips without a kubectl, but for files.
    """
    if name == "files":
        return as_files()
    if (kubectl := _kubectl()) is None:
        pytest.skip("needs kubectl 1.21 or newer, whose kustomize knows components")
    if not name.startswith("documented"):
        return _render(kubectl, KUBERNETES / "overlays" / name)
    with tempfile.TemporaryDirectory(prefix="tandem-test-kustomize-") as folder:
        way = os.path.relpath(KUBERNETES, os.path.realpath(folder))
        text = documented_kustomization().replace("tandem/deploy/kubernetes", way)
        if "-ranks" in name:
            text = text.replace("# - ", "- ")
        if name.endswith("-gpu"):
            text = text.replace("overlays/cpu", "overlays/gpu")
        Path(folder, "kustomization.yaml").write_text(text)
        return _render(kubectl, Path(folder))


def _render(kubectl: str, folder: Path) -> list[Manifest]:
    ran = subprocess.run((kubectl, "kustomize", folder), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.load_all(ran.stdout, Loader=LOADER))


def _kubectl() -> str | None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return None
    command = (kubectl, "version", "--client", "-o", "json")
    version = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["clientVersion"]
    return kubectl if int(re.sub(r"\D", "", version["minor"])) >= 21 else None
