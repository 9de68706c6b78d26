"""Beam search finds what transformers' finds, with ends and without, for every length penalty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CONTEXT, save_tiny
from transformers import AutoModelForCausalLM

from dovetail.gateway.http.beam_search import BeamPlan, BeamSearch
from dovetail.types import FinishReason, TokenLogprob, TokenLogprobs

PROMPT = (72, 101, 108, 108, 111)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tiny") / "llama"
    save_tiny("llama", folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def found(model: Any, plan: BeamPlan) -> BeamSearch:
    search = BeamSearch(plan)
    while search.live:
        texts = torch.tensor([[*PROMPT, *beam.tokens] for beam in search.live])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(texts).logits[:, -1], dim=-1)
        values, tokens = logprobs.topk(plan.num_candidates)
        search.extend(
            [
                TokenLogprobs(0.0, tuple(map(TokenLogprob, *row)))
                for row in zip(tokens.tolist(), values.tolist(), strict=True)
            ]
        )
    return search


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("num_stops", [0, 1, 40])
def test_beams_are_those_of_transformers(model: Any, num_stops: int, penalty: float) -> None:
    stops = list(range(100, 100 + num_stops))
    plan = BeamPlan(width=4, max_tokens=12, stop_ids=frozenset(stops), length_penalty=penalty)
    search = found(model, plan)
    wanted = model.generate(
        torch.tensor([PROMPT]),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        length_penalty=penalty,
        early_stopping="never" if num_stops else False,
        do_sample=False,
        eos_token_id=stops or [CONTEXT + 50],  # never the likeliest
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    texts = [tuple(row[len(PROMPT) :].tolist()) for row in wanted.sequences]
    for beam, text, score in zip(search.ended, texts, wanted.sequences_scores.tolist(), strict=True):
        assert beam.tokens == text[: len(beam.tokens)]
        assert set(text[len(beam.tokens) :]) <= {0, 100}  # padding
        assert beam.score / len(beam.tokens) ** penalty == pytest.approx(score, rel=1e-6)
        assert beam.finish is (FinishReason.STOP if beam.tokens[-1] in stops else FinishReason.LENGTH)
    if num_stops == 40 and penalty <= 1:
        assert any(beam.finish is FinishReason.STOP for beam in search.ended)  # or the test shows nothing


def test_no_beam_ends_before_its_least_length(model: Any) -> None:
    stops = frozenset(range(100, 140))
    plan = BeamPlan(width=4, max_tokens=12, stop_ids=stops, min_tokens=6, length_penalty=-1.0)
    lengths = [len(beam.tokens) for beam in found(model, plan).ended]
    assert min(lengths) > 6
    assert all(not stops & set(beam.tokens[:6]) for beam in found(model, plan).ended)
