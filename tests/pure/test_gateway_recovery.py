"""What a server writes down and the next one reads: models by node, emptied nodes, changes through the API."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gateway_builders import eventually, make_admin, make_card, running_service
from test_gateway_service import collect

from dovetail.cluster.durable import SqliteDurable
from dovetail.config import ModelConfig, NodeConfig
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.workers.adopted import WorkerRecords
from dovetail.gateway.workers.recovery import Changes, Recovery
from dovetail.gateway.workers.supervisor import Supervisor
from dovetail.messages import Hello
from dovetail.pulse import Pulse


def test_models_are_assigned_confirmed_and_forgotten_as_nodes_say(tmp_path: Path) -> None:
    async def run() -> None:
        durable = SqliteDurable(tmp_path / "state")
        async with running_service(tmp_path) as service:
            recovery = Recovery(durable, service.cluster)
            assert recovery.ready_before == ()
            await collect(service, "hi", max_tokens=2)
            assert durable.all("placement") == {"fake@cpu-0": "confirmed"}
            service.cluster.drain("cpu-0")
            assert Recovery(durable, service.cluster).ready_before == ("fake",)
            service.cluster.undrain("cpu-0")
            assert durable.all("drain") == {}
            service.cluster.unload("fake")
            await eventually(lambda: not durable.all("placement"))
            service.cluster.drain("cpu-0")
        async with running_service(tmp_path) as service:
            Recovery(durable, service.cluster)
            assert "cpu-0" in service.cluster.controller.drains
        durable.close()

    asyncio.run(run())


def test_changes_of_models_hold_in_the_next_server_as_far_as_they_can(tmp_path: Path) -> None:
    async def run() -> None:
        durable = SqliteDurable(tmp_path / "state")
        async with running_service(tmp_path) as service:
            admin = _admin(durable, service)
            await admin.add("mine", ModelConfig(source="fake", keep_alive=7.0))
            await admin.change("fake", {"keep_alive": 5.0})
            await admin.remove("broken", force=False)
        durable.put("model", "lost", {"source": "nowhere"})
        async with running_service(tmp_path) as service:
            admin = _admin(durable, service)
            await admin.recover()
            assert service.models.get("mine").config.keep_alive == 7.0
            assert service.models.get("fake").config.keep_alive == 5.0
            assert {one.name for one in service.models.all()} == {"mine", "fake"}
        durable.close()

    def _admin(durable: SqliteDurable, service: object) -> Admin:
        admin = make_admin(service)  # type: ignore[arg-type]
        admin._changes = Changes(durable)
        return admin

    asyncio.run(run())


def test_what_was_ready_before_is_loaded_when_the_first_machine_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.gateway.workers.recovery.JOIN_S", 0.01)

    async def run() -> None:
        async with running_service(tmp_path) as service:
            admin, link = make_admin(service), service.link
            await eventually(link.is_up)
            node, watcher = link.nodes.pop("cpu-0"), link.supervisors.pop("cpu-0")
            admin.load_again(["fake"])
            await asyncio.sleep(0.05)
            link.nodes["cpu-0"], link.supervisors["cpu-0"] = node, watcher
            assert node.hello is not None
            for observer in list(link.observers):
                observer("cpu-0", node.hello)
            await eventually(lambda: "fake" in node.loaded)

    asyncio.run(run())


def test_a_worker_that_comes_back_with_a_model_that_is_on_offer_no_more_is_told_to_forget_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_service(tmp_path, make_card(tmp_path), is_worker_first=True) as service:
            hello = service.link.nodes["cpu-0"].hello
            assert hello is not None
            sent: list[str] = []
            service.link.send = lambda node, message: sent.append(type(message).__name__)  # type: ignore[method-assign]
            service.cluster._greet("cpu-0", type(hello)("cpu-0", 1, "cpu", 0.0, models=("fake", "gone")))
            assert sent == ["Load", "Unload"]

    asyncio.run(run())


def test_a_worker_from_before_is_known_before_anything_that_it_says_can_be_read(tmp_path: Path) -> None:
    async def run() -> None:
        durable = SqliteDurable(tmp_path / "state")
        records = WorkerRecords(durable)
        supervisor = Supervisor(
            NodeConfig(name="left"), "ipc://nowhere", None, lambda name, end: None, tmp_path, (), records, 60.0
        )
        orphan = subprocess.Popen(["sleep", "60"])
        try:
            records.started("left", orphan.pid, supervisor._argv)
            Pulse.create(supervisor._pulse_file).close()
            supervisor.start()  # in the tick in which its socket is bound: it may speak in the next one
            assert supervisor.expects(Hello("left", orphan.pid, "cpu", 0.0))
        finally:
            orphan.kill()
            await supervisor.stop()
            orphan.wait()
            durable.close()

    asyncio.run(run())


def test_a_worker_that_is_heard_of_before_its_start_has_returned_is_taken_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that stands still for a moment; so too when it starts again."""
    real = asyncio.create_subprocess_exec

    async def slowly(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await real(*argv, **options)
        await asyncio.sleep(2.0)
        return process

    async def test() -> None:
        async with running_service(tmp_path) as service:
            supervisor = service.link.supervisors["cpu-0"]
            await asyncio.wait_for(supervisor.greeted, 20)
            await eventually(lambda: supervisor.pid)
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(30):
                while not (service.link.is_up() and supervisor.pid not in (None, first)):
                    await asyncio.sleep(0.05)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    asyncio.run(test())
