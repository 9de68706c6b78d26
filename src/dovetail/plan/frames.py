"""What the dispatcher and a function process say to each other: a header in MessagePack and raw bytes, over a socket.

| header bytes: 4 | payload bytes: 8 | header | payload |
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec

_SIZES = struct.Struct("<IQ")
_MAX_HEADER = 1 << 20
_MAX_PAYLOAD = 1 << 32


class FunctionDied(Exception):
    """The other end is gone."""


class Spec(msgspec.Struct, frozen=True):
    """What a function process is: layers [first, end) of a model."""

    model: str  # wrn50-K, or the folder of a checkpoint
    first: int
    end: int
    threads: int
    device: str = "cpu"
    kv_tokens: int = 0  # of a language model: what its keys and values have room for


class Call(msgspec.Struct, frozen=True):
    """One run. The payload is the input: float32 [batch, …] of a network, hidden states of a decoder stage."""

    batch: int = 1
    shape: tuple[int, ...] = ()  # of the payload
    workers: int = 1  # that share the rows of this run
    worker: int = 0  # which of them this one is
    threads: int = 0  # from now on; 0 = as before
    turn: Any = None  # of a language model: the iteration


class Answer(msgspec.Struct, frozen=True):
    seconds: float = 0.0  # of the run
    shape: tuple[int, ...] = ()
    memory_bytes: int = 0  # resident, at most so far; on a GPU, the device's
    hardware: str = ""  # what it computes on, if not the CPU
    tokens: tuple[int, ...] = ()  # that the last stage of a language model chose
    error: str = ""


def send(connection: socket.socket, header: msgspec.Struct, payload: bytes | memoryview = b"") -> None:
    encoded = msgspec.msgpack.encode(header)
    connection.sendall(_SIZES.pack(len(encoded), len(payload)) + encoded)
    if payload:
        connection.sendall(payload)


def receive(connection: socket.socket, kind: type[Any]) -> tuple[Any, bytearray]:
    header_bytes, payload_bytes = _SIZES.unpack(_exactly(connection, _SIZES.size))
    _check(header_bytes, payload_bytes)
    header = msgspec.msgpack.decode(_exactly(connection, header_bytes), type=kind)
    return header, _exactly(connection, payload_bytes)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise FunctionDied("the dispatcher is gone")
        view = view[count:]
    return data


async def write(stream: asyncio.StreamWriter, header: msgspec.Struct, payload: bytes | memoryview = b"") -> None:
    encoded = msgspec.msgpack.encode(header)
    stream.write(_SIZES.pack(len(encoded), len(payload)) + encoded)
    if payload:
        stream.write(payload)
    await stream.drain()


async def read(stream: asyncio.StreamReader) -> tuple[Answer, bytes]:
    header_bytes, payload_bytes = _SIZES.unpack(await stream.readexactly(_SIZES.size))
    _check(header_bytes, payload_bytes)
    answer = msgspec.msgpack.decode(await stream.readexactly(header_bytes), type=Answer)
    return answer, await stream.readexactly(payload_bytes)


def _check(header_bytes: int, payload_bytes: int) -> None:
    assert header_bytes <= _MAX_HEADER, f"a header of {header_bytes:,} bytes"
    assert payload_bytes <= _MAX_PAYLOAD, f"a payload of {payload_bytes:,} bytes"
