"""Threads for work on text: who waits for what."""

from __future__ import annotations

import asyncio
import time

from dovetail.gateway.text.fair_executor import FairThreads


def test_an_answer_does_not_wait_for_the_pause_after_it_but_the_next_work_does() -> None:
    async def first_and_second() -> tuple[bool, bool]:
        executor = FairThreads("test", 1, rests=1e6)  # the pause outlasts the test
        first = await executor.run(lambda: time.sleep(0.001) is None)
        second = asyncio.create_task(executor.run(lambda: True))
        done, _ = await asyncio.wait([second], timeout=0.05)
        second.cancel()
        return first, bool(done)

    assert asyncio.run(first_and_second()) == (True, False)


def test_what_goes_wrong_in_a_lane_reaches_whoever_waits_and_frees_the_thread() -> None:
    async def fails_then_works() -> bool:
        executor = FairThreads("test", 1)
        try:
            await executor.run(lambda: 1 // 0)
        except ZeroDivisionError:
            return await executor.run(lambda: True)
        return False

    assert asyncio.run(fails_then_works())
