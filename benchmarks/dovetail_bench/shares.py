"""What two keys with a batch each get, and what a third one's clients notice of them.

In turns on one server: the clients alone, the same clients beside both batches. The lines of one batch are more than
twice as long as the other's: shares are of tokens, not of lines. Tokens count when their line has ended, so lines are
short, and as many of them have ended before as run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dovetail_bench.fleet import FleetModel, Report
from dovetail_bench.gaps import Lines, Side, ask_clients, batch_server, endless_batch, usage_of, warm
from dovetail_bench.load import Mix
from dovetail_bench.servers import Running, running

CLIENTS = "key-of-clients"
SETTLED = 72
OWNERS = {"key-of-short-lines": Lines(8, 16, SETTLED), "key-of-long-lines": Lines(8, 48, SETTLED)}


class Round(msgspec.Struct, frozen=True):
    alone: Side
    beside: Side
    tokens: tuple[int, ...]  # of each batch while clients were there: prompts and answers


class SharesReport(msgspec.Struct, frozen=True):
    rounds: list[Round]
    tokens: tuple[int, ...]  # of each key, over all rounds
    apart: float  # by how much the smaller share is less than the larger
    attainment_alone: float
    attainment_beside: float


def measure(
    models: Sequence[FleetModel], mix: Mix, rounds: int, folder: Path, cores: int, step: Report
) -> SharesReport:
    found = []
    with running(batch_server(models, folder, cores, (CLIENTS, *OWNERS)), folder / "server.log") as server:
        for model in models:
            warm(server, [model], mix, CLIENTS)
        for number in range(rounds):
            seeded = msgspec.structs.replace(mix, seed=mix.seed + number)
            found.append(_round(server, models, seeded, is_odd=bool(number % 2)))
            step("rounds", number + 1, rounds)
    return _report(found)


def _round(server: Running, models: Sequence[FleetModel], mix: Mix, *, is_odd: bool) -> Round:
    """Which of the two runs of clients is first changes from round to round."""
    sides: dict[bool, Side] = {}
    tokens: tuple[int, ...] = ()
    for is_beside in (is_odd, not is_odd):
        if is_beside:
            sides[True], tokens = _beside(server, models, mix)
        else:
            sides[False] = ask_clients(server, models, mix, CLIENTS)
    return Round(sides[False], sides[True], tokens)


def _beside(server: Running, models: Sequence[FleetModel], mix: Mix) -> tuple[Side, tuple[int, ...]]:
    (first, short), (second, long) = OWNERS.items()
    with (
        endless_batch(server, models, first, short) as batch,
        endless_batch(server, models, second, long) as other,
    ):
        ids = {first: batch, second: other}
        before = [usage_of(server, id, key)["total_tokens"] for key, id in ids.items()]
        side = ask_clients(server, models, mix, CLIENTS)
        after = [usage_of(server, id, key)["total_tokens"] for key, id in ids.items()]
    return side, tuple(late - early for early, late in zip(before, after, strict=True))


def _report(rounds: Sequence[Round]) -> SharesReport:
    tokens = tuple(sum(column) for column in zip(*(one.tokens for one in rounds), strict=True))
    requests = sum(one.alone.requests for one in rounds)
    return SharesReport(
        rounds=list(rounds),
        tokens=tokens,
        apart=1.0 - min(tokens) / max(*tokens, 1),
        attainment_alone=sum(one.alone.attained for one in rounds) / requests,
        attainment_beside=sum(one.beside.attained for one in rounds) / requests,
    )
