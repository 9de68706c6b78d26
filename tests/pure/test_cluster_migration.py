"""Live migration over real drivers and the wire's coding: every message waits to be delivered, so that every order of
them, and each death between two of them, can be tried."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from fleet_builders import Fleet
from hypothesis import example, given, settings
from hypothesis import strategies as st
from migration_deaths import STEPS, VICTIMS, end, run, under_way


def fleet_under_way(prompt: int = 20, tokens: int = 30, spoken: int = 5) -> Fleet:
    return under_way(prompt, tokens, spoken)


def run_until_moved(fleet: Fleet, limit: int = 2000, slow: str = "") -> None:
    """`slow` does one thing while the others do four."""
    for count in range(limit):
        if fleet.migrations.completed:
            return
        steps = [one for one in fleet.steps() if (one[1] == slow) is (count % 5 == 0)] or fleet.steps()
        fleet.do(steps[count % len(steps)])
    raise AssertionError("it never moved")


def test_an_answer_moves_while_it_is_spoken_and_nothing_is_said_twice() -> None:
    fleet = fleet_under_way()
    source = fleet.place("r")
    assert fleet.migrate("r")
    before = len(fleet.text["r"])
    run_until_moved(fleet)
    assert fleet.place("r") != source
    assert len(fleet.text["r"]) > before, "the source went on while the destination computed"
    fleet.run()
    fleet.check_end()


def test_the_source_goes_on_for_several_rounds_while_a_long_answer_is_recomputed() -> None:
    fleet = fleet_under_way(prompt=200, tokens=150, spoken=60)
    fleet.migrate("r")
    (migration,) = fleet.migrations._by_request.values()
    (slow,) = fleet.peers.keys() - {fleet.place("r")}
    run_until_moved(fleet, slow=slow)
    assert migration.rounds >= 2
    fleet.run()
    fleet.check_end()


def test_an_answer_with_a_long_gap_goes_on_with_the_first_iteration_that_computes_it() -> None:
    fleet = fleet_under_way(prompt=200, tokens=150, spoken=60)
    fleet.migrate("r")
    (slow,) = fleet.peers.keys() - {fleet.place("r")}
    run_until_moved(fleet, slow=slow)
    there = fleet.peers[slow]
    while there.inbox:
        there.handle_one()
    (instance,) = there.driver.home.node.instances.values()
    assert fleet.choice("r") not in instance.running, "there is more to compute than a decode takes along"
    there.take_turn()
    assert fleet.choice("r") in instance.running
    fleet.run()
    fleet.check_end()


def test_an_answer_that_ends_while_it_is_moved_has_ended_once() -> None:
    fleet = fleet_under_way(tokens=7, spoken=5)
    fleet.migrate("r")
    fleet.run()
    assert fleet.migrations.abandoned == 1
    fleet.check_end()


def test_nobody_else_takes_it_and_it_stays() -> None:
    fleet = fleet_under_way()
    (other,) = fleet.peers.keys() - {fleet.place("r")}
    fleet.kill(other)
    assert fleet.migrate("r")
    fleet.run()
    assert fleet.migrations.completed == 0
    fleet.check_end()


def test_a_model_starts_where_its_weights_are_there_soonest() -> None:
    fleet = Fleet("ABC", load_s={"A": 4.0, "B": 0.2, "C": 2.0})
    fleet.submit("r")
    fleet.run()
    assert [len(peer.driver.runners) for peer in fleet.peers.values()] == [0, 1, 0]
    fleet.check_end()


def test_an_answer_moves_to_where_the_model_starts_soonest() -> None:
    fleet = Fleet("ABC", load_s={"A": 4.0, "B": 0.2, "C": 2.0})
    fleet.submit("r", tokens=60)
    while len(fleet.text["r"]) < 5:
        fleet.do(fleet.steps()[0])
    assert fleet.place("r") == "B"
    fleet.migrate("r")
    run_until_moved(fleet)
    assert fleet.place("r") == "C"
    fleet.run()
    fleet.check_end()


def steps_of_a_migration() -> int:
    fleet = fleet_under_way()
    fleet.migrate("r")
    count = 0
    while not fleet.migrations.completed or count < 5:
        steps = fleet.steps()
        fleet.do(steps[count % len(steps)])
        count += 1
    return count + 10  # and some after it


DEATHS = {
    "source": ["source"],
    "destination": ["destination"],
    "both": ["source", "destination"],
    "controller": ["controller"],
    "client": ["client"],
    "controller and source": ["controller", "source"],
    "controller and destination": ["controller", "destination"],
    "everybody": ["source", "destination", "controller"],
    "the source's connection": ["cut source"],
    "the destination's connection": ["cut destination"],
    "both connections": ["cut source", "cut destination"],
}


@pytest.mark.parametrize("who", DEATHS)
def test_whoever_dies_between_any_two_steps_the_answer_ends_right_and_once(who: str) -> None:
    """The gateway that has the clients is the client here: with it they go."""
    for at in range(steps_of_a_migration()):
        fleet = fleet_under_way()
        source = fleet.place("r")
        (destination,) = fleet.peers.keys() - {source}
        fleet.migrate("r")
        for count in range(at):
            steps = fleet.steps()
            if steps:
                fleet.do(steps[count % len(steps)])
        for victim in DEATHS[who]:
            end(fleet, victim, {"source": source, "destination": destination})
        began_s = fleet.clock.now
        fleet.run()
        fleet.check_end()
        assert fleet.clock.now - began_s < 10.0, "it waited for something that had nothing to do with it"


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
def test_whoever_of_the_four_dies_at_a_step_the_answer_ends_right_and_once(step: int) -> None:
    """Each of them alone, and all of them together in every combination. `migration_deaths` by itself also has them die
    at different steps."""
    for count in range(1, len(VICTIMS) + 1):
        for victims in combinations(VICTIMS, count):
            run(dict.fromkeys(victims, step))


def test_those_who_die_one_after_the_other_leave_nothing_behind() -> None:
    run({"destination": 1, "source": 2, "controller": 4, "gateway": 6})
    run({"controller": 0, "destination": 3, "source": 5})


def test_a_destination_that_never_catches_up_is_given_up_and_the_answer_stays() -> None:
    fleet = fleet_under_way(tokens=300)
    source = fleet.place("r")
    (destination,) = fleet.peers.keys() - {source}
    fleet.migrate("r")
    for count in range(100):  # it accepts, and then loads for ever
        steps = [one for one in fleet.steps() if one != ("load", destination)]
        fleet.do(steps[count % len(steps)])
    (migration,) = fleet.migrations._by_request.values()
    assert migration.step == "computing"
    fleet.clock.now += 1000.0
    fleet.cluster.wake(fleet.clock.now)
    assert not len(fleet.migrations)
    assert fleet.migrations.abandoned == 1
    assert fleet.place("r") == source
    fleet.run()
    fleet.check_end()


@settings(max_examples=120, deadline=None)
@example(164)  # one that was silent says that it has caught up, when somebody else was asked
@example(2244)  # a copy is given up while its source, asked to, lets go of the request
@example(15573)  # a copy is withdrawn while the same node is asked to take the request itself
@given(st.integers(0, 2**32))
def test_random_interleavings_with_deaths_and_cancellations_end_every_request_right(seed: int) -> None:
    rng = Random(seed)
    load_s = {name: rng.choice((0.0, 0.2, 4.0)) for name in "ABC"}
    fleet = Fleet("ABC", "mn", memory=rng.choice((1_600_000, 3_200_000, 10_000_000)), load_s=load_s)
    for number in range(rng.randrange(1, 7)):
        fleet.submit(f"r{number}", rng.choice("mn"), rng.randrange(1, 60), rng.randrange(1, 60))
    for _ in range(rng.randrange(20, 400)):
        steps = fleet.steps()
        if steps:
            fleet.do(rng.choice(steps))
        else:
            fleet.advance()
        draw, ids = rng.random(), list(fleet.requests)
        if draw < 0.10:
            fleet.migrate(rng.choice(ids))
        elif draw < 0.11:
            name = rng.choice("ABC")
            fleet.kill(name)
            if name not in fleet.peers:
                fleet.join(name)
        elif draw < 0.12:
            fleet.cancel(rng.choice(ids))
        elif draw < 0.13 and fleet.peers:
            fleet.cut(rng.choice(sorted(fleet.peers)))
        elif draw < 0.135:
            fleet.kill_controller()
        elif draw < 0.14:
            for peer in fleet.peers.values():
                peer.pauses = rng.randrange(4)
    fleet.run(rng)
    fleet.check_end()
