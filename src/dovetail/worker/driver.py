"""Real time for a node's runtime: carries out what it says on real executors, and reports what happened.

The counterpart of `sim.driver`. Everything happens between two iterations on one thread; only loads have their own. It
decides nothing, and knows nothing of other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from dovetail.engine.devices import Preparable
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.protocol import (
    Accepted,
    Answer,
    CatchUp,
    Evicted,
    Finished,
    HandedOver,
    InstanceGone,
    Notice,
    Order,
    Propose,
    Question,
    TookBack,
    Withdraw,
)
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import Composition
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.work import Work
from dovetail.pulse import Pulse
from dovetail.sched.sequence import sequences_of
from dovetail.types import Request, TokenEvent
from dovetail.worker.computer import TurnComputer
from dovetail.worker.prompts import SequenceState
from dovetail.worker.runner import ModelRunner


class WeightLoader(Protocol):
    """Where weights come from. It answers with `NodeDriver.loaded` or `.load_failed`, on the driver's thread."""

    def load(self, command: events.StartLoad) -> None: ...


@dataclass
class DriverReport:
    """What the driver has to say to the outside since it was last asked."""

    tokens: dict[str, list[TokenEvent]]  # by model
    gone: list[str]  # models whose memory is free
    notices: list[Notice]  # what the node says of itself, after these tokens


class NodeDriver:
    def __init__(
        self,
        name: str,
        kind: DeviceKind,
        memory_bytes: int,
        composition: Composition,
        loads: WeightLoader,
        clock: Callable[[], float],
        log: EventLog | None = None,
        on_pause: Callable[[], None] = lambda: None,
        pulse: Pulse | None = None,
        on_growth: Callable[[int], object] = lambda _: None,
        on_said: Callable[[], None] = lambda: None,
        on_launch: Callable[[], None] = lambda: None,
        on_halt: Callable[[], None] = lambda: None,
        on_adapter: Callable[[ModelRunner, str], None] = lambda runner, key: None,
    ) -> None:
        self.hostings: dict[str, Hosting] = {}
        self.runners: dict[int, ModelRunner] = {}  # by instance
        self.states: dict[int, SequenceState] = {}
        self.home = NodeRuntime(Node(name, kind, memory_bytes, self.hostings, composition, prefixes=self), log=log)
        self.report = DriverReport({}, [], [])
        self.resizes, self.resize_s = 0, 0.0
        self._loads, self._clock = loads, clock
        self._on_growth = on_growth  # called with what the ledger has left, before more of it is used
        self._on_adapter = on_adapter  # called before a sequence with an adapter enters
        self._on_said = on_said  # called around each thing that is carried out: what the node says may be passed on
        self._by_choice: dict[tuple[str, int], SequenceState] = {}
        self._sizes: dict[int, int] = {}  # blocks of instances that are still loading
        self._timers: list[tuple[float, int, int]] = []  # heap of (time, instance, epoch)
        self._told_version = -1  # of the view
        self._leaving: list[int] = []  # requests to be forgotten when everything is carried out
        watched = pulse or Pulse()
        self._computer = TurnComputer(
            self.home,
            self.runners,
            self.states,
            self._deliver,
            clock,
            watched,
            on_pause=on_pause,
            on_launch=on_launch,
            on_halt=lambda: self._halted(on_halt),
        )

    # Models

    def register(self, model: str, hosting: Hosting) -> None:
        self.hostings[model] = hosting
        self.home.offer(model, self._clock())
        self.carry_out()

    def instances_of(self, model: str) -> list[int]:
        return self.home.open_instances(model)

    def unregister(self, model: str) -> None:
        """Free its memory; requests that are left go elsewhere."""
        self.home.close_model(model, self._clock())
        self.carry_out()
        self.hostings.pop(model, None)

    def adapters_changed(self) -> None:
        """What they take of the node's memory has."""
        self.home.changed(self._clock())
        self.carry_out()

    def prepare_next(self) -> bool:
        """Some of what first requests would wait for, while nothing is to be computed; False if nothing is left."""
        return any(
            isinstance(runner.executor, Preparable) and runner.executor.prepare_next()
            for runner in self.runners.values()
        )

    def relieve(self) -> int:
        """The host is short of memory: give idle pages back, then close the longest idle instance."""
        for runner in self.runners.values():
            if not runner.is_released and not runner.scheduler.has_work:
                runner.release_pages()
        closed = self.home.close_idle(self._clock())
        self.carry_out()
        return closed

    # Questions and orders

    def cached_tokens(self, instance: int, work: Work) -> int:
        runner = self.runners.get(instance)  # None: its weights are on their way
        return 0 if runner is None else runner.scheduler.cached_tokens(self.states[work.id].sequence)

    def ask(self, question: Question, request: Request | None = None, awaited: Iterable[str] = ()) -> Answer:
        """With Propose comes the request, with one open choice, and what it has no turn before (`prepared`)."""
        if isinstance(question, Propose):
            known = self.states.get(question.request.id)
            if known is not None and known.sequence.aborted:  # it left an iteration that is not over yet
                self._forget(known.id)
                known = None
            if known is not None and known.hold != question.hold:  # what it was held for has come to nothing
                self.obey(Withdraw(known.id))
                self.carry_out()
            if question.request.id not in self.states:
                assert request is not None
                self._expect(question.request.id, request, question.hold)
                self.states[question.request.id].awaited.update(awaited)
            prepares = bool(self.states[question.request.id].awaited)
            answer = self.home.answer(question, self._clock(), prepares=prepares)
        else:
            answer = self.home.answer(question, self._clock())
        if isinstance(question, Propose):
            self._came_or_not(question.request.id, isinstance(answer, Accepted))
        elif isinstance(answer, TookBack) and answer.request is not None:
            self._leaving.append(answer.request.id)
        return answer

    def prepared(self, id: int, what: str) -> None:
        """What a request waits for is there. One that has left meanwhile waits for nothing."""
        state = self.states.get(id)
        if state is not None and what in state.awaited:
            state.awaited.discard(what)
            if not state.awaited:
                self.home.prepared(id, self._clock())
                self.carry_out()

    def unprepared(self, id: int) -> None:
        """There is no room for what it waits for."""
        state = self.states.get(id)
        if state is not None and state.awaited:
            self.home.prepared(id, self._clock(), is_there=False)
            self.carry_out()

    def _came_or_not(self, id: int, is_here: bool) -> None:
        is_leaving = id in self._leaving  # it left a moment ago
        if is_here and is_leaving:
            self._leaving.remove(id)
        elif not is_here and not is_leaving:
            self._forget(id)

    def obey(self, order: Order, tokens: Iterable[int] = ()) -> None:
        """What comes of it, as of an answer, is to be carried out (`carry_out`) before the next turn. With CatchUp come
        the tokens."""
        if isinstance(order, CatchUp):
            self._catch_up(order, tokens)
        self.home.obey(order, self._clock())
        state = self.states.get(order.request) if isinstance(order, Withdraw) else None
        if isinstance(order, Withdraw) and state is not None and order.hold in (None, state.hold):
            self._leaving.append(order.request)

    def _catch_up(self, order: CatchUp, tokens: Iterable[int]) -> None:
        state = self.states.get(order.request.id)
        if state is None or state.hold != order.hold:
            return
        state.sequence.tokens.extend(tokens)
        if order.is_last:
            state.hold, state.sequence.is_held = 0, False

    def _expect(self, id: int, request: Request, hold: int) -> None:
        (sequence,) = sequences_of(request, id)
        sequence.is_held = hold > 0
        state = self.states[id] = SequenceState(id, request.model, sequence, hold=hold)
        self._by_choice[request.id, sequence.choice] = state

    def _forget(self, id: int) -> None:
        state = self.states.pop(id, None)
        if state is None:
            return
        key = state.sequence.request_id, state.sequence.choice
        if self._by_choice.get(key) is state:  # else it was submitted anew while this copy of it was held
            del self._by_choice[key]

    @property
    def has_work(self) -> bool:
        return bool(self.states)

    # Turns

    def next_due_s(self) -> float | None:
        """When `take_turn` has something to do again though nothing can run now."""
        return self._timers[0][0] if self._timers else None

    def run_timers(self) -> None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            self.home.timer(*heappop(self._timers)[1:], now)
        self.carry_out()

    def take_turn(self) -> bool:
        """Compute the next iteration, if there is one to compute; else there may be one now if the node was touched."""
        self.run_timers()
        turn = self.home.next_turn(self._clock())
        self.carry_out()
        if turn is None:
            return False
        self.runners[turn.instance.id].meter.overhead_seconds += self.home.gaps.last_s
        self._computer.compute(turn)
        self.carry_out()
        return True

    def _deliver(self, model: str, token_events: tuple[TokenEvent, ...], extra: dict[int, int]) -> list[int]:
        """Tell the tokens; returns the choices that have ended with them. `extra` gets those beyond one, by request."""
        finished: list[int] = []
        if not token_events:
            return finished
        told, by_choice = self.report.tokens.setdefault(model, []), self._by_choice
        for event in token_events:
            state = by_choice[event.request_id, event.choice]
            if not state.has_token:
                state.has_token = True
                event = msgspec.structs.replace(event, grace_s=self.home.work_of(state.id).grace_s)
            if event.accepted:
                extra[state.id] = event.accepted
            told.append(event)
            if event.finish is not None:
                finished.append(state.id)
        return finished

    def _halted(self, on_halt: Callable[[], None]) -> None:
        """An iteration has come to a layer that is read from the disk: everything else goes on."""
        on_halt()
        if self.home.node.outbox:  # what came of looking for a turn
            self.home.changed(self._clock())
        self.run_timers()

    # Loads

    def loaded(self, instance: int, runner: ModelRunner) -> None:
        self.runners[instance] = runner
        self._on_growth(self.home.node.device.ledger.available)  # what was read to be copied is not in use any more
        runner.resize(self._sizes.pop(instance, 0))
        self.home.load_ended(instance, self._clock())
        self.carry_out()

    def load_failed(self, instance: int) -> None:
        self.home.load_failed(instance, self._clock())
        self.carry_out()

    # Carrying out what the node says

    def carry_out(self) -> None:
        self._on_said()
        while self.home.outbox:
            self._carry_out_one(self.home.outbox.popleft())
            self._on_said()
        while self._leaving:
            self._forget(self._leaving.pop())

    def _carry_out_one(self, said: events.Output) -> None:
        if isinstance(said, events.Enter):
            state = self.states[said.work.id]
            state.instance = said.instance
            if state.sequence.adapter:
                self._on_adapter(self.runners[said.instance], state.sequence.adapter)
            self.runners[said.instance].scheduler.enter(state.sequence)
        elif isinstance(said, events.Leave):
            state = self.states[said.work.id]
            state.instance = None
            self.runners[said.instance].drop(state.sequence)
        elif isinstance(said, events.SetTimer):
            heappush(self._timers, (said.at_s, said.instance, said.epoch))
        elif isinstance(said, events.StartLoad):
            self._on_growth(self.home.node.device.ledger.available)
            self._loads.load(said)
        elif isinstance(said, events.StartUnload):
            self.runners.pop(said.instance).close()
            self.home.unload_ended(said.instance, self._clock())
        elif isinstance(said, events.StartResize):
            self._resize(said)
        elif isinstance(said, Finished):
            self._forget(said.request.id)
        elif isinstance(said, InstanceGone):
            self._sizes.pop(said.instance, None)
            if not self.instances_of(said.model):
                self.report.gone.append(said.model)

    def _resize(self, command: events.StartResize) -> None:
        started = self._clock()
        if command.new_bytes > command.old_bytes:
            self._on_growth(self.home.node.device.ledger.available)
        hosting = self.home.node.instances[command.instance].hosting
        num_blocks = command.new_bytes // (hosting.kv_bytes_per_token * hosting.block_tokens)
        runner = self.runners.get(command.instance)
        if runner is not None:
            runner.resize(num_blocks)
        else:
            self._sizes[command.instance] = num_blocks  # granted before its weights are there
        self.resizes += 1
        self.resize_s += self._clock() - started
        self.home.resize_ended(command.instance, self._clock())

    def take_notices(self) -> list[Notice]:
        notices = list(self.home.mailbox)
        self.home.mailbox.clear()
        self._leaving += [one.request.id for one in notices if isinstance(one, Evicted | HandedOver)]
        return notices

    def take_report(self) -> DriverReport:
        report, self.report = self.report, DriverReport({}, [], [])
        report.notices = self.take_notices()
        if self.home.version != self._told_version:
            self._told_version = self.home.version
            report.notices.append(self.home.view())
        return report


def is_shared(driver: NodeDriver) -> bool:
    """Several models have requests here: what one of them brings holds the others."""
    return sum(runner.scheduler.has_work for runner in driver.runners.values()) > 1
