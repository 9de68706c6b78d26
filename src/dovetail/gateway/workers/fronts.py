"""Other gateways of this server, on its machine: each has this one as the only node that it knows.

They speak HTTP and text; this one decides, and passes tokens on as a worker would. What it accepts for them it queues,
serves late or refuses as it does with requests of its own. When it is killed they keep their clients and every token,
and ask the next one for the rest, as after the death of a worker.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from dovetail.cluster.handle import room_for
from dovetail.errors import Overloaded, RequestError
from dovetail.gateway.service import Service
from dovetail.gateway.workers.client import Arrival, Frames, Inbox
from dovetail.messages import (
    Ask,
    Command,
    Hello,
    Load,
    Loaded,
    LoadFailed,
    Reclaimed,
    Reply,
    Said,
    ToGateway,
    Tokens,
    ToWorker,
    Unload,
    Unloaded,
    decode_for_worker,
    encode,
)
from dovetail.node.protocol import (
    Accepted,
    Answer,
    Finished,
    InstanceView,
    NodeView,
    NoLonger,
    Notice,
    Offer,
    Offered,
    Prefilled,
    Propose,
    Refused,
    Release,
    TakeBack,
    TookBack,
    Warm,
    Withdraw,
)
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Phase, RequestRecord
from dovetail.types import FinishReason, Request, TokenEvent

LEADER = "leader"  # what they call this gateway
LOOK_S = 0.25
_PLENTY = 1 << 50  # bytes: memory is looked at here


class Registration:
    """A front's: its socket, and a lock that is held while it lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = folder / f"{os.getpid()}.lock"
        self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.address = f"ipc://{self._file.with_suffix('.sock')}"

    def publish(self) -> None:
        """The socket is there."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        for suffix in (".lock", ".sock"):
            self._file.with_suffix(suffix).unlink(missing_ok=True)
        os.close(self._lock)


def _is_alive(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


class Fronts:
    def __init__(self, folder: Path, service: Service) -> None:
        self._folder = folder
        self._service = service
        self._context = zmq.Context()
        self._fronts: dict[Path, Front] = {}  # by lock
        self._task: asyncio.Task[None] | None = None
        service.link.observers.append(self._on_message)

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="fronts")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for front in self._fronts.values():
            front.close()
        self._context.term()

    async def _watch(self) -> None:
        while True:
            there = {lock for lock in self._folder.glob("*.lock") if _is_alive(lock)}
            for lock in there - self._fronts.keys():
                self._fronts[lock] = Front(f"ipc://{lock.with_suffix('.sock')}", self._service, self._context)
            for lock in self._fronts.keys() - there:
                self._fronts.pop(lock).close()
                for suffix in (".lock", ".sock"):  # it was killed, and has left them
                    lock.with_suffix(suffix).unlink(missing_ok=True)
            await asyncio.sleep(LOOK_S)

    def _on_message(self, node: str, message: ToGateway) -> None:
        if isinstance(message, Loaded | Reclaimed):
            for front in self._fronts.values():
                front.pass_on(message)


class Relayed(Inbox):
    """One choice of a front's request: its events go back to where it came from."""

    def __init__(self, front: Front, record: RequestRecord, request: Request) -> None:
        super().__init__()
        self.front = front
        self.record = record
        self.request = request
        (self.choice,) = request.open_choices
        self.tokens = list(request.generated_by(self.choice) or ())
        # Choices of one request come one by one, and each is a request here.
        self.key = request.id if request.num_choices == 1 else f"{request.id}#{self.choice}"
        self.task: asyncio.Task[None] | None = None  # while it is being submitted

    @property
    def rest(self) -> Request:
        said = tuple(tuple(self.tokens) if at == self.choice else None for at in range(self.request.num_choices))
        return msgspec.structs.replace(self.request, id=self.key, generated=said)

    def put(self, arrival: Arrival) -> None:
        if arrival.event.token is not None:
            self.tokens.append(arrival.event.token)
        event = arrival.event
        if self.key != self.request.id:
            event = msgspec.structs.replace(event, request_id=self.request.id)
        self.front.relay(self, event)

    def fail(self, error: RequestError) -> None:
        self.front.relay(self, self._as_event(error))

    def _as_event(self, error: RequestError) -> TokenEvent:
        return TokenEvent(
            self.request.id,
            self.choice,
            token=None,
            finish=FinishReason.ERROR,
            error=error.message,
            unprocessable=error.status < 500,
            retry_after_s=(error.retry_after_s or 1.0) if isinstance(error, Overloaded) else None,
        )


class Front:
    """One of them, as its worker would see it."""

    def __init__(self, address: str, service: Service, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._service = service
        self._cluster = service.cluster
        self._open: dict[int, Relayed] = {}  # by the front's number
        self._instances: dict[str, int] = {}  # by model: one of each, which is all of this server's
        self._version = 0
        self._events: list[TokenEvent] = []  # of this tick
        self._notices: list[Notice] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, LEADER.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._frames = Frames(self._socket, self._receive)
        self._send(Hello(LEADER, os.getpid(), "gateway", 0.0, DeviceKind.CPU, _PLENTY))

    def close(self) -> None:
        """Nobody waits there any more."""
        self._frames.stop()
        for relayed in list(self._open.values()):
            self._withdraw(relayed.record.id)
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    def _send(self, message: ToGateway) -> None:
        with suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)
        self._frames.look_again()

    def _receive(self) -> bool:
        """One message; False: there is none."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._take(decode_for_worker(frame))
        return True

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Load):
            self._spawn(self._offer(message))
        elif isinstance(message, Unload):
            self._instances.pop(message.model, None)
            self._say(NoLonger(message.model))
            self._send(Unloaded(message.model))
        elif isinstance(message, Ask):
            self._send(Reply(message.number, self._answer(message)))
        elif isinstance(message, Command) and isinstance(message.order, Withdraw):
            self._withdraw(message.order.request)

    # Models

    async def _offer(self, load: Load) -> None:
        """As they are here: what is not on offer, or is another model by now, cannot be had through a front either."""
        name = load.card.name
        try:
            model = self._service.models.get(name)
            if model.card != load.card:
                raise Overloaded(f"'{name}' is another model at the leading gateway", code="model_changing")
            await self._service.hosted(model)
        except RequestError as error:
            self._send(LoadFailed(name, error.message))
            return
        self._instances.setdefault(name, len(self._instances) + 1)
        room = room_for(self._cluster.remote.nodes.values(), name)
        self._say(Offered(name, Offer(room or 0)))
        for node in self._service.link.nodes.values():
            if name in node.loaded:
                self._send(msgspec.structs.replace(node.loaded[name], again=True))

    def pass_on(self, message: Loaded | Reclaimed) -> None:
        if message.model in self._instances and (
            isinstance(message, Loaded) or not self._cluster.nodes_of(message.model)
        ):
            self._send(message)

    async def _warm(self, name: str) -> None:
        try:
            await self._service.preload([name])
        except RequestError as error:
            self._send(LoadFailed(name, error.message))

    # Requests

    def _answer(self, message: Ask) -> Answer:
        question = message.question
        if isinstance(question, Warm) and question.model in self._instances:
            self._spawn(self._warm(question.model))
            return Accepted(self._instances[question.model])
        if isinstance(question, Propose) and not question.hold and question.request.model in self._instances:
            assert message.request is not None
            relayed = self._open[question.request.id] = Relayed(self, question.request, message.request)
            self.submit(relayed)
            return Accepted(self._instances[question.request.model])
        return TookBack() if isinstance(question, Release | TakeBack) else Refused(Refusal.CLOSED)

    def submit(self, relayed: Relayed) -> None:
        relayed.task = self._spawn(self._submit(relayed))

    async def _submit(self, relayed: Relayed) -> None:
        while True:
            if self._service.trouble() is not None:  # it leads again, or ends and the next one is asked
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await self._service.hosted(self._service.models.get(relayed.request.model))
                break
            except RequestError as error:
                relayed.fail(error)
                return
        relayed.task = None
        self._cluster.submit(relayed.rest, relayed, relayed.record.arrival_s)

    def _withdraw(self, id: int) -> None:
        relayed = self._open.pop(id, None)
        if relayed is not None:
            if relayed.task is not None:
                relayed.task.cancel()
            self._cluster.abort(relayed.key)

    def relay(self, relayed: Relayed, event: TokenEvent) -> None:
        """With everything else of this tick, in one message."""
        if not self._events and not self._notices:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)
        id, instance = relayed.record.id, self._instances.get(relayed.record.model, 0)
        if len(relayed.tokens) == relayed.record.produced + 1:
            self._notices.append(Prefilled(id, event.grace_s))
        if event.finish is not None and self._open.pop(id, None) is not None:
            record = msgspec.structs.replace(relayed.record, produced=len(relayed.tokens))
            self._notices.append(Finished(record, instance))

    def _flush(self) -> None:
        events, self._events = self._events, []
        notices, self._notices = self._notices, []
        if events:
            self._send(Tokens("", tuple(events)))
        if notices:
            self._say(*notices)

    def _say(self, *notices: Notice) -> None:
        self._version += 1
        batches = dict.fromkeys(self._instances, 0)
        for relayed in self._open.values():
            batches[relayed.record.model] = batches.get(relayed.record.model, 0) + 1
        there = tuple(
            InstanceView(id, name, Phase.ANY, batches[name], is_ready=True) for name, id in self._instances.items()
        )
        view = NodeView(self._version, DeviceKind.CPU, bool(self._open), 0.0, _PLENTY, _PLENTY, there)
        self._send(Said((*notices, view)))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
