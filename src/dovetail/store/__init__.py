"""Checkpoints: reading HF folders and GGUF, the catalogue, and getting models from elsewhere. Knows no torch."""

from dovetail.store.catalogue import Catalogue
from dovetail.store.checkpoints import describe, open_checkpoint

__all__ = ["Catalogue", "describe", "open_checkpoint"]
