"""The seven steps of a live migration, and who may die at which: source, destination, controller, and the gateway that
has the clients. `python tests/pure/migration_deaths.py` tries every combination, each of the four at any step or never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

from fleet_builders import Fleet

from dovetail import messages
from dovetail.cluster.migration import Step
from dovetail.node import protocol

VICTIMS = ("source", "destination", "controller", "gateway")
STEPS = (
    "the destination is asked",
    "the destination loads the model",
    "the destination computes",
    "more tokens are sent to it",
    "the source is asked to let go",
    "the source has let go",
    "the destination goes on",
)
PROMPT, TOKENS, SPOKEN = 60, 90, 20
Deaths = Mapping[str, int]  # the step at which each victim dies; one that is not named lives


def under_way(prompt: int = PROMPT, tokens: int = TOKENS, spoken: int = SPOKEN) -> Fleet:
    """One answer that has said something."""
    fleet = Fleet()
    fleet.submit("r", prompt=prompt, tokens=tokens)
    count = 0
    while len(fleet.text["r"]) < spoken:
        steps = fleet.steps()
        fleet.do(steps[count % len(steps)])
        count += 1
    return fleet


def step_of(fleet: Fleet, destination: str) -> int | None:
    """The step that the migration of the only request is in; None before and after."""
    migration = next(iter(fleet.migrations._by_request.values()), None)
    if migration is None:
        return 6 if fleet.migrations.completed and "r" not in fleet.ended else None
    if migration.step is Step.RELEASING:
        return 5 if _has_let_go(fleet, migration.source.name) else 4
    if fleet.peers[destination].loads:
        return 1
    return 0 if migration.step is Step.CHOOSING else 2 if migration.rounds == 0 else 3


def _has_let_go(fleet: Fleet, source: str) -> bool:
    said = [messages.decode_for_gateway(one) for one in fleet.peers[source].outbox]
    return any(isinstance(one, messages.Reply) and isinstance(one.answer, protocol.TookBack) for one in said)


def pace(fleet: Fleet, count: int, destination: str) -> None:
    """The destination does one thing while the source does four: an answer moves in several rounds."""
    steps = [one for one in fleet.steps() if (one[1] == destination) is (count % 5 == 0)] or fleet.steps()
    if steps:
        fleet.do(steps[count % len(steps)])


@cache
def moments() -> tuple[int, ...]:
    """After how many things that happen each step is first under way, if nobody dies."""
    fleet = under_way()
    (destination,) = fleet.peers.keys() - {fleet.place("r")}
    fleet.migrate("r")
    found: dict[int, int] = {}
    for count in range(2000):
        step = step_of(fleet, destination)
        if step is not None:
            found.setdefault(step, count)
        if "r" in fleet.ended:
            break
        pace(fleet, count, destination)
    assert sorted(found) == list(range(len(STEPS))), f"steps {sorted(found)} of a migration were seen"
    assert list(found) == sorted(found), "steps come in another order"
    return tuple(found[step] for step in range(len(STEPS)))


def run(deaths: Deaths) -> Fleet:
    """A migration in which each victim dies when its step would be under way. Every request ends right, none twice."""
    fleet = under_way()
    source = fleet.place("r")
    (destination,) = fleet.peers.keys() - {source}
    fleet.migrate("r")
    names = {"source": source, "destination": destination}
    for count in range(max((moments()[step] for step in deaths.values()), default=0) + 1):
        for victim in VICTIMS:
            if victim in deaths and moments()[deaths[victim]] == count:
                end(fleet, victim, names)
        pace(fleet, count, destination)
    began_s = fleet.clock.now
    fleet.run()
    fleet.check_end()
    assert fleet.clock.now - began_s < 10.0, "it waited for something that had nothing to do with it"
    return fleet


def end(fleet: Fleet, victim: str, names: Mapping[str, str]) -> None:
    """`cut NAME` breaks a connection. A worker that dies is started again; the gateway takes its clients with it."""
    verb, _, name = victim.rpartition(" ")
    if victim == "controller":
        fleet.kill_controller()
    elif victim in ("client", "gateway"):
        fleet.cancel("r")
    elif verb == "cut":
        fleet.cut(names[name])
    else:
        fleet.kill(names[name])
        fleet.join(names[name])


def every_combination() -> Iterator[Deaths]:
    """Each victim at one of the steps, or never."""
    for chosen in product((None, *range(len(STEPS))), repeat=len(VICTIMS)):
        yield {victim: step for victim, step in zip(VICTIMS, chosen, strict=True) if step is not None}


def main() -> int:
    began, failures, count = time.monotonic(), 0, 0
    for deaths in every_combination():
        count += 1
        try:
            run(deaths)
        except AssertionError as error:
            failures += 1
            print(f"{dict(deaths)}: {error}", flush=True)
    print(f"{count} combinations of {len(VICTIMS)} deaths at {len(STEPS)} steps, {failures} ended wrong")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
