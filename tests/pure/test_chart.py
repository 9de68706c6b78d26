"""The Helm chart: rendered by helm, compared with the schemas of Kubernetes and of its operators, and with our own
commands; the query of its autoscaler asked of a real Prometheus. `make chart` brings helm and the schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from edge_server import Edge, running_edge
from test_deploy import parse

from dovetail.config import parse_config, parse_duration, parse_size

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
TOOLS = ROOT / "build" / "chart" / "bin"
VERSIONS = ("1.25", "1.37")  # the oldest that the chart takes, and the newest whose schemas there are
ALL = {
    "workers": {
        "cpu": {"autoscaling": {"enabled": True}},
        "gpu": {"enabled": True, "autoscaling": {"enabled": True}, "runtimeClassName": "nvidia"},
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]},
    "gateway": {"tls": {"secretName": "certificate"}, "nodeSelector": {"disk": "ssd"}, "podAnnotations": {"a": "b"}},
    "image": {"pullSecrets": [{"name": "registry"}]},
}
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "everything": ALL,
    "little": {
        "networkPolicy": {"enabled": False},
        "gateway": {"persistence": {"existingClaim": "models"}, "podDisruptionBudget": {"enabled": False}},
        "workers": {"cpu": {"podDisruptionBudget": {"enabled": False}, "cache": {"storageClassName": "fast"}}},
    },
}

Resources = dict[tuple[str, str], dict[str, Any]]


def helm() -> str:
    found = shutil.which("helm", path=str(TOOLS)) or shutil.which("helm")
    if found is None:
        pytest.skip("no helm; `make chart` installs it on x86-64")
    return found


def run_helm(values: dict[str, Any], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [helm(), *arguments, str(CHART), "--namespace", "llm", "--values", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rendered(values: dict[str, Any], folder: Path) -> Resources:
    done = run_helm(values, folder, "template", "demo")
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    resources = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(resources) == len(found), "no two of a name"
    return resources


def misspelt(resources: Resources) -> Resources:
    """A key of each object that its kind does not have."""
    return {
        name: {("sepc" if key == "spec" else "dta" if key == "data" else key): value for key, value in one.items()}
        for name, one in resources.items()
    }


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """(case, kind, problem) of every case, and of one whose objects are all wrong; the schemas take long to read."""
    folder = tmp_path_factory.mktemp("rendered")
    cases = {case: rendered(values, folder) for case, values in CASES.items()}
    cases["misspelt"] = misspelt(cases["everything"])
    if not (TOOLS / "kubernetes-validate").exists():
        pytest.skip("no schemas of Kubernetes; `make chart` installs them")
    lines = "".join(json.dumps([case, one]) + "\n" for case, found in cases.items() for one in found.values())
    command = [str(TOOLS / "python"), str(ROOT / "tests" / "chart_check.py"), *VERSIONS]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def pods_of(resources: Resources) -> dict[str, dict[str, Any]]:
    """The pod templates by the component that they are."""
    found = [one["spec"]["template"] for one in resources.values() if one["kind"] in ("StatefulSet", "Deployment")]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in found}


def command_of(container: dict[str, Any], **environment: str) -> dict[str, Any]:
    """As our own command line reads it, with the variables filled in as the kubelet does."""
    given = {one["name"] for one in container["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= given, "a variable that is not set stays as it is written"
    return parse([re.sub(r"\$\((\w+)\)", lambda one: environment[one[1]], word) for word in container["args"]])


@pytest.mark.timeout(900)
def test_every_object_is_one_that_kubernetes_and_the_operators_know(problems: list[list[str]]) -> None:
    assert [one for one in problems if one[0] != "misspelt"] == []


@pytest.mark.timeout(900)
def test_the_schemas_find_a_misspelt_key_in_every_kind(problems: list[list[str]]) -> None:
    assert {kind for case, kind, _ in problems if case == "misspelt"} == {
        *("ConfigMap", "Deployment", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "ScaledObject"),
        *("Service", "ServiceMonitor", "StatefulSet"),
    }


def test_helm_has_no_complaint_and_refuses_values_that_the_chart_does_not_have(tmp_path: Path) -> None:
    assert run_helm({}, tmp_path, "lint", "--strict").returncode == 0
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gateway": {"shmsize": "1Gi"}}, "shmsize"),
        ({"workers": {"cpu": {"autoscaling": {"minReplicas": 0}}}}, "minReplicas"),
        ({"workers": {"tpu": {}}}, "tpu"),
        ({"config": {"nodes": []}}, "config"),
        ({"config": {"server": {"host": "127.0.0.1"}}}, "config.server"),
    ]
    for values, named in wrong:
        done = run_helm(values, tmp_path, "template", "demo")
        assert done.returncode != 0
        assert named in done.stderr


def test_pods_start_commands_that_there_are_and_the_workers_find_the_gateway(tmp_path: Path) -> None:
    resources = rendered(ALL, tmp_path)
    pods = pods_of(resources)
    assert pods.keys() == {"gateway", "worker-cpu", "worker-gpu"}
    head = command_of(pods["gateway"]["spec"]["containers"][0], POD_ADDRESS="10.1.0.7")
    assert head["cluster_host"] == "10.1.0.7"
    assert (head["tls_cert"].name, head["tls_key"].name) == ("tls.crt", "tls.key")
    service = resources["Service", "demo-dovetail-head"]["spec"]
    assert service["publishNotReadyAddresses"], "workers join before the gateway is ready, which they make it"
    for kind in ("cpu", "gpu"):
        (container,) = pods[f"worker-{kind}"]["spec"]["containers"]
        joiner = command_of(container, POD_ADDRESS="10.1.0.8", POD_NAME=f"demo-dovetail-{kind}-x")
        assert joiner["address"] == f"demo-dovetail-head:{head['cluster_port']}"
        assert (joiner["name"], joiner["host"]) == (f"demo-dovetail-{kind}-x", "10.1.0.8")
        assert joiner["device"] == {"cpu": "cpu", "gpu": "cuda:0"}[kind]
        cache = pods[f"worker-{kind}"]["spec"]["volumes"][0]["ephemeral"]["volumeClaimTemplate"]["spec"]
        size = parse_size(cache["resources"]["requests"]["storage"].replace("Gi", "GiB"))
        assert parse_size(joiner["max_size"]) < size
    assert pods["worker-gpu"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_selectors_find_the_pods_and_every_volume_and_secret_is_mounted_where_it_is_used(tmp_path: Path) -> None:
    resources = rendered(ALL, tmp_path)
    labels = [pod["metadata"]["labels"] for pod in pods_of(resources).values()]
    for (kind, name), resource in resources.items():
        spec = resource.get("spec", {})
        selector = spec.get("podSelector") if kind == "NetworkPolicy" else spec.get("selector")
        if kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet", "Deployment"):
            wanted = selector if kind == "Service" else selector["matchLabels"]
            matching = [one for one in labels if wanted.items() <= one.items()]
            assert len(matching) == (3 if (kind, name) == ("NetworkPolicy", "demo-dovetail") else 1), (kind, name)
    monitored = resources["ServiceMonitor", "demo-dovetail"]["spec"]["selector"]["matchLabels"]
    services = [
        name
        for (kind, name), one in resources.items()
        if kind == "Service" and monitored.items() <= one["metadata"]["labels"].items()
    ]
    assert services == ["demo-dovetail"], "its name is the job, which the autoscaler's query names"
    for pod in pods_of(resources).values():
        (container,) = pod["spec"]["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_gateways_file_is_a_configuration_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = rendered({"config": {"auth": {"keys": [{"name": "a", "key": "sk-a"}]}}}, tmp_path)
    config = parse_config(yaml.safe_load(resources["ConfigMap", "demo-dovetail"]["data"]["dovetail.yaml"]), "here")
    assert [(key.name, key.metrics) for key in config.auth.keys] == [("a", False), ("prometheus", True)]
    assert config.models.keys() == {"smollm2"}


def test_pods_end_after_they_have_drained(tmp_path: Path) -> None:
    resources = rendered(ALL, tmp_path)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert parse_duration(values["config"]["server"]["drain_timeout"]) == values["gateway"]["drainSeconds"]
    for component, pod in pods_of(resources).items():
        (container,) = pod["spec"]["containers"]
        shell, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        if component != "gateway":
            name, *words = script.split()
            assert name == "dovetail"
            drain = parse([word.replace('"$POD_NAME"', "left") for word in words])
            assert drain["node"] == "left"
            assert drain["timeout"] < pod["spec"]["terminationGracePeriodSeconds"]
            given = {one["name"]: one.get("value") for one in container["env"]}
            assert given["DOVETAIL_URL"] == "https://demo-dovetail-head:8000"
            assert given["SSL_CERT_FILE"] == "/etc/dovetail-tls/ca.crt"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """A gateway whose worker takes requests when the file `wait` has gone."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "wait").touch()
    with running_edge(folder, model="slow") as edge:
        yield edge


def test_a_worker_is_ready_when_the_gateway_says_that_its_node_is_up(held: Edge, tmp_path: Path) -> None:
    (container,) = pods_of(rendered({}, tmp_path))["worker-cpu"]["spec"]["containers"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DOVETAIL_URL": held.url}
    codes = {
        name: subprocess.run(
            container["startupProbe"]["exec"]["command"], env=environment | {"POD_NAME": name}, timeout=120, check=False
        ).returncode
        for name in ("cpu-0", "cpu", "cpu-1")
    }
    assert codes == {"cpu-0": 0, "cpu": 1, "cpu-1": 1}


@contextmanager
def prometheus(edge: Edge, folder: Path, job: str) -> Iterator[Callable[[str], list[Any]]]:
    """A real one that scrapes the gateway, as the ServiceMonitor has it labelled; gives a way to ask it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on the PATH (Debian: prometheus)")
    scrape = {
        "job_name": job,
        "static_configs": [{"targets": [f"127.0.0.1:{edge.port}"], "labels": {"namespace": "llm"}}],
    }
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
    )
    port = httpx.URL(edge.url).port or 0
    address = f"127.0.0.1:{_free_port(port)}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)

    def ask(query: str) -> list[Any]:
        try:
            answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=10).json()
        except httpx.TransportError:
            return []  # it is starting
        assert answer["status"] == "success", answer
        result: list[Any] = answer["data"]["result"]
        return result

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def _free_port(taken: int) -> int:

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    assert port != taken
    return port


@pytest.mark.timeout(900)
def test_the_autoscalers_query_counts_what_waits_in_a_real_prometheus(held: Edge, tmp_path: Path) -> None:
    resources = rendered(ALL, tmp_path)
    triggers = resources["ScaledObject", "demo-dovetail-cpu"]["spec"]["triggers"]
    queries = {one["name"]: one["metadata"]["query"] for one in triggers}
    body = {"model": "slow", "prompt": "hi", "max_tokens": 3}
    with prometheus(held, tmp_path, "demo-dovetail") as ask, ThreadPoolExecutor() as clients:
        _until(lambda: _value(ask("up")) == 1)
        asked = [clients.submit(held.post, "/v1/completions", body, timeout=300) for _ in range(3)]
        try:
            _until(lambda: _value(ask(queries["waiting"])) >= 2)
            assert _value(ask(queries["requests"])) >= 2
            assert ask(queries["waiting"].replace("demo-dovetail", "another")) == []
        finally:
            (held.folder / "wait").unlink()
        assert [one.result().status_code for one in asked] == [200] * 3
        _until(lambda: _value(ask(queries["waiting"])) == 0)


def _value(result: list[Any]) -> float:
    """KEDA takes a query of one element."""
    assert len(result) <= 1, result
    return float(result[0]["value"][1]) if result else -1.0


def _until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.2)
