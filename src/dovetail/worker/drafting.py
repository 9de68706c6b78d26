"""Drafts for the decode under way, as the node's time allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dovetail.node.drafting import longest_decode_s
from dovetail.node.runtime import NodeRuntime
from dovetail.pulse import Pulse
from dovetail.sched import sequence
from dovetail.worker.runner import ModelRunner
from dovetail.worker.speculation import Costs


class Drafts(NamedTuple):
    tokens: Mapping[int, list[int]]  # by sequence
    took_s: float  # a model may have made them


NO_DRAFTS = Drafts({}, 0.0)


def propose(
    home: NodeRuntime,
    runner: ModelRunner,
    sequences: Sequence[sequence.Sequence],
    clock: Callable[[], float],
    pulse: Pulse,
) -> Drafts:
    """In sight of whoever watches this process, as part of the iteration that follows."""
    turn, started_s = home.node.turn, clock()
    if runner.speculator is None or turn is None or turn.prompts or turn.rows is not None:
        return NO_DRAFTS
    instance, batch = turn.instance, len(sequences)
    latency, mean = instance.hosting.latency, instance.tokens // max(batch, 1)

    def costs() -> Costs:
        most_s = longest_decode_s(home.node, clock()) / instance.overestimate
        return Costs(lambda rows: latency.decode_s(rows, rows * mean), most_s)

    pulse.begin([one.request_id for one in sequences], turn.expected_s)
    tokens = runner.propose(sequences, batch, costs)
    return Drafts(tokens, clock() - started_s)
