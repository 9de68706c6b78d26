"""A policy as a composition of strategies, each with its own parameters, and the one composition that a server runs.

A strategy decides one kind of question (how long a turn may be, whether a late request is served, ...) and is an object
that node and controller ask; they know neither a composition's name nor which strategy they have. The compositions of
papers, and strategies with which nobody serves, are in `sim/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.knobs import Knobs, MakeWay
from dovetail.policy.parameters import AdmissionParameters, TurnOrder, TurnParameters


@dataclass(frozen=True, slots=True)
class Composition:
    name: str = "slinfer"
    turns: TurnParameters = field(default_factory=TurnParameters)  # whose iteration is next, of which tokens
    admission: AdmissionParameters = field(default_factory=AdmissionParameters)  # would every request still be in time
    knobs: Knobs = field(default_factory=Knobs)

    def named(self, name: str) -> Composition:
        return replace(self, name=name)

    def having(self, **parameters: object) -> Composition:
        """The same with other values of these parameters, whichever strategy has them."""
        changed: dict[str, Any] = {}
        for name, value in parameters.items():
            kind = self.kind_of(name)
            changed[kind] = replace(changed.get(kind, getattr(self, kind)), **{name: value})
        return replace(self, **changed)

    def kind_of(self, parameter: str) -> str:
        """The kind of strategy that has the parameter."""
        for kind in KINDS:
            if any(one.name == parameter for one in fields(getattr(self, kind))):
                return kind
        there = ", ".join(sorted(self.parameters()))
        raise ConfigError(f"{parameter}: the policy {self.name} has no such parameter; there are {there}")

    def parameters(self) -> dict[str, object]:
        """Of all strategies, by name."""
        return {one.name: getattr(of, one.name) for kind in KINDS if is_dataclass(of := getattr(self, kind))
                for one in fields(of)}  # fmt: skip

    def values(self) -> dict[str, Any]:
        """For the header of a log; `from_values` reads it."""
        return asdict(self)


KINDS = tuple(one.name for one in fields(Composition) if one.name != "name")


def from_values(values: Mapping[str, Any]) -> Composition:
    """What `Composition.values` was written of. JSON has no infinity."""
    base = Composition(values["name"])
    there = {name: value for kind in KINDS for name, value in values[kind].items()}
    known = base.parameters()
    return base.having(**{name: _as(known[name], value) for name, value in there.items()})


def _as(example: object, value: Any) -> Any:
    if value is None:
        return float("inf")
    return type(example)(value) if isinstance(example, Enum) else value


def parsed(name: str, text: str, example: object) -> Any:
    """The value of a parameter that is written so, of the type of another value of it; None: it has none."""
    if example is None:
        return text
    try:
        if isinstance(example, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(example)(text)  # type: ignore[call-arg]
    except (ValueError, KeyError) as error:
        kinds = [one.value for one in type(example)] if isinstance(example, Enum) else [type(example).__name__]
        raise ConfigError(f"{name}: expected {' or '.join(kinds)}, not {text!r}") from error


# What a server runs.
SERVED = Composition("dovetail").having(
    # A pool grows and shrinks in place, so that a small floor costs nothing. Keep-alives are long and memory is what
    # the host has: idle models give way, and starts mind the loads before them.
    floor_tokens=256,
    free_resize=True,
    slots_limited=False,
    lengths_by_model=True,
    one_instance=True,
    reclaim_idle=True,
    count_loads=True,
    # Late rather than refused; whoever comes while a prompt is computed is looked at soon.
    extend_deadlines=True,
    finish_begun=True,
    retry_on_change=True,
    live_moves=True,
    turn_order=TurnOrder.DRAIN,
    max_silence_s=2.0,
    guard_decodes=True,
    part_s=0.1,
    pack_prompts=True,
    smooth_answers=True,
    split_decodes=True,
    max_stall=2.0,
    start_soonest=True,
    make_way=MakeWay.MIGRATE,
)
