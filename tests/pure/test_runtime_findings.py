"""What a runtime must not do to the requests in its care, each as it was once seen: in virtual time, over executors."""

from __future__ import annotations

import pytest
from driver_builders import KV_BYTES, WEIGHT_BYTES, Rig, expected

from dovetail.cluster.waiting import MAX_RETRY_AFTER_S


def told(rig: Rig, id: str) -> int:
    return len(rig.events.get((id, 0), []))


def step_until(rig: Rig, tokens: int, id: str) -> None:
    for _ in range(20_000):
        if told(rig, id) >= tokens:
            return
        if rig.commands:
            rig.finish_load()
        elif not rig.step() and not rig.commands:
            due_s = rig.link.next_due_s()
            assert due_s is not None, "nothing is left that could bring it about"
            rig.clock.now = max(rig.clock.now, due_s)
    raise AssertionError(f"{id} never had {tokens} tokens")


# Resumed work


def test_an_answer_that_goes_on_after_a_loss_is_as_urgent_as_a_new_one() -> None:
    rig = Rig("a")
    said = tuple(expected("r", 20, 200))
    rig.submit("r", "a", prompt=20, tokens=210, generated=(said,))
    (work,) = rig.controller.works.values()
    assert work.due_s - rig.clock.now == pytest.approx(work.ttft_s)
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 210)[200:]


def test_choices_that_go_on_after_a_loss_do_not_wait_for_the_first_to_end() -> None:
    rig = Rig("a")
    said = tuple(expected("r", 20, 10))
    rig.submit("r", "a", prompt=20, tokens=100, num_choices=3, generated=(said, said, said))
    step_until(rig, 20, "r")
    assert all(len(rig.events.get(("r", choice), [])) > 0 for choice in range(3))
    rig.run()
    assert all(rig.tokens("r", choice) == expected("r", 20, 100)[10:] for choice in range(3))


# Grace


def test_the_first_token_says_what_cold_start_it_waited_for_and_nothing_else() -> None:
    rig = Rig("ab", memory=WEIGHT_BYTES + 200 * KV_BYTES)
    rig.submit("first", "a", tokens=100)
    rig.finish_load()
    rig.submit("second", "b", tokens=3)
    rig.run()  # the second waits for memory, then for its load of 0.01 s
    first, second = rig.events["second", 0][:2]
    waited_s = rig.clock.now - 100.0
    assert waited_s > 0.3
    assert first.grace_s == pytest.approx(0.01)
    assert second.grace_s == 0.0


# Newcomers beside long answers


def make_crowded(kind: str, memory_tokens: int = 1600, token_s: float = 0.01) -> Rig:
    """A node full of long answers, without targets, of model a."""
    memory = WEIGHT_BYTES * 2 + memory_tokens * KV_BYTES
    rig = Rig("ab", memory=memory, max_kv_tokens=30_000, token_s=token_s, max_batch=256)
    if kind == "choices":
        rig.submit("long", "a", prompt=10, tokens=180, num_choices=32)
    else:
        for number in range(32):
            rig.submit(f"long{number}", "a", prompt=10, tokens=180)
    for _ in range(120):
        if rig.commands:
            rig.finish_load()
        rig.step()
    return rig


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize(
    ("kind", "memory_tokens"),
    [("choices", 800), ("choices", 1600), ("choices", 20_000), ("streams", 3000), ("streams", 20_000)],
)
def test_a_newcomer_gets_its_first_token_before_the_next_hundred_of_long_answers(
    kind: str, model: str, memory_tokens: int
) -> None:
    rig = make_crowded(kind, memory_tokens)
    before = {key: len(events) for key, events in rig.events.items()}
    rig.submit("new", model, prompt=20, tokens=5)
    step_until(rig, 1, "new")
    advanced = [len(events) - before.get(key, 0) for key, events in rig.events.items()]
    assert max(advanced) < 100
    rig.run(limit=60_000)
    for id, choice in list(rig.events):
        prompt, tokens = (20, 5) if id == "new" else (10, 180)
        assert rig.tokens(id, choice) == expected(id, prompt, tokens), "what gave way goes on where it was"


@pytest.mark.parametrize("model", ["a", "b"])
def test_a_newcomer_has_its_first_token_within_two_seconds_and_its_prefill(model: str) -> None:
    """Beside long streams and one request for many answers, half a second an iteration; and all of them end."""
    rig = Rig("ab", memory=WEIGHT_BYTES * 2 + 60_000 * KV_BYTES, max_kv_tokens=30_000, token_s=0.01, max_batch=256)
    for number in range(16):
        rig.submit(f"long{number}", "a", prompt=10, tokens=150)
    rig.submit("many", "a", prompt=10, tokens=150, num_choices=48)
    for _ in range(200):
        if rig.commands:
            rig.finish_load()
        rig.step()
        (crowd,) = rig.driver.home.node.instances.values()
        if len(crowd.running) > 40:
            break
    assert len(crowd.running) > 40
    began = rig.clock.now
    rig.submit("new", model, prompt=50, tokens=5)
    step_until(rig, 1, "new")
    assert rig.clock.now - began < 2.0 + 0.5
    rig.run(limit=60_000)
    for id, choice in list(rig.events):
        assert rig.tokens(id, choice) == expected(id, *((50, 5) if id == "new" else (10, 150)))


def test_a_prompt_that_will_be_late_is_begun_at_once_where_nothing_but_answers_is_computed() -> None:
    """Its target is 1.2 s, beside a stream it takes seven: it does not wait for the time to go by first."""
    rig = Rig("ab", memory=WEIGHT_BYTES * 2 + 60_000 * KV_BYTES, max_kv_tokens=30_000, token_s=0.01, max_batch=256)
    for prompt in (4, 8, 16, 32, 64, 600):  # what they take is known then
        rig.submit(f"learnt{prompt}", "a", prompt=prompt, tokens=2)
        step_until(rig, 2, f"learnt{prompt}")
    rig.submit("stream", "b", prompt=10, tokens=3000)
    rig.submit("first", "a", prompt=600, tokens=2)
    step_until(rig, 2, "first")
    began = rig.clock.now
    for number in range(2):
        rig.submit(f"late{number}", "a", prompt=600, tokens=2)
    instance = next(one for one in rig.driver.home.node.instances.values() if one.model == "a")
    while not instance.waiting:
        rig.step()
    assert rig.clock.now - began < 1.0
    assert len(instance.waiting) == 1, "one at a time"
    assert instance.waiting[0].tpot_s == pytest.approx(0.25, rel=0.1), "its pace can be kept"
    step_until(rig, 1, "late1")
    assert not any(one.early_due_s for one in rig.controller.seeker.works.values())
    rig.run(limit=60_000)
    assert rig.tokens("late1") == expected("late1", 600, 2)
    assert rig.tokens("stream") == expected("stream", 10, 3000)


def test_running_answers_slow_down_for_a_newcomer_when_time_is_what_there_is_not() -> None:
    rig = make_crowded("streams", memory_tokens=20_000, token_s=0.0068)  # 32 of them just keep their pace of 0.25 s
    rig.submit("new", "b", prompt=20, tokens=5)
    step_until(rig, 5, "new")
    assert rig.clock.now < 100.0 + 180 * 0.22, "before the long ones ended"


@pytest.mark.parametrize("kind", ["choices", "streams"])
def test_targets_that_cannot_be_kept_are_refused_when_their_time_is_over(kind: str) -> None:
    rig = make_crowded(kind)
    for number in range(20):
        rig.submit(f"waits{number}", "b", prompt=30, tokens=50)
    began = rig.clock.now
    names = [f"strict{number}" for number in range(12)]
    for name in names:
        rig.submit(name, "b", prompt=60, tokens=40, ttft_s=1.0, tpot_s=0.04)
    for name in names:
        step_until(rig, 1, name)
    assert any(rig.events[name, 0][0].retry_after_s is not None for name in names)
    assert rig.clock.now - began < 2.0, "its time, and the turn under way"


def test_who_is_refused_is_told_when_it_is_worth_asking_again() -> None:
    rig = make_crowded("streams")
    controller = rig.controller
    rig.submit("early", "b", prompt=20, tokens=5, ttft_s=1.0, tpot_s=0.03)
    step_until(rig, 1, "early")
    for number in range(40):
        rig.submit(f"waits{number}", "b", prompt=30, tokens=50)
    for _ in range(3000):
        if len(controller.seeker.ends._ends_s) == 16 and len(controller.seeker.room) > 10:
            break
        if rig.commands:
            rig.finish_load()
        rig.step()

    def emptied_s() -> float:
        return min(
            len(controller.seeker.room) * (rig.clock.now - controller.seeker.ends._ends_s[0]) / 16, MAX_RETRY_AFTER_S
        )

    before_s = emptied_s()
    rig.submit("strict", "b", prompt=20, tokens=5, ttft_s=0.5, tpot_s=0.03)
    step_until(rig, 1, "strict")
    told_s, after_s = rig.events["strict", 0][0].retry_after_s, emptied_s()  # others may have ended in its last step
    assert told_s is not None
    assert any(told_s == pytest.approx(each_s, rel=0.5, abs=1.0) for each_s in (before_s, after_s))
