"""Decisions as pure functions and small state machines: (view, now) -> decision. No clock, no torch, no I/O."""
