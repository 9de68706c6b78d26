"""Sampling by its parameters: what may be chosen, how often, and that nothing else in the batch matters."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Engine, make_executor, make_request, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.engine.draw import uniform
from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import sample
from dovetail.sched.turn import TurnRow
from dovetail.types import FinishReason, Grammar, SamplingParams

VOCAB = 12
NO_GRAMMARS = Grammars(Path("none"), VOCAB, ())


def row_of(tokens: list[int] | None = None, num_prompt: int | None = None, **sampling: Any) -> TurnRow:
    tokens = tokens or [0]
    params = SamplingParams(**({"max_tokens": 5, "seed": 0} | sampling))
    count = len(tokens) if num_prompt is None else num_prompt
    return make_row(0, tokens, len(tokens) - 1, 1, [0] * 64, num_prompt=count, sampling=params)


def frequencies(logits: torch.Tensor, draws: int = 4000, **sampling: Any) -> torch.Tensor:
    rows = [row_of(seed=seed, **sampling) for seed in range(draws)]
    counts = Counter(o.token for o in sample(logits.repeat(draws, 1), rows, NO_GRAMMARS))
    return torch.tensor([counts[i] / draws for i in range(len(logits))])


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -9.0])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, 12),
        ({"top_k": 3}, 3),
        ({"top_p": 0.6}, 2),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.3}, 3),
        ({"top_k": 5, "top_p": 0.7}, 3),
        ({"temperature": 0.5}, 12),
        ({"temperature": 2.0, "top_k": 4}, 4),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: dict[str, Any], kept: int) -> None:
    wanted = torch.softmax(LOGITS.double() / sampling.get("temperature", 1.0), dim=-1)
    wanted[kept:] = 0
    wanted /= wanted.sum()
    seen = frequencies(LOGITS, **sampling)
    assert not seen[kept:].any()
    error = (seen - wanted).abs()
    bound = 5 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-9
    assert (error <= bound).all(), f"{seen} against {wanted}"


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() -> None:
    flat = torch.zeros(1000)
    tokens = {
        o.token for o in sample(flat.repeat(500, 1), [row_of(seed=s, top_p=0.9) for s in range(500)], NO_GRAMMARS)
    }
    assert len(tokens) > 300


def test_temperature_zero_is_the_likeliest_token() -> None:
    assert frequencies(LOGITS, draws=50, temperature=0.0)[0] == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    seen = frequencies(LOGITS, draws=200, allowed_token_ids=(4, 7, 11), temperature=temperature)
    assert seen.nonzero().flatten().tolist() == ([4] if temperature == 0 else [4, 7, 11])[: seen.count_nonzero()]
    assert seen.sum() == 1.0


def test_a_bad_word_is_never_completed() -> None:
    words = ((0,), (5, 1), (5, 6, 2))

    def best(made: list[int]) -> int:
        row = row_of([1, *made], num_prompt=1, bad_words=words, temperature=0.0)
        return sample(LOGITS[None].clone(), [row], NO_GRAMMARS)[0].token

    assert best([]) == 1  # 0 never comes
    assert best([5]) == 2  # after 5, neither does 1
    assert best([5, 6]) == 1
    assert best([5, 6, 5]) == 2
    row = row_of([3, 5], num_prompt=2, bad_words=words, temperature=0.0)
    assert sample(LOGITS[None].clone(), [row], NO_GRAMMARS)[0].token == 1  # the prompt's 5 begins no word


def test_penalties_act_on_the_tokens_they_should() -> None:
    tokens = [3, 3, 4, 5, 5]  # prompt 3 3 4, output 5 5
    base = torch.ones(VOCAB)

    def penalized(**sampling: Any) -> torch.Tensor:
        logits = base.clone()[None]
        sample(logits, [row_of(tokens, num_prompt=3, temperature=0.0, **sampling)], NO_GRAMMARS)
        return logits[0]

    repetition = penalized(repetition_penalty=2.0)
    assert [i for i in range(VOCAB) if repetition[i] == 0.5] == [3, 4, 5]
    presence = penalized(presence_penalty=0.25)
    assert [i for i in range(VOCAB) if presence[i] != 1.0] == [5]
    assert presence[5] == 0.75
    assert penalized(frequency_penalty=0.25)[5] == 0.5
    negative = torch.full((1, VOCAB), -1.0)
    sample(negative, [row_of(tokens, num_prompt=3, temperature=0.0, repetition_penalty=2.0)], NO_GRAMMARS)
    assert negative[0, 3] == -2.0


def test_bias_and_barred_stop_tokens() -> None:
    assert frequencies(LOGITS, draws=20, temperature=0.0, logit_bias={7: 100.0})[7] == 1.0
    assert frequencies(LOGITS, draws=20, temperature=0.0, logit_bias={0: -100.0})[1] == 1.0
    assert frequencies(LOGITS, draws=20, temperature=0.0, min_tokens=2, stop_token_ids=(0, 10**6))[1] == 1.0


def test_logprobs_are_those_of_the_model_before_penalties() -> None:
    row = row_of(logprobs=3, temperature=0.0, logit_bias={5: 100.0})
    (outcome,) = sample(LOGITS[None].clone(), [row], NO_GRAMMARS)
    wanted = torch.log_softmax(LOGITS.double(), dim=-1)
    assert outcome.token == 5
    assert outcome.logprobs is not None
    assert outcome.logprobs.chosen == pytest.approx(float(wanted[5]), abs=1e-6)
    assert [entry.token for entry in outcome.logprobs.top] == [0, 1, 2]
    assert [entry.logprob for entry in outcome.logprobs.top] == pytest.approx(wanted[:3].tolist(), abs=1e-6)


def test_chosen_tokens_are_told_of_with_the_one_that_was_drawn() -> None:
    wanted = torch.log_softmax(LOGITS.double(), dim=-1)
    for drawn in (5, 9):
        row = row_of(logprobs=0, temperature=0.0, logit_bias={drawn: 100.0}, logprob_token_ids=(9, 2))
        (outcome,) = sample(LOGITS[None].clone(), [row], NO_GRAMMARS)
        assert outcome.logprobs is not None
        told = {entry.token: entry.logprob for entry in outcome.logprobs.top}
        assert told == pytest.approx({token: float(wanted[token]) for token in {2, 9, drawn}}, abs=1e-6)
        assert list(told.values()) == sorted(told.values(), reverse=True)


def test_a_value_that_is_not_a_number_fails_its_row_and_no_other() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 3] = math.nan
    broken, fine = sample(logits, [row_of(temperature=0.0), row_of(temperature=0.0)], NO_GRAMMARS)
    assert broken.error is not None
    assert not broken.unprocessable
    assert (fine.error, fine.token) == (None, 0)


@given(seed=st.integers(0, 2**63), position=st.integers(0, 10**6))
def test_the_draw_is_a_number_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


@settings(max_examples=50, deadline=None)
@given(others=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 12), st.floats(0.1, 1.0)), max_size=6))
def test_a_rows_token_does_not_depend_on_the_other_rows(others: list[tuple[float, int, float]]) -> None:
    mine = row_of(seed=123, temperature=0.8, top_p=0.9)
    rest = [row_of(seed=i, temperature=t, top_k=k, top_p=p) for i, (t, k, p) in enumerate(others)]
    alone = sample(LOGITS[None].clone(), [mine], NO_GRAMMARS)[0].token
    for rows in ([mine, *rest], [*rest, mine]):
        outcomes = sample(LOGITS.repeat(len(rows), 1), rows, NO_GRAMMARS)
        assert outcomes[rows.index(mine)].token == alone


@pytest.mark.parametrize(
    "other", [{"top_k": 50}, {"top_k": 300}, {"top_p": 0.99999, "temperature": 2.0}, {"temperature": 0.0}]
)
@pytest.mark.parametrize("mine", [{"top_p": 0.8}, {"top_k": 40, "top_p": 0.8}, {"top_k": 300, "top_p": 0.8}])
def test_nor_does_it_in_a_large_vocabulary_with_ties(mine: dict[str, Any], other: dict[str, Any]) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)).mul(1.5).bfloat16().float()
    rows = [row_of(seed=seed, temperature=0.5, **mine) for seed in range(100)]
    alone = [sample(logits[None].clone(), [row], NO_GRAMMARS)[0].token for row in rows]
    together = sample(logits.repeat(101, 1), [row_of(**other), *rows], NO_GRAMMARS)
    assert [outcome.token for outcome in together[1:]] == alone


@pytest.mark.parametrize(
    ("sampling", "token"),
    [({"temperature": 5e-324}, 11), ({"temperature": 1e-308}, 11), ({"repetition_penalty": 1e-300}, 9)],
)
def test_absurdly_small_values_lead_to_the_token_that_they_favour(sampling: dict[str, Any], token: int) -> None:
    logits = LOGITS.flip(0)[None].clone()  # token 0 is the least likely
    (outcome,) = sample(logits, [row_of([9], **sampling)], NO_GRAMMARS)
    assert (outcome.error, outcome.token) == (None, token)


# Structured output on a random model: the text is nonsense, its form is not


@pytest.fixture(scope="module")
def engine(tiny_folder: Callable[[str], Path]) -> Engine:
    folder = tiny_folder("llama")
    return Engine(make_executor(folder, tokenizer_file=str(folder / "tokenizer.json"), eos_token_ids=(256,)))


def text_of(folder: Path, tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "valid"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA)), lambda text: json.loads(text)["age"] in range(100)),
        (Grammar("regex", "[a-c]{3}-[0-9]{2}"), lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
        (Grammar("lark", 'start: "yes" | "no"'), lambda text: text in ("yes", "no")),
    ],
    ids=["json_schema", "regex", "grammar"],
)
def test_a_grammar_forms_the_text(
    engine: Engine, tiny_folder: Callable[[str], Path], grammar: Grammar, valid: Callable[[str], Any]
) -> None:
    for seed in range(5):
        request = make_request(
            [1, 2], max_tokens=100, grammar=grammar, seed=seed, temperature=1.5, stop_token_ids=(256,)
        )
        engine.scheduler.add(request)
        events = engine.drain()
        assert events[-1].finish is FinishReason.STOP
        assert valid(text_of(tiny_folder("llama"), [event.token for event in events if event.token != 256]))
    assert engine.executor._grammars._states == {}, "matchers go with their sequences"


def test_a_constrained_request_survives_preemption(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("llama")
    executor = make_executor(folder, tokenizer_file=str(folder / "tokenizer.json"), dtype="f64")
    grammar = Grammar("regex", "[a-z]{30}")
    requests = [make_request([1, 2, i], id=str(i), max_tokens=40, grammar=grammar, temperature=1.0) for i in range(3)]
    roomy, tight = Engine(executor), Engine(executor, num_blocks=12)
    assert roomy.run(*requests) == tight.run(*requests)
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "(["), Grammar("lark", "start: ???"), Grammar("json_schema", "{")]
)
def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine: Engine, grammar: Grammar) -> None:
    engine.scheduler.add(make_request([1, 2], id="bad", grammar=grammar))
    engine.scheduler.add(make_request([1, 2], id="good", max_tokens=3))
    events = engine.drain()
    (bad,) = [event for event in events if event.request_id == "bad"]
    assert bad.finish is FinishReason.ERROR
    assert bad.unprocessable
    assert len([event for event in events if event.request_id == "good"]) == 3
