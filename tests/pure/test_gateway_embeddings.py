"""Embeddings and reranking on a fake worker: forms of input and output, limits, batches, targets."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_worker import BUSY
from test_gateway_http import check_error, on_app

from dovetail.gateway.service import Service

BODY: dict[str, Any] = {"model": "fake", "input": "hello"}


def test_a_text_its_tokens_and_a_list_of_it_have_the_same_unit_vector(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        tokens = (await client.post("/tokenize", json={"model": "fake", "prompt": "hello"})).json()["tokens"]
        vectors = []
        for given in ("hello", ["hello"], tokens, [tokens]):
            answer = (await client.post("/v1/embeddings", json=BODY | {"input": given})).json()
            assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
            assert answer["model"] == "fake"
            (item,) = answer["data"]
            vectors.append(item["embedding"])
        assert all(vector == vectors[0] for vector in vectors)
        assert np.linalg.norm(vectors[0]) == pytest.approx(1)

    on_app(tmp_path, test)


def test_vectors_come_as_base64_shortened_or_as_they_are(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def vector(**options: Any) -> Any:
            response = await client.post("/v1/embeddings", json=BODY | options)
            assert response.status_code == 200, response.text
            return response.json()["data"][0]["embedding"]

        plain = await vector()
        packed = np.frombuffer(base64.b64decode(await vector(encoding_format="base64")), dtype="<f4")
        assert packed.tolist() == plain
        short = await vector(dimensions=7)
        assert len(short) == 7
        assert np.linalg.norm(short) == pytest.approx(1)
        assert sum(await vector(normalize=False)) == 5  # tokens
        assert sum(await vector(normalize=False, truncate_prompt_tokens=2)) == 2

    on_app(tmp_path, test)


def test_many_inputs_keep_their_order_and_no_more_wait_than_a_few(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        texts = ["x" * (1 + number % 50) for number in range(300)]  # more than the queue of 64 holds
        response = await client.post("/v1/embeddings", json=BODY | {"input": texts, "normalize": False})
        data = response.json()["data"]
        assert [sum(item["embedding"]) for item in data] == [len(text) for text in texts]
        assert [item["index"] for item in data] == list(range(300))
        assert service.unfinished == 0

    on_app(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "first"}, "pooling"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_what_cannot_be_embedded_is_a_400(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        error = check_error(await client.post("/v1/embeddings", json=BODY | change), 400)
        assert error["param"].startswith(param)

    on_app(tmp_path, test)


def test_a_refusal_of_one_input_is_the_answer_to_all(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        # The fake refuses by the prompt; pooled requests it looks at in the same way.
        response = await client.post("/v1/embeddings", json=BODY | {"input": [[1, 2], [BUSY]]})
        check_error(response, 503)
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_documents_are_ranked_by_their_nearness(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = {"model": "fake", "query": "aaab", "documents": ["zzz", {"text": "aaab"}, "aab"]}
        answer = (await client.post("/v1/rerank", json=body)).json()
        assert [result["index"] for result in answer["results"]] == [1, 2, 0]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1)
        assert answer["results"][0]["document"]["text"] == "aaab"
        options = {"top_n": 1, "return_documents": False}
        (best,) = (await client.post("/v1/rerank", json=body | options)).json()["results"]
        assert best["document"] is None
        cut = (await client.post("/v1/rerank", json=body | {"max_tokens_per_doc": 1, "top_n": 1})).json()
        assert cut["usage"]["prompt_tokens"] == 4 + 1 + 1  # the query, "z" and "a", which stands for two documents
        assert cut["results"][0]["document"]["text"] == "aaab"
        check_error(await client.post("/v1/rerank", json=body | {"documents": []}), 400, "documents")

    on_app(tmp_path, test)


def test_pairs_are_scored_each_with_its_own_or_all_with_one(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def scores(path: str = "/v1/score", **texts: Any) -> list[float]:
            answer = (await client.post(path, json={"model": "fake"} | texts)).json()
            assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
            return [item["score"] for item in answer["data"]]

        one = await scores(queries="aaab", documents=["aaab", "zzz", "aab"])
        assert one[0] == pytest.approx(1)
        assert one[0] > one[2] > one[1]
        assert await scores("/score", text_1=["aaab", "aaab"], text_2=["aaab", "zzz"]) == pytest.approx(one[:2])
        assert await scores(data_1="aaab", items="aab") == pytest.approx(one[2:])
        for path in ("/rerank", "/v2/rerank"):
            ranked = await client.post(path, json={"model": "fake", "query": "aaab", "documents": ["zzz", "aaab"]})
            assert ranked.json()["results"][0]["index"] == 1
        wrong = {"model": "fake", "queries": ["a", "b"], "documents": ["a"]}
        check_error(await client.post("/v1/score", json=wrong), 400, "documents")

    on_app(tmp_path, test)


def test_vectors_are_as_they_come_where_that_is_asked_for_by_either_name(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for option in ("normalize", "use_activation"):
            plain = (await client.post("/v1/embeddings", json=BODY | {option: False})).json()["data"][0]["embedding"]
            assert sum(plain) == len(BODY["input"])
            unit = (await client.post("/v1/embeddings", json=BODY | {option: True})).json()["data"][0]["embedding"]
            assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)

    on_app(tmp_path, test)
