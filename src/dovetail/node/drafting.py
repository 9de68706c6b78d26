"""What drafts mean to a node: how long a decode with them may take, and answers that get several tokens of one."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.node.instance import Instance
from dovetail.node.node import Node
from dovetail.policy.headroom import INFINITY
from dovetail.policy.parts import begins_by_s


def longest_decode_s(node: Node, now: float) -> float:
    """How long the decode under way may take without making anybody late: whoever shares it, and whoever waits for the
    device. One that has its iterations to itself has its tokens soonest with the most of them per second."""
    turn = node.turn
    assert turn is not None, "no turn under way"
    own, rule = turn.instance, node.device.rule
    until_s = own.running_due_s if len(own.running) > 1 else INFINITY
    others = [one for one in node.instances.values() if one.has_turns and one.can_run]
    for one in others:
        if one.waiting:
            first = one.waiting[0]
            until_s = min(until_s, one.latest_prefill_s(first, one.left_s(first, first.start)))
    latest = {one: min(one.running_due_s, one.spoke_s + rule.max_silence_s) for one in others if one.running}
    latest.pop(own, None)
    if latest:
        until_s = min(until_s, begins_by_s([(latest_s, one.decode_s()) for one, latest_s in latest.items()]))
    return max(until_s - now, 0.0)


def got_more(instance: Instance, extra: Mapping[int, int], now: float) -> None:
    """These got so many tokens in the iteration that ends, and then the one that everybody gets (`decoded`)."""
    for id, count in extra.items():
        work = instance.running.get(id)
        if work is None:
            continue  # it left during the turn
        due_s = instance.due_s(work)
        late = [step for step in range(count) if now > work.true_due_s(due_s + step * work.tpot_s)]
        work.late_tokens += len(late)
        work.produced += count
        instance.tokens += count
    instance.refresh()
