"""Runs one model: layers, paged attention, sampling, weights and arenas. Decides nothing."""
