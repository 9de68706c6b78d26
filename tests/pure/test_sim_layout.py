"""Nodes and models of a simulation from a file: what it may say, and how it complains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_builders import make_hosting, make_node, make_work
from typer.testing import CliRunner

from dovetail.cli.sim import app
from dovetail.errors import ConfigError
from dovetail.node.events import StartLoad
from dovetail.policy.headroom import Refusal
from dovetail.policy.latency import GIB
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.storage import Tier
from dovetail.sim.compositions import policy
from dovetail.sim.layout import read_layout
from dovetail.sim.replay import replay
from dovetail.sim.setup import Setup, build

SHAPE = {"weight_gib": 10.0, "kv_kib_per_token": 512, "layers": 32}
TIMES = {
    "prefill_ms": [[1, 15], [1024, 90]],
    "decode_ms": [{"mean_length": 512, "batch_ms": [[1, 14], [32, 30]]}],
}
PROFILE_TEXT = json.dumps(
    {"models": {"tiny": {"shape": SHAPE, "hardware": {"c": {"kind": "cpu", **TIMES}, "g": {"kind": "gpu", **TIMES}}}}}
)
GOOD = """
nodes:
  - {name: socket, device: cpu, count: 2}
  - {name: big, device: gpu, hardware: h200-141g}
  - {name: old, device: gpu, memory: 40GiB}
models:
  usual: {shape: tiny, share: 2}
  large:
    weights: 62.8GiB
    kv_per_token: 192KiB
    layers: 48
    numbers: [3]
    devices: [gpu]
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    trace, profile, config = tmp_path / "trace.csv", tmp_path / "profile.json", tmp_path / "cluster.yaml"
    rows = [f"{index * 0.5},{index % 5},200,20" for index in range(40)]
    trace.write_text("arrival_s,model,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    profile.write_text(PROFILE_TEXT)
    config.write_text(GOOD)
    return trace, profile, config


def make_setup(files: tuple[Path, Path, Path], name: str = "slinfer") -> Setup:
    return Setup(files[0], files[1], policy(name), layout=read_layout(files[2]), config=files[2])


def test_nodes_of_several_kinds_and_models_of_several_sizes_come_from_one_file(files: tuple[Path, Path, Path]) -> None:
    simulation = build(make_setup(files))
    nodes = {device.node.name: device.node for device in simulation.devices}
    assert list(nodes) == ["socket-0", "socket-1", "big-0", "old-0"]
    assert {arrival.model for arrival in simulation.arrivals} == {0, 1, 3}  # two of every eight, and number 3
    assert set(nodes["socket-0"].device.hostings) == {"0", "1"}
    assert nodes["old-0"].device.hostings["3"].weight_bytes == int(62.8 * GIB)
    assert nodes["big-0"].device.ledger.capacity > 100 * GIB > nodes["old-0"].device.ledger.capacity
    result = simulation.run()
    assert result.met() == len(result.records)


def test_nodes_of_one_machine_share_its_tiers(files: tuple[Path, Path, Path]) -> None:
    nodes = "  - {name: rack, device: gpu, count: 4, hardware: a40-48g, storage: sllm-cluster, per_machine: 2}"
    files[2].write_text(f"nodes:\n{nodes}\nmodels:\n  usual: {{shape: tiny, share: 8}}\n")
    simulation = build(make_setup(files, "serverlessllm"))
    simulation.run()
    machines = {device.machine for device in simulation.devices if device.machine is not None}
    assert len(machines) == 2
    assert sum(machine.loads[Tier.MEMORY] for machine in machines) > 0
    files[2].write_text(files[2].read_text().replace("sllm-cluster", "shelf"))
    with pytest.raises(ConfigError, match=r"line 2: nodes\.0\.storage: 'shelf' is unknown"):
        read_layout(files[2])


def test_a_faster_link_loads_faster(files: tuple[Path, Path, Path]) -> None:
    loads = [device.load_s(StartLoad(0, "m", GIB, 0.0)) for device in build(make_setup(files)).devices]
    assert loads[2] < loads[3]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("count: 2", "cuont: 2", "line 3: nodes.0.cuont: unknown key"),
        ("layers: 48", "layer: 48", "line 11: models.large.layer: unknown key"),
        ("models:", "modles:", "line 6: modles: unknown key|line 1: models: Field required"),
        ("share: 2", "share: 9", "line 7: models.usual.share"),
        ("shape: tiny, share: 2", "shape: tiny", "line 7: models.usual: expected either share or numbers"),
        ("    layers: 48\n", "", "line 8: models.large: weights, kv_per_token and layers belong together"),
        ("name: old", "name: big", "the name 'big' is given twice"),
        ("device: cpu", "device: tpu", "line 3: nodes.0.device"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(
    files: tuple[Path, Path, Path], old: str, new: str, complaint: str
) -> None:
    files[2].write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_layout(files[2])
    assert str(files[2]) in str(caught.value)


def test_unknown_hardware_and_a_model_that_fits_nowhere_name_file_and_line(files: tuple[Path, Path, Path]) -> None:
    files[2].write_text(GOOD.replace("h200-141g", "h900"))
    with pytest.raises(ConfigError, match=r"cluster\.yaml: line 4: nodes\.1\.hardware: 'h900'"):
        build(make_setup(files))
    files[2].write_text(GOOD.replace("62.8GiB", "300GiB"))
    with pytest.raises(ConfigError, match=r"cluster\.yaml: line 8: models\.large: model 3 .* 300\.8 GiB, more than"):
        build(make_setup(files))
    files[2].write_text(GOOD.replace("device: gpu", "device: cpu"))
    with pytest.raises(ConfigError, match="no node is of a device that it names"):
        build(make_setup(files))


def test_a_model_of_a_plain_run_that_fits_nowhere_names_the_traces_line(files: tuple[Path, Path, Path]) -> None:
    files[1].write_text(PROFILE_TEXT.replace('"weight_gib": 10.0', '"weight_gib": 500.0'))
    setup = Setup(files[0], files[1], policy("slinfer"), shape="tiny", cpu_nodes=0, gpu_nodes=1)
    with pytest.raises(ConfigError, match=r"trace\.csv: line 2: model 0 \(tiny\) fits nowhere: it needs 502\.\d GiB"):
        build(setup)


def test_the_command_takes_the_file_and_its_log_replays(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    options = ["run", "--trace", str(files[0]), "--profile", str(files[1]), "--config", str(files[2]), "--json"]
    result = CliRunner().invoke(app, [*options, "--event-log", str(log)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["requests"] == 24
    assert replay(log) > 24
    refused = CliRunner().invoke(app, [*options, "--gpu-nodes", "3"])
    assert isinstance(refused.exception, ConfigError)
    assert "--gpu-nodes" in str(refused.exception)


# Baselines with models of several sizes


def start(node_slots: dict[str, int], *order: str) -> list[int | Refusal]:
    node = make_node(kind=DeviceKind.CPU, composition=policy("sllm+c+s"))
    node.device.hostings = {name: make_hosting(slots=slots, in_place=True) for name, slots in node_slots.items()}
    return [node.start(make_work(number, model), 0.0) for number, model in enumerate(order)]


def test_a_model_that_takes_a_whole_node_shares_it_with_nobody() -> None:
    assert start({"a": 4, "b": 4, "c": 1}, "a", "b") == [0, 1]
    assert start({"a": 4, "b": 4, "c": 1}, "c", "a") == [0, Refusal.SLOTS]
    assert start({"a": 4, "b": 4, "c": 1}, "a", "c") == [0, Refusal.SLOTS]
