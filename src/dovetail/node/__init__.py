"""One device: which models are on it, whose turn it is, and the ports to engine and store."""
