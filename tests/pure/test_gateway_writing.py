"""Answers that are long: written in pieces, by a thread where the loop would stand still, and bounded where nothing
else bounds them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from sse import event_data
from test_gateway_http import TEXT, check_error, on_app

from dovetail.gateway.http import embeddings, scoring
from dovetail.gateway.http.embeddings import EmbeddingRequest
from dovetail.gateway.http.replies import CachedTokens as Cached
from dovetail.gateway.http.replies import (
    ChatLogprobs,
    CompletionDetails,
    PromptLogprob,
    TextChoice,
    TextCompletion,
    TokenEntry,
    Usage,
)
from dovetail.gateway.http.responses import endpoints
from dovetail.gateway.http.scoring import RerankRequest
from dovetail.gateway.http.text_reply import TextReply
from dovetail.gateway.http.writing import json_pieces
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import MAX_PROMPT_REPORTS


def make_answer(num_tokens: int) -> TextCompletion:
    read = [None, *({str(at): PromptLogprob(logprob=-0.5, rank=at, decoded_token="é")} for at in range(num_tokens))]
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    usage = Usage(**counts, prompt_tokens_details=Cached(), completion_tokens_details=CompletionDetails())
    choices = [TextChoice(index=0, text='a"\n', finish_reason="stop", prompt_logprobs=read, token_ids=[1, 2])]
    return TextCompletion(
        id="a", object="text_completion", created=1, model="m", choices=choices * (num_tokens > 0), usage=usage
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 1000])
def test_an_answer_in_pieces_is_the_answer(num_tokens: int) -> None:
    answer = make_answer(num_tokens)
    written = b"".join(json_pieces(answer))
    assert json.loads(written) == json.loads(answer.model_dump_json(exclude_unset=True))


def test_no_piece_is_long() -> None:
    entry = TokenEntry(token="abc", logprob=-1.0, bytes=[1, 2, 3], top_logprobs=[])
    assert max(map(len, json_pieces(ChatLogprobs(content=[entry] * 20_000)))) < 32_768


class Sized:
    """What the pieces of an answer with vectors need of a job."""

    id, num_prompt_tokens = "job", 7

    class model:  # noqa: N801
        name = "m"
        card = SimpleNamespace(spec=SimpleNamespace(encoder=None))


def test_thousands_of_vectors_are_written_a_few_at_a_time() -> None:
    body = EmbeddingRequest.model_validate({"model": "m", "input": ["a"] * 2048})
    vectors = np.random.default_rng(1).standard_normal((2048, 576)).astype(np.float32)
    pieces = list(embeddings._embeddings(body, Sized, vectors))  # type: ignore[arg-type]
    assert max(map(len, pieces)) < 256 * 1024
    answer = json.loads(b"".join(pieces))
    assert [item["index"] for item in answer["data"]] == list(range(2048))
    assert np.allclose(np.linalg.norm([item["embedding"] for item in answer["data"]], axis=1), 1, atol=1e-6)


def test_thousands_of_documents_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    texts = RerankRequest.texts.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(RerankRequest, "texts", property(lambda body: reads.append(1) or texts(body)))
    body = RerankRequest.model_validate({"model": "m", "query": "q", "documents": ["a", "b", "c"] * 600})
    vectors = np.random.default_rng(1).standard_normal((1801, 16)).astype(np.float32)
    scores = scoring._cosines(vectors, [(0, at) for at in range(1, 1801)])
    (piece,) = scoring._ranked(body, Sized, scores)  # type: ignore[arg-type]
    scores = [result["relevance_score"] for result in json.loads(piece)["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(reads) == 1


def test_answers_with_many_log_probabilities_are_not_written_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    for name in ("whole", "chunk"):
        method = getattr(TextReply, name)

        def noting(self: TextReply, *values: Any, method: Any = method) -> Any:
            writers.append(threading.current_thread().name)
            return method(self, *values)

        monkeypatch.setattr(TextReply, name, noting)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        short, long = ({"prompt": "x" * size, "echo": True, "logprobs": 20} for size in (5, 400))
        loop = threading.current_thread().name
        for change, stream, expected in ((short, False, loop), (long, False, "write"), (long, True, "write")):
            writers.clear()
            answer = await client.post("/v1/completions", json=TEXT | change | {"stream": stream, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            assert writers[0].startswith(expected)

    on_app(tmp_path, test)


def test_responses_with_many_log_probabilities_are_whole_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[str] = set()

    def noting(*values: Any, **options: Any) -> Any:
        yield from json_pieces(*values, **options)
        writers.add(threading.current_thread().name)

    monkeypatch.setattr(endpoints, "json_pieces", noting)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def shown(num_tokens: int) -> list[Any]:
            writers.clear()
            body = {"model": "fake", "input": "abc" * 80, "top_logprobs": 2, "max_output_tokens": num_tokens}
            whole = (await client.post("/v1/responses", json=body)).json()
            streamed = await client.post("/v1/responses", json=body | {"stream": True})
            events = [json.loads(data) for data in event_data(streamed)]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            item = next(event for event in events if event["type"] == "response.output_item.done")["item"]
            kept = (await client.get(f"/v1/responses/{whole['id']}")).json()
            assert kept == whole
            parts = [one["content"][0] for one in (whole["output"][0], events[-1]["response"]["output"][0], item)]
            assert parts[0]["text"] == parts[1]["text"] == parts[2]["text"]
            ends = [part["logprobs"][2 - num_tokens :] for part in parts]
            assert ends[0] == ends[1] == ends[2]
            return ends[0]

        assert len(await shown(10)) == 8  # the first token is no text, and need not be told of
        assert not writers
        assert len(await shown(220)) == 218
        assert {name[:5] for name in writers} == {"write"}

    on_app(tmp_path, test)


def test_log_probabilities_of_prompts_are_bounded_with_their_copies(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        size = 500  # tokens
        assert size * 21 * 64 > MAX_PROMPT_REPORTS
        for change, param in (
            ({"prompt": "x" * size, "prompt_logprobs": 20, "n": 64}, "prompt_logprobs"),
            ({"prompt": ["x" * size] * 64, "logprobs": 20, "echo": True}, "logprobs"),
        ):
            check_error(await client.post("/v1/completions", json=TEXT | change), 400, param)

    on_app(tmp_path, test)
