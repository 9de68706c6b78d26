"""Two drivers, one runtime: the same requests with the same durations give the same decisions, turns and commands, byte
for byte, in the simulator and over the wire between a gateway's controller and a worker's driver with executors.

Prefixes are not reused here, because the simulator knows nothing of them: what a hit changes has no parity yet."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Collection
from heapq import heappop, heappush
from typing import NamedTuple

import pytest
from driver_builders import BLOCK, KV_BYTES, SPEC, WEIGHT_BYTES, CheckedExecutor, Clock, Loopback
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_builders import make_latency

from dovetail.eventlog import EventLog
from dovetail.node.answers import offer_of
from dovetail.node.events import StartLoad, StartResize, Turn
from dovetail.node.node import Node
from dovetail.node.protocol import Offered
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.kv_blocks import KvBlocks, Text
from dovetail.sim.trace import Arrival
from dovetail.types import ModelCard, Request, SamplingParams, ServiceClass, Slo
from dovetail.worker.driver import NodeDriver
from dovetail.worker.runner import ModelRunner

MODELS = 4
MEMORY = 2 * WEIGHT_BYTES + 700 * KV_BYTES
MAX_TOKENS = 2000
LOAD_S = 0.153
WHOLE = SERVED.having(part_s=float("inf"))  # a prompt is one turn
PARTS = WHOLE.having(part_s=0.024)  # several prompts at a time where that saves time
MIXED = PARTS.having(mix_decodes=True)


class FixedDurations:
    gap_s = 0.0

    def turn_s(self, node: Node, turn: Turn) -> float:
        """As the node chose it, whatever the prefix cache has since."""
        turn = node.turn or turn
        prompts_s = 0.0041 + 0.00101 * sum(share.tokens for share in turn.prompts) if turn.prompts else 0.0
        if not turn.decodes:
            return prompts_s
        return prompts_s + 0.0203 + 0.00107 * len(turn.decoding) + 0.0000101 * turn.decoded_tokens

    def load_s(self, node: Node, command: StartLoad) -> float:
        return LOAD_S

    def resize_s(self, node: Node, command: StartResize) -> float:
        return 0.0

    def unload_s(self, node: Node) -> float:
        return 0.0


class Asked(NamedTuple):
    gap_s: float
    model: int
    prompt: int
    tokens: int
    kind: str = "plain"


def hostings(*, is_live: bool) -> dict[str, Hosting]:
    latency = make_latency(decode_s=0.004, prefill_s_per_k=1.0)  # parts of some twenty tokens
    return {
        str(model): Hosting(
            WEIGHT_BYTES,
            KV_BYTES,
            LiveLatency(latency) if is_live else latency,
            block_tokens=BLOCK,
            max_kv_tokens=MAX_TOKENS,
            keep_alive_s=3.0,
        )
        for model in range(MODELS)
    }


def arrivals_of(asked: list[Asked]) -> list[Arrival]:
    found, now = [], 1.0
    for number, one in enumerate(asked):
        now += one.gap_s + 0.0000173 * (number + 1)  # no two things at the same instant
        arrival = Arrival(now, one.model, one.prompt, one.tokens)
        if one.kind == "strict":
            arrival = arrival._replace(ttft_s=0.4, tpot_s=0.06)
        elif one.kind == "flex":
            arrival = arrival._replace(is_best_effort=True)
        elif one.kind == "choices":
            arrival = arrival._replace(produced=(0, 0, 0))
        elif one.kind == "resumed":
            arrival = arrival._replace(produced=(5, 2), output_tokens=one.tokens + 5)
        found.append(arrival)
    return found


def texts_of(asked: list[Asked], arrivals: list[Arrival]) -> dict[int, Text]:
    """Choices share their prompt, and chats begin alike. What follows a prompt depends on nothing else, unless it was
    begun elsewhere."""
    texts: dict[int, Text] = {}
    for number, (one, arrival) in enumerate(zip(asked, arrivals, strict=True)):
        for choice in range(len(arrival.produced)):
            if one.kind == "chat":
                texts[len(texts)] = Text(0, 10_000 + arrival.input_tokens)
            else:
                texts[len(texts)] = Text(1 + number, 1000 + 3 * number + (choice if one.kind == "resumed" else 0))
    return texts


def simulated(asked: list[Asked], composition: Composition = PARTS, *, is_live: bool = False) -> str:
    arrivals, file = arrivals_of(asked), io.StringIO()
    blocks = KvBlocks(texts_of(asked, arrivals))
    node = Node("node", DeviceKind.CPU, MEMORY, hostings(is_live=is_live), composition, prefixes=blocks)
    lengths = [one.output_tokens for one in arrivals for _ in one.produced]
    device = Device(node, dict(enumerate(lengths)), FixedDurations())
    device.blocks = blocks
    Simulation([device], composition, arrivals, log=EventLog(file, is_detailed=True), on_one_thread=True).run()
    return file.getvalue()


class TimedExecutor(CheckedExecutor):
    """Computes and checks like its parent, and takes as long as the simulated device."""

    driver: NodeDriver

    def _spend(self, left_s: float) -> None:
        chosen = self.driver.home.node.turn
        assert chosen is not None
        super()._spend(FixedDurations().turn_s(self.driver.home.node, chosen))


class Worker:
    """A driver with a clock that its executors move, and loads one after another."""

    def __init__(self, asked: list[Asked], composition: Composition = PARTS, *, is_live: bool = False) -> None:
        self.clock = Clock()
        self.clock.now = 0.0
        self.file = io.StringIO()
        log = EventLog(self.file, is_detailed=True)
        self.driver = NodeDriver("node", DeviceKind.CPU, MEMORY, composition, self, self.clock, log)
        self.driver.hostings.update(hostings(is_live=is_live))
        self.link = Loopback(self.driver, composition, self.clock, log)
        for model, hosting in self.driver.hostings.items():
            self.link.cluster.nodes["node"].heard(Offered(model, offer_of(self.driver.home.node, hosting)))
        self.coming: list[tuple[float, int, int, Request | StartLoad]] = []
        self.link_free_s = 0.0
        for number, arrival in enumerate(arrivals_of(asked)):
            heappush(self.coming, (arrival.arrival_s, 1, number, _request(number, arrival, asked[number].kind)))

    def load(self, command: StartLoad) -> None:
        self.link_free_s = max(self.clock.now, self.link_free_s) + LOAD_S
        heappush(self.coming, (self.link_free_s, 0, command.instance, command))

    def run(self) -> str:
        link = self.link
        for _ in range(50_000):
            while self.coming and self.coming[0][0] <= self.clock.now:
                self.take(*heappop(self.coming))
            if link.take_turn():
                continue
            dues = [one for one in (link.next_due_s(), self.coming[0][0] if self.coming else None) if one is not None]
            if not dues:
                assert not link.has_work
                return self.file.getvalue()
            self.clock.now = max(self.clock.now, min(dues))
        raise AssertionError("it never came to an end")

    def take(self, at_s: float, priority: int, number: int, said: Request | StartLoad) -> None:
        if isinstance(said, Request):
            self.link.cluster.submit(said, self.link.listener, at_s, self.clock.now)
            self.link.pump()
            return
        executor = TimedExecutor(self.clock, MAX_TOKENS // BLOCK)
        executor.driver = self.driver
        limits = SchedulerConfig(4096, max_batch=256, max_turn_tokens=4096, max_tokens=MAX_TOKENS - BLOCK)
        runner = ModelRunner(ModelCard(said.model, "", SPEC, ""), executor, limits, BLOCK)
        self.driver.loaded(said.instance, runner)
        self.link.pump()


def _request(number: int, arrival: Arrival, kind: str) -> Request:
    text = 0 if kind == "chat" else 1 + number
    prompt = tuple((text * 31 + i * 7) % 90 for i in range(arrival.input_tokens))
    sampling = SamplingParams(max_tokens=arrival.output_tokens, seed=0, temperature=0.0)
    generated: tuple[tuple[int, ...], ...] = ()
    if any(arrival.produced):
        generated = tuple(tuple(range(choice, choice + count)) for choice, count in enumerate(arrival.produced))
    service_class = ServiceClass.BEST_EFFORT if arrival.is_best_effort else ServiceClass.LATENCY_SENSITIVE
    slo = Slo(arrival.ttft_s, arrival.tpot_s)
    return Request(
        f"r{number}", str(arrival.model), prompt, sampling, len(arrival.produced), slo, service_class, generated
    )


KINDS = ("plain", "strict", "flex", "choices", "resumed")
WITH_CHATS = (*KINDS, "chat", "chat")


def requests(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Asked]]:
    one = st.builds(
        Asked,
        st.sampled_from([0.0, 0.013, 0.21, 1.7]),
        st.integers(0, MODELS - 1),
        st.integers(1, 150),
        st.integers(1, 40),
        st.sampled_from(kinds),
    )
    return st.lists(one, min_size=1, max_size=20)


WAYS = {"whole": WHOLE, "parts": PARTS, "mixed": MIXED}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(asked=requests(WITH_CHATS))
def test_both_drivers_are_told_the_same_byte_for_byte(way: str, asked: list[Asked]) -> None:
    assert simulated(asked, WAYS[way]) == Worker(asked, WAYS[way]).run()


SHORT = [Asked(0.0, 0, 1, 1)] * 6
# A chat whose prompt begins in the cache when its turn comes, where it did not when the node asked.
CACHED_MEANWHILE = [
    *SHORT[:2],
    *(Asked(0.0, 0, 146, 1), Asked(0.0, 1, 25, 27), Asked(0.0, 2, 1, 7)),
    *SHORT,
    *(Asked(0.0, 0, 68, 1, "chat"), Asked(0.0, 0, 48, 1), Asked(0.21, 0, 1, 1), Asked(0.0, 0, 4, 1, "chat")),
]


# An instance that only best effort runs on was to make way, and its requests were taken for newcomers each time.
BEST_EFFORT_IN_THE_WAY = [
    *(Asked(0.0, 3, 136, 25), Asked(0.0, 2, 100, 5, "flex"), Asked(0.0, 1, 24, 33), Asked(0.0, 2, 85, 24, "chat")),
    *(Asked(0.0, 2, 149, 30), Asked(1.7, 0, 88, 35, "flex"), Asked(0.013, 0, 84, 31, "strict")),
    *(Asked(0.0, 1, 113, 34), Asked(1.7, 0, 59, 1), Asked(0.0, 3, 1, 3)),
]


@settings(max_examples=30, deadline=None)
@given(requests(("plain", "strict", "flex", "chat")))
@example(CACHED_MEANWHILE)
@example(BEST_EFFORT_IN_THE_WAY)
def test_both_learn_the_same_from_what_turns_take(asked: list[Asked]) -> None:
    assert simulated(asked, is_live=True) == Worker(asked, is_live=True).run()


def test_the_timer_of_a_node_wakes_nobody_else() -> None:
    """A keep-alive that ended while a request waited made the simulated controller extend its deadline."""
    rng = random.Random(1)
    for _ in range(101):
        asked = [
            Asked(
                rng.choice([0.0, 0.013, 0.21, 1.7]),
                rng.randrange(MODELS),
                rng.randint(1, 150),
                rng.randint(1, 40),
                rng.choice(KINDS),
            )
            for _ in range(rng.randint(1, 20))
        ]
    assert simulated(asked, WHOLE) == Worker(asked, WHOLE).run()


def crowd() -> list[Asked]:
    """Every kind, to more models than fit, faster than they can be served."""
    asked = [Asked(0.3, 0, 40, 40, "flex"), Asked(0.3, 1, 30, 30)]
    for number in range(60):
        asked.append(Asked(0.02, number % MODELS, 20 + 7 * (number % 11), 10 + number % 25, KINDS[number % 5]))
    return asked


@pytest.mark.parametrize(
    "said",
    ['"event": "extended"', '"event": "refused"', '"event": "leave"', '"tokens": [16]'],
)
def test_the_drivers_agree_where_it_is_crowded(said: str) -> None:
    asked, composition = crowd(), PARTS.having(max_stall=INFINITY)
    text = simulated(asked, composition)
    assert said in text, "the crowd was not crowded enough to show it"
    assert text == Worker(asked, composition).run()


def test_the_drivers_agree_on_the_rows_of_a_batch_that_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes as long as the next, so that some of them are enough for the others to wait for."""
    curve = Curve([(1, 0.01), (65, 0.65)])
    latency = LatencyModel(Curve([(1, 0.004), (1024, 1.0)]), Surface([(16, curve), (2048, curve)]))
    monkeypatch.setattr(sys.modules[__name__], "make_latency", lambda **_: latency)
    monkeypatch.setattr(sys.modules[__name__], "MEMORY", MEMORY + 4000 * KV_BYTES)
    asked = [Asked(0.0, 0, 5, 120), *[Asked(0.01, 1, 3, 20, KINDS[number % 2]) for number in range(24)]]
    split = simulated(asked)
    assert split == Worker(asked).run()
    assert split != simulated(asked, PARTS.having(split_decodes=False)), "nothing was split"


def test_the_drivers_agree_on_turns_that_stop_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in: list[Turn | None] = []
    interlude = Node.interlude

    def spy(node: Node, now: float, is_layer_here: bool | None = None, leaving: Collection[int] = ()) -> Turn | None:
        let_in.append(interlude(node, now, is_layer_here, leaving))
        return let_in[-1]

    monkeypatch.setattr(Node, "interlude", spy)
    monkeypatch.setattr(sys.modules[__name__], "MEMORY", MEMORY + 4000 * KV_BYTES)
    asked = [Asked(0.0, 0, 5, 120), *[Asked(0.07, 1 + number % 2, 40, 20) for number in range(24)]]
    told = simulated(asked)
    assert sum(turn is not None for turn in let_in) > 100
    assert told == Worker(asked).run()


def test_what_comes_of_a_nodes_timer_is_carried_out_before_anybody_asks_again() -> None:
    """A keep-alive that ended with a turn let the simulated controller ask before the memory was free."""
    asked = [
        Asked(0.0, 0, 1, 1),
        Asked(0.0, 1, 32, 3, "choices"),
        Asked(1.7, 0, 1, 1),
        Asked(1.7, 0, 127, 1, "choices"),
    ]
    assert simulated(asked, MIXED) == Worker(asked, MIXED).run()
