"""The table of sampling parameters: name, bounds, and the values with which each changes nothing. Every API that
has them takes them from here, under these names; what a parameter does is in `engine`.

A further one is a field here, the field of `types.SamplingParams` that carries it to the worker, and the engine's.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import Field

from dovetail.gateway.http.bodies import StrictBody
from dovetail.types import GenerationDefaults, SamplingParams

_MAX_LIMIT = 2**31 - 1
_MIN_TOP_P = 1e-6  # 0 is allowed and means the likeliest token alone


class Neutral(NamedTuple):
    """Values with which a parameter changes nothing, where that is not the default of `SamplingParams` alone."""

    values: tuple[float, ...]


class SamplingBody(StrictBody):
    temperature: Annotated[float | None, Field(ge=0, le=2), Neutral((0,))] = None  # a search knows no chance
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_MAX_LIMIT, description="0 or -1 = off"), Neutral((0, -1))] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None

    @property
    def sampling_fields(self) -> dict[str, Any]:
        """Those of the table, as they are."""
        return {name: getattr(self, name) for name in SamplingBody.model_fields}


def sampling_values(body: SamplingBody, defaults: GenerationDefaults) -> dict[str, Any]:
    """Of `SamplingParams`: the client's, then what the model's authors recommend; what nobody names is left out."""
    found = {name: getattr(defaults, name, None) if value is None else value
             for name, value in body.sampling_fields.items()}  # fmt: skip
    given = {name: value for name, value in found.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    if "top_p" in given:
        given["top_p"] = max(given["top_p"], _MIN_TOP_P)
    return given


def neutral_values() -> dict[str, tuple[float, ...]]:
    """By name."""
    usual = {field.name: (field.default,) for field in msgspec.structs.fields(SamplingParams)}
    return {
        name: next((one.values for one in field.metadata if isinstance(one, Neutral)), usual[name])
        for name, field in SamplingBody.model_fields.items()
    }
