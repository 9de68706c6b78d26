"""What an eviction leaves behind: no node stays closed, nobody goes in vain, nothing is kept of what has ended."""

from __future__ import annotations

from driver_builders import KV_BYTES, WEIGHT_BYTES, Rig, expected
from fleet_builders import Fleet
from sim_builders import make_node, make_work, serve_memory
from test_sim_tiers import set_load

from dovetail.node.instance import Instance
from dovetail.node.node import Node
from dovetail.node.protocol import Evicted, Propose
from dovetail.policy.memory import Account, DemandByModel, Ledger, Part
from dovetail.policy.resizing import InPlace
from dovetail.sim.baselines import Unlimited
from dovetail.sim.compositions import SLINFER

KNOBS = SLINFER.having(floor_tokens=0, watermark=0.0, resizing=InPlace(), memory=DemandByModel, sharing=Unlimited())


def test_a_prompt_that_is_evicted_in_parts_leaves_the_node_open_to_newcomers() -> None:
    rig = Rig("a", memory=WEIGHT_BYTES + 4000 * KV_BYTES, max_kv_tokens=4000)
    for number in range(8):
        rig.submit(f"r{number}", tokens=300, prompt=20)
    rig.submit("long", prompt=520, tokens=20)
    node = rig.driver.home.node
    while not (begun := [work for one in node.instances.values() for work in one.waiting if work.computed > 100]):
        if rig.commands:
            rig.finish_load()
        rig.step()
    (instance,) = node.instances.values()
    node.device.evict(instance, begun[0], "kv_short")
    rig.driver.home.changed(rig.clock.now)
    rig.read()
    rig.run()
    assert rig.tokens("long") == expected("long", 520, 20)
    rig.clock.now += 120.0
    rig.submit("newcomer", prompt=20)
    rig.run()
    assert rig.tokens("newcomer") == expected("newcomer", 20)


def begun_prompts(*, holds: bool) -> tuple[Node, int]:
    """A node whose instance of a has a running request and two prompts, of which none or one has begun."""
    node = make_node(memory_gib=10.7, composition=KNOBS.having(part_s=0.05, paced_from_first_token=False))
    for _ in range(100):
        node.device.lengths.answered("a", 1)
    instance = node.start(make_work(0, input_tokens=500, ttft_s=1.0), 0.0)
    assert isinstance(instance, int)
    serve_memory(node, 0.0)
    now = 0.0
    while not node.instances[instance].running:
        assert node.next_turn(now) is not None
        now += 0.05
        node.turn_done(now, [])
        serve_memory(node, now)
    for id in (1, 2):
        assert node.join(instance, make_work(id, input_tokens=300, arrival_s=now, ttft_s=9.0 - id), now) is None
    serve_memory(node, now)
    if holds:
        (work,) = [one for one in node.instances[instance].waiting if one.id == 2]
        node.instances[instance].held_tokens += 160 + node.instances[instance].hosting.block_tokens
        work.computed = 160
        node.instances[instance].refresh()
    return node, instance


def cut(node: Node, instance: Instance, blocks: int) -> None:
    """Its pool has so many blocks, and no more can be had."""
    node.residency.resize(instance, blocks * instance.hosting.block_tokens)
    serve_memory(node, 1.0)
    node.pools._enlarge = lambda *_: False  # type: ignore[method-assign]


def test_only_requests_that_hold_blocks_are_evicted_for_want_of_memory() -> None:
    node, number = begun_prompts(holds=True)
    instance = node.instances[number]
    cut(node, instance, instance.used_blocks())
    node.pools.make_room(instance, 1.0)
    evicted = [one.request.id for one in node.outbox if isinstance(one, Evicted)]
    assert evicted == [2], "the prompt that has not begun holds nothing, and was evicted first"


def test_a_prompt_that_fits_nowhere_goes_alone() -> None:
    node, number = begun_prompts(holds=False)
    instance = node.instances[number]
    (prompt,) = [one for one in instance.waiting if one.id == 1]
    cut(node, instance, instance.used_blocks() + 2)
    node.pools.make_room(instance, 1.0, prompt)
    evicted = [one.request.id for one in node.outbox if isinstance(one, Evicted)]
    assert evicted == [1]


def test_a_pool_whose_instance_is_in_a_turn_lends_nothing() -> None:
    """The blocks of the prompts that the turn computes are counted at its end."""
    node = make_node(memory_gib=20.8, composition=KNOBS)
    for _ in range(100):
        node.device.lengths.answered("b", 500)
        node.device.lengths.answered("a", 20)
    lender = node.start(make_work(0, "b", input_tokens=200, ttft_s=0.5), 0.0)
    borrower = node.start(make_work(1, "a", input_tokens=700, ttft_s=100.0), 0.0)
    assert isinstance(lender, int)
    assert isinstance(borrower, int)
    serve_memory(node, 0.0)
    turn = node.next_turn(0.0)
    assert turn is not None
    assert turn.instance.id == lender
    before = node.residency.planned_kv_tokens(turn.instance)
    assert not node.pools._borrow(node.instances[borrower], 1100)
    assert node.residency.planned_kv_tokens(turn.instance) == before


def test_a_closed_instance_leaves_no_account() -> None:
    ledger = Ledger(100)
    assert not ledger.issue(Account(Part.WEIGHTS, 1), 0)
    assert not ledger._accounts


def test_nobody_moves_for_a_start_unless_everybody_can() -> None:
    """Two answers of m are on A; B has room for one of them. Neither moves, and n starts when they have ended."""
    fleet = Fleet("AB", "mn", memory=1_500_000)
    for node, model, load_s in (("A", "m", 0.1), ("A", "n", 0.1), ("B", "m", 0.2), ("B", "n", 9.0)):
        set_load(fleet, node, model, load_s)
    for peer in fleet.peers.values():
        for _ in range(100):
            peer.driver.home.node.device.lengths.answered("m", 3)
    fleet.submit("r", "m", prompt=20, tokens=120)
    while not fleet.text["r"]:
        fleet.do(fleet.steps()[0])
    fleet.submit("q", "m", prompt=20, tokens=120)
    while not fleet.text["q"]:
        fleet.do(fleet.steps()[0])
    assert fleet.place("r") == fleet.place("q") == "A"
    ask = fleet.peers["B"].driver.ask

    def refuse_q(question: object, request: object = None) -> object:
        if isinstance(question, Propose) and question.hold and question.request.id == fleet.choice("q"):
            question = Propose(question.request, 999, question.hold)  # an instance that is not there
        return ask(question, request)  # type: ignore[arg-type]

    fleet.peers["B"].driver.ask = refuse_q  # type: ignore[method-assign, assignment]
    fleet.submit("s", "n", prompt=20, tokens=10)
    fleet.run()
    assert fleet.controller.displacements.abandoned >= 1
    assert fleet.migrations.completed == 0, "one of the two moved in vain"
    fleet.check_end()
