"""Token-level batching of one model: sequences, KV block accounting, prefix reuse. Ints and deques, no torch."""
