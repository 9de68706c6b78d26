"""Files and batches: requests in a file, answered when there is time, each exactly once."""
