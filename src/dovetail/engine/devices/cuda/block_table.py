"""Lists of blocks of the rows that decode, on the device: only what has changed since the last iteration is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.engine.devices.cuda.transfer import copy_words
from dovetail.sched.turn import TurnRow

_MANY_CHANGES = 24  # rows: beyond, one copy of all is cheaper


class BlockTable:
    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._host = torch.zeros(max_rows, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros(max_rows, width, dtype=torch.int32, device=device)  # [rows, blocks]
        self._known: list[tuple[list[int] | None, int]] = []  # of each row: its list, and how much of it was copied
        self._taken = torch.cuda.Event()  # the device has what was copied: what it was copied from may be written
        self.forget()

    def fill(self, rows: Sequence[TurnRow]) -> None:
        """Lists grow at their end or are replaced, never changed within: what is known need not be copied."""
        self._taken.synchronize()
        changed = []
        table = self._host.numpy()
        for at, row in enumerate(rows):
            blocks, (known, length) = row.blocks, self._known[at]
            if known is not blocks or length != len(blocks):
                begin = length if known is blocks and length < len(blocks) else 0
                table[at, begin : len(blocks)] = blocks[begin:]
                self._known[at] = (blocks, len(blocks))
                changed.append((at, begin, len(blocks)))
        if not changed:
            return
        if len(changed) > _MANY_CHANGES:
            copy_words(self._host[: len(rows)], self.on_device[: len(rows)])
        else:
            for at, begin, end in changed:
                copy_words(self._host[at, begin:end], self.on_device[at, begin:end])
        self._taken.record()

    def forget(self) -> None:
        """The lists are no longer anybody's."""
        self._known = [(None, 0)] * len(self._host)
