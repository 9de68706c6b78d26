"""Checkpoints: reading HF folders and GGUF, the catalogue, and getting models from elsewhere. Knows no torch."""
