"""What an instance has to do next, as shadow validation sees it (S4): its deadlines and durations after the turn under
way, with the cold start that it may be waiting for.
"""

from __future__ import annotations

from operator import itemgetter

from dovetail.node.instance import Instance, State
from dovetail.policy.headroom import INFINITY, InstanceDemand, Prefill
from dovetail.policy.lane import is_spare
from dovetail.policy.parts import least_s
from dovetail.policy.work import Phase, Work


def cold_start_grace_s(work: Work, ordered_s: float, loaded_s: float) -> float:
    """S1: a cold start is added to the first deadline, as far as the request waits for it."""
    return max(min(loaded_s - ordered_s, loaded_s - work.arrival_s), 0.0)


def movable(instance: Instance) -> tuple[Work, ...]:
    """Copies of its work as it would come to another instance; best effort waits for a place."""
    return tuple(work.as_of(instance.produced(work)) for work in instance.works() if not work.is_best_effort)


def demand_of(
    instance: Instance, free_at_s: float, ready_s: float, loaded_s: float, pace_tokens: float
) -> InstanceDemand:
    """After the turn under way, which ends at `free_at_s`; `ready_s` is when the instance can take turns, `loaded_s`
    when its weights are there, `pace_tokens` as of `Work.pace_from`. One admission looks at a neighbour many times
    between its turns: the instance keeps what was found, and in a burst only those who came since are looked at."""
    blocked = instance.state is State.LOADING
    waits_s = loaded_s if blocked else None
    demand = instance.demand
    if demand is None or blocked or demand.blocked or instance.newcomers:
        latency = instance.hosting.latency
        key = (waits_s, instance.ordered_s, pace_tokens, latency, latency.version)
        if demand is None or key != instance.demand_key or instance.prompts:
            demand = _look(instance, waits_s, pace_tokens, free_at_s)
        else:
            _look_at_newcomers(instance, demand, waits_s, pace_tokens)
        instance.demand, instance.demand_key = demand, key
        instance.newcomers.clear()
    demand.ready_s = ready_s
    if instance.in_turn:
        _foresee(instance, demand, free_at_s)
    return demand


def _foresee(instance: Instance, demand: InstanceDemand, free_at_s: float) -> None:
    """What will have happened when the turn under way is over; one of best effort is none."""
    if is_spare(instance, instance.prompts, decodes=instance.decodes):
        return
    demand.turned_s = free_at_s
    if instance.prompts:
        demand.parted_s = free_at_s
    if instance.decodes and instance.rows is None:
        demand.spoke_s, demand.prompted_s = free_at_s, 0.0


def _look(instance: Instance, loaded_s: float | None, pace_tokens: float, free_at_s: float) -> InstanceDemand:
    prefills = _prefills(instance, loaded_s, pace_tokens) if instance.waiting else []
    due, pace = _after_turn(instance, free_at_s, pace_tokens)
    demand = InstanceDemand(
        deadline_s=due,
        decode_deadline_s=due,
        prefill_s=0.0,
        decode_s=0.0,
        tpot_s=pace,
        blocked=loaded_s is not None,
        spoke_s=instance.spoke_s,
        turned_s=instance.turned_s,
        parted_s=instance.parted_s,
        prompted_s=instance.prompted_s,
        latency=instance.hosting.latency if instance.rule.part_s != INFINITY else None,
        overestimate=instance.overestimate,
    )
    _count(demand, instance, prefills, prefills)
    return demand


def _look_at_newcomers(instance: Instance, demand: InstanceDemand, loaded_s: float | None, pace_tokens: float) -> None:
    costs = _splitting(instance)
    prefills = list(demand.prefills)
    found = []
    for index, work in sorted(((instance.waiting.index(work), work) for work in instance.newcomers), key=itemgetter(0)):
        found.append(_prefill(instance, work, work.start, loaded_s, pace_tokens, costs))
        prefills.insert(index, found[-1])
    _count(demand, instance, prefills, found)


def _count(demand: InstanceDemand, instance: Instance, prefills: list[Prefill], new: list[Prefill]) -> None:
    """All prefills of the instance, of which these are new."""
    if prefills:
        demand.prefill_s = sum([one.seconds for one in prefills], 0.0)
        for one in new:
            if one.tpot_s < demand.tpot_s:
                demand.tpot_s = one.tpot_s
            if one.due_s < demand.deadline_s:
                demand.deadline_s = one.due_s
        demand.prefills = tuple(prefills)
    demand.decode_s = instance.decode_s()
    demand.batch = instance.waited_for
    demand.frees_bytes = instance.frees_bytes


def _after_turn(instance: Instance, free_at_s: float, pace_tokens: float) -> tuple[float, float]:
    """When its running requests are due, and their pace, once the turn under way is over."""
    due, pace = instance.running_due_s, instance.tpot_s
    if instance.rows is not None:
        due = _due_after(instance, set(instance.rows))
    elif instance.decodes:
        due += pace
    if instance.phase is Phase.PREFILL:
        return due, pace
    for joins in [share.work for share in instance.prompts if share.is_last and not share.work.is_best_effort]:
        joins_due = joins.due_s
        if not joins.produced:
            joins_due = min(joins_due, free_at_s + joins.safety_s(pace_tokens))
        due, pace = min(due, joins_due + joins.tpot_s), min(pace, joins.tpot_s)
    return due, pace


def _due_after(instance: Instance, rows: set[int]) -> float:
    """When its running requests are due once these have had a token."""
    works = instance.running.values()
    return min([instance.due_s(one) + (one.tpot_s if one.id in rows else 0.0) for one in works], default=INFINITY)


def _prefills(instance: Instance, loaded_s: float | None, pace_tokens: float) -> list[Prefill]:
    """Of what its prompts have left after the turn under way."""
    in_turn = {share.work.id: share for share in instance.prompts}
    costs = _splitting(instance)
    found = []
    for work in instance.waiting:
        share = in_turn.get(work.id)
        if share is None:
            found.append(_prefill(instance, work, work.start, loaded_s, pace_tokens, costs))
        elif not share.is_last:
            found.append(_prefill(instance, work, share.start + share.tokens, loaded_s, pace_tokens, costs))
    return found


def _silent_s(instance: Instance, work: Work) -> float:
    """When an answer that came from elsewhere and is computed again would have been silent for too long. It may be far
    ahead of its pace: judged by that alone, it would wait for everyone who comes after it."""
    if work.last_token_s is None or work.hold:
        return INFINITY
    return work.last_token_s + instance.rule.max_silence_s


def _splitting(instance: Instance) -> tuple[float, float]:
    return instance.splitting_s(), instance.lost_s()


def _prefill(
    instance: Instance,
    work: Work,
    start: int,
    loaded_s: float | None,
    pace_tokens: float,
    costs: tuple[float, float],
) -> Prefill:
    """Of what is left from this token on; `costs` as of `_splitting`."""
    grace_s = 0.0
    if loaded_s is not None and work.produced == 0:
        grace_s = cold_start_grace_s(work, instance.asked_s(loaded_s), loaded_s)
    seconds, part_s, tokens = instance.at_once_s(work, start), 0.0, work.known_tokens - start
    if instance.rule.part_s != INFINITY:
        part_s = least_s(instance.hosting.latency, start, tokens) * instance.overestimate
    urgent_s = instance.urgent_prefill_s(work) + grace_s
    safety_s = INFINITY if work.produced else work.safety_s(pace_tokens)
    due_s = min(work.due_s + grace_s, _silent_s(instance, work))
    return Prefill(due_s, urgent_s, seconds, work.tpot_s, safety_s, part_s, *costs, start, tokens)
