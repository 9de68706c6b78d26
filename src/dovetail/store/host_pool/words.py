"""Words in a host pool's memory on which processes wait for each other: how far each entry has come, and that something
was let go. Written without the pool's lock, read by whoever sleeps on them.
"""

from __future__ import annotations

import mmap
import struct

from dovetail.store.host_pool.shared_memory import wait_on_word, wake_word

# Per chunk: bytes of the entry that are in from its front (of its first chunk), an event counter, whether this chunk is
# in whatever lies before it, and whether somebody needs it before others.
WORDS = struct.Struct("<QIHH")
_PROGRESS, _FLAG = struct.Struct("<QI"), struct.Struct("<H")
_HERE_AT, _ASKED_AT = 12, 14
PATIENCE_S = 0.05  # how long a waiter sleeps before it looks whether somebody died


class PoolWords:
    def __init__(self, memory: mmap.mmap, address: int, words_at: int, room_at: int) -> None:
        """`address` is where `memory` is mapped; there is a pair of words for each chunk, and one for the room."""
        self._memory = memory
        self._address = address
        self._words_at = words_at
        self._room_at = room_at

    # How far an entry has come; it goes by its first chunk

    def progress(self, first_chunk: int) -> int:
        done, _ = _PROGRESS.unpack_from(self._memory, self._word(first_chunk))
        return int(done)

    def advance(self, first_chunk: int, done_bytes: int) -> None:
        """Say that the first `done_bytes` are in. Only the loader does, after they are."""
        at = self._word(first_chunk)
        _, event = _PROGRESS.unpack_from(self._memory, at)
        _PROGRESS.pack_into(self._memory, at, done_bytes, (event + 1) & 0xFFFFFFFF)
        wake_word(self._address + at + 8)

    def wake_waiters(self, first_chunk: int) -> None:
        self.advance(first_chunk, self.progress(first_chunk))

    def wait_for_progress(self, first_chunk: int, seen_bytes: int, timeout_s: float) -> None:
        """Sleep until the entry may have more than `seen_bytes`, at most for a moment."""
        done, event = _PROGRESS.unpack_from(self._memory, self._word(first_chunk))
        if done == seen_bytes:
            address = self._address + self._word(first_chunk) + 8
            wait_on_word(address, event, max(0.0, min(timeout_s, PATIENCE_S)))

    # Single chunks, which may come out of order

    def is_here(self, chunk: int) -> bool:
        return self._flag(chunk, _HERE_AT)

    def mark_here(self, chunk: int) -> None:
        """Only the loader does, after the chunk's last byte."""
        _FLAG.pack_into(self._memory, self._word(chunk) + _HERE_AT, 1)

    def is_asked(self, chunk: int) -> bool:
        return self._flag(chunk, _ASKED_AT)

    def ask(self, chunk: int) -> None:
        """Have the loader bring this chunk next."""
        _FLAG.pack_into(self._memory, self._word(chunk) + _ASKED_AT, 1)

    def clear(self, chunk: int) -> None:
        """For a new entry."""
        WORDS.pack_into(self._memory, self._word(chunk), 0, self._event(chunk), 0, 0)

    def _event(self, chunk: int) -> int:
        return int(_PROGRESS.unpack_from(self._memory, self._word(chunk))[1])

    def _flag(self, chunk: int, at: int) -> bool:
        return bool(_FLAG.unpack_from(self._memory, self._word(chunk) + at)[0])

    def _word(self, chunk: int) -> int:
        return self._words_at + chunk * WORDS.size

    # Room

    def room_event(self) -> int:
        """Changes whenever something was let go."""
        return int.from_bytes(self._memory[self._room_at : self._room_at + 4], "little")

    def wait_for_room(self, seen: int, timeout_s: float) -> None:
        """Sleep until something may have been let go since `seen`, at most for a moment."""
        wait_on_word(self._address + self._room_at, seen, max(0.0, min(timeout_s, PATIENCE_S)))

    def wake_room(self) -> None:
        event = (self.room_event() + 1) & 0xFFFFFFFF
        self._memory[self._room_at : self._room_at + 4] = event.to_bytes(4, "little")
        wake_word(self._address + self._room_at)
