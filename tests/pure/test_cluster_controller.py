"""The controller: order of candidates, the steps of placement, queueing, giving up, and losing nodes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from sim_builders import make_hosting, make_node, make_work, serve_all

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Decision, How, Moving, Placed, Queued, RequestRejected
from dovetail.cluster.local import LocalNode
from dovetail.cluster.request import RequestState
from dovetail.cluster.start_order import MAX_CANDIDATES
from dovetail.node.node import Node
from dovetail.node.protocol import Evicted
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.lateness import ServeLate
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Phase, RequestRecord, Work
from dovetail.sim.baselines import FinishingBegun, GpusOnly, ReclaimAlike
from dovetail.sim.compositions import ABLATIONS, SLINFER
from dovetail.sim.memory_order import QueueingByMemory


class Counted:
    """Requests have as many tokens as their records say (`cluster.request.TokenCounts`)."""

    def num_tokens(self, work: RequestState) -> int | None:
        return work.produced

    def last_record(self, work: RequestState) -> RequestRecord:
        return work.record()


def make_cluster(*nodes: Node, composition: Composition | None = None) -> Controller:
    for index, node in enumerate(nodes):
        node._next_instance = index * 1000
    return Controller([LocalNode(NodeRuntime(node)) for node in nodes], composition or SLINFER, Counted())


def handle_of(controller: Controller, index: int = 0) -> LocalNode:
    handle = controller.seeker.placer.nodes[index]
    assert isinstance(handle, LocalNode)
    return handle


def said(controller: Controller) -> list[Decision]:
    decisions, controller.seeker.outbox = controller.seeker.outbox, []
    return decisions


def submit(controller: Controller, work: Work, now: float = 0.0) -> Decision:
    controller.queued.begin([work], now)
    return said(controller)[-1]


def test_a_request_goes_to_a_cpu_first() -> None:
    gpu, cpu = make_node(name="gpu"), make_node(kind=DeviceKind.CPU, name="cpu")
    placed = submit(make_cluster(gpu, cpu), make_work())
    assert isinstance(placed, Placed)
    assert (placed.node.name, placed.how) == ("cpu", How.START)


def test_a_request_that_a_cpu_cannot_serve_in_time_goes_to_a_gpu() -> None:
    cpu = make_node(kind=DeviceKind.CPU, name="cpu", hosting=make_hosting(in_place=True, prefill_s_per_k=3.0))
    placed = submit(make_cluster(cpu, make_node(name="gpu")), make_work(input_tokens=1024))
    assert isinstance(placed, Placed)
    assert placed.node.name == "gpu"


def test_without_cpus_only_gpus_are_asked() -> None:
    cpu, gpu = make_node(kind=DeviceKind.CPU, name="cpu"), make_node(name="gpu")
    placed = submit(make_cluster(cpu, gpu, composition=SLINFER.having(nodes=GpusOnly())), make_work())
    assert isinstance(placed, Placed)
    assert placed.node.name == "gpu"


def test_a_second_request_joins_the_instance_of_the_first() -> None:
    controller = make_cluster(make_node(), make_node(name="other"))
    first = submit(controller, make_work(0))
    second = submit(controller, make_work(1))
    assert isinstance(first, Placed)
    assert isinstance(second, Placed)
    assert (second.instance, second.how) == (first.instance, How.JOIN)


def test_best_effort_goes_where_nobody_else_has_work() -> None:
    """Beside a model that serves others on one node, it starts the model anew on a free one, which all of it shares."""
    controller = make_cluster(make_node(name="busy"), make_node(name="free"), composition=SERVED)
    submit(controller, make_work(0, "a"))
    placed = []
    for id, model in enumerate("aab", start=1):
        work = make_work(id, model, ttft_s=300.0, tpot_s=60.0)
        work.is_best_effort, work.is_strict = True, False
        placed.append(submit(controller, work))
        serve_all(handle_of(controller, 1).runtime, 0.0)
    found = [(one.node.name, one.how) for one in placed if isinstance(one, Placed)]
    assert found == [("free", How.START), ("free", How.JOIN), ("free", How.START)]
    waited_for = submit(controller, make_work(9, "a"))
    assert isinstance(waited_for, Placed)
    assert (waited_for.node.name, waited_for.how) == ("busy", How.JOIN)


def test_whoever_is_waited_for_finds_each_instance_that_best_effort_keeps_open() -> None:
    """No second one can be started beside it, so that else its node would be lost to the model."""
    slow = make_hosting(decode_s=0.2)
    nodes = [make_node(name="slow", hosting=slow), make_node(name="too slow", hosting=slow), make_node(name="quick")]
    controller = make_cluster(*nodes, composition=SERVED)
    for index, node in enumerate(nodes):
        work = make_work(index, "a", ttft_s=300.0, tpot_s=60.0)
        work.is_best_effort, work.is_strict = True, False
        instance = node.start(work, 0.0)
        assert isinstance(instance, int)
        serve_all(handle_of(controller, index).runtime, 0.0)
        view = controller.seeker.placer.add_instance(handle_of(controller, index), instance, "a", work.phase)
        view.count(1, is_best_effort=True)
    placed = submit(controller, make_work(9, "a", tpot_s=0.1))
    assert isinstance(placed, Placed)
    assert (placed.node.name, placed.how) == ("quick", How.JOIN)


def test_a_request_without_a_place_is_queued_and_dropped_when_its_token_is_due() -> None:
    controller = make_cluster(make_node(hosting=make_hosting(slots=1)))
    submit(controller, make_work(0, "a"))
    queued = submit(controller, make_work(1, "b", ttft_s=1.0))
    assert isinstance(queued, Queued)
    assert queued.refusals == {"slots": 1}
    assert controller.queued.next_wake_s() == 0.25
    controller.queued.wake(0.9)
    assert isinstance(said(controller)[-1], Queued)
    assert controller.queued.next_wake_s() == pytest.approx(1.001)
    controller.queued.wake(1.001)
    refused = said(controller)[-1]
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "deadline"
    assert not controller.queued


def test_a_request_that_no_hardware_can_serve_is_refused_at_once() -> None:
    slow = make_node(hosting=make_hosting(decode_s=0.9))
    dropped = submit(make_cluster(slow), make_work())
    assert isinstance(dropped, RequestRejected)
    assert dropped.reason == "hardware"


def test_who_came_before_any_node_is_told_when_only_nodes_without_room_for_it_have_come() -> None:
    controller = make_cluster(composition=SLINFER.having(lateness=ServeLate()))
    submit(controller, make_work(0, "a", ttft_s=1.0))
    small = LocalNode(NodeRuntime(make_node(memory_gib=1)))
    assert small.offer_of("a") is not None
    controller.seeker.placer.add_node(small)
    controller.seeker.room.changed()
    controller.queued.wake(1.001)
    refused = said(controller)[-1]
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.retry_after_s) == ("too_large", None)


def test_a_larger_batch_preempts_a_smaller_neighbour_that_can_go_elsewhere() -> None:
    composition = SLINFER.having(floor_tokens=0, paced_from_first_token=False)
    tight = make_node(memory_gib=21.7, name="tight", composition=composition)
    other = make_node(name="other", composition=composition)
    controller = make_cluster(tight)
    for index in range(2):
        submit(controller, make_work(index, "a", 400, ttft_s=5.0))
    submit(controller, make_work(2, "b", 300, ttft_s=5.0))
    source = handle_of(controller)
    serve_all(source.runtime, 0.0)
    controller.seeker.placer.nodes.append(LocalNode(NodeRuntime(other)))
    placed = submit(controller, make_work(3, "a", 1500, ttft_s=5.0))
    assert isinstance(placed, Placed)
    assert (placed.node.name, placed.how) == ("tight", How.PREEMPT)
    (evicted,) = [one for one in source.runtime.mailbox if isinstance(one, Evicted)]
    assert evicted.request.id == 2
    controller.departures.evicted(source, evicted.instance, controller.seeker.works[2], evicted.reason, 0.1)
    moved = said(controller)[-1]
    assert isinstance(moved, Placed)
    assert moved.node.name == "other"


def test_a_neighbour_gives_way_only_if_each_of_its_requests_has_a_node_of_its_own() -> None:
    """That a node would take either of two requests does not mean that it would take both."""
    composition = SLINFER.having(floor_tokens=0, paced_from_first_token=False)
    tight = make_node(memory_gib=22.2, name="tight", composition=composition)
    small = make_node(memory_gib=10.5, name="small", composition=composition)  # room for one of them
    controller = make_cluster(tight)
    for index in range(3):
        submit(controller, make_work(index, "a", 400, ttft_s=5.0))
    for index in range(3, 5):
        submit(controller, make_work(index, "b", 300, ttft_s=5.0))
    runtime = handle_of(controller).runtime
    serve_all(runtime, 0.0)
    controller.seeker.placer.nodes.append(LocalNode(NodeRuntime(small)))
    assert isinstance(submit(controller, make_work(5, "a", 1500, ttft_s=5.0)), Queued)
    assert not [one for one in runtime.mailbox if isinstance(one, Evicted)]


def test_an_overcommitted_node_gives_away_what_another_would_go_on_with() -> None:
    full, free = make_node(name="full"), make_node(name="free")
    controller = make_cluster(full, free)
    work = make_work(0, ttft_s=5.0)
    placed = submit(controller, work)
    assert isinstance(placed, Placed)
    source = handle_of(controller)
    serve_all(source.runtime, 0.0)
    for _ in range(4):
        assert full.next_turn(0.1) is not None
        full.turn_done(0.2, [])
    told = source.runtime.work_of(0).as_of(4).record()
    free.device.up = False
    controller.departures.overcommitted(source, told, 0.2)
    controller.reliever.overcommitted(source, told, 0.2)
    assert said(controller) == [], "nobody would take it: it stays"
    free.device.up = True
    controller.departures.overcommitted(source, told, 0.2)
    controller.reliever.overcommitted(source, told, 0.2)
    moving, moved = said(controller)
    assert isinstance(moving, Moving)
    assert isinstance(moved, Placed)
    assert moved.node.name == "free"
    assert work.produced == 4
    controller.departures.overcommitted(source, told, 0.2)
    controller.reliever.overcommitted(source, told, 0.2)
    assert said(controller) == [], "it is not there any more"


def test_newcomers_are_not_brought_to_a_node_that_owes_memory_to_an_answer() -> None:
    composition = SLINFER.having(floor_tokens=0, lateness=FinishingBegun())
    node = make_node(memory_gib=11.0, composition=composition)  # 1 GiB of KV: 2,048 tokens
    controller = make_cluster(node, composition=composition)
    placed = submit(controller, make_work(0, "a", 1200, ttft_s=5.0))
    assert isinstance(placed, Placed)
    evicted = make_work(1, "a", 1500, ttft_s=5.0)
    evicted.produced = 100
    controller.seeker.works[evicted.id] = evicted
    controller.departures.evicted(handle_of(controller), placed.instance, evicted, "kv_short", 0.0)
    assert isinstance(said(controller)[-1], Queued)
    assert isinstance(submit(controller, make_work(2, "a", 20, ttft_s=5.0)), Queued), "there would be room for it"
    controller.cancel([1], 0.1)
    assert isinstance(submit(controller, make_work(3, "a", 20, ttft_s=5.0)), Placed)


def test_an_evicted_request_is_placed_again_with_its_tokens() -> None:
    node = make_node()
    controller = make_cluster(node)
    work = make_work(0, ttft_s=5.0)
    submit(controller, work)
    handle = handle_of(controller)
    handle.runtime.withdraw(0, 1.0)
    work.produced = 7
    controller.departures.evicted(handle, 0, work, "preempted", 1.0)
    placed = said(controller)[-1]
    assert isinstance(placed, Placed)
    assert handle.runtime.work_of(0).produced == 7


def test_a_lost_node_sends_its_requests_elsewhere() -> None:
    first, second = make_node(name="first"), make_node(name="second")
    controller = make_cluster(first, second)
    placed = submit(controller, make_work(0, ttft_s=5.0))
    assert isinstance(placed, Placed)
    lost = placed.node
    assert isinstance(lost, LocalNode)
    lost.runtime.fail()
    controller.departures.lost(lost, [placed.work], 0.5)
    again = said(controller)[-1]
    assert isinstance(again, Placed)
    assert again.node is not lost


def test_disaggregated_requests_move_to_a_decode_instance_after_their_first_token() -> None:
    node = make_node()
    controller = make_cluster(node, composition=SLINFER.having(**ABLATIONS["pd"]))
    work = make_work(0, ttft_s=5.0)
    placed = submit(controller, work)
    assert isinstance(placed, Placed)
    assert node.instances[placed.instance].phase is Phase.PREFILL
    handle_of(controller).runtime.withdraw(0, 1.0)
    work.produced = 1
    controller.departures.handed_over(handle_of(controller), placed.instance, work, 10**9, 1.0)
    moving = said(controller)[-1]
    assert isinstance(moving, Moving)
    controller.queued.wake(moving.retry_at_s)
    decode = said(controller)[-1]
    assert isinstance(decode, Placed)
    assert node.instances[decode.instance].phase is Phase.DECODE
    assert work.id in node.instances[decode.instance].running


def test_a_request_handed_over_late_asks_for_a_decode_place_before_it_is_given_up() -> None:
    """Requests are dropped for queueing too long (S11); this one has its first token and has not queued yet."""
    node = make_node(hosting=make_hosting(slots=2))
    controller = make_cluster(node, composition=SLINFER.having(**ABLATIONS["pd"]))
    work = make_work()
    submit(controller, work)
    handle_of(controller).runtime.withdraw(0, 9.0)
    work.produced = 1
    controller.departures.handed_over(handle_of(controller), 0, work, 0, 9.0)
    said(controller)
    controller.queued.wake(9.0)
    placed = said(controller)[-1]
    assert isinstance(placed, Placed)
    assert placed.how is How.START


def test_a_request_handed_over_late_that_finds_no_decode_place_is_given_up_on_the_next_try() -> None:
    controller = make_cluster(make_node(hosting=make_hosting(slots=1)), composition=SLINFER.having(**ABLATIONS["pd"]))
    work = make_work()
    submit(controller, work)
    handle_of(controller).runtime.withdraw(0, 9.0)
    work.produced = 1
    controller.departures.handed_over(handle_of(controller), 0, work, 0, 9.0)
    said(controller)
    controller.queued.wake(9.0)
    assert isinstance(said(controller)[-1], Queued)
    controller.queued.wake(9.25)
    assert isinstance(said(controller)[-1], RequestRejected)


def test_in_a_large_cluster_a_start_asks_a_bounded_number_of_nodes() -> None:
    controller = make_cluster(*[make_node(name=f"gpu-{index}") for index in range(200)])
    record = make_work().record()
    assert len(controller.seeker.placer.window(record)) <= MAX_CANDIDATES
    seen = {node.name for _ in range(200) for node in controller.seeker.placer.window(record)}
    assert len(seen) == 200


def test_in_a_large_cluster_nodes_that_seem_full_are_not_asked() -> None:
    nodes = [make_node(name=f"gpu-{index}", memory_gib=13.0) for index in range(40)]
    controller = make_cluster(*nodes)
    for node in nodes[:38]:
        assert isinstance(node.start(make_work(model="b"), 0.0), int)
    window = controller.seeker.placer.window(make_work(1).record())
    assert {node.name for node in window} == {"gpu-38", "gpu-39"}
    for node in nodes[38:]:
        node.start(make_work(model="b"), 0.0)
    assert controller.seeker.placer.window(make_work(1).record()), "somebody says why there is no place"


def test_what_was_evicted_for_want_of_memory_does_not_come_back_at_once() -> None:
    """The node has a block for it and not the next one: they would go round in circles at one moment."""
    node, other = make_node(name="node"), make_node(name="other")
    other.device.up = False
    controller = make_cluster(node, other)
    work = make_work(0, ttft_s=5.0)
    placed = submit(controller, work)
    assert isinstance(placed, Placed)
    source = handle_of(controller)
    source.runtime.withdraw(0, 0.0)
    work.produced = 3
    controller.departures.evicted(source, placed.instance, work, "kv_short", 0.0)
    assert isinstance(said(controller)[-1], Queued)
    assert controller.queued.next_wake_s() is not None
    controller.queued.wake(0.25)
    assert isinstance(said(controller)[-1], Placed)


def test_a_request_with_an_adapter_goes_where_its_model_would_on_any_device() -> None:
    cpu = make_node(kind=DeviceKind.CPU, name="cpu", hosting=make_hosting(in_place=True, prefill_s_per_k=3.0))
    controller = make_cluster(make_node(name="gpu"), cpu)
    plain, adapted = (make_work(id, input_tokens=1024) for id in range(2))
    adapted.adapter = "a"
    for work in (plain, adapted):
        placed = submit(controller, work)
        assert isinstance(placed, Placed)
        assert placed.node.name == "gpu"
    assert Work.of(adapted.record()).adapter == "a"


BY_MEMORY = SLINFER.having(queueing=QueueingByMemory)


def full_cluster(composition: Composition) -> Controller:
    """A node with one instance, of model "a", which has room for requests and for no further weights."""
    controller = make_cluster(
        make_node(hosting=make_hosting(slots=1), composition=composition, memory_gib=40.0), composition=composition
    )
    assert isinstance(submit(controller, make_work(0, "a")), Placed)
    return controller


def answer(controller: Controller, tokens_of: Callable[[str], int], count: int = 200) -> None:
    """So many answers of several models end."""
    for number in range(count):
        work = make_work(1000 + number, "xyz"[number % 3])
        work.produced = tokens_of(work.model)
        controller.departures.finished(handle_of(controller), 0, work, 0.0)


def alike_cluster(composition: Composition) -> Controller:
    """The same, which has seen that models answer at like length."""
    controller = full_cluster(composition)
    random = Random(0)
    answer(controller, lambda model: random.randint(50, 150))
    return controller


def test_by_deadline_whoever_is_due_first_asks_first() -> None:
    controller = full_cluster(SLINFER)
    for id, (model, ttft_s) in enumerate([("b", 3.0), ("c", 2.0), ("c", 4.0)], start=1):
        assert isinstance(submit(controller, make_work(id, model, ttft_s=ttft_s)), Queued)
    assert [work.id for work in controller.queued.in_order()] == [2, 1, 3]


def test_by_memory_whoever_shares_weights_with_more_that_wait_asks_first() -> None:
    controller = alike_cluster(BY_MEMORY)
    for id, (model, ttft_s) in enumerate([("b", 2.0), ("c", 4.0), ("c", 3.0)], start=1):
        assert isinstance(submit(controller, make_work(id, model, ttft_s=ttft_s)), Queued)
    assert [work.id for work in controller.queued.in_order()] == [3, 2, 1]


def test_by_memory_a_model_that_is_called_often_asks_first_and_calls_are_forgotten() -> None:
    controller = alike_cluster(BY_MEMORY)
    for id in range(10, 16):
        submit(controller, make_work(id, "b", ttft_s=1.0))
    controller.queued.wake(2.0)  # these are given up; what is known of their model is not
    assert not controller.queued
    for id, model in ((1, "c"), (2, "b")):
        submit(controller, make_work(id, model, arrival_s=2.0, ttft_s=200.0), now=2.0)
    assert [work.id for work in controller.queued.in_order()] == [2, 1]
    controller.queued.wake(150.0)
    submit(controller, make_work(3, "c", arrival_s=150.0, ttft_s=200.0), now=150.0)
    assert [work.id for work in controller.queued.in_order()] == [1, 3, 2]


def test_by_memory_answers_that_have_begun_go_first_and_short_contexts_before_long_ones() -> None:
    controller = alike_cluster(BY_MEMORY)
    begun = make_work(3, "c", 3000, ttft_s=9.0)
    begun.produced = 5
    submit(controller, begun)
    for id, tokens in ((1, 2000), (2, 100)):
        submit(controller, make_work(id, "b", tokens, ttft_s=9.0))
    assert [work.id for work in controller.queued.in_order()] == [3, 2, 1]


def test_weights_are_weighed_by_what_a_node_that_reads_them_offers() -> None:
    cpu, gpu = make_node(kind=DeviceKind.CPU, name="cpu"), make_node(name="gpu")
    hosting = gpu.device.hostings["a"]
    tokens = hosting.weight_bytes / hosting.kv_bytes_per_token
    assert make_cluster(cpu, gpu).seeker.placer.weights_tokens("a") == tokens
    assert make_cluster(cpu).seeker.placer.weights_tokens("a") == 0.0


def test_by_memory_is_by_deadline_while_nobody_knows_whether_models_answer_alike() -> None:
    controller = full_cluster(BY_MEMORY)
    for id, (model, ttft_s) in enumerate([("b", 2.0), ("c", 4.0), ("c", 3.0)], start=1):
        submit(controller, make_work(id, model, ttft_s=ttft_s))
    assert [work.id for work in controller.queued.in_order()] == [1, 3, 2]
    random = Random(1)
    answer(controller, lambda model: random.randint(50, 150))
    assert [work.id for work in controller.queued.in_order()] == [3, 2, 1]
    answer(controller, lambda model: {"x": 5, "y": 100, "z": 2000}[model] + random.randint(0, 3))
    assert [work.id for work in controller.queued.in_order()] == [1, 3, 2]


def idle_cluster(composition: Composition) -> Controller:
    """A node whose only place is taken by an idle instance, and a request of another model that waits for it."""
    controller = make_cluster(make_node(composition=composition, memory_gib=15.0), composition=composition)
    assert isinstance(submit(controller, make_work(0, "a")), Placed)
    source = handle_of(controller)
    serve_all(source.runtime, 0.0)
    source.runtime.withdraw(0, 0.0)
    controller.seeker.left(source, 0, is_best_effort=False)
    assert isinstance(submit(controller, make_work(1, "b", ttft_s=9.0)), Queued)
    return controller


@pytest.mark.parametrize("is_alike", [True, False])
def test_an_idle_instance_gives_way_to_whoever_waits_while_models_answer_alike(is_alike: bool) -> None:
    controller = idle_cluster(SLINFER.having(reclaiming=ReclaimAlike, keep_alive_s=600.0))
    random = Random(2)
    answer(controller, lambda model: random.randint(50, 150) if is_alike else 10 ** ("xyz".index(model) + 1))
    controller.queued.wake(0.25)
    assert isinstance(said(controller)[-1], Placed if is_alike else Queued)
