"""Real time for the production policies: carries out what node and controller decide, on real executors.

The counterpart of `sim.driver`: the same state machines, the same records in the log, but turns are computed, weights
are mapped and pools are resized. Everything happens between two iterations on one thread; only loads have their own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Decision, Dropped, Moving, Placed, Queued
from dovetail.cluster.waiting import WaitingRoom
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.reasons import in_words
from dovetail.profiles.live import LiveLatency
from dovetail.sched.sequence import Sequence
from dovetail.types import FinishReason, Request, TokenEvent
from dovetail.worker.actor import Actor
from dovetail.worker.journal import Journal
from dovetail.worker.lessons import Lesson, Lessons
from dovetail.worker.piece import Piece, pieces_of, relax

log = logging.getLogger("dovetail.worker")

REFUSED = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) cannot be kept now: {}"
NEVER = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) are beyond this device"
TOO_LARGE = "this request needs {} tokens of KV memory, the node has room for {}"
RETRY_AFTER_S = 1.0
# Refusals that go away with later deadlines.
TOO_LATE = {Refusal.FIRST_TOKEN_LATE, Refusal.DECODE_OVERCOMMITTED, Refusal.HARDWARE, Refusal.LINK}
KEPT_GAPS = 4096  # of which the distribution of turn overhead is told


class Loads(Protocol):
    """Where weights come from. It answers with `Stage.loaded` or `Stage.load_failed`, on the stage's thread."""

    def load(self, command: events.StartLoad) -> None: ...


@dataclass
class Report:
    """What the stage has to say to the outside since it was last asked."""

    tokens: dict[str, list[TokenEvent]]  # by model
    gone: list[str]  # models whose memory is free


class Stage:
    def __init__(
        self,
        name: str,
        kind: DeviceKind,
        memory_bytes: int,
        knobs: Knobs,
        loads: Loads,
        clock: Callable[[], float],
        log: EventLog | None = None,
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.hostings: dict[str, Hosting] = {}
        self.node = Node(name, kind, memory_bytes, self.hostings, knobs)
        self.controller = Controller([self.node], knobs)
        self.actors: dict[int, Actor] = {}  # by instance
        self.pieces: dict[int, Piece] = {}
        self.report = Report({}, [])
        self.gaps: deque[float] = deque(maxlen=KEPT_GAPS)  # seconds between the ends and starts of iterations
        self.resizes = 0
        self.resize_s = 0.0
        self.refused = 0
        self._loads = loads
        self._clock = clock
        self._journal = Journal(log, name)
        self._lessons = Lessons(self._journal)
        self._on_pause = on_pause  # called between the chunks of a long prefill: messages may be taken in
        self._by_request: dict[str, list[Piece]] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._next_id = 0
        self._last_end: float | None = None
        self._gap_s = 0.0  # before the iteration that runs
        self._load_asked: dict[int, float] = {}  # by instance: since when its weights are awaited
        self._sizes: dict[int, int] = {}  # blocks of instances that are still loading
        self._waiting = WaitingRoom()  # pieces without a place

    def start_log(self, device: str) -> None:
        self._journal.start(self.node, device)

    # Models

    def register(self, model: str, hosting: Hosting) -> None:
        now = self._clock()
        self.hostings[model] = hosting
        self._journal.hosting(now, model, hosting)
        self.node.rehost(model, now)
        self._settle(now)

    def warm(self, model: str) -> Refusal | None:
        """Start an instance of the model, unless there is one."""
        if self.instances_of(model):
            return None
        now = self._clock()
        answer = self.node.warm(model, now)
        if isinstance(answer, Refusal):
            return answer
        self.controller.add_instance(self.node, answer, model)
        self._settle(now)
        return None

    def instances_of(self, model: str) -> list[int]:
        return [one.id for one in self.node.instances.values() if one.model == model and one.state != "closing"]

    def unregister(self, model: str, error: str) -> None:
        """End its requests, free its memory."""
        self._fail([piece for piece in self.pieces.values() if piece.request.model == model], error)
        self.close_model(model)
        self.hostings.pop(model, None)

    def close_model(self, model: str) -> None:
        for instance in self.instances_of(model):
            self.node.preempt(instance, "unloaded")
        self._settle(self._clock())

    # Requests

    def submit(self, request: Request, arrival_s: float) -> None:
        now = self._clock()
        hosting = self.hostings[request.model]
        pieces = pieces_of(request, self._next_id, arrival_s, self.node.knobs.slo_scale)
        self._next_id += len(pieces)
        self._by_request[request.id] = pieces
        self.pieces.update((piece.id, piece) for piece in pieces)
        need, most = pieces[0].work.known_tokens + 1, self.node.admit.most_tokens(hosting)
        if need > most - hosting.block_tokens:
            self._fail(pieces, TOO_LARGE.format(need, most - hosting.block_tokens), unprocessable=True)
            return
        self._place(pieces[0], now)
        self._settle(now)

    def _place(self, piece: Piece, now: float) -> None:
        self._journal.arrive(now, piece)
        self.controller.submit(piece.work, now)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free what these choices hold. No event follows for them."""
        now = self._clock()
        for piece in list(self._by_request.get(request_id, ())):
            if choice in (None, piece.sequence.choice):
                if choice is None:
                    piece.followers = []  # they go too
                self._leave(piece, now)
                self._forget(piece, "aborted", now)
                self._settle(now)

    def _leave(self, piece: Piece, now: float) -> None:
        """Take it from wherever it is; the piece stays known."""
        if piece.instance is None:
            self.controller.cancel(piece.id)
            return
        self._drop_sequence(piece)
        self.node.withdraw(piece.instance, piece.work, now)
        self.controller.left(self.node, piece.instance)
        piece.instance = None

    def _drop_sequence(self, piece: Piece) -> None:
        assert piece.instance is not None
        actor = self.actors.get(piece.instance)
        if actor is not None:
            actor.drop(piece.sequence)

    # Turns

    @property
    def has_work(self) -> bool:
        return bool(self.pieces)

    def next_due_s(self) -> float | None:
        """When `take_turn` has something to do again though nothing can run now."""
        due = self._timers[0][0] if self._timers else None
        retry_s = self._waiting.next_s()
        if retry_s is not None:
            due = retry_s if due is None else min(due, retry_s)
        return due

    def take_turn(self) -> bool:
        """Compute the next iteration, if there is one to compute."""
        self._ring()
        turn = self.node.next_turn(self._clock())
        if self.node.outbox:  # choosing may have had something to say, and somebody else may be able to run for it
            self._settle(self._clock())
            turn = turn or self.node.next_turn(self._clock())
        if turn is None:
            self._lessons.learn(self._clock())
            self._last_end = None
            return self._relax_one()
        if turn.prefill is not None:
            self._prefill(turn.instance.id, self.pieces[turn.prefill.id])
        else:
            self._decode(turn.instance.id, [self.pieces[id].sequence for id in turn.instance.running])
        return True

    def _prefill(self, instance: int, piece: Piece) -> None:
        """All of its prompt, in as many iterations as that takes."""
        actor = self.actors[instance]
        sequence = piece.sequence
        known = len(sequence.tokens)
        started, computed = self._begin(actor), actor.meter.tokens
        finished: list[Work] = []
        while piece.instance == instance:
            before = sequence.num_computed
            finished = self._deliver(actor.card.name, actor.iterate([sequence]).events)
            if finished or len(sequence.tokens) > known:
                break
            assert sequence.num_computed > before, f"{actor.card.name}: the KV pool is smaller than the node thinks"
            self._on_pause()
        now = self._end()
        if actor.meter.tokens - computed == known:  # else part of it was in the cache, or it was given up
            self._note_turn(instance, 0, known, now, now - started)
        self._turn_done(now, finished)

    def _decode(self, instance: int, sequences: list[Sequence]) -> None:
        actor = self.actors[instance]
        started = self._begin(actor)
        total = sum(len(sequence.tokens) for sequence in sequences)
        finished: list[Work] = []
        for batch in actor.batches(sequences):
            finished += self._deliver(actor.card.name, actor.iterate(batch).events)
        now = self._end()
        if sequences:
            self._note_turn(instance, len(sequences), total, now, now - started)
        self._turn_done(now, finished)

    def _note_turn(self, instance: int, batch: int, tokens: int, now: float, took_s: float) -> None:
        latency = self.node.instances[instance].hosting.latency
        self._lessons.add(Lesson(latency, batch, tokens, took_s, self._gap_s, bool(self._load_asked)), now)

    def _begin(self, actor: Actor) -> float:
        now = self._clock()
        self._gap_s = 0.0
        if self._last_end is not None:
            self._gap_s = now - self._last_end
            self.gaps.append(self._gap_s)
            actor.meter.overhead_seconds += self._gap_s
        return now

    def _end(self) -> float:
        self._last_end = self._clock()
        return self._last_end

    def _deliver(self, model: str, token_events: Iterable[TokenEvent]) -> list[Work]:
        """Tell the tokens; returns the work that has ended with them."""
        finished = []
        for event in token_events:
            self.report.tokens.setdefault(model, []).append(event)
            if event.finish is not None:
                piece = next(one for one in self._by_request[event.request_id] if one.sequence.choice == event.choice)
                finished.append(piece.work)
        return finished

    def _turn_done(self, now: float, finished: list[Work]) -> None:
        self.node.turn_done(now, finished)
        self._settle(now)

    # Carrying out what node and controller say

    def _settle(self, now: float) -> None:
        controller, box = self.controller, self.node.outbox
        while controller.outbox or box:
            decisions, controller.outbox = controller.outbox, []
            for decision in decisions:
                self._decide(decision, now)
            while box:
                self._carry_out(box.pop(0), now)
                if controller.outbox:
                    break

    def _decide(self, decision: Decision, now: float) -> None:
        piece = self.pieces[decision.work.id]
        self._journal.decision(now, decision)
        if isinstance(decision, Placed):
            piece.instance = decision.instance
            actor = self.actors.get(decision.instance)
            if actor is not None:
                actor.scheduler.enter(piece.sequence)
        elif isinstance(decision, Dropped):
            self._refuse(piece, decision.reason, now)
        else:
            assert isinstance(decision, Queued | Moving)
            if isinstance(decision, Queued):
                piece.refusals = decision.refusals
                self._waiting.enter(piece.id, piece.work)
                if Refusal.HARDWARE in piece.refusals and not piece.is_strict:
                    self._relax(piece, now)  # waiting will not make the device faster
            else:
                self._at(decision.retry_at_s, lambda at: self._retry(piece.id, at))

    def _retry(self, work_id: int, now: float) -> None:
        self.controller.retry(work_id, now)
        self._settle(now)

    def _refuse(self, piece: Piece, reason: str, now: float) -> None:
        """Refuse what was asked to be in time; serve the rest late rather than not at all."""
        work = piece.work
        if not piece.is_strict or work.produced > 0:
            self._relax(piece, now)
            return
        self.refused += 1
        ttft_s, tpot_s = work.ttft_s / work.slo_scale, work.tpot_s / work.slo_scale
        if reason == "hardware" and not self._could_serve(work):
            self._fail([piece, *piece.followers], NEVER.format(ttft_s, tpot_s), unprocessable=True)
            return
        why = in_words(piece.refusals) or "its time has passed"
        self._fail([piece, *piece.followers], REFUSED.format(ttft_s, tpot_s, why), retry_after_s=RETRY_AFTER_S)

    def _could_serve(self, work: Work) -> bool:
        """On an undisturbed device: what iterations take lately may be due to loads beside them."""
        latency = self.hostings[work.model].latency
        base = latency.base if isinstance(latency, LiveLatency) else latency
        return base.prefill_s(work.known_tokens) <= work.ttft_s and base.decode_s(1, work.known_tokens) <= work.tpot_s

    def _relax(self, piece: Piece, now: float) -> None:
        self._waiting.leave(piece.id)
        self.controller.cancel(piece.id)
        relax(piece, now, self.hostings[piece.work.model].latency)
        self.controller.submit(piece.work, now)

    def _relax_one(self) -> bool:
        """Nobody can run, and somebody waits for a moment that suits his targets: better late than idle."""
        waiting = [
            piece
            for id in self._waiting
            if not (piece := self.pieces[id]).is_strict and TOO_LATE & piece.refusals.keys()
        ]
        if not waiting:
            return False
        now = self._clock()
        piece = min(waiting, key=lambda one: (one.work.due_s, one.id))
        self._relax(piece, now)
        self._settle(now)
        return piece.id not in self._waiting

    def _carry_out(self, said: events.Command | events.Notice, now: float) -> None:
        if isinstance(said, events.SetTimer):
            self._at(said.at_s, lambda at: self._timer(said.instance, said.epoch, at))
        elif isinstance(said, events.StartLoad):
            self._journal.said(now, "load", said)
            self._load_asked[said.instance] = now
            self._loads.load(said)
        elif isinstance(said, events.StartUnload):
            self.actors.pop(said.instance).close()
            self.node.unload_done(said.instance, now)
        elif isinstance(said, events.StartResize):
            self._journal.said(now, "resize", said)
            self._resize(said)
        else:
            self._notice(said, now)

    def _resize(self, command: events.StartResize) -> None:
        started = self._clock()
        hosting = self.node.instances[command.instance].hosting
        num_blocks = command.new_bytes // (hosting.kv_bytes_per_token * hosting.block_tokens)
        actor = self.actors.get(command.instance)
        if actor is not None:
            actor.resize(num_blocks)
        else:
            self._sizes[command.instance] = num_blocks  # granted before its weights are there
        ended = self._clock()
        self.resizes += 1
        self.resize_s += ended - started
        self.node.resize_done(command.instance, ended)

    def _notice(self, notice: events.Notice, now: float) -> None:
        if isinstance(notice, events.FirstToken):
            self._journal.first_token(now, notice.work.id)
            self._release_followers(self.pieces[notice.work.id], now)
            return
        if isinstance(notice, events.Evicted):
            piece = self.pieces[notice.work.id]
            self._drop_sequence(piece)
            piece.instance = None
        elif isinstance(notice, events.Finished):
            self._forget(self.pieces[notice.work.id], "finished", now)
        elif isinstance(notice, events.InstanceGone):
            self._sizes.pop(notice.instance, None)
            if not self.instances_of(notice.model):
                self.report.gone.append(notice.model)
        if isinstance(notice, events.InstanceReady | events.InstanceGone):
            self._waiting.changed()
        if not isinstance(notice, events.Finished):
            self._journal.said(now, type(notice).__name__.lower(), notice)
        self.controller.notice(self.node, notice, now)

    # Loads

    def loaded(self, instance: int, actor: Actor) -> None:
        now = self._clock()
        waited_s = now - self._load_asked.pop(instance)  # for other loads too: a cold start is what it takes to start
        self.actors[instance] = actor
        actor.resize(self._sizes.pop(instance, 0))
        for work in self.node.instances[instance].works():
            actor.scheduler.enter(self.pieces[work.id].sequence)
        self.node.load_done(instance, now, waited_s)
        self._settle(now)

    def load_failed(self, instance: int, error: str, *, ends_model: bool = True) -> None:
        """Nobody waits for a model that cannot be loaded."""
        if ends_model:
            model = self.node.instances[instance].model
            self._fail([piece for piece in self.pieces.values() if piece.request.model == model], error)
        now = self._clock()
        del self._load_asked[instance]
        self.node.load_failed(instance, now)
        self._settle(now)

    # The end of a piece

    def _fail(
        self, pieces: list[Piece], error: str, *, unprocessable: bool = False, retry_after_s: float | None = None
    ) -> None:
        """Take them from wherever they are and tell why."""
        now = self._clock()
        pieces = [piece for piece in pieces if piece.id in self.pieces]  # a follower may have been aborted before
        for piece in pieces:
            piece.followers = []  # they are among the pieces, or will be asked about on their own
        for piece in pieces:
            self._leave(piece, now)
            piece.error = error
            event = TokenEvent(
                piece.request.id,
                piece.sequence.choice,
                token=None,
                finish=FinishReason.ERROR,
                error=error,
                unprocessable=unprocessable,
                retry_after_s=retry_after_s,
            )
            self.report.tokens.setdefault(piece.request.model, []).append(event)
            self._forget(piece, "failed", now)

    def _forget(self, piece: Piece, fate: str, now: float) -> None:
        self._journal.end(now, fate, piece)
        del self.pieces[piece.id]
        self._waiting.leave(piece.id)
        self._waiting.changed()
        siblings = self._by_request[piece.request.id]
        siblings.remove(piece)
        if not siblings:
            del self._by_request[piece.request.id]
        self._release_followers(piece, now)

    def _release_followers(self, piece: Piece, now: float) -> None:
        followers, piece.followers = piece.followers, []
        for follower in followers:
            if follower.id in self.pieces:
                self._place(follower, now)

    def relieve(self) -> int:
        """The host is short of memory: give idle pages back, then close the longest idle instance."""
        for actor in self.actors.values():
            if not actor.is_released and not actor.scheduler.has_work:
                actor.release_pages()
        closed = self.node.close_idle()
        self._settle(self._clock())
        return closed

    # Time and the log

    def _timer(self, instance: int, epoch: int, now: float) -> None:
        self.node.timer(instance, epoch, now)
        self._settle(now)

    def _at(self, at_s: float, action: Callable[[float], None]) -> None:
        self._serial += 1
        heappush(self._timers, (at_s, self._serial, action))

    def _ring(self) -> None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2](now)
        self._waiting.retry(now, self._retry)

    def take_report(self) -> Report:
        report, self.report = self.report, Report({}, [])
        return report
