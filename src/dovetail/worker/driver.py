"""Real time for the production runtime: carries out what it says on real executors, and reports what happened.

The counterpart of `sim.driver`. Everything happens between two iterations on one thread; only loads have their own. It
decides nothing and keeps no list of who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dovetail.cluster.decisions import Refused
from dovetail.cluster.intake import Submission
from dovetail.cluster.runtime import Output, Runtime
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.reasons import in_words
from dovetail.pulse import Pulse
from dovetail.sched.sequence import Sequence, sequences_of
from dovetail.types import FinishReason, Request, ServiceClass, TokenEvent
from dovetail.worker.runner import ModelRunner

REFUSED = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) cannot be kept now: {}"
NEVER = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) are beyond this device"
TOO_LARGE = "this request needs {} tokens of KV memory, the node has room for {}"
COMPILE_S = 60.0  # the first iteration on a GPU may have its kernels compiled


class Loads(Protocol):
    """Where weights come from. It answers with `NodeDriver.loaded` or `.load_failed`, on the driver's thread."""

    def load(self, command: events.StartLoad) -> None: ...


@dataclass
class Report:
    """What the driver has to say to the outside since it was last asked."""

    tokens: dict[str, list[TokenEvent]]  # by model
    gone: list[str]  # models whose memory is free


@dataclass(eq=False, slots=True)
class RequestState:
    """One open choice of one request while it is here."""

    id: int  # by which the runtime knows it
    request: Request
    sequence: Sequence
    instance: int | None = None  # whose turns it takes part in
    has_token: bool = False  # its first one was told


class NodeDriver:
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
        pulse: Pulse | None = None,
        on_growth: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.hostings: dict[str, Hosting] = {}
        node = Node(name, kind, memory_bytes, self.hostings, knobs)
        self.runtime = Runtime([node], knobs, log=log)
        (self.home,) = self.runtime.nodes
        self.runners: dict[int, ModelRunner] = {}  # by instance
        self.states: dict[int, RequestState] = {}
        self.report = Report({}, [])
        self.resizes = 0
        self.resize_s = 0.0
        self.refused = 0
        self._loads = loads
        self._clock = clock
        self._on_pause = on_pause  # called between the chunks of a long prefill: messages may be taken in
        self._pulse = pulse or Pulse()
        self._on_growth = on_growth  # called with what the ledger has left, before more of it is used
        self._by_choice: dict[tuple[str, int], RequestState] = {}
        self._sizes: dict[int, int] = {}  # blocks of instances that are still loading
        self._expected_s = 0.0  # what the turn that runs should take

    # Models

    def register(self, model: str, hosting: Hosting) -> None:
        self.hostings[model] = hosting
        self.runtime.offer(self.home, model, hosting, self._clock())
        self._carry_out()

    def warm(self, model: str) -> Refusal | None:
        """Start an instance of the model, unless there is one."""
        if self.instances_of(model):
            return None
        refusal = self.runtime.warm(self.home, model, self._clock())
        self._carry_out()
        return refusal

    def instances_of(self, model: str) -> list[int]:
        return self.home.open_instances(model)

    def unregister(self, model: str, error: str) -> None:
        """End its requests, free its memory."""
        self._fail_model(model, error)
        self.runtime.close_model(self.home, model, self._clock())
        self._carry_out()
        self.hostings.pop(model, None)

    def relieve(self) -> int:
        """The host is short of memory: give idle pages back, then close the longest idle instance."""
        for runner in self.runners.values():
            if not runner.is_released and not runner.scheduler.has_work:
                runner.release_pages()
        closed = self.runtime.close_idle(self.home, self._clock())
        self._carry_out()
        return closed

    # Requests

    def submit(self, request: Request, arrival_s: float) -> None:
        ids = self.runtime.submit(_submission_of(request, arrival_s), self._clock())
        for id, sequence in zip(ids, sequences_of(request, ids[0]), strict=True):
            state = self.states[id] = RequestState(id, request, sequence)
            self._by_choice[request.id, sequence.choice] = state
        self._carry_out()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free what these choices hold. No event follows for them."""
        choices = [key for key in self._by_choice if key[0] == request_id and choice in (None, key[1])]
        states = [self._by_choice[key] for key in choices]
        if states:
            self.runtime.cancel([state.id for state in states], self._clock())
            self._carry_out()
            for state in states:
                self._forget(state)

    def _fail_model(self, model: str, error: str) -> None:
        states = [state for state in self.states.values() if state.request.model == model]
        self.runtime.cancel([state.id for state in states], self._clock(), "failed", error)
        self._carry_out()
        for state in states:
            self._tell_error(state, error)

    def _tell_error(
        self, state: RequestState, error: str, *, unprocessable: bool = False, retry_after_s: float | None = None
    ) -> None:
        event = TokenEvent(
            state.request.id,
            state.sequence.choice,
            token=None,
            finish=FinishReason.ERROR,
            error=error,
            unprocessable=unprocessable,
            retry_after_s=retry_after_s,
        )
        self.report.tokens.setdefault(state.request.model, []).append(event)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        del self.states[state.id]
        del self._by_choice[state.request.id, state.sequence.choice]

    @property
    def has_work(self) -> bool:
        return bool(self.states)

    # Turns

    def next_due_s(self) -> float | None:
        """When `take_turn` has something to do again though nothing can run now."""
        return self.runtime.next_wake_s()

    def take_turn(self) -> bool:
        """Compute the next iteration, if there is one to compute."""
        turn = self._next_turn()
        if turn is None:
            return False
        runner = self.runners[turn.instance.id]
        runner.meter.overhead_seconds += self.home.gap_s
        if turn.prefill is not None:
            self._expected_s = turn.instance.prefill_s(turn.prefill.known_tokens)
            if runner.meter.turns == 0 and self.home.kind is not DeviceKind.CPU:
                self._expected_s += COMPILE_S
            self._prefill(runner, turn.instance.id, self.states[turn.prefill.id])
        else:
            self._expected_s = turn.instance.decode_s()
            self._decode(runner, [self.states[id].sequence for id in turn.instance.running])
        return True

    def _next_turn(self) -> events.Turn | None:
        while True:
            turn = self.runtime.next_turn(self.home, self._clock())
            self._carry_out()
            if turn is not None or not self.runtime.touched:
                return turn

    def _prefill(self, runner: ModelRunner, instance: int, state: RequestState) -> None:
        """All of its prompt, in as many iterations as that takes."""
        sequence, computed = state.sequence, runner.meter.tokens
        known = len(sequence.tokens)
        finished: list[int] = []
        while state.instance == instance:
            before = sequence.num_computed
            finished = self._iterate(runner, [sequence])
            if finished or len(sequence.tokens) > known:
                break
            assert sequence.num_computed > before, f"{runner.card.name}: the KV pool is smaller than the node thinks"
            self._on_pause()
        is_whole = runner.meter.tokens - computed == known  # else part of it was in the cache, or it was given up
        self._turn_ended(finished, is_whole=is_whole)

    def _decode(self, runner: ModelRunner, sequences: list[Sequence]) -> None:
        finished: list[int] = []
        for batch in runner.batches(sequences):
            finished += self._iterate(runner, batch)
        self._turn_ended(finished, is_whole=True)

    def _iterate(self, runner: ModelRunner, batch: list[Sequence]) -> list[int]:
        """One iteration, in sight of whoever watches this process; returns the choices that have ended with it."""
        self._pulse.begin([sequence.request_id for sequence in batch], self._expected_s)
        completed = runner.iterate(batch)
        self._pulse.end()
        return self._deliver(runner.card.name, completed.events)

    def _turn_ended(self, finished: list[int], *, is_whole: bool) -> None:
        self.runtime.turn_ended(self.home, self._clock(), finished, is_whole=is_whole)
        self._carry_out()

    def _deliver(self, model: str, token_events: Iterable[TokenEvent]) -> list[int]:
        """Tell the tokens; returns the choices that have ended with them."""
        finished = []
        for event in token_events:
            state = self._by_choice[event.request_id, event.choice]
            if not state.has_token:
                state.has_token = True
                event = msgspec.structs.replace(event, grace_s=self.runtime.works[state.id].grace_s)
            self.report.tokens.setdefault(model, []).append(event)
            if event.finish is not None:
                finished.append(state.id)
        return finished

    # Loads

    def loaded(self, instance: int, runner: ModelRunner) -> None:
        self.runners[instance] = runner
        self._on_growth(self.home.free_bytes)  # what was read to be copied is not in use any more
        runner.resize(self._sizes.pop(instance, 0))
        self.runtime.load_ended(self.home, instance, self._clock())
        self._carry_out()

    def load_failed(self, instance: int, error: str, *, ends_model: bool = True) -> None:
        """Nobody waits for a model that cannot be loaded."""
        if ends_model:
            self._fail_model(self.home.node.instances[instance].model, error)
        self.runtime.load_failed(self.home, instance, self._clock())
        self._carry_out()

    # Carrying out what the runtime says

    def _carry_out(self) -> None:
        outbox = self.runtime.outbox
        while outbox:
            self._carry_out_one(outbox.popleft()[1])

    def _carry_out_one(self, said: Output) -> None:
        if isinstance(said, events.Enter):
            state = self.states[said.work.id]
            state.instance = said.instance
            self.runners[said.instance].scheduler.enter(state.sequence)
        elif isinstance(said, events.Leave):
            state = self.states[said.work.id]
            state.instance = None
            self.runners[said.instance].drop(state.sequence)
        elif isinstance(said, events.StartLoad):
            self._on_growth(self.home.free_bytes)
            self._loads.load(said)
        elif isinstance(said, events.StartUnload):
            self.runners.pop(said.instance).close()
            self.runtime.unload_ended(self.home, said.instance, self._clock())
        elif isinstance(said, events.StartResize):
            self._resize(said)
        elif isinstance(said, events.Finished):
            self._forget(self.states[said.work.id])
        elif isinstance(said, events.InstanceGone):
            self._sizes.pop(said.instance, None)
            if not self.instances_of(said.model):
                self.report.gone.append(said.model)
        elif isinstance(said, Refused):
            self._refuse(said)

    def _resize(self, command: events.StartResize) -> None:
        started = self._clock()
        if command.new_bytes > command.old_bytes:
            self._on_growth(self.home.free_bytes)
        hosting = self.home.node.instances[command.instance].hosting
        num_blocks = command.new_bytes // (hosting.kv_bytes_per_token * hosting.block_tokens)
        runner = self.runners.get(command.instance)
        if runner is not None:
            runner.resize(num_blocks)
        else:
            self._sizes[command.instance] = num_blocks  # granted before its weights are there
        ended = self._clock()
        self.resizes += 1
        self.resize_s += ended - started
        self.runtime.resize_ended(self.home, command.instance, ended)

    def _refuse(self, refused: Refused) -> None:
        """The decision in words."""
        work, state = refused.work, self.states[refused.work.id]
        self.refused += 1
        targets = work.ttft_s / work.slo_scale, work.tpot_s / work.slo_scale
        if refused.reason == "too_large":
            error = TOO_LARGE.format(work.known_tokens + 1, self.home.room_for(work.model))
        elif refused.retry_after_s is None:
            error = NEVER.format(*targets)
        else:
            error = REFUSED.format(*targets, in_words(refused.refusals) or "its time has passed")
        is_callers = refused.retry_after_s is None
        self._tell_error(state, error, unprocessable=is_callers, retry_after_s=refused.retry_after_s)

    def take_report(self) -> Report:
        report, self.report = self.report, Report({}, [])
        return report


def _submission_of(request: Request, arrival_s: float) -> Submission:
    produced = tuple(len(request.generated_by(choice) or ()) for choice in request.open_choices)
    return Submission(
        request.model,
        len(request.prompt),
        arrival_s,
        produced,
        request.slo.ttft_s,
        request.slo.tpot_s,
        request.service_class is ServiceClass.BEST_EFFORT,
        request.sampling.max_tokens,
    )
