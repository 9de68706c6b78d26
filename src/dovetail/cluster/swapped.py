"""RequestState that was swapped out with headroom to spare, by model."""

from __future__ import annotations

from dovetail.cluster.request import RequestState


class SwappedOut:
    def __init__(self) -> None:
        self._by_model: dict[str, dict[int, RequestState]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_model)

    @property
    def num_models(self) -> int:
        return len(self._by_model)

    def add(self, work: RequestState) -> None:
        self._by_model.setdefault(work.model, {})[work.id] = work

    def take(self, work_id: int) -> RequestState | None:
        for model, works in self._by_model.items():
            work = works.pop(work_id, None)
            if work is not None:
                if not works:
                    del self._by_model[model]
                return work
        return None

    def of(self, model: str) -> list[RequestState]:
        """The most urgent first."""
        return sorted(self._by_model.get(model, {}).values(), key=_urgency)

    def first(self) -> RequestState:
        """The most urgent of all."""
        return min((work for works in self._by_model.values() for work in works.values()), key=_urgency)


def _urgency(work: RequestState) -> tuple[float, int]:
    return (work.due_s, work.id)
