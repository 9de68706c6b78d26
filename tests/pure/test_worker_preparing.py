"""A request whose grammar or adapter is on its way: it has its place at once, and no turn before that is there."""

from __future__ import annotations

from driver_builders import Rig, expected
from fleet_builders import Fleet

from dovetail.node.protocol import CatchUp


def rig_with(awaited: set[str]) -> Rig:
    rig = Rig("a")
    rig.link.awaited["r"] = awaited
    rig.submit("other", tokens=60)
    rig.submit("r", prompt=20, tokens=4)
    rig.finish_load()
    return rig


def id_of(rig: Rig, name: str) -> int:
    opened = rig.link.cluster.requests.get(name)
    assert opened is not None
    return opened.group


def pass_time(rig: Rig, seconds: float) -> None:
    until = rig.clock.now + seconds
    while rig.clock.now < until:
        if not rig.step():
            rig.clock.now += 0.1


def test_a_slow_grammar_is_no_silent_node_and_holds_nobody() -> None:
    rig = rig_with({"grammar"})
    id = id_of(rig, "r")
    pass_time(rig, 3.0)
    assert rig.controller.works[id].place is not None, "it has its place while its grammar is compiled"
    assert not rig.controller.seeker.decisions.num_silent
    assert rig.tokens("other") == expected("other", 5, 60)
    assert ("r", 0) not in rig.events
    rig.driver.prepared(id, "grammar")
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 4)


def test_it_waits_for_both() -> None:
    rig = rig_with({"grammar", "adapter"})
    id = id_of(rig, "r")
    rig.driver.prepared(id, "adapter")
    pass_time(rig, 1.0)
    assert ("r", 0) not in rig.events
    rig.driver.prepared(id, "grammar")
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 4)


def test_it_may_be_there_before_the_weights_are() -> None:
    rig = Rig("a")
    rig.link.awaited["r"] = {"grammar"}
    rig.submit("r", prompt=20, tokens=4)
    rig.driver.prepared(id_of(rig, "r"), "grammar")
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 4)


def test_one_that_is_given_up_meanwhile_leaves_nothing() -> None:
    rig = rig_with({"grammar"})
    id = id_of(rig, "r")
    rig.abort("r")
    rig.driver.prepared(id, "grammar")
    rig.run()
    assert not rig.driver.states


def test_without_memory_for_its_adapter_it_looks_for_another_place() -> None:
    rig = rig_with({"adapter"})
    id = id_of(rig, "r")
    rig.driver.unprepared(id)
    assert id not in rig.driver.states
    rig.link.awaited.clear()
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 4), "it came back when there was memory"


def test_a_copy_that_its_source_lets_go_of_meanwhile_waits_as_well() -> None:
    fleet = Fleet("AB")
    fleet.submit("r", tokens=30)
    while len(fleet.text["r"]) < 5:
        fleet.do(fleet.steps()[0])
    (name,) = fleet.peers.keys() - {fleet.place("r")}
    there, ask = fleet.peers[name].driver, fleet.peers[name].driver.ask
    there.ask = lambda question, request=None: ask(question, request, ["grammar"])  # type: ignore[method-assign, misc]
    fleet.migrate("r")
    while not (fleet.peers[name].driver.states or fleet.peers[name].inbox):
        fleet.do(fleet.steps()[0])
    while not there.states:
        fleet.peers[name].handle_one()
    (state,) = there.states.values()
    record = there.home.work_of(state.id).record()
    there.obey(CatchUp(record, state.hold, record.produced, is_last=True))
    there.carry_out()
    instance = there.home.node.instances[there.home._places[state.id][0]]
    assert state.id in instance.held, "it would run without its grammar"
