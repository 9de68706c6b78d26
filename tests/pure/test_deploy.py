"""The files in `deploy/`: they start commands of ours, what they name is there, and systemd has no complaint."""

from __future__ import annotations

import ipaddress
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dovetail.cli.main import build_app

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
    assert services["head"]["volumes"] == services["joiner"]["volumes"], "models are found under one path"
    assert (DEPLOY / services["head"]["build"]["context"] / services["head"]["build"]["dockerfile"]).exists()
