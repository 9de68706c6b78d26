"""Whether the time of an answer tells one tenant what another has asked, measured.

Each trial asks for two prompts of the same length, one that somebody else has sent before and one that nobody has, in
an order that is drawn. Where prefixes are shared the first is answered many times faster, which the control shows;
where they are not, which of the two is faster is a coin's toss. What else happens on the machine happens to both.
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

TRIALS = int(os.environ.get("DOVETAIL_TRIALS", "8"))
PROMPT_CHARS = 900  # tokens too
REUSE = 2.0  # a prefix that is reused makes a ratio far beyond this, noise in a median of trials none near it
SURE = 1e-5  # of the sign test, which says something from 20 trials on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that takes some hundredths of a second for a prompt."""
    folder = tmp_path_factory.mktemp("tenants")
    save_tiny("llama", folder / "model", hidden_size=192, intermediate_size=512, max_position_embeddings=1024)
    keys = ", ".join(f"{{name: {name}, key: sk-{name}}}" for name in ("ann", "bob"))
    (folder / "dovetail.yaml").write_text(
        f"models: {{m: {{source: {folder / 'model'}, preload: true}}}}\nauth: {{keys: [{keys}]}}\n"
        "nodes: [{threads: 1, kv_cache: 128MiB}]\n"
    )
    with running_server("--config", folder / "dovetail.yaml") as server:
        yield server


def seconds(server: Server, key: str, prompt: str, salt: str) -> float:
    """To the first token, which is the last."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 1}
    started = time.perf_counter()
    answer = server.post(
        "/v1/completions", body | ({"cache_salt": salt} if salt else {}), headers={"authorization": f"Bearer sk-{key}"}
    )
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


def ratios(server: Server, victim: tuple[str, str], attacker: tuple[str, str], seed: str) -> list[float]:
    """Of each trial: the time for what nobody has sent by the time for what the victim has, as the attacker sees it.
    Both are a key and a salt."""
    draw, found = random.Random(seed), []
    for _ in range(TRIALS):
        known, unknown = ("".join(draw.choices("abcdefgh ", k=PROMPT_CHARS)) for _ in range(2))
        seconds(server, victim[0], known, victim[1])
        order = [known, unknown] if draw.random() < 0.5 else [unknown, known]
        times = {prompt: seconds(server, attacker[0], prompt, attacker[1]) for prompt in order}
        found.append(times[unknown] / times[known])
    print(f"{victim} and {attacker}: median ratio {statistics.median(found):.2f}, sign test p = {sign_test(found):.2g}")
    return found


def sign_test(ratios: list[float]) -> float:
    """How likely so many on one side are if either side is as likely as the other."""
    side = max(sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios))
    return min(1.0, 2 * sum(math.comb(len(ratios), k) for k in range(side, len(ratios) + 1)) / 2 ** len(ratios))


def test_the_measure_sees_a_prefix_that_is_shared(server: Server) -> None:
    """Users of one key without salts: what is kept from tenants below."""
    found = ratios(server, ("ann", ""), ("ann", ""), "shared")
    assert statistics.median(found) > REUSE, found
    assert TRIALS < 20 or sign_test(found) < SURE, found


@pytest.mark.parametrize(
    ("victim", "attacker"),
    [(("ann", ""), ("bob", "")), (("ann", "one"), ("ann", "two"))],
    ids=["two keys", "two salts of one key"],
)
def test_time_does_not_tell_what_another_has_asked(
    server: Server, victim: tuple[str, str], attacker: tuple[str, str]
) -> None:
    found = ratios(server, victim, attacker, f"{victim} {attacker}")
    assert 1 / REUSE < statistics.median(found) < REUSE, found
    assert sign_test(found) > SURE, found
