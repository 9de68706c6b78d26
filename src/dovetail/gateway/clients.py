"""Whose work a task does: what is shared is shared among these."""

from __future__ import annotations

from contextvars import ContextVar

# A key's name, or an address where there are no keys; empty = nobody's.
current_client: ContextVar[str] = ContextVar("current_client", default="")
