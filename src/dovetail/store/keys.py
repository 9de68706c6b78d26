"""Typed access to settings that somebody else wrote (a config.json, a GGUF's metadata): every error names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import MANY_LAYERS, ModelSpec, spec_problem

MANY = MANY_LAYERS


def checked_spec(spec: ModelSpec, origin: str) -> ModelSpec:
    problem = spec_problem(spec)
    if problem is not None:
        raise DamagedCheckpoint(f"{origin}: spec: {problem}")
    return spec


class Keys:
    """Typed access to a mapping of settings: a missing or ill-typed value is an error that names its key."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    def with_changes(self, values: Mapping[str, Any]) -> Keys:
        return Keys({**self._values, **values}, self.origin)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, at_most: int = 2**31 - 1) -> int:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.damaged(key, "a whole number above 0")
        if value > at_most:
            raise self.damaged(key, f"at most {at_most}")
        return value

    def whole(self, key: str) -> int:
        """From 0 on."""
        return 0 if self._values.get(key) == 0 else self.integer(key)

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.damaged(key, "a number")
        return float(value)

    def positive(self, key: str) -> float:
        if self.number(key) <= 0:
            raise self.damaged(key, "a number above 0")
        return self.number(key)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.damaged(key, "true or false")
        return bool(value)

    def optional_number(self, key: str) -> float | None:
        return None if self._values.get(key) is None else self.number(key)

    def mapping(self, key: str) -> dict[str, Any]:
        """Empty where it is absent or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.damaged(key, "a mapping")
        return value or {}

    def sequence(self, key: str) -> list[Any]:
        """Empty where it is absent or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.damaged(key, "a list")
        return value or []

    def require(self, key: str, wanted: Any) -> None:
        """The engine implements only `wanted`; what is absent or null counts as that."""
        value = self._values.get(key)
        if value is not None and value != wanted:
            raise self.unsupported(key, value)

    def damaged(self, key: str, expected: str) -> DamagedCheckpoint:
        found = repr(self._values[key]) if key in self._values else "nothing"
        return DamagedCheckpoint(f"{self.origin}: {key}: expected {expected}, got {found}")

    def unsupported(self, key: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(f"{self.origin}: {key} = {value!r} is not supported")
