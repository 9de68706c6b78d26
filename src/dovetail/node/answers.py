"""What a node answers without anything of it changing, and what it does for newcomers beside those who run: slower
paces, and long answers that wait.
"""

from __future__ import annotations

from dovetail.node import protocol
from dovetail.node.instance import Instance, State
from dovetail.node.node import Node
from dovetail.node.outlook import movable
from dovetail.policy.fairness import Running, who_gives_way
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.latency import Latency
from dovetail.policy.placement import Hosting
from dovetail.policy.work import SLACK, Work
from dovetail.profiles.live import LiveLatency

USUAL_TOKENS = 1024  # of a context, where a request is not known yet


def view_of(node: Node, version: int, fullness: float, room: protocol.StartRoom) -> protocol.NodeView:
    """The node as others may know it."""
    ledger = node.device.ledger
    instances = tuple(
        protocol.InstanceView(one.id, one.model, one.phase, one.batch, one.state is State.READY, one.best_effort)
        for one in node.instances.values()
        if one.state is not State.CLOSING
    )
    return protocol.NodeView(
        version,
        node.kind,
        node.in_use,
        fullness,
        ledger.capacity,
        ledger.available,
        instances,
        room,
        node.device.link_free_s,
    )


def offer_of(node: Node, hosting: Hosting) -> protocol.Offer:
    room_tokens = node.admit.most_tokens(hosting) - hosting.block_tokens
    weight_bytes = 0 if hosting.weights_in_place else hosting.weight_bytes
    decode_s = hosting.latency.decode_s(1, USUAL_TOKENS) * node.device.overestimate
    token_s, resume_s = _recompute(hosting.latency)
    return protocol.Offer(
        room_tokens,
        weight_bytes,
        decode_s,
        hosting.load_s,
        hosting.disk_s,
        token_s,
        resume_s,
        hosting.kv_bytes_per_token,
    )


def _recompute(latency: Latency) -> tuple[float, float]:
    """L6: seconds for each token, and on top, of computing what was said elsewhere: a line through two lengths."""
    usual_s, double_s = latency.prefill_s(USUAL_TOKENS), latency.prefill_s(2 * USUAL_TOKENS)
    token_s = max(double_s - usual_s, 0.0) / USUAL_TOKENS
    return token_s, max(usual_s - USUAL_TOKENS * token_s, 0.0)


def load_s(node: Node, question: protocol.Propose, now: float) -> float:
    """Until the weights would be there for a request that is to be held: nobody waits for it, its load included."""
    node.device.now_s = now
    instance = node.instances.get(question.instance) if question.instance is not None else None
    if instance is not None:
        return max(instance.loaded_s - now, 0.0) if instance.state is State.LOADING else 0.0
    hosting = node.device.hostings.get(question.request.model)
    if hosting is None or hosting.weights_in_place:
        return 0.0
    return node.residency.loaded_s(hosting) - now


def ease_overdue(node: Node, now: float, overdue_s: float) -> None:
    """Deadlines far in the past say nothing about who is urgent: those who did not ask for targets get new ones."""
    if any(one.deadline_s < overdue_s and one.can_run for one in node.instances.values()):
        ease_everyone(node, now, 0.0)


def ease_everyone(node: Node, now: float, extra_s: float, read_s: float = 0.0) -> float:
    """Those who did not ask for targets go at a pace that leaves time for an iteration of every instance and for
    something more; where layers are read from the disk, for the iterations of all who read, and for reading something
    more. Returns that pace, of whoever comes."""
    instances = node.instances.values()
    pace_s = SLACK * (sum(_holds_s(one) for one in instances) + extra_s)
    reading_s = SLACK * (sum(one.decode_s() for one in instances if one.hosting.layer_s is not None) + read_s)
    for instance in instances:
        own_s = pace_s if instance.hosting.layer_s is None else max(pace_s, reading_s)
        for work in instance.works():
            is_overdue = instance.due_s(work) < now
            if not work.is_strict and (is_overdue or work.tpot_s < own_s):
                work.slow_down(now, max(work.tpot_s, own_s), instance.produced(work))
        instance.sort_by_due()
        instance.refresh()
    return max(pace_s, reading_s) if read_s else pace_s


def _holds_s(instance: Instance) -> float:
    """What others wait for an iteration of it: one layer, where layers are read from the disk."""
    layer_s = instance.hosting.layer_s
    return instance.decode_s() if layer_s is None or not instance.batch else layer_s


def find_long_answer(node: Node) -> tuple[int, Work] | None:
    """An instance and a long answer on it that may have to wait for a newcomer."""
    places = {work.id: (one, work) for one in node.instances.values() for work in one.running.values()}
    waited_for = [(one, work) for one, work in places.values() if not work.is_best_effort]
    running = [Running(work.id, work.group, one.produced(work), work.is_strict) for one, work in waited_for]
    found = who_gives_way(running)
    return None if found is None else (places[found][0].id, places[found][1])


def estimate(latency: Latency, work: Work) -> tuple[float, float]:
    """Prefill and one decode of the request on an otherwise empty device."""
    known = work.known_tokens
    return latency.prefill_s(known), latency.decode_s(1, known)


def refused(node: Node, refusal: Refusal, work: Work) -> protocol.Refused:
    """With what the request would need here."""
    hosting = node.device.hostings.get(work.model)
    if hosting is None:
        return protocol.Refused(refusal)
    prefill_s, decode_s = estimate(hosting.latency, work)
    could_serve = False
    if refusal is Refusal.HARDWARE:  # what iterations take lately may be due to loads beside them
        latency = hosting.latency.base if isinstance(hosting.latency, LiveLatency) else hosting.latency
        bare_prefill_s, bare_decode_s = estimate(latency, work)
        could_serve = bare_prefill_s <= work.ttft_s and bare_decode_s <= work.tpot_s
    return protocol.Refused(refusal, prefill_s, decode_s, could_serve)


def look(
    node: Node,
    question: protocol.Check | protocol.FindVictims | protocol.FindGuests | protocol.Ease,
    now: float,
) -> protocol.Answer:
    if isinstance(question, protocol.Check):
        return check(node, question, now)
    if isinstance(question, protocol.FindVictims):
        return find_victims(node, question, now)
    if isinstance(question, protocol.FindGuests):
        return find_guests(node, question)
    return ease(node, question, now)


def check(node: Node, question: protocol.Check, now: float) -> protocol.Answer:
    work, instance = Work.of(question.request), question.instance
    refusal = node.check_start(work, now) if instance is None else node.check_join(instance, work, now)
    return protocol.Accepted() if refusal is None else protocol.Refused(refusal)


def find_victims(node: Node, question: protocol.FindVictims, now: float) -> protocol.Victims:
    return protocol.Victims(tuple(node.victims_for(question.instance, Work.of(question.request), now)))


def find_guests(node: Node, question: protocol.FindGuests) -> protocol.Guests:
    """L7. Whoever still waits for a first token is not disturbed, nor is who is held for a migration."""
    work = Work.of(question.request)
    hosting = node.device.hostings.get(work.model)
    if hosting is None or not node.up:
        return protocol.Guests()
    missing = max(node.admit.missing_bytes(hosting, work) - node.admit.yielded_bytes(), 0)
    settled = [one for one in node.instances.values() if one.state is State.READY and not one.waiting and not one.held]
    settled = [one for one in settled if one.hosting.keep_alive_s != INFINITY]
    guests = [
        protocol.Guest(
            one.id,
            one.model,
            node.residency.planned_bytes(one),
            tuple(work.record() for work in movable(one)),
        )
        for one in settled
    ]
    return protocol.Guests(missing, tuple(guests) if missing else ())


def ease(node: Node, question: protocol.Ease, now: float) -> protocol.Eased:
    work = Work.of(question.request)
    hosting = node.device.hostings.get(work.model)
    if hosting is None:
        return protocol.Eased()
    own_s, scale = hosting.latency.decode_s(1, work.known_tokens), node.device.overestimate
    if hosting.layer_s is None:
        return protocol.Eased(ease_everyone(node, now, own_s * scale))
    return protocol.Eased(ease_everyone(node, now, hosting.layer_s * scale, own_s * scale))
