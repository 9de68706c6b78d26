"""Kernels behind one dispatch table; plain torch where nothing faster fits."""

from dovetail.native.dispatch import TORCH, Ops, explain, levels, select, verdicts

__all__ = ["TORCH", "Ops", "explain", "levels", "select", "verdicts"]
