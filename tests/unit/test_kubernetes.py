"""The manifests of deploy/kubernetes ask for what there is: settings, modules, ports, metrics, each other's objects."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvtransfer.settings import TransferSettings
from mesh.settings import load_settings
from router.tenants import KeysFile
from tests import manifests
from tests.client_environment import python_with
from tests.exposition import documented
from tests.manifests import KUBERNETES, SETTINGS, Manifest, Pod, of_kind, pods, rendered, the

RENDERED = ("files", "cpu", "gpu", "documented")
FILES = manifests.files()
RESOURCES = rendered("files")
QUANTITY = {"Mi": 1 << 20, "Gi": 1 << 30}
# The Kubernetes release whose schemas the manifests are held to.
RELEASE = "1.33"

documents = pytest.fixture(params=RENDERED)(lambda request: rendered(request.param))


def tandem_pods(documents: list[Manifest]) -> list[Pod]:
    return [pod for pod in pods(documents) if pod.module]


def settings_of(pod: Pod, documents: list[Manifest]) -> Any:
    flags = pod.container["command"][3:] + pod.container.get("args", [])
    environment = pod.environment(documents)
    return load_settings(SETTINGS[pod.module], flags, prog=pod.module, environ=environment).values


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * QUANTITY[quantity[-2:]]


def test_every_variable_is_a_setting() -> None:
    """In all files, patches included, for any service; each pod's own are checked below."""
    known = {f"TANDEM_{field.name.upper()}" for settings in SETTINGS.values() for field in fields(settings)}
    asked = {name for path in FILES for name in re.findall(r"\bname: (TANDEM_\w+)", path.read_text())}
    asked |= {name for path in FILES for name in re.findall(r"- (TANDEM_\w+)=", path.read_text())}
    assert len(asked) > 15
    assert asked - known == set()


def test_no_secret_is_committed() -> None:
    assert of_kind(RESOURCES, "Secret") == []
    assert not any("MESH_KEY" in path.read_text() or "redis://" in path.read_text() for path in FILES)


def test_services_start_with_their_settings(documents: list[Manifest]) -> None:
    """Names and values are checked as a service does at its start."""
    found = tandem_pods(documents)
    assert {pod.module for pod in found} >= {"router", "gateway", "prefill_worker", "decode_worker"}
    for pod in found:
        settings = settings_of(pod, documents)
        own = {field.name for field in fields(settings)}
        assert {name for name in names_of(pod) if name.removeprefix("TANDEM_").lower() not in own} == set()
        assert settings.host == "0.0.0.0" if "host" in own else pod.module == "rank_worker"
        if hasattr(settings, "num_threads"):
            assert settings.num_threads == int(pod.container["resources"]["limits"]["cpu"])


def names_of(pod: Pod) -> set[str]:
    return {variable["name"] for variable in pod.container["env"]}


def test_pods_may_no_more_than_they_need(documents: list[Manifest]) -> None:
    for pod in pods(documents):
        spec, security = pod.spec, pod.spec["securityContext"]
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 999
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))


def test_the_image_has_the_user_of_the_pods() -> None:
    dockerfile = (KUBERNETES.parents[1] / "Dockerfile").read_text()
    users = {pod.spec["securityContext"]["runAsUser"] for pod in tandem_pods(RESOURCES)}
    (user,) = users
    assert f"--uid {user}" in dockerfile
    assert f"USER {user}:{user}" in dockerfile


def test_kubernetes_waits_for_the_grace(documents: list[Manifest]) -> None:
    for pod in tandem_pods(documents):
        settings = settings_of(pod, documents)
        grace_s = getattr(settings, "grace_s", 0) + getattr(settings, "drain_grace_s", 0)
        sleep = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert sleep[0] == "sleep"
        assert pod.spec["terminationGracePeriodSeconds"] >= grace_s + int(sleep[1]) + 10


def test_probes_ask_at_ports_that_are_served(documents: list[Manifest]) -> None:
    for pod in tandem_pods(documents):
        settings = settings_of(pod, documents)
        served = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        expected = {"metrics": getattr(settings, "metrics_port", None), "grpc": getattr(settings, "port", None)}
        expected["http"] = expected["grpc"]
        expected["ranks"] = int(getattr(settings, "rank_listen", "").rpartition(":")[2] or 0)
        assert served == {name: expected[name] for name in served}
        probes = {name: pod.container[name] for name in pod.container if name.endswith("Probe")}
        for probe in probes.values():
            port = probe["grpc"]["port"] if "grpc" in probe else probe["httpGet"]["port"]
            assert port in served or port in served.values()
        # Health, which says whether requests are served, must never end a process.
        assert "grpc" not in probes["livenessProbe"]
        assert probes["livenessProbe"]["httpGet"]["path"] != "/ping"


def test_shared_memory_holds_what_is_put_there(documents: list[Manifest]) -> None:
    workers = [pod for pod in tandem_pods(documents) if "worker" in pod.module]
    assert workers
    for pod in workers:
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        assert mounts.keys() == {"/tmp", "/dev/shm", "/var/cache/tandem", "/models"}
        memory = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert memory["medium"] == "Memory"
        assert num_bytes(memory["sizeLimit"]) > TransferSettings().arena_bytes


def test_the_gateway_names_every_router(documents: list[Manifest]) -> None:
    routers = the(documents, "StatefulSet", "router")
    (gateway,) = [pod for pod in pods(documents) if pod.module == "gateway"]
    service, num_routers = routers["spec"]["serviceName"], routers["spec"]["replicas"]
    assert the(documents, "Service", service)["spec"]["clusterIP"] == "None"
    expected = ",".join(f"router-{number}.{service}:50051" for number in range(num_routers))
    assert settings_of(gateway, documents).router == expected


def test_selectors_select_something(documents: list[Manifest]) -> None:
    labels = [pod.labels for pod in pods(documents)]
    redis = {"app.kubernetes.io/component": "redis"}
    for document in of_kind(documents, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for selector in selectors_in(document["spec"]):
            wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
            assert any(wanted.items() <= each.items() for each in labels) or wanted == redis, document["metadata"]
            for expression in selector.get("matchExpressions", []):
                values = {each.get(expression["key"]) for each in labels}
                assert set(expression["values"]) <= values


def selectors_in(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [selector for item in node for selector in selectors_in(item)]
    if not isinstance(node, dict):
        return []
    own = [value for key, value in node.items() if key in ("selector", "podSelector")]
    return own + [selector for key, value in node.items() if key not in own for selector in selectors_in(value)]


def test_only_public_ports_are_open_to_all(documents: list[Manifest]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ingress = {name: spec["ingress"] for name, spec in policies.items() if "ingress" in spec}
    assert {name for name, rules in ingress.items() if any("from" not in rule for rule in rules)} == {
        "gateway",
        "router",
    }
    (downloads,) = policies["model-downloads"]["egress"]
    (block,) = (peer["ipBlock"] for peer in downloads["to"])
    private = [ip_network(each) for each in block["except"]]
    for address in ("10.96.0.1", "100.64.0.1", "169.254.169.254", "172.20.0.1", "192.168.1.1"):
        assert any(ip_address(address) in network for network in private), address
    (workers,) = ingress["workers"]
    callers = workers["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert set(callers) == {"router", "prefill", "decode"}


def test_secrets_exist(secrets: dict[str, dict[str, str]], documents: list[Manifest]) -> None:
    assert {name: secrets[name].keys() for name in manifests.SECRETS} == {
        name: content.keys() for name, content in manifests.SECRETS.items()
    }
    for pod in pods(documents):
        names = {source["secretRef"]["name"] for source in pod.container.get("envFrom", []) if "secretRef" in source}
        names |= {each["secret"]["secretName"] for each in pod.spec.get("volumes", []) if "secret" in each}
        assert names <= secrets.keys()
    for monitor in of_kind(documents, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            credentials = endpoint.get("authorization", {}).get(
                "credentials", {"name": "tandem-redis", "key": "users.acl"}
            )
            assert credentials["key"] in secrets[credentials["name"]]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What new-secrets.sh prints, by name."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "tandem"
    main = "import sys; from tandem_cli.main import main; sys.exit(main())"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{main}' \"$@\"\n")
    command.chmod(0o700)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = KUBERNETES / "new-secrets.sh"
    ran = subprocess.run(("sh", script, "elsewhere"), env=environment, capture_output=True, text=True, check=True)
    printed = list(yaml.safe_load_all(ran.stdout))
    assert {each["metadata"]["namespace"] for each in printed} == {"elsewhere"}
    assert ran.stderr.count("tandem-") == 2  # one key, and where the other one is
    return {each["metadata"]["name"]: each["stringData"] for each in printed}


def test_new_secrets_fit_each_other(secrets: dict[str, dict[str, str]], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(secrets["tandem-api-keys"]["keys.toml"])
    tenant = KeysFile(keys).tenant_of([("x-api-key", secrets["tandem-operator-key"]["key"])])
    assert tenant.operator
    assert secrets["tandem-router"]["TANDEM_MESH_KEY"] == secrets["tandem-worker"]["TANDEM_MESH_KEY"]
    users = secrets["tandem-redis"]["users.acl"]
    said = (KUBERNETES.parents[1] / "docs" / "security.md").read_text()
    for role in ("router", "worker"):
        password = secrets[f"tandem-{role}"]["TANDEM_REGISTRY_URL"].split(":")[2].partition("@")[0]
        (line,) = [line for line in users.splitlines() if line.startswith(f"user tandem-{role} ")]
        assert line.replace(password, f"{role.upper()}_PASSWORD") in said.splitlines()


SCALED = of_kind(RESOURCES, "ScaledObject")
TYPES = {name: kind for service in ("Router", "Workers") for name, kind in documented(service).items()}


@pytest.mark.parametrize("scaled", SCALED, ids=lambda scaled: scaled["metadata"]["name"])
def test_scaling_asks_for_what_there_is(scaled: Manifest) -> None:
    name = scaled["metadata"]["name"]
    for trigger in scaled["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        asked = re.findall(r"\btandem_\w+", query)
        assert asked
        for metric in asked:
            base = re.sub(r"_(sum|count|bucket)$", "", metric)
            assert TYPES.get(metric) in ("gauge", "counter") or TYPES.get(base) == "histogram", metric
        assert set(re.findall(r'role="(\w+)"', query)) == {name}
        assert query.count("(") == query.count(")")
        assert float(trigger["metadata"]["threshold"]) <= 1
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", name)
    assert scaled["spec"]["minReplicaCount"] == the(RESOURCES, "LeaderWorkerSet", name)["spec"]["replicas"]


@pytest.mark.parametrize("scaled", SCALED, ids=lambda scaled: scaled["metadata"]["name"])
def test_workers_leave_one_at_a_time(scaled: Manifest) -> None:
    (pod,) = pods([the(RESOURCES, "LeaderWorkerSet", scaled["metadata"]["name"])])
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    (policy,) = behavior["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert policy["periodSeconds"] > pod.spec["terminationGracePeriodSeconds"]


def test_alerts_are_those_of_compose() -> None:
    (rule,) = of_kind(RESOURCES, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((KUBERNETES.parent / "prometheus" / "alerts.yml").read_text())


def test_the_documented_kustomization_changes_what_it_names() -> None:
    documents = rendered("documented")
    workers = [pod for pod in tandem_pods(documents) if pod.module != "gateway"]
    assert {settings_of(pod, documents).name for pod in workers} == {"qwen"}
    specs = [pod.spec for pod in tandem_pods(documents)]
    containers = [each for spec in specs for each in [*spec["containers"], *spec.get("initContainers", [])]]
    assert {container["image"] for container in containers} == {"registry.example.com/tandem-serve:1"}
    assert not any("replicas" in each["spec"] for each in of_kind(documents, "LeaderWorkerSet"))
    namespaced = [each for each in documents if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in namespaced} == {"tandem"}


@pytest.mark.parametrize(("name", "utilization"), [("documented-ranks", 0.0), ("documented-ranks-gpu", 0.9)])
def test_ranks_find_their_leader_and_share_its_settings(name: str, utilization: float) -> None:
    documents = rendered(name)
    groups = of_kind(documents, "LeaderWorkerSet")
    assert {group["spec"]["leaderWorkerTemplate"]["size"] for group in groups} == {2}
    for group in groups:
        leader, rank = (settings_of(pod, documents) for pod in pods([group]))
        assert leader.degrees().num_ranks == rank.group_size == 2
        assert rank.leader_address[1] == leader.listen_for_ranks().port
        assert leader.model == rank.model
        assert leader.kv_memory_shares == rank.kv_memory_shares == 1  # each pod's memory is its own
        assert leader.memory_utilization == rank.memory_utilization == utilization
        assert (leader.device, leader.num_threads, True) == (rank.device, rank.num_threads, rank.trust_fabric)
        assert {each.removeprefix("TANDEM_").lower() for each in names_of(pods([group])[1])} <= vars(rank).keys()


def test_ranks_reach_each_other_and_those_that_take_their_kv() -> None:
    """At any port: sums of ranks, and the KV of ranks that are no leader, go to free ones."""
    documents = rendered("documented-ranks")
    roles = {each["metadata"]["name"]: pods([each]) for each in of_kind(documents, "LeaderWorkerSet")}
    assert {role: len(of_role) for role, of_role in roles.items()} == {"prefill": 2, "decode": 2}
    for source, target in (("prefill", "prefill"), ("decode", "decode"), ("prefill", "decode")):
        for sender in roles[source]:
            assert all(may_reach(sender, receiver, documents) for receiver in roles[target]), (source, target)
    (router,) = [pod for pod in pods(documents) if pod.module == "router"]
    assert not any(may_reach(router, rank, documents) for rank in roles["decode"])


def may_reach(source: Pod, target: Pod, documents: list[Manifest]) -> bool:
    """Whether the policies allow this way to every port."""
    policies = [each["spec"] for each in of_kind(documents, "NetworkPolicy")]
    leaves, enters = (
        any(
            "ports" not in rule and any(selects(peer.get("podSelector"), there) for peer in rule.get(peers, []))
            for policy in policies
            if selects(policy["podSelector"], here)
            for rule in policy.get(way, [])
        )
        for way, peers, here, there in (("egress", "to", source, target), ("ingress", "from", target, source))
    )
    return leaves and enters


def selects(selector: Any, pod: Pod) -> bool:
    if selector is None:
        return False
    labels = selector.get("matchLabels", {}).items() <= pod.labels.items()
    return labels and all(
        pod.labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


VALIDATE = f"""
import json, sys
import kubernetes_validate
for document in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(document, "{RELEASE}", strict=True)
    except kubernetes_validate.ValidationError as error:
        print(document["kind"], document["metadata"]["name"], error)
"""


@pytest.mark.parametrize("name", ["files", "documented-ranks"])
def test_objects_have_the_structure_that_kubernetes_asks_for(name: str) -> None:
    python = python_with("kubernetes-validate==1.37.0", "kubernetes_validate")
    documents = rendered(name)
    core = [document for document in documents if is_core(document)]
    for number, pod in enumerate(pods(of_kind(documents, "LeaderWorkerSet"))):
        metadata = {"name": f"pod-{number}", **pod.template["metadata"]}
        core.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec})
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "wrong"}, "spec": {"containers": [], "comand": []}}
    ran = subprocess.run((python, "-c", VALIDATE), input=json.dumps([*core, wrong]), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Pod wrong "), ran.stdout


def is_core(document: Manifest) -> bool:
    group = document["apiVersion"].rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("leaderworkerset."))


@pytest.mark.skipif("TANDEM_CRDS" not in os.environ, reason="TANDEM_CRDS names no folder of CustomResourceDefinitions")
def test_custom_resources_have_the_structure_that_their_definitions_ask_for() -> None:
    """Of LeaderWorkerSet, KEDA and Prometheus Operator; from a cluster: `kubectl get crd -o yaml`."""
    schemas = {}
    for path in Path(os.environ["TANDEM_CRDS"]).glob("*.yaml"):
        for definition in manifests.read(path):
            for crd in definition.get("items", [definition]):
                for version in crd["spec"]["versions"]:
                    key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
                    schemas[key] = closed(version["schema"]["openAPIV3Schema"])
    custom = [
        each for name in ("documented", "documented-ranks", "gpu") for each in rendered(name) if not is_core(each)
    ]
    assert {each["kind"] for each in custom} == {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "PrometheusRule"}
    for document in custom:
        jsonschema.validate(document, schemas[document["apiVersion"], document["kind"]])


def closed(schema: Any) -> Any:
    """The schema as the API server applies it: unknown fields are refused, and an int-or-string is one of the two."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # Patterns are Go's, which Python reads otherwise.
    made = {key: closed(value) for key, value in schema.items() if key != "pattern" or not isinstance(value, str)}
    if made.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if "metadata" in made.get("properties", {}) and "apiVersion" in made["properties"]:
        made["properties"]["metadata"] = {"type": "object"}
    return made
