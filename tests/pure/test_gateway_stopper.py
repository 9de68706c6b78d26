"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.gateway.text.stopper import Stopper

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    stopper = Stopper(stops, include_stop=include_stop)
    shown = "".join(stopper.feed(piece) for piece in pieces)
    return shown + (stopper.flush() if stopper.matched is None else ""), stopper.matched


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stop string that is complete first; of those complete together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, st.lists(TEXT, max_size=6))
def test_any_cutting_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))


@given(STOPS, st.lists(TEXT, max_size=6))
def test_the_stop_string_is_shown_only_when_asked_for(stops: list[str], pieces: list[str]) -> None:
    text, matched = run(stops, pieces)
    assert run(stops, pieces, include_stop=True) == (text + (matched or ""), matched)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stopper = Stopper(["\n\nUser:"])
    assert [stopper.feed(piece) for piece in ("Paris.", "\n", "\nUs", "ually")] == ["Paris.", "", "", "\n\nUsually"]
    assert stopper.flush() == ""


def test_without_stop_strings_text_passes_through() -> None:
    assert Stopper([]).feed("anything") == "anything"
