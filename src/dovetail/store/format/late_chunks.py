r"""Chunks that a model's first token can do without: rows of its input embedding.

    | embedding of 32,000 tokens | layers ... | final norm, head |
      late: only the rows of the prompt's tokens are read

Of a table that is the head as well (tied embeddings) every row is read for every token, so that nothing is late.
"""

from __future__ import annotations

from dovetail.store.format.manifest import Manifest, TensorEntry

EMBEDDING = "embed.weight"


def embedding_of(manifest: Manifest) -> TensorEntry | None:
    """The table, where its rows are looked up and nothing else is done with it."""
    spec = manifest.spec
    if spec is None or spec.tied_embeddings or spec.encoder is not None or len(manifest.partitions) != 1:
        return None
    entries = [entry for entry in manifest.tensors if entry.name == EMBEDDING]
    return entries[0] if len(entries) == 1 and entries[0].layout == "plain" else None


def late_chunks(manifest: Manifest) -> range:
    """Of the only partition: the chunks that hold rows of the embedding and nothing else."""
    entry = embedding_of(manifest)
    if entry is None:
        return range(0)
    size = manifest.partitions[0].chunk_bytes
    return range(-(-entry.offset // size), (entry.offset + entry.size) // size)
