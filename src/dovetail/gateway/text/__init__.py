"""Between text and tokens: chat templates, tokenizers, tools, reasoning, grammars, detokenising."""
