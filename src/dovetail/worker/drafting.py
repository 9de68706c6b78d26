"""Drafts for the decode under way, as the node's time allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dovetail.node.drafting import longest_decode_s
from dovetail.node.runtime import NodeRuntime
from dovetail.sched import sequence
from dovetail.worker.runner import ModelRunner
from dovetail.worker.speculation import Costs

NO_DRAFTS: Mapping[int, list[int]] = {}


def propose(
    home: NodeRuntime, runner: ModelRunner, sequences: Sequence[sequence.Sequence], clock: Callable[[], float]
) -> Mapping[int, list[int]]:
    """By sequence."""
    turn = home.node.turn
    if runner.speculator is None or turn is None or turn.prompts:
        return NO_DRAFTS
    instance, batch = turn.instance, len(sequences)
    latency, mean = instance.hosting.latency, instance.tokens // max(batch, 1)

    def costs() -> Costs:
        most_s = longest_decode_s(home.node, clock()) / instance.overestimate
        return Costs(lambda rows: latency.decode_s(rows, rows * mean), most_s)

    return runner.speculator.propose(sequences, batch, costs)
