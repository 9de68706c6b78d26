"""The gateway's side of a tokenizer's process: it is opened and closed from any thread, and called from event loops.

A process that ends or hangs takes nobody along but the call that it was at: what waited behind that one is told so and
may ask the next process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import cast
from weakref import WeakKeyDictionary, finalize

import msgspec

from dovetail.gateway.text.tokenizer_child import (
    LENGTH_BYTES,
    MAX_CPU_S,
    OpenedTokenizer,
    TokenizerAnswer,
    TokenizerOrder,
    framed,
    receive,
)

WAIT_S = MAX_CPU_S  # for one call, from when it is the first of its channel
_CHILD = "dovetail.gateway.text.tokenizer_child"


class TokenizerLost(Exception):
    """The process is gone. `is_suspect`: it was at this call, which `took_long`."""

    def __init__(self, what: str, *, is_suspect: bool = False, took_long: bool = False) -> None:
        super().__init__(what)
        self.is_suspect = is_suspect
        self.took_long = took_long


class ForkServer:
    """The process that forks: it has `tokenizers` in memory, so that a fork is there in a millisecond and shares it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def warm(self) -> None:
        with self._lock:
            self._started()

    def fork(self) -> tuple[socket.socket, int]:
        """A new process: its control socket, and its id. Raises OSError, EOFError."""
        with self._lock:
            try:
                return self._forked()
            except (OSError, EOFError):  # it has ended since it was looked at
                self._stop()
                return self._forked()

    def _forked(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._started(), [b"f"], [theirs.fileno()])
            ours.settimeout(WAIT_S)
            return ours, msgspec.msgpack.decode(receive(ours), type=int)
        except (OSError, EOFError):
            ours.close()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _started(self) -> socket.socket:
        if self._orders is not None and self._process is not None and self._process.poll() is None:
            return self._orders
        self._stop()
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints must not get into the output of a command
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C is for the parent; no session of its own, see `confined.give_way`
                env=dict(os.environ, MALLOC_ARENA_MAX="2", RUST_BACKTRACE="0", TOKENIZERS_PARALLELISM="false"),
            )
        return self._orders

    def _stop(self) -> None:
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


fork_server = ForkServer()  # one for all tokenizers


class _Handle:
    """Of a process. It ends when its control socket is closed here, or is killed where it may hang."""

    def __init__(self) -> None:
        self.control, self.pid = fork_server.fork()
        self._pidfd: int | None = None
        with suppress(AttributeError, OSError):  # Linux only
            self._pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        if self._pidfd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.control.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class TokenizerProcess:
    def __init__(self, file: bytes) -> None:
        """Blocks until the file is read. Raises ValueError for what `tokenizers` says against it, TokenizerLost."""
        self._handle = _Handle()
        finalize(self, self._handle.close)
        opened = self._opened(file)
        if opened.table is None:
            raise ValueError(opened.problem)
        self.pid, self.table = self._handle.pid, opened.table
        self._channels: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, _Channel]] = WeakKeyDictionary()

    async def call(self, order: TokenizerOrder, kind: bytes) -> TokenizerAnswer:
        """After the calls before it on this kind of channel. Raises TokenizerLost."""
        channels = self._channels.setdefault(asyncio.get_running_loop(), {})
        if kind not in channels:
            channels[kind] = self._connected(kind)
        return await channels[kind].call(msgspec.msgpack.encode(order))

    def _opened(self, file: bytes) -> OpenedTokenizer:
        control = self._handle.control
        try:
            control.sendall(framed(file))
            opened = msgspec.msgpack.decode(receive(control), type=OpenedTokenizer)
            control.settimeout(None)
        except (OSError, EOFError) as error:
            self._handle.kill()
            took_long = isinstance(error, TimeoutError)
            what = f"takes more than {WAIT_S:g} s" if took_long else "needs too much memory, or ends its process"
            raise TokenizerLost(f"reading it {what}", is_suspect=True, took_long=took_long) from error
        return opened

    def _connected(self, kind: bytes) -> _Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._handle.control, [kind], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise TokenizerLost("its process has ended") from error
        return _Channel(ours, self._handle)


class _Channel(asyncio.Protocol):
    """Calls of one event loop, one after the other; answers come in their order."""

    def __init__(self, ours: socket.socket, handle: _Handle) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle = handle
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []  # before there was a transport
        self._waiting: deque[asyncio.Future[TokenizerAnswer]] = deque()  # the process is at the first
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(TokenizerAnswer)
        self._clock: asyncio.TimerHandle | None = None
        self._end = ""  # why nobody can call any more
        self._connecting = self._loop.create_task(self._connect(ours))

    async def call(self, message: bytes) -> TokenizerAnswer:
        if self._end:
            raise TokenizerLost(self._end)
        answer: asyncio.Future[TokenizerAnswer] = self._loop.create_future()
        self._waiting.append(answer)
        if self._clock is None:
            self._watch()
        if self._transport is None:
            self._unsent.append(framed(message))
        else:
            self._transport.write(framed(message))
        return await answer

    async def _connect(self, ours: socket.socket) -> None:
        await self._loop.create_unix_connection(lambda: self, sock=ours)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are of a kind of their own
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) < end:
                return
            message = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._settle(self._decoder.decode(message))

    def connection_lost(self, error: Exception | None) -> None:
        took_long, self._end = bool(self._end), self._end or "its process has ended"
        if self._clock is not None:
            self._clock.cancel()
        for place, answer in enumerate(self._waiting):
            if not answer.done():
                is_first = place == 0
                lost = TokenizerLost(self._end, is_suspect=is_first, took_long=is_first and took_long)
                answer.set_exception(lost)
        self._waiting.clear()

    def _settle(self, found: TokenizerAnswer) -> None:
        answer = self._waiting.popleft()
        if not answer.done():  # else nobody waits any more
            answer.set_result(found)
        assert self._clock is not None
        self._clock.cancel()
        self._clock = None
        if self._waiting:
            self._watch()

    def _watch(self) -> None:
        self._clock = self._loop.call_later(WAIT_S, self._hang)

    def _hang(self) -> None:
        self._end = f"it takes more than {WAIT_S:g} s"
        self._handle.kill()
        if self._transport is not None:
            self._transport.abort()
