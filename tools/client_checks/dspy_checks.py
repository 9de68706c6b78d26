"""DSPy: a prediction in its own format, by a real small model, and the chat that it rests on."""

from __future__ import annotations

import dspy
from common import MODEL, QUESTION, URL, WANTED, check, run

model = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=60, cache=False)


@check("chat")
def chat() -> None:
    assert WANTED in model(QUESTION)[0]


run("dspy")
