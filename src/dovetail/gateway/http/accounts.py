"""What each API key may use: requests and tokens in a minute, answers at a time. Counts only; time is an argument."""

from __future__ import annotations

from collections import deque

from dovetail.config import KeyConfig
from dovetail.errors import InvalidRequest, QuotaExceeded
from dovetail.types import ServiceClass

_WINDOW_S = 60


class Window:
    """How much was taken in the last minute, to the second."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: deque[tuple[int, int]] = deque()  # (second, how much), one per second at most
        self._used = 0

    def wait_s(self, count: int, now: float) -> float:
        """Until so much more fits, where it ever does; 0 = now."""
        while self._taken and self._taken[0][0] + _WINDOW_S <= now:
            self._used -= self._taken.popleft()[1]
        excess = self._used + count - self.limit
        wait_s = 0.0
        for second, taken in self._taken:
            if excess <= 0:
                break
            excess -= taken
            wait_s = second + _WINDOW_S - now
        return wait_s

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if self._taken and self._taken[-1][0] == second:
            self._taken[-1] = (second, self._taken[-1][1] + count)
        else:
            self._taken.append((second, count))
        self._used += count


class KeyAccount:
    """One key's use. A call is one request when it comes in; what it asks for is charged when that is known."""

    def __init__(self, key: KeyConfig) -> None:
        self.name = key.name
        self.max_unfinished = key.max_unfinished
        self.is_best_effort = key.service_class is ServiceClass.BEST_EFFORT
        self.may_go_first = key.priority
        self._requests = Window(key.requests_per_minute) if key.requests_per_minute is not None else None
        self._tokens = Window(key.tokens_per_minute) if key.tokens_per_minute is not None else None

    def begin(self, now: float) -> None:
        """A call has come in. Raises QuotaExceeded."""
        self._take(self._requests, 1, now, "requests")
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)):
            raise self._exceeded(self._tokens, "tokens", wait_s)

    def charge(self, num_answers: int, prompt_tokens: int, now: float) -> None:
        """The call asks for so many answers (the first was counted when it came in) to prompts of so many tokens."""
        self._take(self._requests, num_answers - 1, now, "requests")
        self._take(self._tokens, prompt_tokens, now, "tokens")

    def add_tokens(self, count: int, now: float) -> None:
        """Tokens that were generated. Nothing is refused for them; the next call waits."""
        if self._tokens is not None:
            self._tokens.add(count, now)

    def _take(self, window: Window | None, count: int, now: float, what: str) -> None:
        if window is None or count == 0:
            return
        if count > window.limit:  # however long the client waits
            raise InvalidRequest(
                f"{count} {what} at once are more than the key '{self.name}' may use in a minute ({window.limit})",
                code="rate_limit_exceeded",
            )
        wait_s = window.wait_s(count, now)
        if wait_s:
            raise self._exceeded(window, what, wait_s)
        window.add(count, now)

    def _exceeded(self, window: Window, what: str, wait_s: float) -> QuotaExceeded:
        return QuotaExceeded(
            f"the key '{self.name}' may use {window.limit} {what} a minute; a prompt counts as often as it is answered",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
