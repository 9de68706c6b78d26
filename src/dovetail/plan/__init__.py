"""The cost planner (P1–P7)."""
