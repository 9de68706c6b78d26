"""Nodes that cannot be reached or stand still: what the controller makes of it, in a server and in storms."""

from __future__ import annotations

from collections import Counter

import pytest
from driver_builders import Listener

from dovetail.cluster.decisions import GiveUp, Kill
from dovetail.cluster.liveness import DOUBT_S, HANG_FACTOR, is_hung
from dovetail.cluster.remote_cluster import RemoteCluster
from dovetail.errors import WorkerLost
from dovetail.messages import Hello, Said, ToWorker
from dovetail.node.protocol import Offer, Offered
from dovetail.policy.compositions import SERVED
from dovetail.policy.placement import DeviceKind, NodeFacts
from dovetail.pulse import LOOK_S, Pulse, StillWatch
from dovetail.sim.driver import Simulation
from dovetail.sim.storm import run_one
from dovetail.types import Request, SamplingParams


def make_cluster() -> tuple[RemoteCluster, Listener]:
    """A node, and a request that it was asked to take."""
    sent: list[ToWorker] = []
    cluster, listener = (
        RemoteCluster([NodeFacts("a", DeviceKind.CPU)], SERVED, lambda _, message: sent.append(message)),
        Listener(),
    )
    join(cluster)
    cluster.submit(Request("r", "m", (1, 2), SamplingParams(max_tokens=5, seed=0)), listener, 0.0, 0.0)
    return cluster, listener


def join(cluster: RemoteCluster) -> None:
    cluster.joined("a", Hello("a", 1, "cpu", 0.1, memory_bytes=1 << 30))
    cluster.received("a", Said((Offered("m", Offer(4096)),)), 0.0)


def wake_until(cluster: RemoteCluster, end_s: float) -> list[tuple[float, str]]:
    """What the shell is to do, and when."""
    told = []
    while (wake_s := cluster.next_wake_s()) is not None and wake_s <= end_s:
        cluster.wake(wake_s)
        while cluster.outbox:
            told.append((wake_s, type(cluster.outbox.popleft()).__name__))
    return told


def test_a_node_that_cannot_be_reached_is_given_up_after_a_moment() -> None:
    cluster, _ = make_cluster()
    cluster.unreachable("a", 0.2)
    cluster.unreachable("a", 0.7)  # the next message does not get through either
    assert wake_until(cluster, 3.0) == [(pytest.approx(0.2 + DOUBT_S), "GiveUp")]


def test_a_node_whose_end_is_told_meanwhile_or_that_is_there_again_is_not_given_up() -> None:
    for is_there in (False, True):
        cluster, _ = make_cluster()
        cluster.unreachable("a", 0.2)
        cluster.lost("a", 0.3, WorkerLost("it died"))
        if is_there:
            join(cluster)
        assert not wake_until(cluster, 3.0)


def test_a_node_that_is_not_there_is_not_missed() -> None:
    cluster, _ = make_cluster()
    cluster.lost("a", 0.1, WorkerLost("it died"))
    cluster.unreachable("a", 0.2)
    assert not wake_until(cluster, 3.0)


def test_a_node_that_stands_still_is_killed_when_what_it_computes_should_long_be_done() -> None:
    cluster, _ = make_cluster()
    limit_s, expected_s = 3.0, 2.0
    for stood_s in (2.0, limit_s + HANG_FACTOR * expected_s):
        cluster.stands_still("a", stood_s, expected_s, limit_s, 20.0)
        assert not cluster.outbox
    cluster.stands_still("a", 11.5, expected_s, limit_s, 20.0)
    (said,) = cluster.outbox
    assert isinstance(said, Kill)
    assert (said.node.name, said.stood_s) == ("a", 11.5)
    assert not is_hung(1e6, 0.0, 0.0), "it may do nothing for as long as it likes"


def test_a_heartbeat_stands_still_while_nothing_moves_and_the_observer_looks() -> None:
    pulse = Pulse()
    pulse.beat()
    watch = StillWatch(0.0)
    assert watch.look(pulse, 0, LOOK_S) == 0.0
    assert watch.look(pulse, 0, 2 * LOOK_S) == pytest.approx(LOOK_S)
    assert watch.look(pulse, 1, 3 * LOOK_S) == 0.0, "it reads from the disk"
    assert watch.look(pulse, 1, 100.0) < 3 * LOOK_S, "the observer did not run either"
    pulse.close()


def test_storms_play_nodes_that_are_given_up_and_nodes_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Counter[str] = Counter()
    carry_out = Simulation._carry_out

    def counted(self: Simulation, node: object, said: object, now: float) -> None:
        told[type(said).__name__] += isinstance(said, GiveUp | Kill)
        carry_out(self, node, said, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulation, "_carry_out", counted)
    for seed in range(12):
        run_one(seed, of_server=True)
    assert told["GiveUp"] >= 2
    assert told["Kill"] >= 2
