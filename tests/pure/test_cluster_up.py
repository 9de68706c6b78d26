"""The commands of several machines where Ray is not installed, and what does not need it."""

from __future__ import annotations

import asyncio
import builtins
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from dovetail import messages
from dovetail.cli import up
from dovetail.cluster.ray_backend import HostLost, Member, WorkerEnd, import_ray
from dovetail.config import NodeConfig
from dovetail.errors import ConfigError, DovetailError, Overloaded
from dovetail.gateway.workers.client import WorkerClient
from dovetail.gateway.workers.remote_workers import RemoteWorkers, WireKeys
from dovetail.worker.remote_link import apply_keys, clock_offset_s, take_keys


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ray(name: str, *rest: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError("no ray")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ConfigError, match=r"dovetail\[cluster\]"):
        import_ray()


class FakeHost:
    """A machine whose worker lives until the test says otherwise."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.runs: list[list[str]] = []
        self.ends: asyncio.Queue[WorkerEnd | None] = asyncio.Queue()  # None = the machine is gone
        self.left: bool | None = None
        self.refusals = 0  # before it describes itself

    async def describe(self) -> dict[str, Any]:
        if self.refusals:
            self.refusals -= 1
            raise HostLost("not yet")
        return self.description

    async def run(self, arguments: Sequence[str], keys: str, hang_timeout_s: float) -> WorkerEnd:
        self.runs.append(list(arguments))
        end = await self.ends.get()
        if end is None:
            raise HostLost("gone")
        return end

    async def stop(self, *, leaves: bool = False) -> None:
        self.left = leaves


class FakeMembers:
    def __init__(self) -> None:
        self.hosts: dict[str, FakeHost] = {}

    def members(self) -> list[Member]:
        return [Member(id, "127.0.0.1") for id in self.hosts]

    def host(self, member: Member) -> FakeHost:
        return self.hosts[member.id]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_machine_that_finds_no_head_gives_up_and_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(up, "_note_signals", list)  # this process keeps its own
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            DovetailError, match=rf"no head at {address}.*Start `dovetail up --cluster-host 127\.0\.0\.1"
        ):
            up.join(address, name="left")
    with pytest.raises(ConfigError, match=r"expected the head's address and port, as 10\.0\.0\.5:6379"):
        up.join("somewhere", name="left")


@pytest.mark.parametrize("port", [10001, 15000, 19999, 8265])
def test_a_port_that_ray_keeps_is_refused_before_ray_is_started(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--cluster-port {port}: Ray keeps ports 10001 to 19999"):
        up.up(cluster_port=port)


def test_machines_come_go_and_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.gateway.workers.remote_workers.LOOK_S", 0.01)

    async def run() -> None:
        link, keys, members = WorkerClient(()), WireKeys(), FakeMembers()
        told: list[str] = []
        link.join_observers.append(lambda name: told.append(f"+{name}"))
        link.leave_observers.append(lambda name: told.append(f"-{name}"))
        link.close_observers.append(keys.close)
        port = link.listen(lambda context: keys.bind(context, "tcp://127.0.0.1:*"))
        with pytest.raises(Overloaded, match="no node has joined"):
            link.check_usable()
        membership = RemoteWorkers(members, link, keys, f"tcp://127.0.0.1:{port}", ["--verify", "off"])
        link.start()
        membership.start()
        first = members.hosts["1"] = FakeHost({"name": "left", "threads": 2})
        members.hosts["2"] = FakeHost({"name": "left"})  # taken
        members.hosts["3"] = FakeHost({"device": "abacus"})  # nonsense
        await eventually(lambda: first.runs)
        assert told == ["+left"]
        assert first.runs[0][first.runs[0].index("--threads") :][:2] == ["--threads", "2"]
        first.ends.put_nowait(WorkerEnd(-9, ("request",)))
        await eventually(lambda: len(first.runs) == 2)  # it is started again
        first.ends.put_nowait(None)
        membership.is_drained = lambda name: True
        link.leaving.add("left")
        second = members.hosts["2"]
        await eventually(lambda: second.runs)
        assert told == ["+left", "-left", "+left"], "its name is free"
        assert first.left, "the machine was told to leave"
        third = members.hosts["4"] = FakeHost({"name": "right"})
        third.refusals = 3
        await eventually(lambda: third.runs)
        del members.hosts["4"]  # without a word
        await eventually(lambda: told[-1] == "-right")
        await membership.close()
        await link.close()

    asyncio.run(run())


def test_a_machine_that_was_asked_to_leave_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dovetail.gateway.workers.remote_workers.LOOK_S", 0.01)

    async def run() -> None:
        link, keys, members = WorkerClient(()), WireKeys(), FakeMembers()
        link.close_observers.append(keys.close)
        port = link.listen(lambda context: keys.bind(context, "tcp://127.0.0.1:*"))
        membership = RemoteWorkers(members, link, keys, f"tcp://127.0.0.1:{port}", [])
        link.start()
        membership.start()
        hosts = {name: FakeHost({"name": name}) for name in ("asked", "lost")}
        for name, host in hosts.items():
            members.hosts[name] = host
            await eventually(lambda host=host: host.runs)
            link.nodes[name].hello = messages.Hello(name, 1, "cpu", 0.0)  # as if its worker had spoken
        membership.is_drained = lambda name: True
        link.leaving.add("asked")
        await eventually(lambda: "asked" not in link.nodes)
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
        del members.hosts["lost"]
        await eventually(lambda: "lost" not in link.nodes)
        assert "worker lost is gone with its machine" in caplog.text
        await membership.close()
        await link.close()

    asyncio.run(run())


def test_only_who_has_the_keys_is_heard_and_learns_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        link, keys = WorkerClient(()), WireKeys()
        link.close_observers.append(keys.close)
        port = link.listen(lambda context: keys.bind(context, "tcp://127.0.0.1:*"))
        link.start()

        class Watcher:
            starts, pid, retry_after_s = 0, None, None
            greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def start(self) -> None: ...

            def expects(self, hello: messages.Hello) -> bool:
                return True

            def on_hello(self) -> None: ...

            async def stop(self) -> None: ...

        link.add(NodeConfig(name="left"), Watcher())
        monkeypatch.setenv(messages.KEYS_VARIABLE, keys.for_workers)
        offset_s = await asyncio.to_thread(_ask_clock, port, with_keys=True)
        assert abs(offset_s) < 1.0, "the same machine, the same clock"
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(_ask_clock, port, with_keys=False)
        await link.close()

    asyncio.run(run())


def _ask_clock(port: int, *, with_keys: bool) -> float:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"left")
    socket.setsockopt(zmq.LINGER, 0)
    if with_keys:
        apply_keys(socket, take_keys())
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        return clock_offset_s(socket, 1.0)
    finally:
        socket.close()
        context.term()
