"""Where models may start, in which order, and which instance takes or gives way."""

from __future__ import annotations

from dataclasses import dataclass

from sim_builders import make_hosting

from dovetail.policy.consolidate import Consolidating, ConsolidatingOnBoth, rank_victims
from dovetail.policy.placement import DeviceKind, NodeFacts, can_ever_serve, is_hopeless
from dovetail.policy.startup import Draws, LoadTimes, rank_by_start, start_s
from dovetail.sim.baselines import Packing, Spreading, SpreadStart


@dataclass(frozen=True)
class FakeNode:
    kind: DeviceKind
    in_use: bool
    fullness: float

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts("a", self.kind)


@dataclass(frozen=True)
class FakeInstance:
    batch: int
    on_cpu: bool = False


def test_cpu_nodes_come_first_then_nodes_in_use_then_the_fullest() -> None:
    empty_cpu = FakeNode(DeviceKind.CPU, False, 0.0)
    used_cpu = FakeNode(DeviceKind.CPU, True, 0.1)
    full_gpu = FakeNode(DeviceKind.GPU, True, 9.0)
    half_gpu = FakeNode(DeviceKind.GPU, True, 5.0)
    nodes = [half_gpu, empty_cpu, full_gpu, used_cpu]
    assert Packing().rank(nodes, lambda node: 0.0, Draws()) == [used_cpu, empty_cpu, full_gpu, half_gpu]
    assert SpreadStart().rank(nodes, lambda node: 0.0, Draws()) == [empty_cpu, used_cpu, half_gpu, full_gpu]


def test_a_device_that_breaks_the_slo_even_alone_is_excluded() -> None:
    slow = make_hosting(decode_s=0.3)
    assert not can_ever_serve(slow, 512, 1.0, 0.25)
    fast = make_hosting(decode_s=0.1, prefill_s_per_k=1.0)
    assert can_ever_serve(fast, 512, 1.0, 0.25)
    assert not can_ever_serve(fast, 4096, 1.0, 0.25)


def test_new_requests_go_to_the_largest_batch_on_cpu_first() -> None:
    small, large, cpu = FakeInstance(1), FakeInstance(5), FakeInstance(2, on_cpu=True)
    assert Consolidating().rank([small, large, cpu], 0) == [cpu, large, small]
    assert Spreading().rank([small, large, cpu], 0) == [small, cpu, large]


def test_a_gpu_that_has_the_model_is_asked_however_many_cpus_have_it() -> None:
    cpus = [FakeInstance(batch, on_cpu=True) for batch in (4, 3, 2, 1)]
    gpus = [FakeInstance(9), FakeInstance(8)]
    assert Consolidating().rank([*gpus, *cpus], 0) == cpus[:3]
    assert ConsolidatingOnBoth().rank([*gpus, *cpus], 0) == [*cpus[:2], gpus[0]]
    assert ConsolidatingOnBoth().rank(cpus, 0) == cpus[:3]
    assert ConsolidatingOnBoth().rank([*gpus, *cpus[:2]], 0) == [*cpus[:2], gpus[0]]
    assert ConsolidatingOnBoth().rank([], 0) == []


def test_only_smaller_neighbours_give_way_the_smallest_first() -> None:
    one, two, three = FakeInstance(1), FakeInstance(2), FakeInstance(3)
    assert rank_victims([three, two, one], batch=3) == [one, two]


def test_a_queued_request_is_given_up_when_its_token_is_due() -> None:
    assert not is_hopeless(5.0, 5.0)
    assert is_hopeless(5.0, 5.1)


def test_a_load_is_expected_to_take_what_it_took_and_else_what_others_took() -> None:
    times = LoadTimes()
    assert times.expected_s("a", "disk", 100) == 0.0, "nothing was seen"
    times.observe("a", "disk", 100, 2.0)
    times.observe("a", "host", 100, 0.1)
    assert times.expected_s("a", "disk", 100) == 2.0
    assert times.expected_s("b", "disk", 400) == 8.0, "by the bandwidth of the tier"
    times.observe("a", "disk", 100, 3.0)
    assert 2.0 < times.expected_s("a", "disk", 100) < 3.0, "corrected by what happened"
    assert times.expected_s("a", "host", 100) == 0.1


def test_what_has_to_come_from_another_machine_is_thought_slow_until_it_was_seen() -> None:
    size = 10**9
    times = LoadTimes()
    assert times.expected_s("a", "neighbour", size) == 8.0 > times.expected_s("a", "disk", size)
    here, empty = FakeNode(DeviceKind.CPU, False, 0.0), FakeNode(DeviceKind.CPU, True, 0.5)
    starts = {here: times.expected_s("a", "disk", size), empty: times.expected_s("a", "neighbour", size)}
    ranked = rank_by_start([empty, here], starts.__getitem__)
    assert ranked == [here, empty], "whoever has the weights is asked first"
    times.observe("a", "neighbour", size, 2.0)
    assert times.expected_s("a", "neighbour", size) == 2.0
    assert times.expected_s("b", "neighbour", 2 * size) == 4.0


def test_a_model_starts_where_it_is_there_soonest_and_packing_decides_among_equals() -> None:
    full = FakeNode(DeviceKind.CPU, True, 9.0)
    half = FakeNode(DeviceKind.CPU, True, 5.0)
    far = FakeNode(DeviceKind.CPU, True, 99.0)
    gpu = FakeNode(DeviceKind.GPU, True, 1.0)
    seconds = {full: 0.51, half: 0.58, far: 4.0, gpu: 0.0}
    assert rank_by_start([gpu, far, half, full], seconds.__getitem__) == [full, half, far, gpu]


def test_what_waits_on_the_link_counts_before_a_load() -> None:
    assert start_s(link_free_s=12.0, load_s=1.5, now=10.0) == 3.5
    assert start_s(link_free_s=3.0, load_s=1.5, now=10.0) == 1.5
