"""The store's own form: partitions named by their content, and the manifest that describes them (L1)."""
