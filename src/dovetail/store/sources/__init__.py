"""Where models come from: indexes, buckets, and neighbours of a cluster."""
