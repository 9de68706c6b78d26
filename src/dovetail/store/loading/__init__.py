"""From disk into the host pool: the loading queue, its threads, direct reads (L3)."""
