"""The switches of a policy that are not parameters of a strategy of its own yet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Admission(StrEnum):
    SHADOW = "shadow"  # S4, S5–S8
    CONCURRENCY = "concurrency"  # a fixed limit per instance (ServerlessLLM)


class MakeWay(StrEnum):
    """What may be done to those who run where a model would start soonest."""

    NEVER = "never"
    MIGRATE = "migrate"  # L7: they go on elsewhere, live, if the start is sooner with that than anywhere else
    PREEMPT = "preempt"  # Shepherd*: they are evicted and begin anew elsewhere


class WaitOrder(StrEnum):
    """Who without a place asks first when there may be one."""

    DEADLINE = "deadline"  # whose token is due first
    MEMORY = "memory"  # whose answer takes least of it: weights are shared with those who wait and who will come


@dataclass(frozen=True, slots=True)
class Knobs:
    admission: Admission = Admission.SHADOW
    retry_s: float = 0.25  # a request without a place tries again this often
    retry_on_change: bool = False  # and soon after somebody has left or memory has come free
    waits: WaitOrder = WaitOrder.DEADLINE
    # S11 gives a request up whose token is due while it has no place. True: what did not ask for targets, or has tokens
    # already, gets later deadlines instead.
    extend_deadlines: bool = False
    finish_begun: bool = False  # what has tokens already gets later deadlines in any case: no answer is broken off
    # memory
    watermark: float = 0.25  # S6
    floor_tokens: int = 4096  # S5: L_min
    lengths_by_model: bool = False  # demand by what the model's own answers are long; S5: by the mean of all
    whole_node_kv: bool = False  # give an instance its share of the node at start, never resize
    shares: int = 1  # with whole_node_kv: instances that split a node statically
    # sharing and placement
    sharing: bool = True  # several instances on one node
    use_cpu: bool = True  # S11
    proactive: bool = True  # S9
    reactive: bool = True  # S10; False: spread over the emptiest
    keep_alive_s: float = 1.0  # on devices that must load weights
    round_robin: bool = False  # over a model's instances (ServerlessLLM)
    disaggregate: bool = False  # prefill and decode on instances of their own
    # beyond the paper
    slots_limited: bool = True  # at most the configured number of instances per node; False: memory decides
    weights_share: float = 1.0  # of a device's memory that weights may take: what is left lets batches grow
    # Where models answer at like length and so many usual requests fit into the floor of a pool, floors are lower, and
    # weights may take more than their share as long as what is left holds so many of each instance. 0 = never.
    short_requests: int = 0
    one_instance: bool = False  # no second instance of a model on a node: it would split the batch
    free_resize: bool = False  # pools grow and shrink in place, without copying
    reclaim_idle: bool = False  # idle instances give way to a start before their keep-alive is over
    reclaim_alike: bool = False  # the same for who waits, as long as models answer at like length
    live_moves: bool = False  # L4: who outgrows its node goes on while another one recomputes what it has said
    start_soonest: bool = False  # L6: a model starts where its weights are there first; else nodes are packed (S11)
    start_random: bool = False  # a model starts on any node that takes it (the usual serverless scheduler)
    start_waits: bool = False  # with start_soonest: it waits for the node where that is, and starts nowhere else
    make_way: MakeWay = MakeWay.NEVER  # with start_soonest: others are moved away, or evicted, for a sooner start
    count_loads: bool = False  # a start counts the loads before its own on the link (L6)
