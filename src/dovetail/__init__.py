"""Dovetail serves many language models from few machines, a token of each at a time."""

__version__ = "0.1.0"
