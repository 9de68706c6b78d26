"""Weights in memory that all processes of a server share (L3)."""
