"""A model that reads its layers from the disk with every iteration, beside others: they go before each layer, and every
message is taken in while one is awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from driver_builders import WEIGHT_BYTES, CheckedExecutor, Clock, Rig, expected
from sim_builders import make_latency

from dovetail.node.protocol import Preempt
from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import LatencyModel
from dovetail.policy.placement import Hosting
from dovetail.policy.streaming import with_link
from dovetail.profiles.live import LiveLatency
from dovetail.sched.turn import Outcome

LAYERS, READ_S, LAYER_S = 20, 0.25, 0.01  # of one layer each
LINK_S = LAYERS * READ_S


class Source:
    """A disk in virtual time, which reads one layer after another."""

    layers = tuple(range(LAYERS))
    speed = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._here_s = clock.now + READ_S

    def wait(self, layer: int, timeout_s: float = INFINITY) -> bool:
        self._clock.now = max(self._clock.now, min(self._here_s, self._clock.now + timeout_s))
        return self._clock.now >= self._here_s

    def release(self, layer: int) -> None:
        self._here_s = max(self._here_s, self._clock.now - READ_S) + READ_S

    def close(self) -> None: ...


class ReadingExecutor(CheckedExecutor):
    def __init__(self, clock: Clock, max_blocks: int) -> None:
        super().__init__(clock, max_blocks)
        self.layer_source = Source(clock)
        self.is_computing = False
        self.iterations = 0

    def collect(self) -> Outcome:
        outcome, _ = self._launched.popleft()
        self.is_computing = True
        for layer in range(LAYERS):
            assert self.preemption is not None, "others wait"
            self.preemption.halt(lambda seconds, at=layer: self.layer_source.wait(at, seconds))
            self.clock.now += LAYER_S
            self.layer_source.release(layer)
        self.is_computing = False
        self.iterations += 1
        return outcome


class LayerRig(Rig):
    """Models a and b are in memory, l and m are not."""

    def hosting_of(self, model: str, keep_alive_s: float) -> Hosting:
        hosting = super().hosting_of(model, keep_alive_s)
        if model not in "lm":
            return hosting
        assert isinstance(self.latency, LatencyModel)
        latency = LiveLatency(with_link(self.latency, LINK_S), LINK_S)
        return replace(hosting, weight_bytes=2 * WEIGHT_BYTES, latency=latency, layer_s=LAYER_S)

    def make_executor(self, model: str, blocks: int) -> CheckedExecutor:
        return ReadingExecutor(self.clock, blocks) if model in "lm" else super().make_executor(model, blocks)

    @property
    def large(self) -> ReadingExecutor:
        (found,) = (one for one in self.executors if isinstance(one, ReadingExecutor) and not one.is_closed)
        return found

    def when_computing(self, *acts: Callable[[], None], after_s: float = 1.0) -> None:
        """In the middle of iterations of the large model, one act each."""
        left = list(acts)
        due_s = self.clock.now + after_s

        def act() -> None:
            nonlocal due_s
            if left and self.clock.now >= due_s and self.large.is_computing:
                due_s = self.clock.now + after_s
                left.pop(0)()

        self.on_halt = act


@pytest.fixture
def rig() -> LayerRig:
    rig = LayerRig("abl", latency=make_latency(0.01))
    for model in "abl":
        rig.submit(f"warm-{model}", model=model, tokens=1)
        rig.run()
    return rig


def gaps(rig: Rig, id: str) -> list[float]:
    heard = rig.heard_s[id, 0]
    return [later - earlier for earlier, later in pairwise(heard)]


def test_an_iteration_takes_as_long_as_the_disk_and_the_latency_says_no_less(rig: LayerRig) -> None:
    rig.submit("long", model="l", tokens=6)
    rig.run()
    assert rig.tokens("long") == expected("long", tokens=6)
    assert min(gaps(rig, "long")) > 0.999 * LINK_S
    assert max(gaps(rig, "long")) < 1.1 * (LINK_S + LAYERS * LAYER_S)
    assert rig.driver.hostings["l"].latency.decode_s(1, 8) >= LINK_S


def test_a_request_that_comes_meanwhile_is_answered_as_if_it_were_alone(rig: LayerRig) -> None:
    rig.submit("long", model="l", tokens=3)
    came: list[float] = []

    def come() -> None:
        came.append(rig.clock.now)
        rig.submit(f"short-{len(came)}", model="a", prompt=8, tokens=20, ttft_s=0.5, tpot_s=0.05)

    rig.when_computing(come, come)
    rig.run()
    assert len(came) == 2
    for number, at in enumerate(came, 1):
        heard = rig.heard_s[f"short-{number}", 0]
        assert heard[0] - at < 0.1, "after one layer and its own prompt"
        assert max(gaps(rig, f"short-{number}")) < 0.05
        assert rig.tokens(f"short-{number}") == expected(f"short-{number}", prompt=8, tokens=20)
    assert rig.tokens("long") == expected("long", tokens=3)
    assert max(gaps(rig, "long")) < 1.2 * LINK_S, "layers are read while others compute"


def test_it_goes_on_a_layer_at_a_time_beside_those_who_never_stop(rig: LayerRig) -> None:
    for model in "ab":
        rig.submit(f"stream-{model}", model=model, tokens=900)
    rig.submit("long", model="l", tokens=2)
    rig.run()
    for model in "ab":
        assert max(gaps(rig, f"stream-{model}")) < 0.06, "its own iteration, one of the other's, and a layer"
    assert gaps(rig, "long")[0] < 1.5 * LINK_S


def test_its_own_request_may_leave_in_the_middle_of_its_iteration(rig: LayerRig) -> None:
    rig.submit("gone", model="l", tokens=9)
    rig.submit("stays", model="l", tokens=4)
    rig.when_computing(lambda: rig.abort("gone"))
    rig.run()
    assert rig.tokens("stays") == expected("stays", tokens=4)
    assert len(rig.events.get(("gone", 0), [])) < 9
    runner = next(one for one in rig.driver.runners.values() if one.executor is rig.large)
    assert not runner.scheduler.has_work
    assert runner.scheduler.pool.num_held == 0


@pytest.mark.parametrize("after_s", [0.2, 2.0, 7.0])
def test_what_was_sent_away_in_the_middle_comes_back_with_the_tokens_that_it_has(rig: LayerRig, after_s: float) -> None:
    rig.submit("moved", model="l", tokens=3)
    (instance,) = rig.driver.instances_of("l")
    rig.when_computing(lambda: rig.driver.obey(Preempt(instance, "displaced")), after_s=after_s)
    rig.run()
    assert rig.tokens("moved") == expected("moved", tokens=3)


def test_a_model_may_be_removed_in_the_middle_of_its_iteration(rig: LayerRig) -> None:
    rig.submit("ended", model="l", tokens=9)
    rig.when_computing(lambda: rig.unload("l"))
    rig.run()
    assert rig.gone == ["l"]
    assert all(one.is_closed for one in rig.executors if isinstance(one, ReadingExecutor))
    rig.submit("after", model="a")
    rig.run()
    assert rig.tokens("after") == expected("after")


def test_another_model_is_loaded_grows_and_goes_in_the_middle_of_its_iteration() -> None:
    rig = LayerRig("al", latency=make_latency(0.01))
    rig.submit("warm", model="l", tokens=1)
    rig.run()
    rig.submit("long", model="l", tokens=3)

    def come() -> None:
        rig.submit("cold", model="a", prompt=30, tokens=150)
        rig.finish_load()

    def go() -> None:
        assert rig.events["cold", 0][-1].finish is not None, "its pool grew meanwhile"
        rig.driver.unregister("a")

    rig.when_computing(come, go, after_s=2.2)
    rig.run()
    assert rig.tokens("cold") == expected("cold", prompt=30, tokens=150)
    assert rig.tokens("long") == expected("long", tokens=3)
    assert rig.gone == ["a"]


def test_whoever_asks_for_a_pace_that_no_disk_keeps_is_refused_and_others_are_not_slowed(rig: LayerRig) -> None:
    rig.submit("strict", model="l", ttft_s=30.0, tpot_s=1.0)
    assert "strict" not in rig.driver.states
    rig.submit("neighbour", model="a", tokens=400, ttft_s=1.0, tpot_s=0.04)
    rig.submit("patient", model="l", tokens=2, ttft_s=30.0, tpot_s=20.0)
    rig.submit("lenient", model="l", tokens=2)
    rig.run()
    assert rig.tokens("patient") == expected("patient", tokens=2)
    assert rig.tokens("lenient") == expected("lenient", tokens=2)
    assert max(gaps(rig, "neighbour")) < 0.04


def test_a_turn_that_is_let_in_lets_others_in_but_not_the_one_that_it_is_let_into(rig: LayerRig) -> None:
    rig.submit("long", model="l", tokens=4)
    rig.when_computing(
        lambda: rig.submit("stream", model="a", tokens=1500),
        lambda: rig.submit("prompt", model="b", prompt=400, tokens=3),
        after_s=6.0,
    )
    rig.run()
    for id, prompt, tokens in (("long", 5, 4), ("stream", 5, 1500), ("prompt", 400, 3)):
        assert rig.tokens(id) == expected(id, prompt=prompt, tokens=tokens)


def test_its_prompt_does_not_wait_for_others_who_go_before_each_of_its_layers(rig: LayerRig) -> None:
    rig.submit("stream", model="a", tokens=1200)
    for _ in range(20):
        rig.step()
    began_s = rig.clock.now
    rig.submit("long", model="l", prompt=12, tokens=2)
    rig.run()
    assert rig.heard_s["long", 0][0] - began_s < 1.2 * LINK_S
    assert max(gaps(rig, "stream")) < 0.06


def test_two_that_read_from_one_disk_are_accepted_where_it_has_time_for_both() -> None:
    rig = LayerRig("alm", latency=make_latency(0.01))
    for model in "lm":
        rig.submit(f"warm-{model}", model=model, tokens=1)
        rig.run()
    rig.submit("first", model="l", tokens=6, ttft_s=60.0, tpot_s=8.0)
    for _ in range(3):
        rig.step()
    rig.submit("refused", model="m", ttft_s=60.0, tpot_s=30.0)
    assert "refused" not in rig.driver.states, "an iteration of it would make the first one late"
    rig.run()
    assert max(gaps(rig, "first")) < 8.0
    rig.submit("slow", model="l", tokens=6, ttft_s=60.0, tpot_s=14.0)
    rig.submit("other", model="m", tokens=6, ttft_s=60.0, tpot_s=14.0)
    rig.run()
    for id in ("slow", "other"):
        assert rig.tokens(id) == expected(id, tokens=6)
        heard = rig.heard_s[id, 0]
        assert all(at <= heard[0] + 14.0 * number for number, at in enumerate(heard))


def test_two_that_asked_for_nothing_share_the_disk_and_a_neighbour_does_not_notice() -> None:
    rig = LayerRig("alm", latency=make_latency(0.01))
    rig.submit("stream", model="a", tokens=2000, ttft_s=5.0, tpot_s=0.1)
    for model in "lm":
        rig.submit(model, model=model, tokens=5)
    rig.run()
    for model in "lm":
        assert rig.tokens(model) == expected(model, tokens=5)
        assert sum(gaps(rig, model)) / 4 < 2.2 * LINK_S
    assert max(gaps(rig, "stream")) < 0.06
