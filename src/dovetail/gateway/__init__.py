"""OpenAI over HTTP: parsing, chat templates, tokenising, streaming detokenisation, auth, metrics."""
