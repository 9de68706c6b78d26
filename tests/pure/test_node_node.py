"""The node: whose turn it is, what it accepts, how it makes room, and that its books always balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import make_hosting, make_node, make_work, serve_memory

from dovetail.node.events import FirstToken, SetTimer, StartLoad, StartResize, StartUnload
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.node.outlook import demand_of
from dovetail.node.protocol import Evicted, Finished, HandedOver, InstanceGone, Overcommitted
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.memory import DemandByModel
from dovetail.policy.parameters import TurnOrder
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.reclaiming import ReclaimIdle
from dovetail.policy.resizing import InPlace
from dovetail.policy.work import Phase, Work
from dovetail.sim.baselines import StaticShares, Unlimited
from dovetail.sim.compositions import DOVETAIL, SLINFER
from dovetail.sim.storm import check_node

BY_SLO = SLINFER.having(paced_from_first_token=False)  # a first token that comes early leaves the others its time


def start(node: Node, work: Work, now: float = 0.0) -> int:
    answer = node.start(work, now)
    assert isinstance(answer, int), answer
    return answer


def take_turn(node: Node, now: float, finished: list[Work] | None = None) -> str:
    turn = node.next_turn(now)
    assert turn is not None
    label = f"{turn.instance.model}:{'prefill' if turn.prompts else 'decode'}"
    node.turn_done(now + 0.01, finished or [])
    return label


def test_a_new_instance_loads_its_weights_before_its_first_turn() -> None:
    node = make_node()
    instance = start(node, make_work())
    kinds = [type(said) for said in node.outbox]
    assert StartLoad in kinds
    assert node.next_turn(0.0) is None
    serve_memory(node, 1.0)
    assert node.instances[instance].state is State.READY
    assert take_turn(node, 1.0) == "a:prefill"


def test_prompts_of_one_iteration_each_take_whole_blocks() -> None:
    node = make_node()
    instance = node.instances[start(node, make_work())]
    instance.kv_tokens = 8 * instance.hosting.block_tokens
    one = 2 * instance.hosting.block_tokens + 1
    assert not instance.is_short(one, one)
    assert instance.is_short(one, one, one), "nine blocks, though the tokens would fit into seven"


def test_a_cold_start_is_added_to_the_first_deadline_only_as_far_as_it_was_waited_for() -> None:
    node = make_node()
    early, late = make_work(0, arrival_s=0.0), make_work(1, arrival_s=0.8)
    instance = start(node, early)
    node.join(instance, late, 0.8)
    load = next(said for said in node.outbox if isinstance(said, StartLoad))
    node.load_done(load.instance, 1.0, 1.0)
    assert early.grace_s == pytest.approx(1.0)
    assert late.grace_s == pytest.approx(0.2)


def test_the_shortest_headroom_runs_and_prefill_comes_before_decode() -> None:
    node = make_node(composition=BY_SLO)
    start(node, make_work(0, "a", ttft_s=2.0))
    start(node, make_work(1, "b", ttft_s=1.0))
    serve_memory(node, 0.0)
    assert take_turn(node, 0.0) == "b:prefill"  # due at 1.0, then at 1.25
    assert take_turn(node, 0.0) == "b:decode"  # then at 1.5, 1.75, 2.0
    for _ in range(2):
        assert take_turn(node, 0.0) == "b:decode"
    assert take_turn(node, 0.0) == "a:prefill"


def test_what_frees_most_memory_runs_while_everyone_has_slack() -> None:
    node = make_node(composition=BY_SLO.having(turn_order=TurnOrder.DRAIN, slack_s=0.5))
    large = start(node, make_work(0, "a", ttft_s=5.0))
    node.join(large, make_work(1, "a", ttft_s=5.0), 0.0)
    start(node, make_work(2, "b", ttft_s=6.0))
    serve_memory(node, 0.0)
    assert take_turn(node, 0.0) == "b:prefill"
    assert take_turn(node, 0.1) == "b:decode"
    assert take_turn(node, 4.6) == "a:prefill"  # now it is urgent


def test_an_early_first_token_gives_later_ones_no_more_time_than_their_pace_leaves() -> None:
    """The pace is measured from the first token: at 20 ms, due at 2 s, the next is due at 20 ms plus one pace."""
    node = make_node()
    work = make_work(0, ttft_s=2.0)
    start(node, work)
    serve_memory(node, 0.0)
    take_turn(node, 0.01)
    assert work.first_due_s == pytest.approx(0.02)
    safe = Work(1, "b", 512, 0.0, 2.0, 0.19, slo_scale=0.95)
    start(node, safe)
    serve_memory(node, 0.0)
    assert take_turn(node, 0.0) == "a:decode"
    while take_turn(node, 0.01) != "b:prefill":
        pass
    assert safe.first_due_s == pytest.approx(
        0.02 + 0.5 * 32 * 0.01
    )  # 10 ms of safety a token, of three quarters of a short answer


def join_all(node: Node, instance: int, works: list[Work], now: float) -> int:
    """How many were accepted."""
    return sum(node.join(instance, work, now) is None for work in works)


def test_requests_without_haste_do_not_slow_down_one_in_haste_of_the_same_model() -> None:
    """Beside one request with 50 ms per token, no batch is accepted whose iteration takes longer."""
    node = make_node(memory_gib=200.0)
    hasty = make_work(0, tpot_s=0.05)
    instance = start(node, hasty)
    serve_memory(node, 0.0)
    for turn in range(100):
        take_turn(node, 0.01 * turn)  # it is far ahead: prefills are no matter
    lenient = [make_work(1 + i, ttft_s=300.0, tpot_s=60.0) for i in range(59)]
    accepted = join_all(node, instance, lenient, 1.0)
    assert 0 < accepted < 59
    assert node.instances[instance].decode_s() <= 0.05


def test_a_loading_instance_accepts_as_many_as_it_would_once_it_is_ready() -> None:
    def accepted(is_ready: bool) -> int:
        node = make_node(memory_gib=200.0, hosting=replace(make_hosting(), load_s=1.0))
        instance = start(node, make_work(0))
        if is_ready:
            serve_memory(node, 0.0)
        return join_all(node, instance, [make_work(1 + i) for i in range(59)], 0.0)

    assert accepted(is_ready=False) == pytest.approx(accepted(is_ready=True), abs=2)
    assert accepted(is_ready=True) < 30


def test_a_neighbour_counts_the_prefills_that_wait_for_a_load() -> None:
    def accepted(loading: int) -> int:
        node = make_node(memory_gib=200.0, hosting=replace(make_hosting(), load_s=0.1), composition=BY_SLO)
        ready = start(node, make_work(0, "a"))
        serve_memory(node, 0.0)
        if loading:
            other = start(node, make_work(1, "b"))
            assert join_all(node, other, [make_work(2 + i, "b") for i in range(loading - 1)], 0.0) == loading - 1
        return join_all(node, ready, [make_work(100 + i, "a") for i in range(59)], 0.0)

    assert accepted(loading=8) <= accepted(loading=0) - 4


def test_a_load_that_takes_longer_than_expected_moves_what_is_expected_behind_it() -> None:
    node = make_node(memory_gib=200.0, hosting=replace(make_hosting(), load_s=1.0))
    first = start(node, make_work(0, "a"))
    second = start(node, make_work(1, "b"))
    assert [node.instances[one].loaded_s for one in (first, second)] == [1.0, 2.0]
    node.load_done(first, 3.0, 3.0)
    assert node.instances[second].loaded_s == 4.0


def test_an_iteration_gives_every_running_request_one_token() -> None:
    node = make_node()
    works = [make_work(index) for index in range(3)]
    instance = node.instances[start(node, works[0])]
    for work in works[1:]:
        node.join(instance.id, work, 0.0)
    serve_memory(node, 0.0)
    for _ in range(3):
        take_turn(node, 0.1)
    take_turn(node, 0.2)
    assert [instance.produced(work) for work in works] == [2, 2, 2]
    take_turn(node, 0.3, finished=[works[1]])
    assert works[1].produced == 3
    said = serve_memory(node, 0.3)
    assert [type(one) for one in said].count(FirstToken) == 3
    assert any(isinstance(one, Finished) and one.request.id == works[1].id for one in said)
    check_node(node)


def test_requests_with_different_paces_share_a_batch() -> None:
    node = make_node(composition=BY_SLO)
    relaxed, strict = make_work(0, tpot_s=0.5, ttft_s=0.6), make_work(1, tpot_s=0.1, ttft_s=1.0)
    instance = node.instances[start(node, relaxed)]
    node.join(instance.id, strict, 0.0)
    serve_memory(node, 0.0)
    for _ in range(2):
        take_turn(node, 0.0)
    assert instance.deadline_s == pytest.approx(min(0.6 + 0.5, 1.0 + 0.1))
    take_turn(node, 0.0)
    assert instance.deadline_s == pytest.approx(min(0.6 + 1.0, 1.0 + 0.2))


def test_a_node_refuses_for_want_of_memory_slots_or_time() -> None:
    assert make_node(memory_gib=11.0).start(make_work(), 0.0) is Refusal.MEMORY
    node = make_node(hosting=make_hosting(slots=1))
    start(node, make_work(0, "a"))
    assert node.start(make_work(1, "b"), 0.0) is Refusal.SLOTS
    busy = make_node(kind=DeviceKind.CPU, hosting=make_hosting(in_place=True, decode_s=0.15))
    start(busy, make_work(0, "a", ttft_s=9.0))
    assert busy.start(make_work(1, "b", ttft_s=9.0), 0.0) is Refusal.DECODE_OVERCOMMITTED
    assert make_node().start(make_work(model="unknown"), 0.0) is Refusal.HARDWARE


def test_a_pace_that_an_empty_node_cannot_promise_is_not_waited_for() -> None:
    """Its decode takes less than the pace, but not what admission takes it for: later it would be no faster."""
    slow = make_hosting(decode_s=0.245)
    assert make_node(hosting=slow).start(make_work(tpot_s=0.25), 0.0) is Refusal.HARDWARE
    beside = make_node(hosting=make_hosting(decode_s=0.13))
    assert isinstance(beside.start(make_work(0, "a"), 0.0), int)
    assert beside.start(make_work(1, "b"), 0.0) is Refusal.DECODE_OVERCOMMITTED


def test_a_concurrency_limit_ignores_deadlines() -> None:
    composition = SLINFER.having(sharing=StaticShares())
    node = make_node(composition=composition)
    instance = start(node, make_work(0, ttft_s=0.0))
    answers = [node.join(instance, make_work(index, ttft_s=0.0), 9.0) for index in range(1, 5)]
    assert answers == [None, None, None, Refusal.CONCURRENCY]
    assert node.start(make_work(9, "b"), 0.0) is Refusal.SLOTS


def test_a_join_grows_the_pool_to_the_recommendation() -> None:
    node = make_node(composition=SLINFER.having(floor_tokens=0, watermark=0.25))
    instance = start(node, make_work(0, input_tokens=1000))
    serve_memory(node, 0.0)
    before = node.instances[instance].kv_tokens
    node.join(instance, make_work(1, input_tokens=1000), 0.0)
    resize = next(said for said in node.outbox if isinstance(said, StartResize))
    assert resize.new_bytes > resize.old_bytes == before * node.instances[instance].hosting.kv_bytes_per_token


def test_an_idle_instance_goes_after_its_keep_alive_unless_work_comes() -> None:
    node = make_node(composition=SLINFER.having(keep_alive_s=1.0))
    work = make_work(0)
    instance = start(node, work)
    serve_memory(node, 0.0)
    take_turn(node, 0.0, finished=[work])
    timer = next(said for said in serve_memory(node, 0.0) if isinstance(said, SetTimer))
    again = make_work(1, arrival_s=0.5)
    assert node.join(instance, again, 0.5) is None
    node.timer(timer.instance, timer.epoch, timer.at_s)
    assert instance in node.instances
    take_turn(node, 0.6, finished=[again])
    timer = next(said for said in serve_memory(node, 0.6) if isinstance(said, SetTimer))
    node.timer(timer.instance, timer.epoch, timer.at_s)
    said = serve_memory(node, timer.at_s)
    assert any(isinstance(one, InstanceGone) for one in said)
    assert node.device.ledger.held == 0


def test_an_idle_instance_gives_way_to_a_start_before_its_keep_alive_is_over() -> None:
    node = make_node(memory_gib=15.0, composition=SLINFER.having(keep_alive_s=600.0, reclaiming=ReclaimIdle))
    work = make_work(0, "a")
    start(node, work)
    serve_memory(node, 0.0)
    assert node.start(make_work(1, "b"), 0.0) is Refusal.MEMORY  # it is busy
    take_turn(node, 0.0, finished=[work])
    start(node, make_work(2, "b", arrival_s=1.0), 1.0)
    serve_memory(node, 1.0)
    assert [instance.model for instance in node.instances.values()] == ["b"]


def test_preempting_hands_back_every_request_with_its_tokens() -> None:
    node = make_node()
    work = make_work(0)
    instance = start(node, work)
    serve_memory(node, 0.0)
    take_turn(node, 0.0)
    take_turn(node, 0.1)
    node.preempt(instance, "preempted")
    evicted = [said for said in node.outbox if isinstance(said, Evicted)]
    assert [one.request.id for one in evicted] == [work.id]
    assert work.produced == 2
    serve_memory(node, 0.2)
    assert not node.instances
    assert node.device.ledger.held == 0


def test_a_preempted_instance_unloads_only_after_its_turn() -> None:
    node = make_node()
    instance = start(node, make_work(0))
    serve_memory(node, 0.0)
    node.next_turn(0.0)
    node.preempt(instance, "preempted")
    assert not any(isinstance(said, StartUnload | StartResize) for said in node.outbox)
    node.turn_done(0.1, [])
    assert any(isinstance(said, StartResize | StartUnload) for said in node.outbox)
    serve_memory(node, 0.2)
    assert not node.instances


def test_when_the_pool_runs_short_and_cannot_grow_the_longest_headroom_is_evicted() -> None:
    node = make_node(
        memory_gib=10.7, composition=SLINFER.having(floor_tokens=0, watermark=0.0)
    )  # 0.7 GiB of KV: 1,433 tokens
    node.device.lengths.outputs.add(0)
    urgent, relaxed = make_work(0, input_tokens=500, ttft_s=1.0), make_work(1, input_tokens=400, ttft_s=5.0)
    instance = start(node, urgent)
    assert node.join(instance, relaxed, 0.0) is None
    serve_memory(node, 0.0)
    evicted: list[Evicted] = []
    for step in range(1200):
        if node.next_turn(step * 0.01) is not None:
            node.turn_done(step * 0.01, [])
        evicted += [one for one in serve_memory(node, step * 0.01) if isinstance(one, Evicted)]
        check_node(node)
        if evicted:
            break
    assert evicted
    assert evicted[0].request.id == relaxed.id
    assert evicted[0].reason == "kv_short"


def growing_hosting() -> Hosting:
    """Ten requests take 0.1 s at 512 tokens each and 0.4 s at 2,048."""
    rows = [(512, Curve([(1, 0.01), (10, 0.1)])), (2048, Curve([(1, 0.04), (10, 0.4)]))]
    latency = LatencyModel(Curve([(1, 0.01), (1024, 0.05)]), Surface(rows))
    return replace(make_hosting(in_place=True, kv_kib=1), latency=latency)


def accepted_of(composition: Composition, answers: int) -> int:
    """Of twenty requests, on a node that has seen answers of this length."""
    node = make_node(composition=composition, hosting=growing_hosting())
    for _ in range(40):
        node.device.lengths.answered("a", answers)
    instance = start(node, make_work(0, ttft_s=30.0))
    return 1 + sum(node.join(instance, make_work(id, ttft_s=30.0), 0.0) is None for id in range(1, 20))


def test_admission_counts_what_an_iteration_takes_when_contexts_have_grown() -> None:
    composition = BY_SLO.having(floor_tokens=0)
    assert accepted_of(composition, answers=2000) < 0.6 * accepted_of(composition, answers=20)
    blind = composition.having(counts_growth=False)
    assert accepted_of(blind, answers=2000) == accepted_of(blind, answers=20)


def test_a_node_whose_contexts_have_outgrown_the_pace_says_who_is_furthest_ahead() -> None:
    node = make_node(composition=BY_SLO.having(floor_tokens=0), hosting=growing_hosting())
    works = [make_work(id, ttft_s=30.0 + id) for id in range(12)]
    instance = start(node, works[0])
    for work in works[1:]:
        assert node.join(instance, work, 0.0) is None
    serve_memory(node, 0.0)
    now = 0.0
    told: list[Overcommitted] = []
    while not told and now < 400:
        turn = node.next_turn(now)
        assert turn is not None
        now += turn.instance.decode_s()
        node.turn_done(now, [])
        told = [one for one in serve_memory(node, now) if isinstance(one, Overcommitted)]
    assert 0.25 < node.instances[instance].decode_s() < 0.3
    assert told[0].request.id == works[-1].id
    assert told[0].request.produced == node.instances[instance].produced(works[-1])


def test_a_pool_that_runs_short_borrows_from_neighbours_before_anybody_is_evicted() -> None:
    composition = SLINFER.having(
        floor_tokens=0, watermark=0.0, resizing=InPlace(), memory=DemandByModel, sharing=Unlimited()
    )
    node = make_node(memory_gib=20.8, composition=composition)  # 0.8 GiB of KV: 1,638 tokens
    for _ in range(100):
        node.device.lengths.answered("b", 500)
        node.device.lengths.answered("a", 20)
    start(node, make_work(0, "b", input_tokens=200, ttft_s=500.0))  # it holds room for 500 tokens to come
    instance = start(node, make_work(1, "a", input_tokens=700, ttft_s=1.0))
    said: list[object] = serve_memory(node, 0.0)
    for step in range(450):
        if node.next_turn(step * 0.001) is not None:
            node.turn_done(step * 0.001, [])
        said += serve_memory(node, step * 0.001)
        check_node(node)
    assert node.instances[instance].tokens > 950  # more than it was given at first
    assert not [one for one in said if isinstance(one, Evicted)]


def test_an_instance_that_lost_its_last_request_for_want_of_kv_is_reclaimed_like_any_idle_one() -> None:
    node = make_node(
        memory_gib=10.3, composition=SLINFER.having(floor_tokens=0, watermark=0.0)
    )  # 0.3 GiB of KV: 614 tokens
    start(node, make_work(0, input_tokens=300, ttft_s=1.0))
    said: list[object] = serve_memory(node, 0.0)
    for step in range(400):
        if node.next_turn(step * 0.01) is not None:
            node.turn_done(step * 0.01, [])
        said += serve_memory(node, step * 0.01)
    assert any(isinstance(one, Evicted) and one.reason == "kv_short" for one in said)
    timer = next(one for one in said if isinstance(one, SetTimer))
    node.timer(timer.instance, timer.epoch, timer.at_s)
    serve_memory(node, timer.at_s)
    assert not node.instances


def test_a_failed_load_evicts_and_frees() -> None:
    node = make_node()
    start(node, make_work(0))
    load = next(said for said in node.outbox if isinstance(said, StartLoad))
    node.outbox.clear()
    node.load_failed(load.instance, 1.0)
    said = serve_memory(node, 1.0)
    assert any(isinstance(one, Evicted) and one.reason == "load_failed" for one in said)


def test_a_prefill_instance_hands_over_after_the_first_token() -> None:
    node = make_node()
    work = make_work(0)
    work.phase = Phase.PREFILL
    start(node, work)
    serve_memory(node, 0.0)
    take_turn(node, 0.0)
    handed = [said for said in serve_memory(node, 0.0) if isinstance(said, HandedOver)]
    assert [one.request.id for one in handed] == [work.id]
    assert handed[0].kv_bytes == work.known_tokens * 512 * 1024


def test_a_dead_node_returns_its_work_and_refuses_until_it_recovers() -> None:
    node = make_node()
    work = make_work(0)
    start(node, work)
    assert node.fail() == [work]
    assert node.start(make_work(1), 0.0) is Refusal.CLOSED
    node.device.up = True
    assert isinstance(node.start(make_work(2), 0.0), int)


# Any interleaving


def _random_step(node: Node, what: int, which: int, number: int, pending: list[Callable[[], None]]) -> None:
    now = number * 0.05
    models = ("a", "b", "c")
    instances = list(node.instances)
    if what < 3:
        work = make_work(number, models[which % 3], 100 + 300 * (which % 5), now, ttft_s=5.0)
        if not instances or node.join(instances[which % len(instances)], work, now) is not None:
            node.start(work, now)
    elif what < 7:
        turn = node.turn or node.next_turn(now)
        if turn is not None and node.turn is not None:
            running = list(turn.instance.running.values())
            ends = running[:1] if not turn.prompts and which % 4 == 0 else []
            node.turn_done(now, ends)
    elif what < 10 and pending:
        pending.pop(which % len(pending))()
    elif what == 10 and instances:
        node.preempt(instances[which % len(instances)], "preempted")
    elif what == 11:
        node.next_turn(now)


def _collect(node: Node, number: int, pending: list[Callable[[], None]]) -> None:
    now = number * 0.05
    for said in node.outbox:
        if isinstance(said, StartLoad):
            pending.append(lambda i=said.instance: node.load_done(i, now, 0.5))
        elif isinstance(said, StartUnload):
            pending.append(lambda i=said.instance: node.unload_done(i, now))
        elif isinstance(said, StartResize):
            pending.append(lambda i=said.instance: node.resize_done(i, now))
        elif isinstance(said, SetTimer):
            pending.append(lambda i=said.instance, e=said.epoch: node.timer(i, e, now))
    node.outbox.clear()


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 19)), max_size=60),
    st.sampled_from([0, 512, 4096]),
    st.sampled_from([15.0, 25.0, 40.0]),
)
def test_any_interleaving_keeps_the_books_balanced(
    steps: list[tuple[int, int]], floor_tokens: int, memory_gib: float
) -> None:
    node = make_node(memory_gib=memory_gib, composition=SLINFER.having(floor_tokens=floor_tokens, sharing=Unlimited()))
    pending: list[Callable[[], None]] = []
    for number, (what, which) in enumerate(steps):
        _random_step(node, what, which, number, pending)
        _collect(node, number, pending)
        check_node(node)
    if node.turn is not None:
        node.turn_done(99.0, [])
        _collect(node, 99, pending)
    for instance in list(node.instances):
        node.preempt(instance, "end")
        _collect(node, 99, pending)
    for _ in range(200):
        if not pending:
            break
        pending.pop(0)()
        _collect(node, 99, pending)
    assert not node.instances
    assert node.device.ledger.held == node.device.ledger.planned == node.device.ledger.waiting == 0


def test_who_comes_later_does_not_silence_an_answer_that_is_computed_again() -> None:
    """An answer that was moved here is far ahead of its pace; what is judged is when it falls silent for too long."""
    node = make_node(composition=DOVETAIL.having(max_silence_s=2.0), hosting=make_hosting(in_place=True))
    moved = make_work(0, input_tokens=1024)
    moved.produced, moved.last_token_s = 200, 0.0  # due 50 s from now by its pace
    moved.first_due_s = 1.0
    assert not isinstance(node.start(moved, 0.5), Refusal)
    instance = next(iter(node.instances.values()))
    demand = demand_of(instance, 0.5, 0.0, 0.0, 32.0)
    assert demand.prefills[0].due_s == pytest.approx(node.device.rule.max_silence_s)
    assert demand.prefills[0].due_s < moved.due_s


def resident_models(tokens: int, short_requests: int, *, are_alike: bool = True) -> int:
    """How many models start on a device after requests that held so many tokens each have ended."""
    composition = SLINFER.having(
        sharing=Unlimited(), memory=DemandByModel, weights_share=0.75, short_requests=short_requests
    )
    node = make_node(
        "abcdefg", memory_gib=64.0, composition=composition
    )  # 10 GiB of weights each: four are in their share
    node.device.lengths.are_alike = are_alike
    for _ in range(40):
        node.device.lengths.held(tokens)
        node.device.lengths.answered("z", tokens // 2)
    return sum(
        isinstance(node.start(make_work(id, model, 16, ttft_s=90.0), 0.0), int) for id, model in enumerate("abcdefg")
    )


def test_where_requests_are_short_weights_take_more_of_a_device() -> None:
    assert resident_models(200, short_requests=0) == 4
    assert resident_models(200, short_requests=5) == 6
    assert resident_models(2000, short_requests=5) == 4
    assert resident_models(200, short_requests=5, are_alike=False) == 4


def test_idle_instances_do_not_close_for_a_start_that_they_would_not_make_room_for() -> None:
    node = make_node("ab", memory_gib=25.0, composition=SLINFER.having(keep_alive_s=600.0, sharing=Unlimited()))
    idle, busy = make_work(0, "a"), make_work(1, "b")
    for work in (idle, busy):
        start(node, work)
    serve_memory(node, 0.0)
    node.withdraw(0, idle, 0.0)
    huge = make_work(2, "b", 40_000, ttft_s=900.0, tpot_s=9.0)
    assert node.start(huge, 0.0, reclaims=True) is Refusal.MEMORY
    assert len(node.instances) == 2
