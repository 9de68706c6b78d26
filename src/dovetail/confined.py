"""Work on what strangers wrote (grammars, templates), in a child process that may take so much time and memory.

The parent sends bytes and gets bytes; a child that takes too long or too much is ended, and the next call starts
another. What the work is, is up to the child's module: `python -m MODULE` calls `serve`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LENGTH_BYTES = 8
_MAX_FRAME_BYTES = 1 << 30
_LARGE_BYTES = 1 << 20
_LONG_S = 0.02
_LOOK_CALLS = 32  # how often a child looks whether it has grown
_PREPARE_CPU_S = 30
_SPARE_S = 1  # the kernel counts processor time in whole seconds
_PAGE_BYTES = resource.getpagesize()
_LEAST_PROGRESS = 0.1  # of the processor time that a call may take, in the time that it is waited for
_SHORTEST_LOOK_S = 0.005
_HAS_NICE_THREADS = sys.platform == "linux"  # elsewhere niceness is a process's

_Order = tuple[bytes, "asyncio.Future[bytes]"]


@dataclass(frozen=True)
class Bounds:
    """What one call may take."""

    cpu_s: float  # processor time
    wall_s: float  # time without progress: a child that computes is waited for, however slowly it does
    memory_bytes: int  # beyond what the child has when it starts
    niceness: int = 0
    quick_s: float = 0.0  # processor time of a call before it becomes nice: what is quick is not starved by others
    kept_bytes: int = 64 << 20  # a child that has grown by more is replaced when it has answered: memory returns


class Exceeded(Exception):
    """The call took more than its bounds; `what` says of which."""

    def __init__(self, what: str, *, is_wall: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.is_wall = is_wall  # time passed while others had the processor: it tells nothing of the call itself


class Confined:
    """One child, one call at a time. Threads may share it."""

    def __init__(self, module: str, bounds: Bounds) -> None:
        self._module = module
        self._bounds = bounds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.starts = 0

    def call(self, request: bytes) -> bytes:
        """Raises Exceeded. Waits for calls of other threads first; that time is not counted."""
        self.start()
        with self._lock:
            if self._child is None:  # another thread's call ended it
                self._start()
            try:
                answer = self._exchange(request)
            except (OSError, EOFError) as error:
                raise self._ended(error) from error
            if answer[:1] == b"\1":  # it has answered, and has grown
                self._stop()
            return answer[1:]

    def start(self) -> None:
        """Before the first call waits for it."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()

    def close(self) -> None:
        with self._lock:
            self._stop()

    def end(self) -> None:
        """At once, also in the middle of a call, which raises Exceeded. The next call starts another child."""
        child = self._child
        if child is not None:
            child.kill()
            child.wait()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def _start(self) -> None:
        self._stop()
        ours, theirs = socket.socketpair()
        bounds = self._bounds
        is_nice_later = bounds.quick_s > 0 and _HAS_NICE_THREADS
        numbers = [theirs.fileno(), bounds.cpu_s, bounds.memory_bytes, bounds.kept_bytes]
        numbers += [bounds.quick_s, bounds.niceness] if is_nice_later else [0, 0]
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", self._module, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints must not get into the output of a command
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C is for the parent; no session of its own, see `give_way`
                env=dict(os.environ, MALLOC_ARENA_MAX="2", RUST_BACKTRACE="0"),
            )
        self._socket = ours
        self.starts += 1
        if not is_nice_later:
            give_way(self._child.pid, bounds.niceness)

    def _exchange(self, request: bytes) -> bytes:
        assert self._socket is not None
        assert self._child is not None
        progress = _Progress(self._child.pid, self._bounds)
        self._socket.settimeout(self._bounds.wall_s)
        self._socket.sendall(len(request).to_bytes(_LENGTH_BYTES, "little") + request)
        size = int.from_bytes(_receive(self._socket, _LENGTH_BYTES, progress.left_s), "little")
        return _receive(self._socket, size, progress.left_s)

    def _ended(self, error: Exception) -> Exceeded:
        """Why there is no answer; the child is gone afterwards."""
        assert self._child is not None
        hung = isinstance(error, TimeoutError)
        if not hung:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
        code = self._child.poll()
        self._stop()
        if hung:
            what = f"it got hardly any processor time for {self._bounds.wall_s:g} s on a busy machine"
            return Exceeded(what, is_wall=True)
        if code == -signal.SIGXCPU:
            return Exceeded(f"it takes more than {self._bounds.cpu_s:g} s of processor time")
        return Exceeded(
            f"it needs more than {self._bounds.memory_bytes >> 20} MB, or ends the process that looks at it"
        )

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


class _Progress:
    """How long a call is waited for: `wall_s` from when its child was last seen to have computed. Processor time is
    bounded, and so is that."""

    def __init__(self, pid: int, bounds: Bounds) -> None:
        self._pid = str(pid)
        self._wall_s = bounds.wall_s
        self._least_s = bounds.cpu_s * _LEAST_PROGRESS
        self._seen_s = _processor_s(self._pid)
        self._until = time.monotonic() + bounds.wall_s

    def left_s(self) -> float:
        """Raises TimeoutError."""
        now = time.monotonic()
        if now >= self._until:
            used_s = _processor_s(self._pid)
            if used_s - self._seen_s < self._least_s:
                raise TimeoutError
            self._seen_s, self._until = used_s, now + self._wall_s
        return self._until - now


class Lane:
    """Calls from event loops, one after another, by a thread that does not hold up the end of the process. Whoever has
    many waiting is served one, then the next client one."""

    def __init__(self, confined: Confined, max_waiting: int = 256) -> None:
        self._confined = confined
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._orders: OrderedDict[str, deque[_Order]] = OrderedDict()  # by client, whose turn it is first
        self._wants_child = False
        self._thread: threading.Thread | None = None
        self._unanswered: Counter[str] = Counter()  # calls, by client

    def warm(self) -> None:
        """Have the child started before the first call waits for it."""
        with self._changed:
            self._wants_child = True
            self._changed.notify()
        self._begin()

    def is_full(self, client: str = "") -> bool:
        """For this client, who alone may have half of the places."""
        return self._unanswered[client] >= self._max_waiting - self._unanswered.total()

    async def call(self, request: bytes, client: str = "") -> bytes:
        """Raises Exceeded. A call that nobody waits for any more and that has not begun is not made."""
        self._begin()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unanswered[client] += 1
        try:
            with self._changed:
                self._orders.setdefault(client, deque()).append((request, answer))
                self._changed.notify()
            return await answer
        finally:
            self._unanswered[client] -= 1
            if not self._unanswered[client]:
                del self._unanswered[client]

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="confined")
            self._thread.start()

    def _run(self) -> None:
        while True:
            order = self._next()
            if order is None:
                self._confined.start()
                continue
            request, answer = order
            if answer.cancelled():
                continue
            outcome: bytes | Exceeded
            try:
                outcome = self._confined.call(request)
            except Exceeded as error:
                outcome = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                answer.get_loop().call_soon_threadsafe(_settle, answer, outcome)

    def _next(self) -> _Order | None:
        """None: the child is wanted, and no call."""
        with self._changed:
            while not self._orders and not self._wants_child:
                self._changed.wait()
            if self._wants_child:
                self._wants_child = False
                return None
            client, queue = self._orders.popitem(last=False)
            order = queue.popleft()
            if queue:
                self._orders[client] = queue  # its next turn is after everybody's
            return order


def give_way(pid: int, niceness: int) -> None:
    """Let a process that was started just now leave the cores to others: from outside, so that importing counts. It
    must be in the caller's session: Linux (sched_autogroup) divides a core among sessions first, whatever the niceness
    of who is in them."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)


def giving_way_later(work: Callable[[], object], quick_s: float, niceness: int) -> None:
    """Returns when `work` has, or has raised. It is done in a thread that is nice after `quick_s` of processor time:
    one of its own, because niceness can only grow."""
    thread = threading.Thread(target=work, daemon=True, name="gives way")
    thread.start()
    if _HAS_NICE_THREADS:
        used_s = 0.0
        while used_s < quick_s and thread.is_alive():
            thread.join(max(quick_s - used_s, _SHORTEST_LOOK_S))
            used_s = _processor_s(f"self/task/{thread.native_id}")
        if thread.native_id is not None and thread.is_alive():
            give_way(thread.native_id, niceness)
    thread.join()


def thread_gives_way(niceness: int) -> None:
    """Let the calling thread leave the cores to others, where threads have a niceness of their own."""
    if _HAS_NICE_THREADS:
        give_way(threading.get_native_id(), niceness)


def _settle(answer: asyncio.Future[bytes], outcome: bytes | Exceeded) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exceeded):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def serve(
    handle: Callable[[bytes], bytes],
    prepare: Callable[[bytes], None] | None = None,
    *,
    starts_others: bool = False,
) -> None:
    """The child's side: answer until the parent is gone. A MemoryError of `handle` ends the child, as other excess.
    `prepare` reads what a request needs beside itself (files of the server); its processor time is not the request's.
    `starts_others`: programs that are not bound as it is; they may lift its limits for themselves.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal may stop whoever prints from behind
    descriptor, cpu_s, memory_bytes, kept_bytes, quick_s, niceness = (float(text) for text in sys.argv[1:7])
    channel = socket.socket(fileno=int(descriptor))
    base, calls = _address_bytes(), 0
    with suppress(ValueError, OSError):  # a system without such a limit has the one on time
        if base:
            most = base + int(memory_bytes)
            hard = resource.getrlimit(resource.RLIMIT_AS)[1] if starts_others else most
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while True:
        try:
            size = int.from_bytes(_receive(channel, _LENGTH_BYTES), "little")
            request = _receive(channel, size)
        except (EOFError, ConnectionResetError):  # reset: the parent has ended before it read an answer
            return
        if prepare is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + _PREPARE_CPU_S, hard_limit))
            prepare(request)
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu_s) + _SPARE_S, hard_limit))
        answers = list[bytes]()
        if quick_s:
            giving_way_later(lambda: answers.append(handle(request)), quick_s, int(niceness))  # noqa: B023
        else:
            answers.append(handle(request))
        if not answers:
            return  # what it raised has been printed
        answer = answers[0]
        calls += 1
        is_large = len(request) + len(answer) > _LARGE_BYTES or time.process_time() - used > _LONG_S
        looks = is_large or calls % _LOOK_CALLS == 0  # looking takes as long as a small call
        has_grown = looks and _address_bytes() - base > kept_bytes
        head = (len(answer) + 1).to_bytes(_LENGTH_BYTES, "little") + (b"\1" if has_grown else b"\0")
        try:
            channel.sendall(head + answer)
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent has ended meanwhile


def _receive(channel: socket.socket, count: int, left_s: Callable[[], float] | None = None) -> bytes:
    if count > _MAX_FRAME_BYTES:
        raise EOFError("a frame beyond all measure")
    parts = bytearray()
    while len(parts) < count:
        if left_s is not None:
            channel.settimeout(left_s())
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except TimeoutError:
            continue  # `left_s` says whether that was the end
        if not part:
            raise EOFError("the other side is gone")
        parts += part
    return bytes(parts)


def _processor_s(task: str) -> float:
    """What a process or a thread has used; 0 where that cannot be known."""
    try:
        after_name = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def _address_bytes() -> int:
    """0 where that cannot be known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    except OSError:
        return 0
