"""Probes of the control core: what a rebuild of it is measured by. `python tests/pure/core_probes.py PROBE`:

containers   dicts, sets, lists and heaps that hold requests while answers run, in a gateway and in a worker
remains      containers of the core that are larger at the end of a storm than at its beginning
lines        lines of cluster, node and policy that the server's pure tests execute and fault storms do not
switches     reads of what a policy switches on and off, in node, cluster and worker
calls        pairs of files that call each other in both directions
names        public names of the control rooms that stand for more than one thing
kept         requests that a node takes and then answers late, where everything takes what was predicted
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import io
import sys
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import aclosing
from enum import Enum
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeGuard

from dovetail.eventlog import EventLog
from dovetail.node.device import turn_rule
from dovetail.policy.compositions import KINDS, SERVED
from dovetail.policy.placement import DeviceKind
from dovetail.sim.baselines import FinishingBegun
from dovetail.sim.compositions import POLICIES
from dovetail.sim.driver import Simulation
from dovetail.sim.storm import VIOLATIONS, build_server_storm, build_storm, check, run_one

TESTS = Path(__file__).parent
SOURCE = TESTS.parents[1] / "src" / "dovetail"
CORE = ("cluster", "node", "policy")
ROOMS = (*CORE, "worker", "sched", "gateway")
CONTAINERS = (dict, set, frozenset, list, deque)
RECORDS = (
    "Work",
    "RequestRecord",
    "OpenRequest",
    "OpenChoice",
    "Request",
    "RequestState",
    "SequenceState",
    "Sequence",
    "GenerationTask",
    "Run",
)
FIRST_ID = 7_000_000_000  # of requests: like no other number in the process
STORMS = 30
LINE_STORMS = 120
# Of the core, what joins it to other processes and to those who read: tokens and their streams, sockets' ends, a file,
# refusals in words. `test_runtime_parity` compares what the second pair decides with the simulator, byte for byte.
SHELLS = ("cluster/open_requests.py", "cluster/remote_cluster.py", "cluster/remote.py", "cluster/durable.py",
          "policy/reasons.py", "policy/speculation.py")  # fmt: skip
CROWDS = 400
NONE_MEANS_OFF = ("slack_s",)  # numbers of a policy that may be None

Place = tuple[str, str]  # class, attribute


# Containers


def objects_of(rooms: tuple[str, ...]) -> Iterator[Any]:
    """Every object of a class of these rooms that the collector knows."""
    modules = tuple(f"dovetail.{room}." for room in rooms)
    for one in gc.get_objects():
        if str(type(one).__module__).startswith(modules) and not isinstance(one, type):
            yield one


def attributes_of(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for base in type(one).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)


def is_request(value: Any, names: set[str]) -> bool:
    if isinstance(value, tuple):
        return any(is_request(one, names) for one in value)
    if isinstance(value, int):
        return value >= FIRST_ID
    if isinstance(value, str):
        return value in names
    return type(value).__name__ in RECORDS and type(value).__module__.startswith("dovetail.")


def holds_requests(container: Any, names: set[str], depth: int = 2) -> bool:
    """By key, by element, or in a container that it has as a value."""
    values = [*container, *container.values()] if isinstance(container, dict) else list(container)
    if any(is_request(one, names) for one in values):
        return True
    inner = [one for one in values if isinstance(one, CONTAINERS)]
    return depth > 1 and any(holds_requests(one, names, depth - 1) for one in inner)


Found = dict[Place, set[Place]]  # by place: the places that had the same container


def look(rooms: tuple[str, ...], names: set[str], found: Found) -> None:
    """Note the containers that hold requests now."""
    owners: dict[int, set[Place]] = defaultdict(set)
    for one in objects_of(rooms):
        for name, value in attributes_of(one):
            if isinstance(value, CONTAINERS) and holds_requests(value, names):
                owners[id(value)].add((type(one).__name__, name))
    for places in owners.values():
        for place in places:
            found.setdefault(place, set()).update(places)


def tell(process: str, found: Found) -> None:
    distinct = {frozenset(places) for places in found.values()}
    print(f"{process}: {len(distinct)} containers hold requests while answers run")
    for places in sorted(sorted(one) for one in distinct):
        print("  " + " = ".join(f"{owner}.{name}" for owner, name in places))


def crowd_on_one_node(found: Callable[[], None]) -> None:
    """More requests than fit, of every kind, to four models on one node."""
    from test_runtime_parity import Worker, crowd

    worker = Worker(crowd())
    worker.link.cluster.controller.next_id = FIRST_ID
    take_turn, count = worker.link.take_turn, iter(range(10**9))

    def watched() -> bool:
        if not next(count) % 20:
            found()
        return take_turn()

    worker.link.take_turn = watched  # type: ignore[method-assign]
    worker.run()


def answers_that_move(found: Callable[[], None]) -> None:
    """Three answers on two nodes, one of which goes on at the other."""
    from fleet_builders import Fleet

    fleet = Fleet()
    fleet.controller.next_id = FIRST_ID
    for number in range(3):
        fleet.submit(f"request-{number}", prompt=60, tokens=90)
    for count in range(600):
        if count == 200 and "request-0" not in fleet.ended:
            fleet.migrate("request-0")
        if steps := fleet.steps():
            fleet.do(steps[count % len(steps)])
        else:
            fleet.advance()
        if not count % 10:
            found()


async def _listen(found: Callable[[], None], names: set[str]) -> None:
    """Four answers of a service."""
    from gateway_builders import make_card, running_service
    from test_gateway_service import make_job

    with tempfile.TemporaryDirectory() as folder:
        async with running_service(Path(folder), make_card(Path(folder))) as service:
            service.cluster.controller.next_id = FIRST_ID

            async def listen(number: int) -> None:
                job = await make_job(service, f"question {number}", max_tokens=40)
                names.add(job.request.id if hasattr(job, "request") else job.id)
                async with aclosing(service.run(job)) as deltas:
                    async for _ in deltas:
                        found()

            await asyncio.gather(*[listen(number) for number in range(4)])


def probe_containers() -> int:
    sys.path.insert(0, str(TESTS))
    worker: Found = {}
    gateway: Found = {}
    names = {f"r{number}" for number in range(100)} | {f"request-{number}" for number in range(3)}

    def both() -> None:
        look(("node", "worker", "sched"), names, worker)
        look(("cluster",), names, gateway)

    crowd_on_one_node(both)
    answers_that_move(both)
    gc.collect()
    asyncio.run(_listen(lambda: look(("gateway", "cluster"), names, gateway), names))
    tell("worker", worker)
    tell("gateway", gateway)
    return 0


def sizes(simulation: Simulation) -> Counter[Place]:
    """Of what hangs on this simulation's controller and nodes."""
    found: Counter[Place] = Counter()
    seen, left = set[int](), [simulation.cluster]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        values = [value for _, value in attributes_of(one)]
        if str(type(one).__module__).startswith(("dovetail.cluster", "dovetail.node", "dovetail.policy.memory")):
            for name, value in attributes_of(one):
                if isinstance(value, CONTAINERS):
                    found[type(one).__name__, name] += len(value)
        if isinstance(one, (*CONTAINERS, tuple)):
            values = [*one, *one.values()] if isinstance(one, dict) else list(one)
        left += [value for value in values if isinstance(value, (*CONTAINERS, tuple)) or hasattr(value, "__module__")]
    return found


def probe_remains() -> int:
    """What is learnt (lengths, durations) remains by design; what is kept by request or instance is a leak."""
    grown: Counter[Place] = Counter()
    for seed in range(STORMS):
        for build in (build_storm, build_server_storm):
            simulation = build(seed)
            before = sizes(simulation)
            simulation.on_sample = lambda now, simulation=simulation: check(simulation, now)  # type: ignore[misc]
            try:
                simulation.run()
            except VIOLATIONS as error:
                print(f"{build.__name__}({seed}): {type(error).__name__}: {error}")
                continue
            after = sizes(simulation)
            grown.update(place for place in after if after[place] > before[place])
    for (owner, name), count in grown.most_common():
        print(f"  {owner}.{name}: larger after {count} of {2 * STORMS} storms")
    return 0


# Lines


def probe_lines() -> int:
    import coverage
    import pytest

    def executed(run: Callable[[], object]) -> dict[str, set[int]]:
        traced = coverage.Coverage(data_file=None, source=[str(SOURCE / room) for room in CORE], config_file=False)
        traced.start()
        run()
        traced.stop()
        data = traced.get_data()
        return {str(Path(file).relative_to(SOURCE)): set(data.lines(file) or ()) for file in data.measured_files()}

    def storms() -> None:
        for seed in range(LINE_STORMS):
            log = EventLog(io.StringIO(), is_detailed=True) if seed % 2 else None
            for of_server in (False, True):
                try:
                    run_one(seed, of_server=of_server, log=log)
                except VIOLATIONS as error:
                    print(f"storm {seed}: {error}")

    in_storms = executed(storms)
    kinds = ("gateway_service", "gateway_recovery", "gateway_hosted", "gateway_fronts", "gateway_adapters")
    kinds += ("worker_driver", "worker_preparing", "runtime_findings", "runtime_parity", "cluster_migration")
    files = [str(path) for kind in kinds for path in sorted(TESTS.glob(f"test_{kind}.py"))]
    in_tests = executed(lambda: pytest.main(["-q", "-p", "no:cacheprovider", *files]))
    total = 0
    for file in sorted(in_tests):
        only = sorted(in_tests[file] - in_storms.get(file, set()))
        if only and file not in SHELLS:
            total += len(only)
            print(f"  {file}: {len(only)} lines: {_ranges(only)}")
    print(f"{total} lines of {', '.join(CORE)} that the server's tests execute and {2 * LINE_STORMS} storms do not")
    print(f"left out, because a simulation has nothing of their kind: {', '.join(SHELLS)}")
    return 0


def _ranges(lines: list[int]) -> str:
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


# What the source says


def trees(rooms: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for room in rooms:
        for path in sorted((SOURCE / room).rglob("*.py")):
            yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def probe_switches() -> int:
    """A boolean or a choice among several that a policy fixes and a branch reads is a switch, whatever record it lies
    in and whatever it is called there; a number is one where a branch compares it with a constant."""
    modes, numbers = parameters_of_policies()
    reads: Counter[str] = Counter()
    kept: dict[str, set[str]] = defaultdict(set)  # by class: attributes that hold what a switch says
    sources = list(trees(("node", "cluster", "worker")))
    for _, tree in sources:
        for owner, line in ((one, line) for one in ast.walk(tree) if isinstance(one, ast.ClassDef)
                            for line in ast.walk(one)):  # fmt: skip
            if isinstance(line, ast.Assign) and any(name in modes for name in attributes_in(line.value)):
                kept[owner.name] |= {to.attr for to in line.targets if _is_own(to)}
    modes |= {name for names in kept.values() for name in names}
    for file, tree in sources:
        compared = {id(one) for test in conditions(tree) for one in compared_with_constants(test)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                reads[file] += node.attr in modes or (node.attr in numbers and id(node) in compared)
    for file, count in reads.most_common():
        if count:
            print(f"  {file}: {count}")
    print(f"{reads.total()} reads of switches in node, cluster and worker ({len(modes)} names)")
    return 0


def parameters_of_policies() -> tuple[set[str], set[str]]:
    """Names of modes, and of numbers: fields, and properties without arguments, of all strategies and of the records
    that are made of them."""
    modes, numbers = set[str](), set[str]()
    for composition in (SERVED, *POLICIES.values()):
        for strategy in [*(getattr(composition, kind) for kind in KINDS), turn_rule(DeviceKind.CPU, composition)]:
            for name in dir(strategy):
                value = getattr(strategy, name) if name[0] != "_" else None
                if isinstance(value, bool | Enum) or (name in NONE_MEANS_OFF and value is None):
                    modes.add(name)
                elif isinstance(value, int | float):
                    numbers.add(name)
    return modes, numbers


def attributes_in(tree: ast.expr) -> Iterator[str]:
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _is_own(target: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values


def compared_with_constants(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.Attribute):
        yield test  # a number that is not 0
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(one, ast.Constant) or _is_infinity(one) for one in sides):
                yield from sides


def _is_infinity(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "INFINITY"


def probe_names() -> int:
    """Without `main`: a process begins at its module's, and nothing else calls it."""
    sys.path.insert(0, str(TESTS.parent))
    from public_names import names_in_two_files

    double = names_in_two_files(trees(ROOMS))
    for name, files in sorted(double.items()):
        print(f"  {name}: {', '.join(files)}")
    classes = sum(name[0].isupper() for name in double)
    print(f"{len(double)} public names of {', '.join(ROOMS)} with two meanings, {classes} of them of classes")
    return 0


# Calls


class Calls:
    """Which file calls which, while it is installed."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_back is not None:
            callee, caller = self._name(frame), self._name(frame.f_back)
            if callee and caller and callee != caller:
                self.pairs[caller, callee] += 1

    def _name(self, frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in self._names:
            inside = file.startswith(str(SOURCE))
            name = str(Path(file).relative_to(SOURCE)) if inside else ""
            self._names[file] = name if name.startswith(ROOMS) else None
        return self._names[file]


def probe_calls() -> int:
    """A chat, a cold load, an eviction and a worker's death: in a gateway on a fake worker, in a node's driver behind
    the controller, and in storms. A generator that is resumed counts as called."""
    import pytest

    sys.path.insert(0, str(TESTS))
    from test_runtime_parity import Worker, crowd

    with Calls() as calls:
        Worker(crowd()).run()
        for seed in range(6):
            run_one(seed, of_server=True)
        files = [str(TESTS / f"test_gateway_{kind}.py") for kind in ("service", "recovery")]
        pytest.main(["-q", "-p", "no:cacheprovider", *files])
    found = sorted({tuple(sorted(pair)) for pair in calls.pairs if pair[::-1] in calls.pairs})
    for first, second in found:
        print(f"  {first} <-> {second}")
    print(f"{len(found)} pairs of files call each other in both directions")
    return 0


def probe_kept() -> int:
    """Requests with targets that a node took and then answered late, of random crowds on one node: durations are as
    predicted and nobody comes later, so that none should be."""
    sys.path.insert(0, str(TESTS))
    from test_policy_rounds import FLAT, LINEAR, serve

    served = SERVED.having(lateness=FinishingBegun())
    for name, hosting in (("parts cost little", LINEAR), ("parts cost most of what they take", FLAT)):
        random = Random(5)
        pace_s = 2.5 * hosting.latency.decode_s(1, 512)
        crowds = [_drawn_crowd(random, pace_s) for _ in range(CROWDS)]
        taken = [serve(crowd, served, hosting) for crowd in crowds]
        late = sum(any(one.late_tokens or not one.produced for one in works) for works in taken)
        print(f"{name}: {sum(map(len, taken))} of {sum(map(len, crowds))} taken, in {late} of {CROWDS} crowds one late")
    return 0


def _drawn_crowd(random: Random, pace_s: float) -> list[tuple[str, int, float, float]]:
    """(model, tokens of its prompt, when its first is due, pace) of each."""
    return [
        (random.choice("abc"), int(16 * 94 ** random.random()), random.uniform(0.2, 8.0), random.uniform(pace_s, 0.6))
        for _ in range(random.randint(2, 10))
    ]


PROBES = {name.removeprefix("probe_"): probe for name, probe in list(globals().items()) if name.startswith("probe_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=PROBES)
    return PROBES[parser.parse_args().probe]()


if __name__ == "__main__":
    sys.exit(main())
