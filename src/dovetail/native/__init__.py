"""Kernels behind one dispatch table; plain torch where nothing faster fits."""

from dovetail.native.dispatch import Ops, select

__all__ = ["Ops", "select"]
