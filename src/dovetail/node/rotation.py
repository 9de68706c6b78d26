"""Whose turn it is when nothing is known of deadlines: each model with work in its order, one iteration each."""

from __future__ import annotations

from collections.abc import Callable


class Rotation:
    def __init__(self) -> None:
        self._order: list[str] = []

    def add(self, model: str) -> None:
        assert model not in self._order
        self._order.append(model)

    def remove(self, model: str) -> None:
        self._order.remove(model)

    def next(self, has_work: Callable[[str], bool]) -> str | None:
        """The first model in line that has work; it goes to the end of the line."""
        for at, model in enumerate(self._order):
            if has_work(model):
                self._order.append(self._order.pop(at))
                return model
        return None
