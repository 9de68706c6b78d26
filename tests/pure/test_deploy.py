"""The files in `deploy/`: they start commands of ours, what they name is there, and systemd has no complaint."""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dovetail.cli.main import build_app
from dovetail.config import parse_size

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def parse(arguments: list[str]) -> dict[str, Any]:
    """As the command line would, without doing it; raises what a user would see."""
    group: Any = typer.main.get_command(build_app(arguments[0]))
    with group.commands[arguments[0]].make_context(arguments[0], arguments[1:]) as parsed:
        return dict(parsed.params)


def unit_lines(unit: Path, key: str) -> list[str]:
    lines = [line.strip() for line in unit.read_text().splitlines()]
    return [line.removeprefix(f"{key}=") for line in lines if line.startswith(f"{key}=")]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_there_is(unit: Path) -> None:
    (line,) = unit_lines(unit, "ExecStart")
    values = {"%i": "8001", "%H": "here", "${HEAD}": "10.0.0.5:6379", "${ADDRESS}": "10.0.0.6"}
    for name, value in values.items():
        line = line.replace(name, value)
    command = shlex.split(line)
    assert command[0] == "/opt/dovetail/bin/dovetail"
    parse(command[1:])


def test_a_server_that_crashes_leaves_its_workers_to_the_next_one() -> None:
    unit = DEPLOY / "dovetail.service"
    assert unit_lines(unit, "KillMode") == ["process"]
    (line,) = unit_lines(unit, "ExecStart")
    front = unit_lines(DEPLOY / "dovetail-front@.service", "ExecStart")[0]
    assert parse(shlex.split(line)[1:])["state"] == parse(shlex.split(front.replace("%i", "1"))[1:])["state"]


def test_systemd_has_no_complaint(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    names = []
    for unit in UNITS:  # what they start is not installed here
        name = unit.name.replace("@.", "@8001.")
        names.append(tmp_path / name)
        names[-1].write_text(
            unit.read_text().replace("/opt/dovetail/bin/dovetail", shutil.which("true") or "/bin/true")
        )
    done = subprocess.run(
        ["systemd-analyze", "verify", *names], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "dovetail" in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_the_container_has_what_it_copies_and_what_it_runs() -> None:
    lines = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    for step in steps:
        if step[0] == "COPY" and not step[1].startswith("--from"):
            missing = [source for source in step[1:-1] if not (ROOT / source).exists()]
            assert not missing, missing
    (command,) = (line for line in lines if line.startswith("CMD"))
    assert parse(yaml.safe_load(command.removeprefix("CMD")))["state"] == "/var/lib/dovetail/state"


def container_arguments() -> dict[str, tuple[str, ...]]:
    """What the Containerfile takes, and the values that it decides by."""
    text = (DEPLOY / "Containerfile").read_text()
    found = re.findall(r"^ARG (\w+)", text, re.MULTILINE)
    (cases,) = re.findall(r'case "\$DEVICES" in (.*) esac', text)
    devices = tuple(re.findall(r"(\w+)\) extras=", cases))
    return {name: devices if name == "DEVICES" else () for name in found}


def test_the_context_of_the_container_has_what_it_copies_and_leaves_out_the_rest() -> None:
    """A clone that was worked in has gigabytes of environments and builds beside its sources."""
    lines = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert kept == {source for group in copied for source in group.split()}


def test_in_compose_the_joiner_finds_the_head() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose.keys() == {"services", "volumes", "networks"}
    services = compose["services"]
    head, joiner = parse(services["head"]["command"]), parse(services["joiner"]["command"])
    addresses = {name: one["networks"]["cluster"]["ipv4_address"] for name, one in services.items()}
    (subnet,) = (one["subnet"] for one in compose["networks"]["cluster"]["ipam"]["config"])
    assert all(ipaddress.ip_address(one) in ipaddress.ip_network(subnet) for one in addresses.values())
    assert head["cluster_host"] == addresses["head"]
    assert joiner["address"] == f"{addresses['head']}:{head['cluster_port']}"
    assert joiner["host"] == addresses["joiner"]
    assert services["head"]["volumes"] != services["joiner"]["volumes"], "it fetches what it lacks"
    gpu = parse(services["gpu"]["command"])
    assert (gpu["device"], gpu["address"], gpu["host"]) == ("cuda:0", joiner["address"], addresses["gpu"])
    assert services["gpu"]["profiles"] == ["gpu"], "machines without one start the others"
    assert services["gpu"]["build"]["args"]["DEVICES"] in container_arguments()["DEVICES"]
    used = {volume.partition(":")[0] for one in services.values() for volume in one["volumes"]}
    assert used == compose["volumes"].keys()
    assert (DEPLOY / services["head"]["build"]["context"] / services["head"]["build"]["dockerfile"]).exists()


def kuberay() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def pod_command(pod: dict[str, Any]) -> dict[str, Any]:
    """Of its first container, with the variables that it has filled in as the kubelet would."""
    container = pod["spec"]["containers"][0]
    values = {"POD_ADDRESS": "10.1.0.7", "POD_NAME": "joiner-1", "FQ_RAY_IP": "dovetail-head-svc"}
    given = {one["name"] for one in container["env"]} | {"FQ_RAY_IP"}  # the last one from the operator
    command = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["args"]]
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= given, "a variable that is not set stays as it is written"
    return parse(command)


def test_in_kubernetes_the_joiners_find_the_head() -> None:
    cluster = kuberay()["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    pod = cluster["spec"]["headGroupSpec"]["template"]
    head, joiner = pod_command(pod), pod_command(group["template"])
    assert joiner["address"] == f"dovetail-head-svc:{head['cluster_port']}"
    assert head["cluster_host"] == joiner["host"] == "10.1.0.7", "each has its own pod's address"
    ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": head["cluster_port"], "http": 8000}
    pinned = re.search(r"ray==([0-9.]+)", (ROOT / "Makefile").read_text())
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]


def test_in_kubernetes_every_volume_and_name_is_there() -> None:
    found = kuberay()
    cluster, claim, service = found["RayCluster"], found["PersistentVolumeClaim"], found["Service"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for spec in (group["template"]["spec"] for group in groups):
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert {"livenessProbe", "readinessProbe"} <= container.keys(), "else the operator adds its own"
        claimed = volumes["models"].get("persistentVolumeClaim", {}).get("claimName")
        assert claimed in (None, claim["metadata"]["name"])
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert len({one["metadata"]["namespace"] for one in found.values()}) == 1
    limit = groups[1]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]
    given = pod_command(groups[1]["template"])["max_size"]
    assert parse_size(given) < parse_size(limit.replace("Gi", "GiB")), "models go before the kubelet evicts the pod"
