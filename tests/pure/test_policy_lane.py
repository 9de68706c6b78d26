"""What an instance counts in as requests come and go is what looking at everybody anew would find."""

from __future__ import annotations

import copy

from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_builders import make_latency

from dovetail.node.instance import Instance, State
from dovetail.node.outlook import demand_of
from dovetail.policy.headroom import INFINITY
from dovetail.policy.lengths import expected_length, most_tokens
from dovetail.policy.placement import Hosting
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import Phase, Work
from dovetail.profiles.live import LiveLatency

RULES = (TurnRule(), TurnRule(slack_s=4.0, max_silence_s=1.9, turn_silence_s=1.4, part_s=0.1, packs_prompts=True))


def make_instance(rule: TurnRule, state: State) -> Instance:
    hosting = Hosting(10**9, 1000, LiveLatency(make_latency()), block_tokens=16)
    instance = Instance(0, "m", hosting, 1.1, Phase.ANY, rule)
    instance.state = state
    return instance


def make_work(id: int, tokens: int, ttft_s: float, *, tpot_s: float = 0.2, cached: bool = False) -> Work:
    work = Work(id, "m", tokens, 0.1 * id, ttft_s, tpot_s, 0.95)
    work.cached = cached
    if cached:
        work.produced, work.last_token_s = 1 + id % 5, 0.1 * id
    return work


def said_of(instance: Instance) -> tuple[object, ...]:
    return (
        [one.id for one in instance.waiting],
        instance.deadline_s,
        instance.urgent_s,
        instance.running_due_s,
        instance.tpot_s,
        instance.strictest_s,
        instance.spoke_s,
        instance.mixed_pace,
        instance.decode_s(),
        instance.lengths(),
    )


def looked_at_anew(instance: Instance) -> Instance:
    other = copy.deepcopy(instance)
    other.sort_waiting()
    other.refresh()
    return other


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["waits", "waits", "waits", "runs", "decoded", "first token", "leaves", "learns", "asked"]),
        st.integers(1, 600),
        st.sampled_from([0.5, 0.5, 1.0, 3.0]),
        st.sampled_from([0.2, 0.2, 0.1]),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@example(
    [
        ("waits", 1, 0.5, 0.2),
        ("waits", 405, 0.5, 0.2),
        ("learns", 1, 0.5, 0.2),
        ("learns", 404, 0.5, 0.2),
        ("waits", 1, 0.5, 0.2),
    ],
    RULES[1],
    State.READY,
)
@given(EVENTS, st.sampled_from(RULES), st.sampled_from([State.READY, State.LOADING]))
def test_who_is_counted_in_leaves_what_looking_at_all_would_find(
    happened: list[tuple[str, int, float, float]], rule: TurnRule, state: State
) -> None:
    instance = make_instance(rule, state)
    now, pace_tokens = 1.0, 20.0
    for id, (what, tokens, ttft_s, tpot_s) in enumerate(happened):
        now += 0.01
        if what in ("waits", "runs"):
            instance.add(make_work(id, tokens, ttft_s, tpot_s=tpot_s, cached=what == "runs"))
            assert said_of(instance) == said_of(looked_at_anew(instance))
        elif what == "decoded":
            instance.begin_turn((), decodes=True)
            instance.end_turn()
            instance.decoded(now)
        elif what == "first token" and instance.waiting:
            work = instance.waiting[tokens % len(instance.waiting)]
            instance.prefilled(work, now, INFINITY)
            instance.refresh()
        elif what == "leaves" and instance.batch:
            works = instance.works()
            instance.remove(*works[tokens % len(works) :][:2])
        elif what == "learns":
            assert isinstance(instance.hosting.latency, LiveLatency)
            instance.hosting.latency.observe_prefill(tokens, 0.01 + tokens / 5000)
            pace_tokens += tokens % 2
        elif what == "asked":
            anew = copy.deepcopy(instance)
            anew.demand = None
            asked = (now, 0.0 if state is State.READY else 5.0, 5.0, pace_tokens)
            is_current = instance.demand is None or bool(instance.newcomers) or state is State.LOADING
            found = demand_of(instance, *asked)
            assert not instance.newcomers
            if is_current:  # what was found before stays until something of the instance changes
                assert found == demand_of(anew, *asked)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 60)), min_size=1), st.floats(1.0, 300.0))
def test_those_who_came_together_are_one_group_where_most_tokens_are_looked_for(
    lengths: list[tuple[int, int]], mean: float
) -> None:
    left = sorted((max(expected_length(mean, made) - made, 1.0), given + made) for given, made in lengths)
    count, known = len(left), float(sum(tokens for _, tokens in left))
    best = (count, known)
    for remaining, tokens in left:
        if known + count * remaining > best[1]:
            best = (count, known + count * remaining)
        count, known = count - 1, known - tokens
    if len(lengths) > 1:
        assert most_tokens(lengths, mean) == (best[0], int(best[1]))


def test_nobody_is_noted_for_a_look_that_nobody_asks_for() -> None:
    instance = make_instance(RULES[1], State.READY)
    for id in range(40):
        instance.add(make_work(id, 100, 1.0))
    assert not instance.newcomers
    assert demand_of(instance, 1.0, 0.0, INFINITY, 20.0).batch == 40
