"""Encoders against transformers: vectors of texts in one iteration, in chunks and beside each other, within 1e-4; how
their folders say what a vector is; and the same through a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from drive import make_request
from server_fixture import Server
from store_builders import stored
from tiny import TINY_ENCODERS, save_tiny_encoder, tiny_encoder

from dovetail.engine.encoder import EncoderExecutor
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.node.ports import Checkpoint
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.format.manifest import MANIFEST
from dovetail.types import TokenEvent

TinyFolder = Callable[[str], Path]
TOLERANCE = 1e-4
TEXTS = [[(seed * 31 + 7 * i) % 251 + 2 for i in range(length)] for seed, length in enumerate((40, 3, 160, 33))]


def events_of(checkpoint: Checkpoint, *requests: Any, turn_tokens: int = 64) -> dict[str, TokenEvent]:
    """By request, through the scheduler: a text longer than a turn's tokens comes in chunks."""
    executor = EncoderExecutor(checkpoint, ExecutorConfig(kv_bytes=1 << 24, block_size=4, dtype="f32"))
    executor.resize(executor.max_blocks)
    pool = BlockPool(executor.max_blocks, executor.block_size)
    scheduler = FcfsScheduler(
        SchedulerConfig(context_length=executor.spec.context_length, max_batch=8, max_turn_tokens=turn_tokens), pool
    )
    for request in requests:
        scheduler.add(request)
    found = {}
    while scheduler.has_work:
        turn = scheduler.next_turn()
        completed = scheduler.take_failed() if turn is None else scheduler.complete(executor.run(turn))
        found |= {event.request_id: event for event in completed.events}
    pool.check()
    executor.close()
    return found


def vector(event: TokenEvent) -> np.ndarray[Any, Any]:
    assert event.error is None
    return np.frombuffer(event.embedding or b"", dtype=np.float32)


def states_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_vectors_are_those_of_transformers_however_texts_are_cut_and_stored(
    name: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model = tiny_encoder(name)
    states = [states_of(model, text) for text in TEXTS]
    pools: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "cls": lambda all_of: all_of[0],
        "mean": lambda all_of: all_of.mean(dim=0),
        "last": lambda all_of: all_of[-1],
    }
    requests = [
        make_request(text, id=f"{pooling} {at}", pooling=pooling) for at, text in enumerate(TEXTS) for pooling in pools
    ]
    folder = tiny_folder(name)
    for checkpoint, tokens in ((open_checkpoint(folder), 48), (stored(folder, tmp_path), 4096)):
        found = events_of(checkpoint, *requests, turn_tokens=tokens)
        for pooling, pool in pools.items():
            for at, wanted in enumerate(states):
                difference = np.abs(vector(found[f"{pooling} {at}"]) - pool(wanted).numpy()).max()
                assert difference < TOLERANCE, f"{pooling} of text {at} differs by {difference:.1e}"


def scores_of(model: Any, name: str, pairs: list[list[int]]) -> list[float]:
    """By transformers; a BERT is told which is the second text."""
    found = []
    for tokens in pairs:
        second = tokens.index(256) + 1
        types = torch.tensor([[int(at >= second) for at in range(len(tokens))]])
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), **({"token_type_ids": types} if name == "bert" else {})).logits
        found.append(float(logits[0, 0]))
    return found


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_scores_of_pairs_are_those_of_transformers(name: str, tiny_folder: TinyFolder) -> None:
    pairs = [[257, *b"which?", 256, *text, 256] for text in (b"this one", b"that one, and so on", b"x" * 90)]
    requests = [make_request(pair, id=str(at), pooling="score") for at, pair in enumerate(pairs)]
    found = events_of(open_checkpoint(tiny_folder(f"{name}_scores")), *requests)
    wanted = scores_of(tiny_encoder(name, labels=1), name, pairs)
    np.testing.assert_allclose([vector(found[str(at)])[0] for at in range(3)], wanted, atol=TOLERANCE)


def test_a_model_of_several_classes_is_refused(tmp_path: Path) -> None:
    save_tiny_encoder("bert", tmp_path, labels=3)
    with pytest.raises(UnsupportedModel, match="num_labels = 3"):
        open_checkpoint(tmp_path)


def test_a_folder_says_what_its_vectors_are(tiny_folder: TinyFolder) -> None:
    found = {name: open_checkpoint(tiny_folder(name)).spec.encoder for name in TINY_ENCODERS}
    said = {name: (encoder.pooling, encoder.normalize) for name, encoder in found.items() if encoder is not None}
    assert said == {"bert": ("cls", True), "xlm_roberta": ("mean", False), "modernbert": ("mean", False)}


def test_an_encoder_is_kept_in_the_type_that_it_is_computed_in(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    catalogue, source = Catalogue(tmp_path), str(tiny_folder("modernbert"))
    card = catalogue.pull(source)
    assert card.dtype == "f32"  # whatever the processor multiplies fastest
    executor = EncoderExecutor(open_checkpoint(Path(card.path)), ExecutorConfig(kv_bytes=1 << 24))
    assert (executor.dtype, executor.copied_bytes) == ("f32", 0)
    executor.close()
    written = (Path(card.path) / MANIFEST).stat().st_mtime_ns
    catalogue.pull(source)
    assert (Path(card.path) / MANIFEST).stat().st_mtime_ns == written  # it is what was asked for


@pytest.mark.parametrize(
    ("kind", "file", "content", "text"),
    [
        (UnsupportedModel, "1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode = 'max_tokens'"),
        (UnsupportedModel, "1_Pooling/config.json", {}, "pooling_mode = []"),
        (UnsupportedModel, "modules.json", [{"type": "x.Dense", "path": "2_Dense"}], "the module Dense"),
        (DamagedCheckpoint, "modules.json", [{"type": "x.Pooling", "path": "../there"}], "the name of a folder"),
        (DamagedCheckpoint, "modules.json", {}, "expected a JSON list"),
    ],
)
def test_vectors_that_would_be_others_are_refused(
    kind: type[CheckpointError], file: str, content: Any, text: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(tiny_folder("bert"), folder)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    assert text in str(caught.value)


def test_a_request_for_text_is_the_requests_own_fault(tiny_folder: TinyFolder) -> None:
    event = events_of(open_checkpoint(tiny_folder("bert")), make_request([5, 6, 7]))["r"]
    assert event.unprocessable
    assert event.error == "an encoder makes vectors, no text"


def test_a_server_embeds_with_an_encoder(tiny_server: Server, tiny_folder: TinyFolder) -> None:
    model, client = tiny_encoder("bert"), tiny_server.client()
    texts = ["a text", "another, which is longer", "x" * 158]  # the last fills the context
    tokens = [[257, *text.encode(), 256] for text in texts]
    unit = [torch.nn.functional.normalize(states_of(model, each)[0], dim=0) for each in tokens]
    answer = client.embeddings.create(model="bert", input=texts)
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    for item, wanted in zip(answer.data, unit, strict=True):
        assert np.abs(np.array(item.embedding) - wanted.numpy()).max() < TOLERANCE
    own = {"pooling": "mean", "normalize": False, "truncate_prompt_tokens": 9}
    (item,) = client.embeddings.create(model="bert", input=texts[1], extra_body=own).data
    wanted = states_of(model, [*tokens[1][:8], 256]).mean(dim=0)
    assert np.abs(np.array(item.embedding) - wanted.numpy()).max() < TOLERANCE
    with pytest.raises(openai.BadRequestError, match="context is 160 tokens"):
        client.embeddings.create(model="bert", input="x" * 159)


def test_an_encoder_that_is_asked_for_text_says_what_it_is_for(tiny_server: Server) -> None:
    client = tiny_server.client()
    for ask in (
        lambda: client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hi"}]),
        lambda: client.completions.create(model="bert", prompt="hi"),
        lambda: client.responses.create(model="bert", input="hi"),
    ):
        with pytest.raises(openai.BadRequestError, match=r"'bert' is an encoder.*ask /v1/embeddings") as caught:
            ask()
        assert caught.value.param == "model"


def test_a_server_ranks_documents_by_a_cross_encoders_scores(tiny_server: Server) -> None:
    query, texts = "which?", ["this one", "that one, and so on", "neither"]
    pairs = [[257, *query.encode(), 256, *text.encode(), 256] for text in texts]
    logits = np.array(scores_of(tiny_encoder("bert", labels=1), "bert", pairs))
    body = {"model": "bert_scores", "query": query, "documents": texts}
    answer = tiny_server.post("/v1/rerank", body).json()
    assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
    assert [item["index"] for item in answer["results"]] == np.argsort(-logits).tolist()
    found = {item["index"]: item["relevance_score"] for item in answer["results"]}
    np.testing.assert_allclose([found[at] for at in range(3)], 1 / (1 + np.exp(-logits)), atol=TOLERANCE)
    with pytest.raises(openai.BadRequestError, match="compares two texts: ask /v1/rerank"):
        tiny_server.client().embeddings.create(model="bert_scores", input="hi")
