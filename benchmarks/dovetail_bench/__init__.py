"""Load generation and side-by-side runs against peers."""
