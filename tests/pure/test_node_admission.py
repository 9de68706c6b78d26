"""Admission remembers and shares what it has found: it answers as if it had looked at everything anew."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import make_hosting, make_node, make_work, serve_memory

from dovetail.node.instance import Instance
from dovetail.node.node import Node
from dovetail.node.protocol import EMPTY, StartRoom
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.parameters import Shadow
from dovetail.policy.reclaiming import ReclaimIdle
from dovetail.policy.work import Work
from dovetail.sim.baselines import ReclaimAlike
from dovetail.sim.compositions import DOVETAIL, SLINFER

MODELS = "abcde"
POLICIES = (DOVETAIL, SLINFER, SLINFER.having(shadow=Shadow.CLOSED), DOVETAIL.having(reclaiming=ReclaimIdle))
requests = st.lists(
    st.tuples(st.sampled_from(MODELS), st.integers(16, 3000), st.sampled_from((0.1, 0.25, 0.5)), st.integers(0, 6)),
    max_size=24,
)


def busy_node(composition: Composition, arrivals: list[tuple[str, int, float, int]]) -> tuple[Node, float]:
    """A node that took of these requests what it would, with some turns after each; and the time."""
    node = make_node(MODELS, memory_gib=300.0, composition=composition, hosting=make_hosting(decode_s=0.03, slots=8))
    now = 0.0
    for id, (model, tokens, tpot_s, turns) in enumerate(arrivals):
        work = make_work(id, model, tokens, now, ttft_s=2.0, tpot_s=tpot_s)
        there = next((one for one in node.instances.values() if one.model == model), None)
        if there is None:
            node.start(work, now)
        else:
            node.join(there.id, work, now)
        serve_memory(node, now)
        for _ in range(turns):
            now += 0.01
            if node.next_turn(now) is not None:
                node.turn_done(now + 0.02, [])
                serve_memory(node, now)
    return node, now + 0.02


def has_time_without(node: Node, target: Instance, work: Work, now: float, gone: Instance) -> bool:
    """By the question that admission asks, on a node where the neighbour is not."""
    there = dict(node.instances)
    del node.instances[gone.id]
    refusal = node.admit.timing.refuses(target, work, now)
    node.instances.clear()
    node.instances.update(there)
    return refusal is None


@settings(max_examples=150, deadline=None)
@given(requests, st.sampled_from(POLICIES), st.integers(16, 3000), st.sampled_from((0.08, 0.1, 0.12, 0.25)))
def test_who_could_make_way_is_who_would_not_be_missed(
    arrivals: list[tuple[str, int, float, int]], composition: Composition, tokens: int, tpot_s: float
) -> None:
    node, now = busy_node(composition, arrivals)
    for target in list(node.instances.values()):
        work = make_work(99, target.model, tokens, now, ttft_s=2.0, tpot_s=tpot_s)
        neighbours = [one for one in node.instances.values() if one is not target]
        found = list(node.admit.timing.making_way(target, work, now, neighbours))
        assert found == [one for one in neighbours if has_time_without(node, target, work, now, one)]


@settings(max_examples=50, deadline=None)
@given(requests, st.sampled_from(POLICIES))
def test_what_is_left_for_a_start_is_counted_over_everyone_there(
    arrivals: list[tuple[str, int, float, int]], composition: Composition
) -> None:
    node, _ = busy_node(composition, arrivals)
    room, ledger, there = node.admit.room_for_start(), node.device.ledger, node.instances.values()
    if isinstance(composition.reclaiming, ReclaimIdle):
        assert room == EMPTY
        return
    weights = ledger.available
    if composition.memory.weights_share < 1.0 and there:
        weights = min(
            weights,
            int(composition.memory.weights_share * ledger.capacity) - sum(o.hosting.weight_bytes for o in there),
        )
    if isinstance(composition.reclaiming, ReclaimAlike):
        weights += sum(one.hosting.weight_bytes for one in there if one.is_idle)
    pace_s = sum(node.admit.timing.pace_s(one) for one in there if one.batch)
    assert room == StartRoom(weights, pace_s, min((one.strictest_s for one in there if one.batch), default=INFINITY))


def test_work_made_of_a_record_lacks_nothing_that_a_new_one_has() -> None:
    work = make_work(7, "b", 33, 1.5, ttft_s=2.0, tpot_s=0.5)
    made = Work.of(work.record())
    assert {name: getattr(made, name) for name in Work.__slots__} == {
        name: getattr(work, name) for name in Work.__slots__
    }


def test_a_load_that_waits_for_memory_excuses_no_more_than_its_own_time() -> None:
    """What somebody has waited for before he joins it is not excused, ordered or not."""
    node = make_node(hosting=replace(make_hosting(weight_gib=40.0), load_s=2.0), composition=SERVED)
    first = make_work(0, "a")
    assert isinstance(node.start(first, 0.0), int)
    serve_memory(node, 0.0)
    node.withdraw(0, first, 5.0)
    assert node.close_idle() == 1
    target = node.start(make_work(1, "b", arrival_s=5.0), 5.0)
    assert isinstance(target, int)
    assert node.instances[target].loaded_s == INFINITY  # the other one's memory is not free yet
    waited = make_work(2, "b", arrival_s=3.0)
    assert node.join(target, waited, 5.0) is Refusal.FIRST_TOKEN_LATE
    assert node.join(target, make_work(3, "b", arrival_s=5.0), 5.0) is None
