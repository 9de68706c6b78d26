"""Virtual time for the production policy code: synthetic executors, workloads and reports."""
