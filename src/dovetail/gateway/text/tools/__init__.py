"""Calls of tools: what a client offers, how each family of models writes a call, how it is read."""
