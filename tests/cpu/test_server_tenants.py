"""Whether the time of an answer tells one tenant what another has asked, measured.

Each trial asks for two prompts of the same length, one that somebody else has sent before and one that nobody has, in
an order that is drawn. Where prefixes are shared the first is answered several times faster, which the control shows
(users of one key without salts); where they are not, which of the two is faster is a coin's toss. Trials of all cases
take turns, so that what else happens on the machine happens to all of them.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_fixture import Server, running_server
from tiny import save_tiny

TRIALS = int(os.environ.get("DOVETAIL_TRIALS", "8"))  # a hundred in `make tenants`
PROMPT_CHARS = 900  # tokens too
REUSE = 2.0  # at least, where a prefix is shared
SURE = 1e-5  # of the sign test, which can say something from 18 trials on

Client = tuple[str, str]  # a key and a salt
CASES: dict[str, tuple[Client, Client]] = {  # who has asked before, and who looks at the time
    "one key": (("ann", ""), ("ann", "")),
    "two keys": (("ann", ""), ("bob", "")),
    "two salts of one key": (("ann", "one"), ("ann", "two")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that takes a tenth of a second for a prompt: much longer than the request around it."""
    folder = tmp_path_factory.mktemp("tenants")
    save_tiny("llama", folder / "model", hidden_size=576, intermediate_size=2048, max_position_embeddings=1024)
    keys = ", ".join(f"{{name: {name}, key: sk-{name}}}" for name in ("ann", "bob"))
    (folder / "dovetail.yaml").write_text(
        f"models: {{m: {{source: {folder / 'model'}, preload: true}}}}\nauth: {{keys: [{keys}]}}\n"
        "nodes: [{threads: 1, kv_cache: 128MiB}]\n"
    )
    with running_server("--config", folder / "dovetail.yaml") as server:
        yield server


def seconds(server: Server, key: str, salt: str, prompt: str) -> float:
    """To the first token, which is the last."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 1}
    started = time.perf_counter()
    answer = server.post(
        "/v1/completions", body | ({"cache_salt": salt} if salt else {}), headers={"authorization": f"Bearer sk-{key}"}
    )
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


def ratio(server: Server, victim: Client, attacker: Client, draw: random.Random) -> float:
    """The time for what nobody has sent by the time for what the victim has, as the attacker sees it."""
    known, unknown = ("".join(draw.choices("abcdefgh ", k=PROMPT_CHARS)) for _ in range(2))
    seconds(server, *victim, known)
    order = [known, unknown] if draw.random() < 0.5 else [unknown, known]
    times = {prompt: seconds(server, *attacker, prompt) for prompt in order}
    return times[unknown] / times[known]


def sign_test(ratios: list[float]) -> float:
    """How likely so many on one side are if either side is as likely as the other."""
    side = max(sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios))
    return min(1.0, 2 * sum(math.comb(len(ratios), k) for k in range(side, len(ratios) + 1)) / 2 ** len(ratios))


def test_time_does_not_tell_what_another_tenant_has_asked(server: Server) -> None:
    draw, found = random.Random(1), {name: list[float]() for name in CASES}
    for _ in range(TRIALS):
        for name, (victim, attacker) in CASES.items():
            found[name].append(ratio(server, victim, attacker, draw))
    medians = {name: statistics.median(ratios) for name, ratios in found.items()}
    for name, ratios in found.items():
        print(f"{name}: median ratio {medians[name]:.2f}, sign test p = {sign_test(ratios):.2g}, {TRIALS} trials")
    control = medians.pop("one key")
    assert control > REUSE, f"the measure does not see a prefix that is shared: {found}"
    for name, median in medians.items():
        assert 1 / math.sqrt(control) < median < math.sqrt(control), f"{name}: {found[name]}"
        assert sign_test(found[name]) > SURE, f"{name}: {found[name]}"


def test_the_sign_test_is_one() -> None:
    assert sign_test([2.0] * 20) < SURE < sign_test([2.0] * 15 + [0.5] * 5)
    assert sign_test([2.0, 0.5]) == 1.0
