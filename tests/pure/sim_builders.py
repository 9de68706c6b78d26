"""Small things that tests of policy, node, cluster and simulator are built from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from dovetail.cluster.request import RequestState
from dovetail.node.events import StartLoad, StartResize, StartUnload, Turn
from dovetail.node.node import Node
from dovetail.node.protocol import Notice
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import Composition
from dovetail.policy.latency import GIB, Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.sim.compositions import SLINFER
from dovetail.sim.static_shares import node_type
from dovetail.sim.storm import check_node

KIB = 1024


def make_latency(decode_s: float = 0.02, prefill_s_per_k: float = 0.1) -> LatencyModel:
    rows = [(length, Curve([(1, decode_s), (64, decode_s * 3)])) for length in (512, 2048)]
    return LatencyModel(Curve([(1, decode_s), (1024, max(prefill_s_per_k, decode_s))]), Surface(rows))


def make_hosting(
    weight_gib: float = 10.0,
    *,
    kv_kib: int = 512,
    decode_s: float = 0.02,
    prefill_s_per_k: float = 0.1,
    slots: int = 4,
    in_place: bool = False,
) -> Hosting:
    return Hosting(
        weight_bytes=int(weight_gib * GIB),
        kv_bytes_per_token=kv_kib * KIB,
        latency=make_latency(decode_s, prefill_s_per_k),
        slots=slots,
        concurrency=4,
        half_concurrency=2,
        weights_in_place=in_place,
    )


def make_node(
    models: Iterable[str] = ("a", "b", "c"),
    *,
    kind: DeviceKind = DeviceKind.GPU,
    memory_gib: float = 72.0,
    composition: Composition | None = None,
    name: str | None = None,
    hosting: Hosting | None = None,
    first_instance: int = 0,
) -> Node:
    on_cpu = kind is DeviceKind.CPU
    shared = hosting or make_hosting(in_place=on_cpu, decode_s=0.07 if on_cpu else 0.02, slots=2 if on_cpu else 4)
    composition = composition or SLINFER
    return node_type(composition)(
        name or f"{kind.value}-0",
        kind,
        int(memory_gib * GIB),
        dict.fromkeys(models, shared),
        composition,
        first_instance=first_instance,
    )


def make_work(
    id: int = 0,
    model: str = "a",
    input_tokens: int = 512,
    arrival_s: float = 0.0,
    ttft_s: float = 1.0,
    tpot_s: float = 0.25,
) -> RequestState:
    return RequestState(id, model, input_tokens, arrival_s, ttft_s, tpot_s)


def serve_memory(node: Node, now: float) -> list[object]:
    """Answer every memory command at once; returns the other things the node said, in order."""
    others: list[object] = []
    while node.outbox:
        said = node.outbox.pop(0)
        if isinstance(said, StartLoad):
            node.load_done(said.instance, now, 0.0)
        elif isinstance(said, StartUnload):
            node.unload_done(said.instance, now)
        elif isinstance(said, StartResize):
            node.resize_done(said.instance, now)
        else:
            others.append(said)
    return others


def end_turn(node: Node, turn: Turn, now: float) -> float:
    """The turn takes what it should, nobody ends with it, and the books balance; returns when it is over."""
    now += turn.seconds(turn.instance.hosting.latency)
    node.turn_done(now, [])
    serve_memory(node, now)
    check_node(node)
    return now


def run_turns(node: Node, until_s: float) -> list[tuple[float, Turn]]:
    """Each with its end."""
    now, found = 0.0, []
    while now < until_s and (turn := node.next_turn(now)) is not None:
        now = end_turn(node, turn, now)
        found.append((now, turn))
    return found


def serve_all(runtime: NodeRuntime, now: float) -> list[Notice]:
    """Carry out every memory command at once; returns what the node said of itself, in order."""
    while runtime.outbox:
        said = runtime.outbox.popleft()
        if isinstance(said, StartLoad):
            runtime.load_ended(said.instance, now)
        elif isinstance(said, StartUnload):
            runtime.unload_ended(said.instance, now)
        elif isinstance(said, StartResize):
            runtime.resize_ended(said.instance, now)
    notices = list(runtime.mailbox)
    runtime.mailbox.clear()
    return notices


SHARED = Path(os.environ.get("DOVETAIL_SHARED", Path(__file__).parents[3] / "shared"))
CONVERSATION = SHARED / "traces" / "azure_128_conversation.csv.gz"
PROFILE = SHARED / "profiles" / "slinfer.json"
needs_shared = pytest.mark.skipif(
    not (CONVERSATION.exists() and PROFILE.exists()),
    reason="needs the traces and profiles beside the repository (or in DOVETAIL_SHARED)",
)
