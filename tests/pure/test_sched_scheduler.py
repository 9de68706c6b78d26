"""Batching with an executor that needs no weights: the next token is a function of the whole prefix, so a sequence that
was scheduled wrongly anywhere (a token skipped, computed twice, read from another's block) changes its text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import Scheduler, SchedulerConfig
from dovetail.sched.sequence import Sequence, mix64
from dovetail.sched.turn import Outcome, RowOutcome, Turn
from dovetail.types import FinishReason, Request, SamplingParams, TokenEvent

SIZE = 4
VOCAB = 50


def next_token(prefix: list[int]) -> int:
    return mix64(*prefix) % VOCAB


class BlockMemory:
    """Stands in for a KV cache: remembers which token was written into which slot, and computes from the slots only."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, turn: Turn) -> Outcome:
        outcomes = []
        for row in turn.rows:
            for position in range(row.start, row.end):
                self._slots[row.blocks[position // SIZE], position % SIZE] = row.tokens[position]
            prefix = [self._slots[row.blocks[position // SIZE], position % SIZE] for position in range(row.end)]
            assert prefix == row.tokens[: row.end], "the cache does not hold this sequence's tokens"
            if row.samples:
                outcomes.append(RowOutcome(row.sequence, next_token(prefix)))
        return Outcome(tuple(outcomes))


def make_scheduler(num_blocks: int = 32, **limits: Any) -> FcfsScheduler:
    limits = {"context_length": 100, "max_batch": 8, "max_turn_tokens": 16} | limits
    return FcfsScheduler(SchedulerConfig(**limits), BlockPool(num_blocks, SIZE))


def make_request(id: str, prompt: list[int], **sampling: Any) -> Request:
    num_choices = sampling.pop("num_choices", 1)
    options = {"max_tokens": 5, "seed": 0} | sampling
    return Request(id, "m", tuple(prompt), SamplingParams(**options), num_choices=num_choices)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def drain(scheduler: FcfsScheduler, memory: BlockMemory) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(10_000):
        if not scheduler.has_work:
            return events
        turn = scheduler.next_turn()
        completed = scheduler.take_failed() if turn is None else scheduler.complete(memory.run(turn))
        events.extend(completed.events)
        scheduler.pool.check()
    raise AssertionError("never finished")


def tokens_of(events: list[TokenEvent], request_id: str, choice: int = 0) -> list[int | None]:
    return [event.token for event in events if (event.request_id, event.choice) == (request_id, choice)]


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    scheduler, memory = make_scheduler(max_turn_tokens=6), BlockMemory()
    scheduler.add(make_request("a", list(range(20)), max_tokens=2))
    counts = []
    while scheduler.has_work:
        turn = scheduler.next_turn()
        assert turn is not None
        counts.append(turn.num_tokens)
        scheduler.complete(memory.run(turn))
    assert counts == [6, 6, 6, 2, 1]


def test_texts_of_an_encoder_are_never_cut_and_fill_an_iteration_as_far_as_they_fit() -> None:
    pool = BlockPool(64, SIZE)
    scheduler = Scheduler(SchedulerConfig(context_length=100, max_turn_tokens=16, whole_prompts=True), pool)
    sampling = SamplingParams(max_tokens=1, seed=0, pooling="mean")
    sequences = [
        Sequence(at, str(at), 0, list(range(at, at + length)), length, sampling)
        for at, length in enumerate((40, 7, 12, 9))
    ]
    for sequence in sequences:
        scheduler.enter(sequence)
    seen = []
    while scheduler.has_work:
        waiting = [each for each in sequences if not each.was_admitted]
        turn = scheduler.turn_of(waiting, {each.id: 3 for each in waiting})
        assert turn is not None
        assert all(row.samples and row.start == 0 for row in turn.rows)
        seen.append([row.sequence for row in turn.rows])
        scheduler.complete(Outcome(tuple(RowOutcome(row.sequence, 0, embedding=b"") for row in turn.rows)))
    assert seen == [[0], [1, 3], [2]]  # the first alone, although it is longer than an iteration
    pool.check()


def test_decodes_are_not_held_up_by_a_long_prompt() -> None:
    scheduler, memory = make_scheduler(max_turn_tokens=8), BlockMemory()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=6))
    scheduler.complete(memory.run(scheduler.next_turn()))
    scheduler.add(make_request("b", list(range(30))))
    for _ in range(3):
        turn = scheduler.next_turn()
        assert turn is not None
        assert {row.count for row in turn.rows} == {1, 7}
        scheduler.complete(memory.run(turn))


def test_a_repeated_prompt_is_taken_from_the_cache() -> None:
    scheduler, memory = make_scheduler(), BlockMemory()
    prompt = list(range(14))
    scheduler.add(make_request("a", prompt))
    drain(scheduler, memory)
    scheduler.add(make_request("b", prompt))
    events = drain(scheduler, memory)
    assert events[0].cached_tokens == 12
    assert all(event.cached_tokens == 0 for event in events[1:])
    assert tokens_of(events, "b") == expected(prompt, 5)
    assert (scheduler.prefix_hits, scheduler.prefix_queries) == (12, 28)


def test_choices_of_one_request_compute_their_prompt_once() -> None:
    scheduler, memory = make_scheduler(), BlockMemory()
    scheduler.add(make_request("a", list(range(13)), num_choices=3))
    first = scheduler.next_turn()
    assert first is not None
    assert len(first.rows) == 1
    scheduler.complete(memory.run(first))
    second = scheduler.next_turn()
    assert second is not None
    assert sorted(row.count for row in second.rows) == [1, 1, 1]
    scheduler.complete(memory.run(second))
    events = drain(scheduler, memory)
    assert {event.choice for event in events} == {0, 1, 2}


def test_a_resumed_request_goes_on_where_its_answer_was() -> None:
    scheduler, memory = make_scheduler(), BlockMemory()
    prompt = list(range(6))
    whole = expected(prompt, 30)
    scheduler.add(make_request("a", prompt, max_tokens=30))
    drain(scheduler, memory)
    resumed = make_request("b", prompt, max_tokens=30, num_choices=3)
    scheduler.add(msgspec.structs.replace(resumed, generated=(tuple(whole[:17]), None, ())))
    events = drain(scheduler, memory)
    assert tokens_of(events, "b") == whole[17:]
    assert tokens_of(events, "b", 1) == []
    assert tokens_of(events, "b", 2) == whole
    assert [event.choice for event in events if event.finish is FinishReason.LENGTH] == [0, 2]
    assert scheduler.prefix_hits <= scheduler.prefix_queries, "the answer is cached too, but it is no prompt"


def test_a_request_ends_by_stop_token_by_length_and_by_context() -> None:
    prompt = [1, 2, 3]
    text = expected(prompt, 10)
    stop = text[2]
    for sampling, context, count, finish in [
        ({"stop_token_ids": (stop,)}, 100, text.index(stop) + 1, FinishReason.STOP),
        ({"max_tokens": 4}, 100, 4, FinishReason.LENGTH),
        ({}, 8, 5, FinishReason.LENGTH),
    ]:
        scheduler, memory = make_scheduler(context_length=context), BlockMemory()
        scheduler.add(make_request("a", prompt, **({"max_tokens": 10} | sampling)))
        events = drain(scheduler, memory)
        assert tokens_of(events, "a") == text[:count]
        assert [event.finish for event in events] == [None] * (count - 1) + [finish]
        assert scheduler.pool.num_held == 0


def test_without_memory_the_latest_is_preempted_and_still_gets_its_text() -> None:
    scheduler, memory = make_scheduler(num_blocks=6), BlockMemory()
    prompts = {"a": [1] * 7, "b": [2] * 7, "c": [3] * 7}
    for name, prompt in prompts.items():
        scheduler.add(make_request(name, prompt, max_tokens=12))
    events = drain(scheduler, memory)
    assert scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens_of(events, name) == expected(prompt, 12)


def test_a_request_larger_than_the_pool_ends_with_an_error_and_others_go_on() -> None:
    scheduler, memory = make_scheduler(num_blocks=4, max_turn_tokens=8), BlockMemory()
    scheduler.add(make_request("large", list(range(40))))
    scheduler.add(make_request("small", [1, 2]))
    events = drain(scheduler, memory)
    (failed,) = [event for event in events if event.request_id == "large"]
    assert failed.finish is FinishReason.ERROR
    assert failed.error is not None
    assert "KV pool" in failed.error
    assert failed.unprocessable, "to try again would not help"
    assert scheduler.num_preemptions == 0, "it pushed nobody out"
    assert tokens_of(events, "small") == expected([1, 2], 5)
    assert scheduler.pool.num_held == 0


def test_an_abort_during_a_turn_frees_blocks_when_the_turn_ends() -> None:
    scheduler, memory = make_scheduler(), BlockMemory()
    scheduler.add(make_request("a", list(range(9))))
    turn = scheduler.next_turn()
    assert turn is not None
    scheduler.abort("a")
    assert scheduler.pool.num_held == 3, "the executor may still write to them"
    completed = scheduler.complete(memory.run(turn))
    assert completed.events == ()
    assert scheduler.pool.num_held == 0
    assert not scheduler.has_work


def test_what_an_abort_ends_is_told_without_another_turn() -> None:
    scheduler, memory = make_scheduler(), BlockMemory()
    scheduler.add(make_request("a", [1, 2]))
    turn = scheduler.next_turn()
    assert turn is not None
    scheduler.complete(memory.run(turn))
    scheduler.abort("a")
    assert not scheduler.has_work
    assert scheduler.take_failed().ended == (turn.rows[0].sequence,)


def test_a_failed_turn_ends_its_sequences_and_no_others() -> None:
    scheduler = make_scheduler(max_batch=1)
    scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("b", [2]))
    scheduler.next_turn()
    completed = scheduler.fail_turn("broken")
    assert [(event.request_id, event.error) for event in completed.events] == [("a", "broken")]
    assert tokens_of(drain(scheduler, BlockMemory()), "b") == expected([2], 5)


def test_turns_must_be_completed_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    scheduler.next_turn()
    with pytest.raises(AssertionError, match="not completed"):
        scheduler.next_turn()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(0, 3), st.integers(1, 8), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("resize"), st.integers(10, 24)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, budget=st.integers(1, 20), batch=st.integers(1, 6))
def test_any_interleaving_gives_each_request_its_own_text(actions: list[Any], budget: int, batch: int) -> None:
    """Arrivals, aborts, chunk sizes, preemptions and a pool that changes size: the text is that of running alone."""
    scheduler, memory = make_scheduler(24, max_turn_tokens=budget, max_batch=batch), BlockMemory()
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    events: list[TokenEvent] = []
    for action in actions:
        if action[0] == "add":
            _, length, content, max_tokens, choices = action
            request = make_request(f"r{len(requests)}", [content] * length, max_tokens=max_tokens, num_choices=choices)
            requests[request.id] = request
            scheduler.add(request)
        elif action[0] == "abort":
            aborted.add(f"r{action[1]}")
            scheduler.abort(f"r{action[1]}")
        elif action[0] == "resize":
            scheduler.pool.resize(action[1])
        else:
            for _ in range(action[1]):
                turn = scheduler.next_turn()
                completed = scheduler.take_failed() if turn is None else scheduler.complete(memory.run(turn))
                events.extend(completed.events)
                scheduler.pool.check()
    events.extend(drain(scheduler, memory))
    assert scheduler.pool.num_held == 0
    for id, request in requests.items():
        for choice in range(request.num_choices):
            made = tokens_of(events, id, choice)
            text = expected(list(request.prompt), request.sampling.max_tokens)
            if id in aborted:
                assert made == text[: len(made)]
            else:
                assert made == text
                ends = [e for e in events if (e.request_id, e.choice) == (id, choice) and e.finish]
                assert len(ends) == 1


def test_a_prefix_is_found_by_requests_of_the_same_salt_only() -> None:
    def cached_tokens(scheduler: FcfsScheduler, id: str, salt: str) -> int:
        request = msgspec.structs.replace(make_request(id, list(range(12)), max_tokens=1), cache_salt=salt)
        scheduler.add(request)
        events: list[TokenEvent] = []
        while scheduler.has_work:
            turn = scheduler.next_turn()
            assert turn is not None
            events.extend(scheduler.complete(memory.run(turn)).events)
        return events[0].cached_tokens

    scheduler, memory = make_scheduler(), BlockMemory()
    assert [cached_tokens(scheduler, f"a{i}", "ann") for i in range(2)] == [0, 8]
    assert [cached_tokens(scheduler, f"b{i}", "bob") for i in range(2)] == [0, 8]
    assert [cached_tokens(scheduler, f"n{i}", "") for i in range(2)] == [0, 8]
    scheduler.pool.check()
