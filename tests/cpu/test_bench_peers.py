"""Peers as child processes: what one answers, how one fails, and how one that cannot be had is told apart."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dovetail_bench import peer_child
from dovetail_bench.peers import PEERS, Peer, PeerFailed, PeerProcess, PeerUnavailable, find_python, set_up

pytestmark = pytest.mark.slow  # whole contests of processes

SCRIPT = Path(peer_child.__file__)
MISSING = Peer("nowhere", ("dovetail-peer-that-is-nowhere==1.0",), ("dovetail_peer_that_is_nowhere",))


@pytest.fixture(scope="module")
def child() -> Iterator[PeerProcess]:
    with PeerProcess(Path(sys.executable), SCRIPT, "safetensors") as process:
        yield process


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    tensors = {"b": torch.randn(33, 7).bfloat16(), "a": torch.randn(5000), "c": torch.randn(3)}
    save_file(tensors, tmp_path / "weights.safetensors")
    torch.save(tensors, tmp_path / "weights.pt")
    return {"safetensors": tmp_path / "weights.safetensors", "torch": tmp_path / "weights.pt"}


def test_every_way_to_load_gives_the_same_bytes(child: PeerProcess, weights: dict[str, Path]) -> None:
    answers = []
    for loader, form in (
        ("safetensors mmap", "safetensors"),
        ("safetensors load_file", "safetensors"),
        ("torch.load", "torch"),
    ):
        answers.append(child.ask({"load": loader, "path": str(weights[form]), "device": "cpu"}))
    assert {answer["bytes"] for answer in answers} == {33 * 7 * 2 + 5000 * 4 + 3 * 4}
    assert len({answer["checksum"] for answer in answers}) == 1
    assert all(answer["seconds"] > 0 for answer in answers)


def test_the_checksum_sees_the_end_of_a_tensor(tmp_path: Path, child: PeerProcess) -> None:
    sums = set()
    for last in (0.0, 1.0):
        tensor = torch.zeros(1000)
        tensor[-1] = last
        save_file({"a": tensor}, tmp_path / "one.safetensors")
        answer = child.ask(
            {"load": "safetensors load_file", "path": str(tmp_path / "one.safetensors"), "device": "cpu"}
        )
        sums.add(answer["checksum"])
    assert len(sums) == 2


def test_a_failing_load_names_the_peer_and_the_next_one_works(child: PeerProcess, weights: dict[str, Path]) -> None:
    with pytest.raises(PeerFailed, match=r"safetensors: .*no-such"):
        child.ask({"load": "safetensors mmap", "path": "/no-such.safetensors", "device": "cpu"})
    answer = child.ask({"load": "safetensors mmap", "path": str(weights["safetensors"]), "device": "cpu"})
    assert answer["bytes"] > 0


def test_a_child_that_dies_or_hangs_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("import sys\nsys.stdin.readline()\nsys.exit(3)\n")
    short_lived = PeerProcess(Path(sys.executable), script, "short-lived")
    with short_lived, pytest.raises(PeerFailed, match="short-lived: its process ended with 3"):
        short_lived.ask({})
    script.write_text("import sys, time\nsys.stdin.readline()\ntime.sleep(60)\n")
    silent = PeerProcess(Path(sys.executable), script, "silent")
    with silent, pytest.raises(PeerFailed, match="silent: no answer in time"):
        silent.ask({}, timeout_s=0.2)


def test_what_this_interpreter_has_needs_no_environment(tmp_path: Path) -> None:
    assert find_python(PEERS["safetensors"], tmp_path) == Path(sys.executable)


def test_a_peer_that_is_not_here_is_not_installed_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="nowhere is not installed"):
        set_up(MISSING, tmp_path, install=False)
    assert not any(tmp_path.iterdir())


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    with pytest.raises(PeerUnavailable, match=r"nowhere cannot be installed on .*: No matching distribution"):
        set_up(MISSING, tmp_path, report=said.append)
    assert any("installing dovetail-peer-that-is-nowhere" in text for text in said)
    assert find_python(MISSING, tmp_path) is None  # half an environment is none


def test_without_a_network_wheels_of_a_folder_join_what_this_python_has(tmp_path: Path) -> None:
    """Pins give way: the machine's own numpy, in whatever version, goes with the wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "dovetail_made_up-3.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("dovetail_made_up.py", "import numpy\n")
        about = "dovetail_made_up-3.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: dovetail-made-up\nVersion: 3.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    peer = Peer("made-up", ("numpy==0.0.1", "dovetail-made-up==1.0"), ("numpy", "dovetail_made_up"))
    python = set_up(peer, tmp_path, wheels=wheels)
    assert python == tmp_path / "made-up" / "bin" / "python"
    assert find_python(peer, tmp_path) == python
