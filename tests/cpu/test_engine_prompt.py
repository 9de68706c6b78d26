"""What a prompt's own tokens come to, against transformers: log-probabilities and embeddings, in chunks and after
preemption, beside other requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import Engine, make_executor, make_request

from dovetail.types import TokenEvent

TinyFolder = Callable[[str], Path]
PROMPT = [(7 * i) % 251 for i in range(150)]  # three chunks of 64 tokens
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "opt", "mixtral", "mistral"]


def reference(folder: Path, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States behind the final norm, and log-probabilities, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    return output.hidden_states[-1][0], torch.log_softmax(output.logits[0].double(), dim=-1)


def events_of(engine: Engine, *requests: Any) -> list[TokenEvent]:
    for request in requests:
        engine.scheduler.add(request)
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    return events


def embedding_of(events: list[TokenEvent]) -> torch.Tensor:
    (event,) = [event for event in events if event.embedding is not None]
    assert event.token is None
    return torch.from_numpy(np.frombuffer(event.embedding or b"", dtype=np.float32).copy())


@pytest.mark.parametrize(
    ("family", "level"), [*((family, "auto") for family in FAMILIES), ("gemma2", "torch"), ("opt", "torch")]
)
def test_embeddings_are_those_of_transformers(tiny_folder: TinyFolder, family: str, level: str) -> None:
    states, _ = reference(tiny_folder(family), PROMPT)
    engine = Engine(make_executor(tiny_folder(family), level=level))
    for pooling, wanted in (("last", states[-1]), ("mean", states.mean(dim=0))):
        for _ in range(2):  # the second finds its prompt in the cache
            found = embedding_of(events_of(engine, make_request(PROMPT, pooling=pooling)))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("level", ["auto", "torch"])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(tiny_folder: TinyFolder, level: str) -> None:
    _, logprobs = reference(tiny_folder("llama"), PROMPT)
    engine = Engine(make_executor(tiny_folder("llama"), level=level))
    for num_choices in (1, 2):
        events = events_of(engine, make_request(PROMPT, prompt_logprobs=3, max_tokens=2, num_choices=num_choices))
        (read,) = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
        assert len(read) == len(PROMPT) - 1
        for position, (entry, token) in enumerate(zip(read, PROMPT[1:], strict=True)):
            assert entry.chosen == pytest.approx(float(logprobs[position, token]), abs=1e-4)
            assert entry.rank == int((logprobs[position] > logprobs[position, token]).sum()) + 1
            top = logprobs[position].topk(3)
            assert [item.logprob for item in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        first = next(event for event in events if event.token is not None)
        assert first.token == int(logprobs[-1].argmax())


def test_reading_prompts_changes_nothing_for_others_and_survives_a_small_pool(tiny_folder: TinyFolder) -> None:
    other = make_request(PROMPT[:40], "other", max_tokens=12)
    alone = Engine(make_executor(tiny_folder("qwen3"))).run(other)
    engine = Engine(make_executor(tiny_folder("qwen3")), num_blocks=44)  # of four tokens: not room for all at once
    requests = [
        make_request(PROMPT, "mean", pooling="mean"),
        other,
        make_request(PROMPT[1:], "scored", prompt_logprobs=0, max_tokens=3),
    ]
    events = events_of(engine, *requests)
    tokens = [event.token for event in events if event.request_id == "other"]
    assert tokens == alone["other", 0]
    states, _ = reference(tiny_folder("qwen3"), PROMPT)
    torch.testing.assert_close(embedding_of(events), states.mean(dim=0), atol=1e-4, rtol=1e-4)
    (read,) = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert len(read) == len(PROMPT) - 2
    assert not engine.executor._reader._read, "nothing is kept of requests that have ended"
