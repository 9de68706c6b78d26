"""Anthropic's API for its clients: messages and their tokens. The same jobs as OpenAI's paths make."""
