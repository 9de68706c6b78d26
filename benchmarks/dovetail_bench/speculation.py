"""Speculative decoding of one model: tokens per second with and without drafts, and whether the text is the same.

A server is asked for the same answers in turn, with drafts as it is configured and without (`speculative: false`), one
request at a time. Texts that repeat their prompt gain by lookup, all by a draft model that is right; none shall lose.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from dovetail_bench.servers import Contender, our_server, running

TIMEOUT_S = 120.0
_ESSAY = (
    "The lighthouse at Skerry Point was built in 1874 by Anna Lindqvist, who carried the lamp up the stairs herself. "
    "It stands forty metres above the tide, and its light is seen by ships for nineteen nautical miles. "
    "In the winter of 1903 a storm broke the northern wall, and the keeper repaired it with stones from the beach. "
    "Since 1988 the lamp has been electric; the old lens is kept in the museum of the harbour."
)
_CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        if item.quantity > 0:
            total += item.price * item.quantity
    total = total * (1 + tax_rate)
    return round(total, 2)


def print_receipt(items, tax_rate):
    for item in items:
        print(f"{item.name}: {item.quantity} x {item.price}")
    print("Total:", total_price(items, tax_rate))
"""


class Case(msgspec.Struct, frozen=True):
    name: str
    repeats: bool  # much of the answer stands in the prompt
    prompt: str


CASES = (
    Case("repeat", True, f"Repeat the following text word for word.\n\n{_ESSAY}"),
    Case("edit", True, f"Rename tax_rate to rate in this code. Answer with the whole code.\n\n{_CODE}"),
    Case("summarise", True, f"Summarise the following text in its own words.\n\n{_ESSAY}"),
    Case("advice", False, "How do I keep bread fresh for longer? Give some advice."),
    Case("story", False, "Tell a short story about a fox that learns to swim."),
    Case("explain", False, "Explain why the sky is blue to a child."),
)


class Sample(msgspec.Struct, frozen=True):
    """One answer."""

    text: str
    tokens: int
    seconds: float  # from the first token to the last
    accepted: int
    rejected: int

    @property
    def rate(self) -> float:
        return (self.tokens - 1) / max(self.seconds, 1e-9)


class CaseResult(msgspec.Struct, frozen=True):
    case: str
    repeats: bool
    tokens: int  # of the answer
    off: float  # tokens/s, median of the rounds
    on: float
    off_range: tuple[float, float]  # slowest and fastest round
    on_range: tuple[float, float]
    accepted: int  # proposed tokens that were right, in one answer
    rejected: int
    same_text: bool  # in every round

    @property
    def gain(self) -> float:
        return self.on / self.off


class SpeculationResult(msgspec.Struct, frozen=True):
    model: str
    mode: str
    tokens: int  # proposed at a time, at most
    rounds: int
    cases: list[CaseResult]
    draft: str = ""  # the model that proposed; empty = lookup alone

    def gain(self, *, repeats: bool) -> float:
        """Geometric mean."""
        gains = [case.gain for case in self.cases if case.repeats == repeats]
        return statistics.geometric_mean(gains) if gains else 1.0


def measure(
    model: str,
    mode: str,
    tokens: int,
    rounds: int,
    max_tokens: int,
    cases: Sequence[Case] = CASES,
    draft: str = "",
    temperature: float = 0.0,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> SpeculationResult:
    with tempfile.TemporaryDirectory() as folder:
        contender = _server(Path(folder), model, mode, tokens, draft)
        with running(contender, Path(folder) / "server.log") as server:
            client = httpx.Client(base_url=server.url, timeout=TIMEOUT_S)
            for is_on in (False, True):  # loads the model, and lets the server learn what rows cost
                _ask(client, model, cases[0], max_tokens, temperature, is_on=is_on)
            found: dict[tuple[str, bool], list[Sample]] = {}
            for round_number in range(rounds):
                for place, case in enumerate(cases):
                    report(case.name, round_number * len(cases) + place, rounds * len(cases))
                    for is_on in (False, True) if round_number % 2 == 0 else (True, False):
                        sample = _ask(client, model, case, max_tokens, temperature, is_on=is_on)
                        found.setdefault((case.name, is_on), []).append(sample)
            client.close()
    results = [_result(case, found[case.name, False], found[case.name, True]) for case in cases]
    return SpeculationResult(model, mode, tokens, rounds, results, draft)


def _server(folder: Path, model: str, mode: str, tokens: int, draft: str) -> Contender:
    speculative = {"mode": mode, "tokens": tokens} | ({"draft": draft} if draft else {})
    models: dict[str, Any] = {model: {"source": model, "speculative": speculative, "keep_alive": -1}}
    if draft:
        models[draft] = {"source": draft}
    return our_server({"models": models}, folder / "dovetail.yaml")


def _ask(client: httpx.Client, model: str, case: Case, max_tokens: int, temperature: float, *, is_on: bool) -> Sample:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": case.prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculative": is_on,
    }
    text, first_s, last_s = "", 0.0, 0.0
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece:
                last_s = time.monotonic()
                first_s = first_s or last_s
                text += piece
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    return Sample(text, usage["completion_tokens"], last_s - first_s, accepted, rejected)


def _result(case: Case, off: Sequence[Sample], on: Sequence[Sample]) -> CaseResult:
    off_rates, on_rates = sorted(one.rate for one in off), sorted(one.rate for one in on)
    return CaseResult(
        case.name,
        case.repeats,
        off[0].tokens,
        statistics.median(off_rates),
        statistics.median(on_rates),
        (off_rates[0], off_rates[-1]),
        (on_rates[0], on_rates[-1]),
        round(statistics.median(one.accepted for one in on)),
        round(statistics.median(one.rejected for one in on)),
        len({one.text for one in (*off, *on)}) == 1,
    )
