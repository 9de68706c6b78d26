"""An open-loop load over HTTP: requests leave when the workload says so, however slow the server is.

Speaks streaming `/v1/completions`, which every contender offers, and notes when each piece of text came. What the times
mean is `attainment`'s; where the requests come from is `sim.workload`'s.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import httpx
import msgspec

from dovetail.errors import ConfigError
from dovetail.policy.headroom import SloRule
from dovetail.sim.trace import Arrival, keep_models
from dovetail.sim.workload import Workload, generate

LENGTHS_DRAWN = 512  # pairs of lengths that requests choose from
REQUEST_TIMEOUT_S = 300.0  # without a byte; a server that hangs ends a run
DATA = "data: "
DONE = "[DONE]"
RULE = SloRule()
JSON = {"Content-Type": "application/json"}


class Mix(msgspec.Struct, frozen=True):
    """What is asked for: the same seed gives the same requests."""

    minutes: float = 5.0
    rate_per_s: float = 0.7
    zipf: float = 1.0
    cv: float = 3.0  # of the gaps; 1 = Poisson
    input_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (16, 64)
    seed: int = 0


class Answer(msgspec.Struct):
    """One request's story. Times are seconds since the run began."""

    model: str
    arrival_s: float  # when it should leave; lateness of the generator counts as the server's
    input_tokens: int
    output_tokens: int  # asked for
    sent_s: float = 0.0
    text_s: list[float] = []  # each piece of text; a piece is a token, or several where a character takes them
    end_s: float = 0.0
    num_tokens: int = 0  # received
    status: int = 0  # HTTP; 0 = no answer at all
    error: str = ""

    @property
    def is_refused(self) -> bool:
        return self.status in (429, 503)

    @property
    def is_finished(self) -> bool:
        return self.status == 200 and not self.error and bool(self.text_s)


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """As much of a stream's event as is looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


def arrivals_of(mix: Mix, models: int) -> list[Arrival]:
    """Models are numbered by popularity, the most popular first."""
    for low, high in (mix.input_tokens, mix.output_tokens):
        if not 1 <= low <= high:
            raise ConfigError(f"lengths from {low} to {high}: expected 1 <= from <= to")
    rng = random.Random(mix.seed)
    lengths = [(rng.randint(*mix.input_tokens), rng.randint(*mix.output_tokens)) for _ in range(LENGTHS_DRAWN)]
    requests = max(round(mix.minutes * 60 * mix.rate_per_s), 1)
    return generate(Workload(requests, models, mix.rate_per_s, mix.zipf, mix.cv), mix.seed, lengths)


def cut_trace(arrivals: Sequence[Arrival], models: int, minutes: float, shrink: float) -> list[Arrival]:
    """The first minutes of a trace, of as many of its models, spread over popularity and numbered by it; lengths are
    divided by `shrink`, so that a small machine can answer what was asked of a large one."""
    if models < max(one.model for one in arrivals) + 1:
        arrivals = keep_models(arrivals, models)
    arrivals = [one for one in arrivals if one.arrival_s < minutes * 60]
    if not arrivals:
        raise ConfigError(f"--minutes {minutes:g}: the trace has no request by then")
    counts = Counter(one.model for one in arrivals)
    rank = {model: index for index, (model, _) in enumerate(counts.most_common())}
    return [
        one._replace(
            model=rank[one.model],
            input_tokens=max(round(one.input_tokens / shrink), 1),
            output_tokens=max(round(one.output_tokens / shrink), 1),
        )
        for one in arrivals
    ]


class Prompts:
    """Texts of so many tokens: each of `units` is one token wherever it stands. No two begin alike, so that nothing
    is found in a prefix cache."""

    def __init__(self, units: Sequence[str], seed: int) -> None:
        self._units = units
        self._rng = random.Random(seed)

    def make(self, tokens: int) -> str:
        return "".join(self._rng.choices(self._units, k=tokens))


class Load:
    """One run against one server. `names` are the models by popularity, `prompts` by the name of the model."""

    def __init__(
        self,
        url: str,
        names: Sequence[str],
        prompts: Mapping[str, Prompts],
        on_end: Callable[[Answer], None] = lambda _: None,
        *,
        sends_targets: bool = True,
        key: str = "",
    ) -> None:
        self._sends_targets = sends_targets  # else the server serves late rather than refuses
        self._headers = JSON | key_header(key)
        self._url = url
        self._names = names
        self._prompts = prompts
        self._on_end = on_end
        self.began = 0.0  # monotonic clock

    async def run(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        # Texts are made before the clock starts: two cores are shared with the server.
        planned = [(_answer_for(arrival, self._names), self._body(arrival)) for arrival in arrivals]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=timeout, trust_env=False) as client:
            self.began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for answer, body in planned:
                    await asyncio.sleep(max(answer.arrival_s - self._now(), 0.0))
                    group.create_task(self._ask(client, answer, body))
        return [answer for answer, _ in planned]

    def _body(self, arrival: Arrival) -> bytes:
        name = self._names[arrival.model]
        return request_body(name, self._prompts[name].make(arrival.input_tokens), arrival.output_tokens)

    def _now(self) -> float:
        return time.monotonic() - self.began

    async def _ask(self, client: httpx.AsyncClient, answer: Answer, body: bytes) -> None:
        answer.sent_s = self._now()
        try:
            await self._receive(client, answer, body)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.end_s = self._now()
        answer.num_tokens = max(answer.num_tokens, len(answer.text_s))
        self._on_end(answer)

    async def _receive(self, client: httpx.AsyncClient, answer: Answer, body: bytes) -> None:
        headers = self._headers | (_targets(answer) if self._sends_targets else {})
        async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:500]
                return
            async for line in response.aiter_lines():
                if line.startswith(DATA) and line != DATA + DONE:
                    self._take(answer, _decode(line[len(DATA) :]))

    def _take(self, answer: Answer, event: _Event) -> None:
        error = bytes(event.error)
        if error not in (b"", b"null"):
            answer.error = error.decode(errors="replace")[:500]
        if any(choice.text for choice in event.choices):
            answer.text_s.append(self._now())
        if event.usage is not None:
            answer.num_tokens = event.usage.completion_tokens


def key_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _targets(answer: Answer) -> dict[str, str]:
    """The targets that it is judged by, said to the server: one that knows them may refuse what it cannot keep."""
    ttft_ms = RULE.ttft_s(answer.input_tokens) * 1e3
    return {"x-slo-ttft-ms": f"{ttft_ms:.0f}", "x-slo-tpot-ms": f"{RULE.tpot_s * 1e3:.0f}"}


def _answer_for(arrival: Arrival, names: Sequence[str]) -> Answer:
    return Answer(names[arrival.model], arrival.arrival_s, arrival.input_tokens, arrival.output_tokens)


def request_body(model: str, prompt: str, max_tokens: int) -> bytes:
    """Greedy, and as many tokens as were asked for: both ways of saying so, since servers differ in which they know."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def first_token_s(client: httpx.AsyncClient, body: bytes) -> float:
    """Seconds until the first piece of text of one request; its rest is read."""
    began = time.monotonic()
    first: float | None = None
    async with client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith(DATA) and line != DATA + DONE:
                event = _decode(line[len(DATA) :])
                if any(choice.text for choice in event.choices):
                    first = time.monotonic() - began
    if first is None:
        raise httpx.RemoteProtocolError("the answer has no text")
    return first
