"""The load generator without a server that computes: what it asks for, what it makes of the times, what it samples."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail.sim.trace import Arrival
from dovetail_bench.attainment import meets, percentile, start_ttfts, summarise, token_times, tpot_s, ttft_s
from dovetail_bench.load import Answer, Load, Mix, Prompts, arrivals_of, cut_trace
from dovetail_bench.node_log import Start, grace_of, read_starts
from dovetail_bench.process_tree import TreeSampler, memory_of


def make_answer(times: list[float], *, arrival_s: float = 10.0, tokens: int = 0, **changes: object) -> Answer:
    answer = Answer("m", arrival_s, 64, len(times), text_s=times, num_tokens=tokens or len(times), status=200)
    for name, value in changes.items():
        setattr(answer, name, value)
    return answer


def test_the_same_seed_gives_the_same_requests_and_texts() -> None:
    mix = Mix(minutes=2, rate_per_s=2, seed=7)
    assert arrivals_of(mix, 8) == arrivals_of(mix, 8)
    assert arrivals_of(mix, 8) != arrivals_of(Mix(minutes=2, rate_per_s=2, seed=8), 8)
    assert [Prompts("ab", 1).make(20)] * 2 == [Prompts("ab", 1).make(20), Prompts("ab", 1).make(20)]


def test_lengths_popularity_and_number_are_what_was_asked_for() -> None:
    mix = Mix(minutes=10, rate_per_s=2, zipf=1.2, input_tokens=(5, 9), output_tokens=(3, 3))
    arrivals = arrivals_of(mix, 6)
    assert len(arrivals) == 1200
    assert {arrival.input_tokens for arrival in arrivals} == {5, 6, 7, 8, 9}
    assert {arrival.output_tokens for arrival in arrivals} == {3}
    counts = [sum(arrival.model == model for arrival in arrivals) for model in range(6)]
    assert counts == sorted(counts, reverse=True)
    with pytest.raises(ConfigError, match="9 to 5"):
        arrivals_of(Mix(input_tokens=(9, 5)), 6)


def test_a_cut_of_a_trace_has_its_first_minutes_fewer_models_and_shorter_texts() -> None:
    trace = [Arrival(float(at), at % 16, 100, 40) for at in range(120)] + [Arrival(120.0, 8, 9, 3)] * 2
    cut = cut_trace(trace, 2, minutes=1.5, shrink=8)
    assert len(cut) == 12, "two of sixteen models, 90 of 120 seconds"
    assert {one.model for one in cut} == {0, 1}, "numbered anew"
    assert {(one.input_tokens, one.output_tokens) for one in cut} == {(12, 5)}
    assert cut_trace(trace, 16, minutes=9, shrink=1)[-1].model == 0, "the most asked for comes first"
    with pytest.raises(ConfigError, match="--minutes 0"):
        cut_trace(trace[5:], 16, minutes=0, shrink=1)


def test_a_start_is_a_request_for_a_model_that_nobody_asked_for_during_the_keep_alive() -> None:
    answers = [
        make_answer([at + 2.0 + at / 100], model=model, arrival_s=at)
        for model, at in (("a", 10.0), ("b", 11.0), ("a", 15.0), ("b", 31.0), ("a", 25.0), ("b", 52.0))
    ]
    answers.append(make_answer([], model="c", arrival_s=60.0))  # refused: it has no first token
    assert start_ttfts(answers, 20.0) == pytest.approx([2.10, 2.11, 2.52])
    figures = summarise(answers, 2, keep_alive_s=20.0)
    assert (figures.starts, figures.start_ttft_p50_s) == (3, pytest.approx(2.11))


def test_every_token_has_its_own_deadline() -> None:
    in_time = [10.5, 10.75, 11.0]  # 64 tokens of prompt: 0.5 s, then 0.25 s each
    assert meets(make_answer(in_time))
    assert not meets(make_answer([10.5, 10.75, 11.01]))
    assert not meets(make_answer([10.51, 10.6, 10.7]))
    assert meets(make_answer([10.51, 10.6, 10.7]), grace_s=0.02)
    assert meets(make_answer([10.4, 10.99, 11.0])) is False, "the second is late though the mean pace is kept"
    assert not meets(make_answer(in_time, status=503))
    assert not meets(make_answer(in_time, error="the stream broke"))
    assert not meets(make_answer([]))


def test_a_long_prompt_has_longer_until_its_first_token() -> None:
    late = [12.0]
    assert not meets(make_answer(late, input_tokens=512))
    assert meets(make_answer(late, input_tokens=1024))
    assert not meets(make_answer([18.1], input_tokens=100_000)), "eight seconds at most"


@given(st.integers(1, 40), st.integers(1, 40))
def test_tokens_are_spread_over_the_pieces_of_text_that_came(pieces: int, tokens: int) -> None:
    answer = make_answer([10 + 0.1 * index for index in range(pieces)], tokens=tokens)
    times = token_times(answer)
    assert len(times) == max(pieces, tokens)
    assert times == sorted(times)
    assert (times[0], times[-1]) == (answer.text_s[0], answer.text_s[-1])


def test_the_summary_counts_each_request_once() -> None:
    answers = [
        make_answer([10.1, 10.2, 10.3]),
        make_answer([10.6, 10.7], end_s=70.0),
        make_answer([], status=503, error="later"),
        make_answer([], status=0, error="ConnectError"),
        make_answer([10.1], error="the worker died"),
    ]
    figures = summarise(answers, cores=2, grace=lambda answer: 0.2)
    assert (figures.requests, figures.finished, figures.refused, figures.errors) == (5, 2, 1, 2)
    assert (figures.attained, figures.attained_with_grace) == (1, 2)
    assert figures.attainment == pytest.approx(0.2)
    assert figures.seconds == pytest.approx(60.0)
    assert figures.attained_per_core_minute == pytest.approx(0.5)
    assert figures.ttft_p99_s == pytest.approx(0.6)
    assert ttft_s(answers[0]) == pytest.approx(0.1)
    assert tpot_s(answers[0]) == pytest.approx(0.1)
    assert tpot_s(make_answer([10.1])) is None
    assert percentile([], 0.5) == 0.0


def test_grace_is_the_load_that_the_request_waited_for_and_no_more() -> None:
    starts = [Start("m", 99.0, 100.5), Start("m", 130.0, 131.0), Start("other", 100.0, 100.4)]
    grace = grace_of(starts, run_began_s=90.0)
    assert grace(make_answer([11.0])) == pytest.approx(0.5), "half a second of the load fell to it"
    assert grace(make_answer([11.0], arrival_s=5.0)) == pytest.approx(1.5), "it waited for a place before"
    assert grace(make_answer([10.4])) == 0.0, "it had its first token before"
    assert grace(make_answer([12.0], arrival_s=11.0)) == 0.0
    assert grace(make_answer([])) == 0.0


def test_starts_are_read_from_a_log_that_is_still_written(tmp_path: Path) -> None:
    lines = [
        {"dovetail_sim": 1, "real": True},
        {"t": 1.0, "event": "arrive", "request": 0, "model": "m", "input": 3},
        {"t": 1.0, "event": "load", "node": "cpu-0", "instance": 4, "model": "m", "due_s": None},
        {"t": 1.5, "event": "load", "node": "cpu-0", "instance": 5, "model": "n", "due_s": 3.0},
        {"t": 1.75, "event": "instanceready", "node": "cpu-0", "instance": 4, "model": "m"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 2.0, "eve')
    assert read_starts(path) == [Start("m", 1.0, 1.75)]


def test_a_process_tree_is_sampled_with_its_ended_children() -> None:
    # A mapping of its own: fresh pages, not what the allocator has left over.
    with TreeSampler(os.getpid(), interval_s=10) as sampler, mmap.mmap(-1, 32 << 20) as block:
        block.write(b"x" * len(block))
        sampler.take()
    first, during = sampler.samples[0], sampler.samples[1]
    assert during.pss_bytes - first.pss_bytes > 24 << 20
    assert 0 < during.pss_bytes <= during.rss_bytes
    assert during.cpu_s >= 0.0
    assert memory_of(2**30) == (0, 0)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_by_model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server of three models: one answers, one is full, one breaks off."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    if body["model"] == "full":
        writer.write(b"HTTP/1.1 503 Full\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfull")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        events = [{"choices": [{"text": f"{index} "}]} for index in range(body["max_tokens"] - 1)]
        events.insert(1, {"choices": [{"text": ""}]})  # a token without text
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        broken = {"error": {"message": "the worker died"}}
        for event in [*events, usage if body["model"] == "good" else broken]:
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
        writer.write(b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


def test_requests_leave_in_time_and_every_ending_is_told() -> None:
    arrivals = [Arrival(0.0, 0, 3, 5), Arrival(0.0, 1, 3, 5), Arrival(0.05, 2, 3, 5)]
    seen: list[Answer] = []

    async def run() -> list[Answer]:
        names = ["good", "full", "broken"]
        async with serving(answer_by_model) as url:
            return await Load(url, names, {name: Prompts("ab", 0) for name in names}, seen.append).run(arrivals)

    good, full, broken = asyncio.run(run())
    assert good.is_finished
    assert (len(good.text_s), good.num_tokens) == (4, 5)
    assert full.is_refused
    assert full.error == "full"
    assert "the worker died" in broken.error
    assert not broken.is_finished
    assert broken.sent_s >= 0.05
    assert len(seen) == 3


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    load = Load("http://127.0.0.1:9", ["m"], {"m": Prompts("ab", 0)})
    answers = asyncio.run(load.run([Arrival(0.0, 0, 1, 1), Arrival(0.0, 0, 1, 1)]))
    assert [answer.status for answer in answers] == [0, 0]
    assert all("Connect" in answer.error for answer in answers)
