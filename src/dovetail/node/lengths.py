"""How long answers are and what requests hold in the end, as this node has seen and been told (S5)."""

from __future__ import annotations

from dovetail.policy.lengths import AnswerLengths, most_tokens
from dovetail.policy.memory import OutputMean

CONTEXT_TOKENS = 1024.0  # of a request, until some have ended


class LengthStats:
    def __init__(self) -> None:
        self.outputs = OutputMean()
        self.are_alike = False  # models answer at like length, as the controller said with its last proposal
        self._by_model = AnswerLengths()
        self._contexts = OutputMean(CONTEXT_TOKENS, weight=2)  # of all models: what requests held when they ended
        self._told: dict[str, float] = {}  # by model: its mean length, as requests bring it along
        self._asked: tuple[str, list[tuple[int, int]]] = ("", [])  # of `most_tokens`, last
        self._answer: tuple[int, int] | None = None  # to that; None when something was learnt since

    def pace_tokens(self, model: str) -> float:
        """Over how many tokens the safety of a pace may be spent at once, see `Work.pace_from`."""
        return self._by_model.pace_tokens(model)

    @property
    def usual_tokens(self) -> float:
        """What a request holds in the end, of whichever model."""
        return self._contexts.value

    def ended(self, model: str, input_tokens: int, produced: int) -> None:
        self.answered(model, produced)
        self.held(input_tokens + produced)

    def held(self, tokens: int) -> None:
        """A request has ended, which held so many."""
        self._contexts.add(tokens)

    def answered(self, model: str, tokens: int) -> None:
        """An answer has ended."""
        self.outputs.add(tokens)
        self._by_model.add(model, tokens)
        self._answer = None

    def hear(self, model: str, mean_tokens: float) -> None:
        """A request brings along what the controller knows of its model."""
        if self._told.get(model) != mean_tokens:
            self._told[model] = mean_tokens
            self._answer = None

    def mean_length(self, model: str, lengths: list[tuple[int, int]]) -> float:
        """Of the model's answers, of which these run: (input, produced) pairs."""
        guess = self._told.get(model) or self.outputs.value
        return self._by_model.mean(model, guess, [produced for _, produced in lengths])

    def most_tokens(self, model: str, lengths: list[tuple[int, int]]) -> tuple[int, int]:
        """When these will hold most: how many of them, and how many tokens together."""
        if self._answer is None or self._asked != (model, lengths):  # memory and time are asked one after the other
            self._asked = (model, lengths)
            self._answer = most_tokens(lengths, self.mean_length(model, lengths))
        return self._answer
