"""Simulated nodes that are alike, as a bound on any policy sees them: how many, and the least that work can cost there.

Everything is a lower bound on a duration: what is claimed with these costs holds for every order of turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.errors import ConfigError
from dovetail.node.events import StartLoad
from dovetail.policy.latency import LatencyModel
from dovetail.policy.placement import Hosting
from dovetail.sim.device import Device
from dovetail.sim.linear import LinearProgram

BATCHES = (1, 8, 32)  # at which the planes under a decode surface shall be close to it


class Plane(NamedTuple):
    """A decode of b requests that hold T tokens takes at least turn_s + b·request_s + T·token_s."""

    turn_s: float
    request_s: float
    token_s: float

    def alone_s(self, tokens: int) -> float:
        return self.turn_s + self.request_s + tokens * self.token_s


@dataclass(frozen=True)
class Pool:
    count: int
    memory_bytes: int  # of each
    hostings: Mapping[str, Hosting]  # by model
    planes: Mapping[str, tuple[Plane, ...]]  # by model
    load_s: Mapping[str, float]  # by model: bringing its weights there; 0 where they lie

    def weight_bytes(self, model: str) -> int:
        hosting = self.hostings[model]
        return 0 if hosting.weights_in_place else hosting.weight_bytes

    @property
    def longest_load_s(self) -> float:
        """A cold start's duration. Loads that have been ordered hold their memory, and one link serves them in turn: so
        it is no longer than filling the whole memory takes."""
        sizes = {model: self.weight_bytes(model) for model in self.hostings}
        slowest = max((self.load_s[model] / size for model, size in sizes.items() if size), default=0.0)
        return slowest * self.memory_bytes

    def most_used(self, seconds: float) -> float:
        """Memory of weights that are used at some time within so long, in nodes: what lay there at its beginning, whole
        or on its way, and what was loaded from then on."""
        sizes = {model: self.weight_bytes(model) for model in self.hostings}
        fastest = max((size / self.load_s[model] for model, size in sizes.items() if self.load_s[model]), default=0.0)
        return self.count * (1.0 + fastest * seconds / self.memory_bytes)

    def decode_s(self, model: str, tokens: int) -> float:
        """Of one request that holds so many."""
        return max(plane.alone_s(tokens) for plane in self.planes[model])

    def prompt_s(self, model: str, tokens: int) -> float:
        """What a prompt takes of the device at least, in any parts and beside any others of its model: no iteration is
        cheaper by the token than the cheapest."""
        return tokens * _cheapest_token_s(_latency(self.hostings[model]))


def _cheapest_token_s(latency: LatencyModel) -> float:
    """Of prompts. Between two measured points seconds over tokens is monotonous, before the first it falls, beyond the
    last it is level."""
    return min(seconds / tokens for tokens, seconds in latency.prefill.points)


def pools_of(devices: Sequence[Device], usual_tokens: int) -> list[Pool]:
    """`usual_tokens`: the length of contexts at which the planes shall be closest."""
    if any(device.machine is not None for device in devices):
        raise ConfigError("a bound is computed only where loads take the same from everywhere: leave out `storage`")
    alike: dict[tuple[int, int], list[Device]] = {}
    for device in devices:
        key = id(device.node.device.hostings), device.node.device.ledger.capacity
        alike.setdefault(key, []).append(device)
    known: dict[int, tuple[Plane, ...]] = {}
    return [_pool(group, usual_tokens, known) for group in alike.values()]


def _pool(group: Sequence[Device], usual_tokens: int, known: dict[int, tuple[Plane, ...]]) -> Pool:
    hostings = group[0].node.device.hostings
    planes = {}
    for model, hosting in hostings.items():
        latency = _latency(hosting)
        if id(latency) not in known:
            known[id(latency)] = _planes_under(latency, usual_tokens)
        planes[model] = known[id(latency)]
    load_s = {model: _load_s(group[0], model, hosting) for model, hosting in hostings.items()}
    return Pool(len(group), group[0].node.device.ledger.capacity, hostings, planes, load_s)


def _load_s(device: Device, model: str, hosting: Hosting) -> float:
    return 0.0 if hosting.weights_in_place else device.load_s(StartLoad(0, model, hosting.weight_bytes, 0.0))


def _latency(hosting: Hosting) -> LatencyModel:
    assert isinstance(hosting.latency, LatencyModel)
    return hosting.latency


def _planes_under(latency: LatencyModel, usual_tokens: int) -> tuple[Plane, ...]:
    """Planes that lie nowhere above the decode surface. Over each cell of its grid the surface and b·L are linear along
    either axis, so the difference is least at a corner; beyond the grid the surface grows in proportion, which is at
    least as fast as a plane that starts at or above 0, and before it the surface is level."""
    corners = latency.decode.corners()
    found = [_plane_under(corners, batch, usual_tokens) for batch in BATCHES]
    return tuple(dict.fromkeys(found))


def _plane_under(corners: Sequence[tuple[float, float, float]], batch: int, tokens: int) -> Plane:
    """The one that is highest at this point."""
    program = LinearProgram()
    most = max(seconds for *_, seconds in corners)  # each is at most what an iteration with b = T = 1 could take
    turn, request = program.variable(most, gain=1.0), program.variable(most, gain=float(batch))
    token = program.variable(most, gain=float(batch * tokens))
    for b, length, seconds in corners:
        program.at_most([(turn, 1.0), (request, b), (token, b * length)], seconds)
    values, _ = program.solve()
    highest = max((values[0] + b * values[1] + b * length * values[2]) / s for b, length, s in corners)
    return Plane(*(value / max(highest, 1.0) for value in values))  # the solver's rounding
