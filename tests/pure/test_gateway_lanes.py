"""Threads for work on text: who waits for what."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import pytest

from dovetail.gateway.lanes import SHORT_CHARS, Lane, TextLanes


def test_an_answer_does_not_wait_for_the_pause_after_it_but_the_next_work_does() -> None:
    async def first_and_second() -> tuple[bool, bool]:
        lane = Lane("test", 1, rests=1e6)  # the pause outlasts the test
        first = await lane.run(lambda: time.sleep(0.001) is None)
        second = asyncio.create_task(lane.run(lambda: True))
        done, _ = await asyncio.wait([second], timeout=0.05)
        second.cancel()
        return first, bool(done)

    assert asyncio.run(first_and_second()) == (True, False)


def test_what_goes_wrong_in_a_lane_reaches_whoever_waits_and_frees_the_thread() -> None:
    async def fails_then_works() -> bool:
        lane = Lane("test", 1)
        try:
            await lane.run(lambda: 1 // 0)
        except ZeroDivisionError:
            return await lane.run(lambda: True)
        return False

    assert asyncio.run(fails_then_works())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_threads_for_long_texts_give_way_and_the_event_loop_does_not() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def compare() -> tuple[int, int]:
        lanes = TextLanes()
        return await lanes.run(SHORT_CHARS, niceness) - niceness(), await lanes.run(SHORT_CHARS + 1, niceness)

    before = niceness()
    assert asyncio.run(compare()) == (0, min(before + 10, 19))
    assert niceness() == before
