"""What `doctor --server` makes of records that a small server does not show by itself, and the runbook's sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from dovetail.cli.doctor_server import parse_metrics
from dovetail.cli.symptoms import Look, Symptom, findings
from dovetail.gateway.metrics import Metrics

RUNBOOK = Path(__file__).parents[2] / "docs" / "guide" / "runbook.md"
SOUND: dict[str, Any] = {"version": "1", "health": {"status": "ok"}, "health_code": 200}


def seen(symptom: str, **parts: Any) -> list[str]:
    return [f"{one.seen}; {one.do}" for one in findings(Look(**SOUND | parts)) if one.symptom == symptom]


def measured(**cold: int) -> Any:
    metrics = Metrics()
    for seconds in (0.2, 0.3, 12.0, 30.0):
        metrics.observe_ttft("m", seconds)
    for tier, count in cold.items():
        metrics.cold_starts.labels("m", tier).inc(count)
    return parse_metrics(metrics.render().body.decode())


def test_slow_first_tokens_are_told_with_their_cause() -> None:
    (told,) = seen("slow-first-token", samples=measured(disk=2))
    assert "m: 2 of 4 first tokens came after more than 10 s" in told
    assert "2 of them waited for the model to load" in told
    assert "dovetail profile m" in seen("slow-first-token", samples=measured())[0]
    missed = {"name": "m", "attainment": 0.5, "requests": 40}
    assert "50% of 40 requests met their targets" in seen("slow-first-token", models=(missed,))[0]


@pytest.mark.parametrize(
    ("symptom", "parts", "says"),
    [
        ("memory", {"ps": {"nodes": [node]}}, "a: 9.8 of 10.0 GiB are taken")
        for node in [{"name": "a", "memory_budget_bytes": 10 << 30, "memory_planned_bytes": int(9.8 * 2**30)}]
    ]
    + [
        ("disk-full", {"store_free_bytes": 1 << 30}, "1.0 GiB are free where models are kept"),
        (
            "disk-full",
            {"pulls": ({"name": "m", "state": "failed", "stage": "convert", "error": "No space left on device"},)},
            "m: No space left on device",
        ),
        ("upgrade", {"server_version": "0"}, "the server is version 0, this command 1"),
        ("upgrade", {"config": {"problem": None, "needs_restart": ["nodes"]}}, "not in force: nodes"),
        ("shutdown", {"ps": {"draining": True, "unfinished": 3}}, "shutting down, 3 answers are left"),
    ],
)
def test_each_symptom_says_what_it_saw(symptom: str, parts: dict[str, Any], says: str) -> None:
    (told,) = seen(symptom, **parts)
    assert says in told


def test_a_server_that_shows_nothing_but_health_is_sound() -> None:
    assert findings(Look(**SOUND)) == []


def test_the_runbook_has_a_section_for_every_symptom() -> None:
    headings = [line.removeprefix("## ") for line in RUNBOOK.read_text().splitlines() if line.startswith("## ")]
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(get_args(Symptom)) | {"no-answer"} <= anchors
