"""Machines with stores of their own, one of which can fetch nothing: its requests go elsewhere. Run by `make cluster`;
it takes a worker more than the suite has time for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from server_fixture import eventually
from test_server_neighbour import expected, fill, running_head


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
