"""A server over several Ray nodes, as a user starts it: `up`, `join`, `nodes`, `leave`; all on this machine, each in a
network namespace of its own, or with ports of its own where these are refused. Run by `make cluster`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ray_machines import TIMEOUT_S, Cluster, eventually

pytest.importorskip("ray.exceptions", reason="the extra `cluster` is not installed; `make cluster` runs these")

NUM_STREAMS = 50
NAMES = ("north", "east", "south", "west")


@pytest.fixture(scope="module")
def cluster(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = f"models: {{llama: {{source: {tiny_folder('llama')}, dtype: f64, keep_alive: 600s}}}}\n"
    running = Cluster(tmp_path_factory.mktemp("cluster"), config, "64MiB")
    try:
        for name in NAMES:
            running.join(name)
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str]:
    return cluster.ask_all(NUM_STREAMS)


def busiest(cluster: Cluster) -> str:
    found: str = max(cluster.nodes().values(), key=lambda one: one["unfinished"])["name"]
    return found


def test_machines_that_join_serve(cluster: Cluster, undisturbed: list[str]) -> None:
    assert all(undisturbed)
    assert set(NAMES) <= {line.split()[0] for line in cluster.run("nodes").splitlines()}


def test_workers_under_ray_stand_behind_nobody(cluster: Cluster) -> None:
    """Ray makes its actors nice, and what these start."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, one["pid"]) for one in cluster.nodes().values()} == {ours}


def test_a_worker_that_is_killed_comes_back_and_answers_go_on(cluster: Cluster, undisturbed: list[str]) -> None:
    def kill() -> None:
        os.kill(cluster.nodes()[busiest(cluster)]["pid"], signal.SIGKILL)

    assert cluster.ask_all(NUM_STREAMS, kill) == undisturbed
    eventually(lambda: all(one["state"] == "up" for one in cluster.nodes().values()))


def test_a_machine_leaves_while_it_answers_and_nobody_notices(cluster: Cluster, undisturbed: list[str]) -> None:
    left: list[str] = []

    def leave() -> None:
        left.append(busiest(cluster))
        cluster.leave(left[0])

    assert cluster.ask_all(NUM_STREAMS, leave) == undisturbed
    eventually(lambda: left[0] not in cluster.nodes())
    print(f"answers that moved: {cluster.num_migrations()}")
    assert cluster.num_migrations(), "answers moved, they did not merely end"
    assert cluster.joined[left[0]].wait(30) == 0, "the command that joined it has ended well"
    cluster.join(left[0])


def test_every_machine_is_restarted_under_load_and_no_request_fails(cluster: Cluster, undisturbed: list[str]) -> None:
    texts: list[tuple[int, str]] = []
    failures: list[str] = []
    is_over = threading.Event()

    def keep_asking(first: int) -> None:
        index, seen = first, [0] * NUM_STREAMS
        while not is_over.is_set():
            try:
                texts.append((index, cluster.ask(index, seen)))
            except (AssertionError, httpx.HTTPError) as error:
                failures.append(str(error))
            index = (index + 4) % NUM_STREAMS

    clients = [threading.Thread(target=keep_asking, args=(first,)) for first in range(4)]
    for client in clients:
        client.start()
    try:
        for name in list(cluster.nodes()):
            cluster.run("leave", name)
            eventually(lambda: name not in cluster.nodes())  # noqa: B023
            cluster.join(name)
    finally:
        is_over.set()
        for client in clients:
            client.join(TIMEOUT_S)
    assert not failures
    assert len(texts) > len(clients), "requests came all the time"
    assert all(text == undisturbed[index] for index, text in texts)


def test_a_head_that_is_killed_finds_its_machines_again(cluster: Cluster, undisturbed: list[str]) -> None:
    there = {name: node["pid"] for name, node in cluster.nodes().items()}
    cluster.kill_head()
    cluster.up()
    eventually(
        lambda: cluster.nodes().keys() == there.keys() and all(one["state"] == "up" for one in cluster.nodes().values())
    )
    assert {name: node["pid"] for name, node in cluster.nodes().items()} == there, "no worker was started"
    assert any(node["models"] for node in cluster.nodes().values()), "and their models are there"
    assert cluster.ask_all(NUM_STREAMS) == undisturbed


def test_a_machine_that_goes_without_a_word_is_missed(cluster: Cluster, undisturbed: list[str]) -> None:
    def vanish() -> None:
        process = cluster.joined[busiest(cluster)]
        process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert cluster.ask_all(NUM_STREAMS, vanish) == undisturbed
    eventually(lambda: len(cluster.nodes()) == len(NAMES) - 1)
