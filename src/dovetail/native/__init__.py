"""Kernels behind one dispatch table; plain torch where nothing faster fits."""
