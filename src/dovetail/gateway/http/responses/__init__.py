"""OpenAI's Responses API on top of the chat: items in, items out, conversations that the server remembers."""
