"""The driver of a real node: production policies over executors that check every block, in virtual time."""

from __future__ import annotations

import pytest
from driver_builders import KV_BYTES, WEIGHT_BYTES, Rig, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_builders import make_latency

from dovetail.node.instance import State
from dovetail.node.protocol import Preempt
from dovetail.types import FinishReason, Request, SamplingParams, ServiceClass, Slo
from dovetail.worker.driver import is_shared


def test_a_request_for_a_cold_model_waits_for_it_and_gets_its_tokens() -> None:
    rig = Rig()
    rig.submit("r", "a")
    assert [command.model for command in rig.commands] == ["a"]
    assert not rig.step()
    rig.run()
    assert rig.tokens("r") == expected("r")
    assert rig.events["r", 0][-1].finish is FinishReason.LENGTH


def test_models_take_turns_token_by_token() -> None:
    rig = Rig()
    for name in "ab":
        rig.submit(name, name, tokens=20)
    while rig.commands:
        rig.finish_load()
    for _ in range(12):
        rig.step()
    assert all(0 < len(rig.events[name, 0]) < 20 for name in "ab")
    rig.run()
    assert all(rig.tokens(name) == expected(name, tokens=20) for name in "ab")


def test_a_node_is_shared_while_several_models_have_requests() -> None:
    rig = Rig()
    rig.submit("a", "a", tokens=20)
    rig.finish_load()
    assert not is_shared(rig.driver)
    rig.submit("b", "b", tokens=2)
    rig.finish_load()
    assert is_shared(rig.driver)
    rig.run()
    assert not is_shared(rig.driver)


def test_turns_name_the_traced_requests_that_took_part_and_no_others() -> None:
    rig = Rig()
    rig.submit("seen", "a", prompt=5, tokens=4, traced=True)
    rig.submit("other", "a", prompt=5, tokens=9)
    rig.run()
    (runner,) = rig.driver.runners.values()
    turns = [span.traced for span in runner.take_spans()]
    assert turns.count(("seen",)) == 4
    assert set(turns) == {("seen",), ()}


def test_a_prompt_longer_than_a_turn_is_computed_in_chunks() -> None:
    rig = Rig()
    rig.submit("long", "a", prompt=100, tokens=3)
    rig.run()
    assert rig.tokens("long") == expected("long", 100, 3)


def test_choices_of_one_request_compute_their_prompt_once() -> None:
    rig = Rig()
    rig.submit("r", "a", prompt=41, tokens=3, num_choices=3)
    rig.run()
    assert all(rig.tokens("r", choice) == expected("r", 41, 3) for choice in range(3))
    (runner,) = rig.driver.runners.values()
    assert runner.scheduler.prefix_hits == 2 * 40


def submit_turn(rig: Rig, id: str, prompt: tuple[int, ...], ttft_s: float) -> None:
    sampling = SamplingParams(max_tokens=3, seed=0, temperature=0.0)
    rig.submit_request(Request(id, "a", prompt, sampling, 1, Slo(ttft_s, 1.0)))


def test_admission_counts_only_what_the_prefix_cache_lacks() -> None:
    rig = Rig("a", latency=make_latency(prefill_s_per_k=1.0))
    history = tuple(i % 90 for i in range(400))
    submit_turn(rig, "first", history, ttft_s=10.0)
    rig.run()
    submit_turn(rig, "other", tuple((i + 1) % 90 for i in range(430)), ttft_s=0.3)  # 0.4 s
    submit_turn(rig, "second", history + tuple(range(30)), ttft_s=0.3)
    rig.run()
    (refused,) = rig.events["other", 0]
    assert refused.token is None
    assert len(rig.tokens("second")) == 3
    first_s = rig.heard_s["second", 0][0]
    assert first_s < rig.heard_s["other", 0][0]


def test_a_prefix_that_goes_before_its_turn_is_computed() -> None:
    rig = Rig("a")
    history = tuple(i % 90 for i in range(400))
    submit_turn(rig, "first", history, ttft_s=10.0)
    rig.run()
    submit_turn(rig, "second", history + tuple(range(30)), ttft_s=10.0)
    (runner,) = rig.driver.runners.values()
    runner.scheduler.pool.drop_cache()
    rig.run()
    assert len(rig.tokens("second")) == 3  # the executor looks at every block


def test_an_idle_model_goes_after_its_keep_alive_and_gives_everything_back() -> None:
    rig = Rig()
    rig.register("a", keep_alive_s=5.0)
    rig.submit("r", "a")
    rig.run()
    rig.clock.now += 5.1
    rig.step()
    assert rig.gone == ["a"]
    assert rig.executors[0].is_closed
    assert rig.driver.home.node.device.ledger.held == 0
    rig.submit("again", "a")
    rig.run()
    assert rig.tokens("again") == expected("again")


def test_an_idle_model_makes_room_for_another() -> None:
    rig = Rig(memory=WEIGHT_BYTES * 2)
    for name in "abc":
        rig.submit(name, name)
        rig.run()
        assert rig.tokens(name) == expected(name)
    assert rig.gone == ["a", "b"]


def test_a_model_that_is_kept_forever_gives_no_room() -> None:
    rig = Rig(memory=WEIGHT_BYTES * 2)
    rig.register("a", keep_alive_s=float("inf"))
    rig.submit("first", "a")
    rig.run()
    rig.submit("second", "b", ttft_s=1.0, tpot_s=0.25)
    rig.run()
    (event,) = rig.events["second", 0]
    assert event.retry_after_s is not None
    assert "memory" in str(event.error)


def test_targets_that_were_asked_for_are_kept_or_refused() -> None:
    rig = Rig("a")
    for i in range(40):
        rig.submit(f"r{i}", "a", prompt=60, tokens=30, ttft_s=0.4, tpot_s=0.05)
    rig.run()
    refused = [key for key, events in rig.events.items() if events[-1].retry_after_s is not None]
    served = [key for key in rig.events if key not in refused]
    assert refused
    assert served
    assert all(rig.tokens(id) == expected(id, 60, 30) for id, _ in served)


def test_targets_beyond_the_device_are_the_callers_mistake() -> None:
    rig = Rig("a")
    rig.submit("r", "a", ttft_s=0.001, tpot_s=0.001)
    rig.run()
    (event,) = rig.events["r", 0]
    assert event.unprocessable
    assert "beyond this device" in str(event.error)


def test_without_targets_of_its_own_a_request_is_late_rather_than_refused() -> None:
    rig = Rig("a")
    for i in range(60):
        rig.submit(f"r{i}", "a", prompt=120, tokens=10)
    rig.run(limit=20_000)
    assert all(rig.tokens(f"r{i}") == expected(f"r{i}", 120, 10) for i in range(60))


def test_a_cold_model_is_not_kept_waiting_for_targets_that_it_misses_anyway() -> None:
    rig = Rig("a")
    rig.submit("late", age_s=0.474)  # of 0.475 s
    arrived = rig.clock.now
    assert not rig.commands
    rig.step()
    assert (len(rig.commands), rig.clock.now) == (1, arrived)
    rig.run()
    assert rig.tokens("late") == expected("late", 5, 4)


def test_best_effort_waits_for_those_with_targets() -> None:
    rig = Rig("ab")
    rig.submit("be", "a", tokens=40, service_class=ServiceClass.BEST_EFFORT)
    rig.submit("ls", "b", tokens=40)
    while len(rig.events.get(("ls", 0), [])) < 40:
        if rig.commands:
            rig.finish_load()
        rig.step()
    rig.run()
    assert rig.tokens("be") == expected("be", tokens=40)


def test_a_request_that_no_memory_could_hold_is_refused_at_once() -> None:
    rig = Rig("a", max_kv_tokens=40)
    rig.submit("r", "a", prompt=60)
    (event,) = rig.events["r", 0]
    assert event.unprocessable
    assert "KV memory" in str(event.error)


def test_an_answer_ends_where_the_memory_does() -> None:
    rig = Rig("a", max_kv_tokens=40)
    rig.submit("r", "a", prompt=10, tokens=100)
    rig.run()
    assert rig.events["r", 0][-1].finish is FinishReason.LENGTH
    assert len(rig.tokens("r")) == 40 - 4 - 10


def test_an_abort_frees_the_blocks_and_nothing_more_is_heard() -> None:
    rig = Rig("a")
    rig.submit("r", "a", tokens=50, num_choices=2)
    rig.finish_load()
    for _ in range(5):
        rig.step()
    told = {key: len(events) for key, events in rig.events.items()}
    rig.abort("r")
    rig.run()
    assert {key: len(events) for key, events in rig.events.items()} == told
    assert not rig.link.has_work
    assert rig.driver.runners[0].scheduler.pool.num_held == 0


def test_a_load_that_fails_leaves_nobody_waiting_for_it() -> None:
    rig = Rig("ab")
    rig.submit("r", "a", num_choices=2)
    rig.submit("other", "b")
    rig.fail_load()
    rig.run()
    assert not any(key[0] == "r" for key in rig.events)
    assert rig.tokens("other") == expected("other")
    assert not rig.driver.instances_of("a")


def test_an_iteration_that_breaks_ends_its_own_requests_only() -> None:
    rig = Rig("ab")
    rig.fails_on = 7
    rig.submit("good", "b", prompt=2)
    rig.finish_load()
    rig.step()  # else both prompts would be in it
    rig.submit_request(_with_token(7))
    rig.run()
    assert rig.events["bad", 0][-1].error
    assert rig.tokens("good") == expected("good", 2)


def test_a_model_unloaded_while_it_serves_gives_its_requests_back() -> None:
    rig = Rig("a")
    rig.submit("r", "a", tokens=50)
    rig.finish_load()
    for _ in range(3):
        rig.step()
    rig.driver.unregister("a")
    rig.read()
    assert 0 not in rig.driver.states
    assert 0 in rig.controller.works, "it comes back to the controller, with its tokens"
    assert rig.driver.home.node.device.ledger.held == 0
    assert rig.executors[0].is_closed


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_that_is_moved_goes_on_where_it_was(is_late: bool) -> None:
    rig = Rig("a", is_late=is_late)
    rig.submit("r", "a", tokens=50, num_choices=2)
    rig.finish_load()
    for _ in range(12):
        rig.step()
    told = len(rig.events["r", 0])
    assert 0 < told < 50
    rig.driver.obey(Preempt(0, "preempted"))
    rig.run()
    assert len(rig.executors) == 2, "on another instance"
    assert all(rig.tokens("r", choice) == expected("r", tokens=50) for choice in range(2))


def test_a_device_that_computes_by_itself_is_not_kept_waiting_for_the_host() -> None:
    rig = Rig("a", is_pipelined=True)
    for id in "rst":
        rig.submit(id, "a", tokens=30)
    rig.finish_load()
    rig.run()
    assert all(rig.tokens(id) == expected(id, tokens=30) for id in "rst")
    executor = rig.executors[0]
    assert executor.num_ahead > 25
    assert executor.num_discarded <= 1, "only the one that an end made pointless"


def test_nothing_is_learnt_from_iterations_for_which_something_was_prepared() -> None:
    """A GPU compiles kernels in the first one of a kind, for seconds: prompts would seem to take that long for ever."""
    learnt = []
    for is_typical in (False, True):
        rig = Rig("a")
        latency = rig.driver.hostings["a"].latency
        expected_s = latency.prefill_s(5), latency.decode_s(1, 6)
        rig.submit("r", "a", tokens=4)
        rig.finish_load()
        rig.executors[0].token_s, rig.executors[0].was_typical = 2.0, is_typical
        rig.run()
        learnt.append((latency.prefill_s(5), latency.decode_s(1, 6)) != expected_s)
    assert learnt == [False, True]


def test_an_iteration_begun_in_vain_leaves_nothing_behind() -> None:
    rig = Rig("ab", is_pipelined=True)
    rig.submit("r", "a", tokens=60)
    rig.finish_load()
    for _ in range(5):
        rig.step()
    rig.submit("joins", "a", prompt=30, tokens=5)  # needs a prefill: not what was begun
    rig.submit("other", "b", tokens=20)
    rig.run()
    assert rig.tokens("r") == expected("r", tokens=60)
    assert rig.tokens("joins") == expected("joins", 30, 5)
    assert rig.tokens("other") == expected("other", tokens=20)
    assert rig.executors[0].num_discarded > 0


def test_an_iteration_begun_ahead_is_taken_up_though_a_prompt_has_come() -> None:
    """Whoever came waits for its end in any case."""
    rig = Rig("a", is_pipelined=True, floor_tokens=2000, max_kv_tokens=8000, memory=100_000_000)  # no pool grows
    rig.submit("r", "a", tokens=120)
    rig.finish_load()
    executor = rig.executors[0]
    for number in range(5):
        before = executor.num_ahead
        while executor.num_ahead < before + 5:
            rig.step()
        rig.submit(f"joins{number}", "a", prompt=30, tokens=5)
    while not rig.events.get(("joins4", 0)):
        rig.step()
    assert executor.num_discarded == 0
    rig.run()
    assert rig.tokens("r") == expected("r", tokens=120)
    assert all(rig.tokens(f"joins{number}") == expected(f"joins{number}", 30, 5) for number in range(5))


def test_an_iteration_that_breaks_takes_the_one_begun_after_it_along() -> None:
    rig = Rig("a", is_pipelined=True)
    third = expected("r", tokens=50)[2]
    rig.fails_on = third
    rig.submit("r", "a", tokens=50)
    rig.finish_load()
    rig.run()
    assert rig.events["r", 0][-1].finish is FinishReason.ERROR
    rig.fails_on = None
    rig.executors[0].fails_on = None
    rig.submit("s", "a", tokens=9)
    rig.run()
    assert rig.tokens("s") == expected("s", tokens=9)


def test_pools_follow_the_load_up_and_down() -> None:
    rig = Rig("a", floor_tokens=16)
    rig.submit("long", "a", prompt=4, tokens=200)
    rig.finish_load()
    for _ in range(3):
        rig.step()
    sizes = [rig.executors[0].num_blocks]
    for i in range(6):
        rig.submit(f"r{i}", "a", prompt=100, tokens=8)
    while ("r5", 0) not in rig.events or rig.events["r5", 0][-1].finish is None:
        rig.step()
        sizes.append(rig.executors[0].num_blocks)
    assert max(sizes) > sizes[0]
    assert sizes[-1] < max(sizes)
    rig.run()
    assert rig.tokens("long") == expected("long", 4, 200)


@pytest.mark.parametrize("policy_changes", [{}, {"num_victims": 0}, {"is_late": True}, {"is_pipelined": True}])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 120), st.integers(1, 40), st.floats(0.0, 0.3)),
        min_size=1,
        max_size=25,
    )
)
def test_every_request_gets_exactly_its_tokens(
    policy_changes: dict[str, bool], requests: list[tuple[str, int, int, float]]
) -> None:
    rig = Rig("abcd", memory=WEIGHT_BYTES * 2 + 700 * KV_BYTES, **policy_changes)
    for i, (model, prompt, tokens, gap) in enumerate(requests):
        rig.submit(f"r{i}", model, prompt, tokens)
        rig.clock.now += gap
        if rig.commands:
            rig.finish_load()
        rig.step()
    rig.run(limit=20_000)
    for i, (_, prompt, tokens, _) in enumerate(requests):
        assert rig.tokens(f"r{i}") == expected(f"r{i}", prompt, tokens)


class Interleavings(RuleBasedStateMachine):
    """Any order of requests, aborts, loads that come or fail, unloads and time."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: dict[str, int] = {}
        self.models: dict[str, str] = {}
        self.aborted: set[str] = set()

    @initialize(is_pipelined=st.booleans())
    def begin(self, is_pipelined: bool) -> None:
        self.rig = Rig("abc", memory=WEIGHT_BYTES * 2 + 500 * KV_BYTES, is_pipelined=is_pipelined)

    @rule(
        model=st.sampled_from("abc"),
        prompt=st.integers(1, 100),
        tokens=st.integers(1, 20),
        choices=st.integers(1, 3),
        strict=st.booleans(),
    )
    def submit(self, model: str, prompt: int, tokens: int, choices: int, strict: bool) -> None:
        if model not in self.rig.driver.hostings:
            self.rig.register(model)
        id = f"r{len(self.submitted)}"
        self.submitted[id] = choices
        self.models[id] = model
        targets = {"ttft_s": 0.5, "tpot_s": 0.1} if strict else {}
        self.rig.submit(id, model, prompt, tokens, num_choices=choices, **targets)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.submitted)))
        choice = data.draw(st.sampled_from([None, *range(self.submitted[id])]))
        self.rig.abort(id, choice)
        self.rig.read()
        self.aborted.add(id)

    @precondition(lambda self: self.rig.commands)
    @rule(data=st.data(), fails=st.integers(0, 4).map(lambda n: n == 0))
    def load(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.rig.commands) - 1))
        if not fails:
            self.rig.finish_load(index)
            return
        failed = self.rig.commands[index].model
        self.aborted |= {id for id, model in self.models.items() if model == failed}
        self.rig.fail_load(index)

    @rule(count=st.integers(1, 8))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(seconds=st.sampled_from([0.05, 1.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(model=st.sampled_from("abc"))
    def unload(self, model: str) -> None:
        self.aborted |= {id for id, known in self.models.items() if known == model}
        self.rig.unload(model)

    @rule(model=st.sampled_from("abc"))
    def warm(self, model: str) -> None:
        if model in self.rig.driver.hostings:
            self.rig.warm(model)

    @rule()
    def relieve(self) -> None:
        self.rig.driver.relieve()

    @invariant()
    def holds(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        self.rig.run(limit=20_000)
        for id, choices in self.submitted.items():
            for choice in range(choices):
                ends = [event for event in self.rig.events.get((id, choice), []) if event.finish is not None]
                assert len(ends) == 1 or (id in self.aborted and len(ends) == 0), f"{id}/{choice}: {len(ends)} ends"
        for runner in self.rig.driver.runners.values():
            assert runner.scheduler.pool.num_held == 0
        for instance in self.rig.driver.home.node.instances.values():
            assert instance.batch == 0
            assert instance.state is not State.CLOSING


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _with_token(token: int):  # type: ignore[no-untyped-def]
    from dovetail.types import Request, SamplingParams

    return Request("bad", "b", (1, token), SamplingParams(max_tokens=4, seed=0, temperature=0.0))


def test_the_host_pool_is_told_what_the_ledger_has_left_before_anything_grows() -> None:
    """Models between uses, weights and KV share one memory: the pool has what nobody else needs."""
    rig = Rig("ab", memory=WEIGHT_BYTES * 2 + 2000 * KV_BYTES)
    ledger = rig.driver.home.node.device.ledger
    told: list[int] = []
    rig.driver._on_growth = told.append
    rig.submit("r0", "a", prompt=20, tokens=30)
    assert told[0] == ledger.capacity - ledger.planned, "before the weights are read"
    assert told[0] <= ledger.capacity - WEIGHT_BYTES
    for number in range(1, 6):
        rig.submit(f"r{number}", "b", prompt=20, tokens=60)
    rig.run()
    assert min(told) < ledger.capacity - 2 * WEIGHT_BYTES
    assert all(left >= 0 for left in told)
