"""Fault storms of what a server runs: its own policy on one node, on two, or on many, with learnt latencies, KV pools
that are small for the load, requests of every kind that clients send, and a server's limits on trying again.
"""

from __future__ import annotations

from itertools import count
from random import Random

from dovetail.cluster.retry import RetryRule
from dovetail.eventlog import EventLog
from dovetail.node.node import Node
from dovetail.policy.compositions import SERVED
from dovetail.policy.latency import GIB, IN_PLACE_RESIZE, Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.live import LiveLatency
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise, PredictedDurations
from dovetail.sim.faults import draw_faults
from dovetail.sim.kv_blocks import KvBlocks, Text
from dovetail.sim.operations import draw_operations, draw_preparations
from dovetail.sim.setup import INSTANCE_IDS
from dovetail.sim.trace import Arrival
from dovetail.sim.workload import Workload, generate

# Prompts and answers as shares of the context: chats, long prompts with short answers, answers longer than expected.
LENGTHS = ((0.01, 0.01), (0.05, 0.05), (0.1, 0.01), (0.1, 0.1), (0.3, 0.01), (0.05, 0.4), (0.6, 0.1), (0.02, 0.9))
KINDS = ("plain", "plain", "plain", "strict", "flex", "choices", "resumed")
CONVERSATIONS = 3
CONTEXTS = (128, 256, 512, 1024)  # tokens that a request may have


def build_server_storm(seed: int, log: EventLog | None = None) -> Simulation:
    """A third of the seeds has one node, a third two, the others three to six. Half of the nodes that are alone decide
    on the thread that computes, as a worker does."""
    rng = Random(seed)
    composition = SERVED.having(max_stall=rng.choice((2.0, 2.0, 4.0)))
    nodes = (1, 2, rng.randrange(3, 7))[seed % 3]
    workload = Workload(
        requests=rng.randrange(15, 60),
        models=rng.choice((1, 2, 2, 3, 3, 6)),
        rate_per_s=rng.uniform(0.5, 6.0) * nodes,
        zipf=rng.uniform(0.0, 1.5),
        cv=rng.choice((0.5, 1.0, 4.0)),
        burst_every_s=rng.choice((0.0, 20.0)),
        burst_requests=rng.randrange(4, 30),
    )
    context = rng.choice(CONTEXTS)
    kinds = rng.choice((KINDS, ("plain",)))
    usual = [rng.choice(LENGTHS) for _ in range(workload.models)]  # a model's requests are alike, mostly
    arrivals = [_varied(rng, one, kinds, context, usual[one.model]) for one in generate(workload, seed)]
    arrivals = _with_some_first(Random(f"first {seed}"), arrivals)
    lengths = [arrival.output_tokens for arrival in arrivals for _ in arrival.produced]
    texts = _draw_texts(Random(f"texts {seed}"), arrivals)
    noise = Noise(rng, 0.1)
    devices: list[Device] = []
    for index in range(nodes):
        kind = rng.choice(list(DeviceKind))
        hostings = {
            str(model): _draw_hosting(Random(seed + model), kind, context, rng) for model in range(workload.models)
        }
        memory = _draw_memory(rng, list(hostings.values()), context)
        blocks = KvBlocks(texts)
        first = index * INSTANCE_IDS
        node = Node(f"{kind.value}-{index}", kind, memory, hostings, composition, first_instance=first, prefixes=blocks)
        devices.append(Device(node, dict(enumerate(lengths)), PredictedDurations(IN_PLACE_RESIZE, noise)))
        devices[-1].blocks = blocks
        devices[-1].catalogue = hostings
        devices[-1].drafts = _draw_drafts(Random(f"drafts {seed}"))
    horizon_s = arrivals[-1].arrival_s
    faults = draw_faults(rng, rng.randrange(0, 13), nodes, horizon_s + 10)
    is_alone = nodes == 1 and seed % 2 == 0
    others = Random(f"operations {seed}")
    operations = draw_operations(others, _choices(arrivals), workload.models, nodes, horizon_s)
    retry, deadly = _draw_losses(Random(f"losses {seed}"), len(lengths))
    return Simulation(
        devices,
        composition,
        arrivals,
        horizon_s=horizon_s,
        log=log,
        faults=faults,
        on_one_thread=is_alone,
        retry=retry,
        deadly=deadly,
        hang_s=Random(f"hang {seed}").choice((4.0, 30.0)),
        operations=operations,
        preparations=draw_preparations(others, len(lengths)),
        are_viewed=others.random() < 0.5,
    )


def _draw_drafts(rng: Random) -> Random | None:
    return rng if rng.random() < 0.25 else None


def _choices(arrivals: list[Arrival]) -> list[tuple[float, tuple[int, ...]]]:
    """When each comes, and the numbers of its choices."""
    numbers = count()
    return [(one.arrival_s, tuple(next(numbers) for _ in one.produced)) for one in arrivals]


def _draw_losses(rng: Random, requests: int) -> tuple[RetryRule, list[int]]:
    """How long lost requests are tried again, and in every fourth storm one that ends every worker that computes it."""
    retry = RetryRule(rng.choice((0, 1, 2, 2)), rng.choice((0.5, 4.0, 60.0)), rng.choice((5.0, 30.0)))
    return retry, [rng.randrange(requests)] if rng.random() < 0.25 else []


def _varied(rng: Random, arrival: Arrival, kinds: tuple[str, ...], context: int, usual: tuple[float, float]) -> Arrival:
    """Most clients ask for nothing; others for targets, best effort, several choices, or the rest of an answer."""
    kind = rng.choice(kinds)
    prompt, answer = usual if rng.random() < 0.8 else rng.choice(LENGTHS)
    size = context * rng.uniform(0.7, 1.0)
    arrival = arrival._replace(input_tokens=1 + int(size * prompt), output_tokens=2 + int(size * answer))
    if kind == "strict":
        return arrival._replace(ttft_s=rng.uniform(0.5, 5.0), tpot_s=rng.uniform(0.05, 0.5))
    if kind == "flex":
        return arrival._replace(is_best_effort=True)
    if kind == "choices":
        return arrival._replace(produced=(0,) * rng.randrange(2, 4))
    if kind == "resumed":
        done = rng.randrange(1, arrival.output_tokens)
        return arrival._replace(produced=(done,))
    return arrival


def _with_some_first(rng: Random, arrivals: list[Arrival]) -> list[Arrival]:
    """In half of the storms some go before others."""
    share = rng.choice((0.0, 0.0, 0.1, 0.5))
    return [one._replace(goes_first=not one.is_best_effort and rng.random() < share) for one in arrivals]


def _draw_texts(rng: Random, arrivals: list[Arrival]) -> dict[int, Text]:
    """Choices share their prompt; in half of the storms most requests go on with one of a few conversations."""
    share = rng.choice((0.0, 0.8))
    texts: dict[int, Text] = {}
    for number, arrival in enumerate(arrivals):
        conversation = rng.randrange(CONVERSATIONS) if rng.random() < share else None
        for _ in arrival.produced:
            own = CONVERSATIONS + len(arrivals) + len(texts)
            prompt = CONVERSATIONS + number if conversation is None else conversation
            texts[len(texts)] = Text(prompt, own if conversation is None else conversation)
    return texts


def _draw_hosting(shape: Random, kind: DeviceKind, context: int, rng: Random) -> Hosting:
    size = shape.choice((0.3, 1.0, 1.0, 3.0))  # billions of parameters, 2 bytes each
    speed = size * (0.0015 if kind is DeviceKind.GPU else 0.012)
    rows = [(length, Curve([(1, speed), (64, speed * (2 + length / 2048))])) for length in (512, 2048)]
    latency = LatencyModel(Curve([(1, speed), (2048, speed * 20)]), Surface(rows))
    load_s = rng.uniform(0.05, 3.0)
    return Hosting(
        weight_bytes=int(size * 2 * GIB),
        kv_bytes_per_token=int(size * 2**15),
        latency=LiveLatency(latency),
        slots=2,
        load_s=load_s,
        max_kv_tokens=context * rng.choice((2, 16, 64)),
        keep_alive_s=rng.choice((0.0, 2.0, 30.0, 300.0)),
    )


def _draw_memory(rng: Random, hostings: list[Hosting], context: int) -> int:
    """Room for the largest model with one long request; mostly the others' weights fit too, with few tokens left."""
    largest = max(hostings, key=lambda one: one.weight_bytes)
    others = sum(one.weight_bytes for one in hostings) - largest.weight_bytes
    tokens = context + 32 + rng.uniform(0.0, 2.0 * context)
    return int(largest.weight_bytes + others * rng.choice((0.3, 1.0, 1.0)) + tokens * largest.kv_bytes_per_token)
