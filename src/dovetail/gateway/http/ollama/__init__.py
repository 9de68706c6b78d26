"""Ollama's API for its clients: chat, generate, embed, and what there is. The same jobs as OpenAI's paths make."""
