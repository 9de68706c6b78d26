"""Tokenizers in processes of their own, one each: `python -m` of this module waits for orders to fork, and each fork
reads one tokenizer's file and encodes with it. `tokenizers` keeps the interpreter to itself while it reads a file.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from tokenizers import Tokenizer

from dovetail.confined import thread_gives_way
from dovetail.errors import EngineFailed
from dovetail.gateway.text.token_table import TokenTable
from dovetail.gateway.text.tokenizer_errors import tokenizer_call
from dovetail.machine import trim_memory

LENGTH_BYTES = 8
# Channels of a fork, by who is on them: none waits for another's texts.
QUICK, SHORT, LONG = b"q", b"s", b"l"
MAX_CPU_S = 60.0  # of one call; nobody waits longer either
_GIVES_WAY = 10  # niceness of what may take long: whoever waits for it waits anyway, and streams go on meanwhile
SPARE_BYTES = 1 << 30  # of memory, beyond so many times the tokenizer's file
BYTES_PER_FILE_BYTE = 64
_TRIM_BYTES = 128 * 1024


class EncodeTexts(msgspec.Struct, tag=True, array_like=True):
    texts: list[str]
    add_special_tokens: bool


class EncodePair(msgspec.Struct, tag=True, array_like=True):
    """Two texts that are read together, with the tokens around and between them that the file says."""

    first: str
    second: str


class DecodeTokens(msgspec.Struct, tag=True, array_like=True):
    tokens: list[int]
    skip_special_tokens: bool


TokenizerOrder = EncodeTexts | EncodePair | DecodeTokens


class TokenizerAnswer(msgspec.Struct, array_like=True, omit_defaults=True):
    tokens: list[list[int]] = []
    text: str = ""
    problem: str = ""  # what `tokenizers` says against it


class OpenedTokenizer(msgspec.Struct, array_like=True):
    table: TokenTable | None
    problem: str = ""


def parse_tokenizer(file: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(file)
    # Files of trained models may carry both; a server must see every token and add none.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def answer_to(order: TokenizerOrder, tokenizer: Tokenizer) -> TokenizerAnswer:
    """Raises what `tokenizers` raises. Its batches leave the interpreter to the other channels."""
    match order:
        case EncodeTexts():
            special = order.add_special_tokens
            each = [tokenizer.encode_batch([text], add_special_tokens=special)[0].ids for text in order.texts]
            return TokenizerAnswer(tokens=each)
        case EncodePair():
            return TokenizerAnswer(tokens=[tokenizer.encode_batch([(order.first, order.second)])[0].ids])
        case DecodeTokens():
            hides = order.skip_special_tokens
            return TokenizerAnswer(text=tokenizer.decode_batch([order.tokens], skip_special_tokens=hides)[0])


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def receive(channel: socket.socket) -> bytes:
    """Raises EOFError."""
    return _exactly(channel, int.from_bytes(_exactly(channel, LENGTH_BYTES), "little"))


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts += part
    return bytes(parts)


class _Fork:
    """One tokenizer, and whoever asks it: on each channel one call after the other."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tokenizer: Tokenizer | None = None

    def run(self) -> None:
        """Until the control socket is closed at the other end, whatever the other threads are at."""
        self._control.sendall(framed(msgspec.msgpack.encode(os.getpid())))
        reader = threading.Thread(target=self._open, args=(receive(self._control),))
        reader.start()
        reader.join()
        while self._tokenizer is not None:
            kind, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            if not kind:
                return
            channel = socket.socket(fileno=descriptors[0])
            threading.Thread(target=self._serve, args=(channel, kind == LONG), daemon=True).start()

    def _open(self, file: bytes) -> None:
        thread_gives_way(_GIVES_WAY)
        _limit_memory(SPARE_BYTES + BYTES_PER_FILE_BYTE * len(file))
        _limit_time()
        opened = OpenedTokenizer(None)
        try:
            with tokenizer_call():
                self._tokenizer = parse_tokenizer(file)
                opened.table = TokenTable.of(self._tokenizer)
        except EngineFailed as error:
            opened.problem = error.message
        del file
        trim_memory()
        with suppress(OSError):  # the gateway is gone: `run` finds that out too, and ends
            self._control.sendall(framed(msgspec.msgpack.encode(opened)))

    def _serve(self, channel: socket.socket, is_long: bool) -> None:
        if is_long:
            thread_gives_way(_GIVES_WAY)
        decoder = msgspec.msgpack.Decoder(TokenizerOrder)
        with suppress(EOFError, OSError):
            while True:
                message = receive(channel)
                _limit_time()
                channel.sendall(framed(msgspec.msgpack.encode(self._answer(decoder.decode(message)))))
                if len(message) > _TRIM_BYTES:
                    trim_memory()

    def _answer(self, order: TokenizerOrder) -> TokenizerAnswer:
        assert self._tokenizer is not None
        try:
            with tokenizer_call():
                return answer_to(order, self._tokenizer)
        except EngineFailed as error:
            return TokenizerAnswer(problem=error.message)


def _limit_memory(spare_bytes: int) -> None:
    with suppress(OSError, ValueError):  # a system without such a count has the limit on time
        with open("/proc/self/statm") as file:
            base = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (base + spare_bytes,) * 2)


def _limit_time() -> None:
    """The kernel ends the process after so much more of a core."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + MAX_CPU_S) + 1, hard_limit))


def _fork_on_demand(orders: socket.socket, run: Callable[[socket.socket], None]) -> None:
    """A fork for each socket that is sent; it has that one and nothing else of ours."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as control, suppress(OSError):  # no memory: its socket is closed
            if os.fork() == 0:
                orders.close()
                run(control)


def _run_fork(control: socket.socket) -> None:
    try:
        with suppress(EOFError, OSError):
            _Fork(control).run()
    finally:
        os._exit(0)  # at once: a thread may be in the middle of a text


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal may stop whoever prints from behind
    gc.collect()
    gc.freeze()  # what is there is shared with the forks until somebody writes to it
    _fork_on_demand(socket.socket(fileno=int(sys.argv[1])), _run_fork)


if __name__ == "__main__":
    main()
