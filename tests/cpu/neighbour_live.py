"""Machines with stores of their own: one can fetch nothing and its requests go elsewhere, one is left by everybody who
waited. Run by `make cluster`; they take more workers than the suite has time for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
from server_fixture import eventually
from test_server_neighbour import expected, fill, running_head

from dovetail.store import Catalogue
from dovetail.store.paths import StorePaths, source_key


def test_what_a_machine_has_no_room_for_is_served_by_the_next_and_handed_on(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = fill(tmp_path, tiny_folder)
    with running_head(folder, "full 1", "roomy", "third") as head:
        eventually(lambda: list(head.states().values()) == ["up"] * 3, 120)
        for model in ("llama", "qwen3", "lost"):
            assert head.complete(model)["choices"][0]["text"] == expected(folder, model)
    said = (folder / "log").read_text()
    assert "no room in" in said, "the first one was asked"
    assert not (folder / "full" / "models").exists() or not list((folder / "full" / "models").iterdir())
    fetched = [path for name in ("roomy", "third") for path in (folder / name / "models").glob("*-*")]
    assert len(fetched) == 3, "each model once"


def test_who_waits_sees_it_loading_and_what_everybody_has_left_is_not_fetched(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = fill(tmp_path, tiny_folder)
    key = source_key(f"neighbour:{Catalogue(folder / 'store').get('llama').digest}")
    body = {"model": "llama", "prompt": "fox", "max_tokens": 4, "stream": True}
    with running_head(folder, "machine") as head:
        eventually(lambda: head.states() == {"machine": "up"}, 120)
        with StorePaths(folder / "machine").lock(f"source-{key}"):  # as if another process there were at it
            with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=60) as answer:
                assert next(line for line in answer.iter_lines() if '"state":"loading"' in line)
            eventually(lambda: "nobody waits for it any more" in (folder / "log").read_text(), 60)
        assert not (folder / "machine" / "models" / "llama").exists()
        assert head.complete("llama")["choices"][0]["text"] == expected(folder, "llama")
