"""What inference should cost: which functions or nodes serve given applications within their SLOs, and running that."""
