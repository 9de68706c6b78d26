"""vLLM's own endpoint tests against this server. See `tools/vllm_endpoint_tests.py`."""
