"""Sampling on a GPU: what the host draws from the same logits, whatever the parameters, ahead of the host or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from random_sampling import random_logits, random_row, random_sampling

from dovetail.engine.executor import ExecutorConfig
from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import sample
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import Grammar, ModelCard, SamplingParams
from dovetail.worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.device import CudaDevice
    from dovetail.engine.devices.cuda.sampling import DeviceSampler

BLOCK, ROWS, STEPS = 4, 24, 30
LIST = Grammar("regex", "[a-f]{3,60}")


@pytest.mark.parametrize("vocab", [40, 300, 9000, 128_256])
def test_the_device_draws_what_the_host_draws(vocab: int) -> None:
    device, grammars = torch.device("cuda"), Grammars(Path("none"), vocab, ())
    for seed in range(12):
        chance = random.Random(1000 * vocab + seed)
        rows = [random_row(chance, vocab, at, random_sampling(chance, vocab)) for at in range(ROWS)]
        logits = random_logits(chance, ROWS, vocab)
        wanted = [outcome.token for outcome in sample(logits.float(), rows, grammars)]
        sampler = DeviceSampler(vocab, ROWS + 3, device, grammars)
        chosen = torch.full((ROWS + 3,), -7, dtype=torch.int32, device=device)
        with torch.inference_mode():
            sampler.admit(rows)
            assert sampler.choose(rows, logits.to(device), chosen, None, lambda choose: choose()) == {}
        found = chosen[:ROWS].tolist()
        different = [(rows[at].sampling, found[at], wanted[at]) for at in range(ROWS) if found[at] != wanted[at]]
        assert not different, f"seed {seed}: {different}"
        for row in rows:
            sampler.forget(row.sequence)


def test_a_row_of_what_is_no_number_fails_alone() -> None:
    logits = torch.randn(3, 9000, device="cuda")
    logits[1, 5000] = float("nan")
    sampler = DeviceSampler(9000, 3, torch.device("cuda"), Grammars(Path("none"), 9000, ()))
    rows = [TurnRow(i, [1, 2], 1, 1, [0], 2, SamplingParams(9, 5, top_p=0.5), samples=True) for i in range(3)]
    chosen = torch.zeros(3, dtype=torch.int32, device="cuda")
    sampler.admit(rows)
    sampler.choose(rows, logits, chosen, None, lambda choose: choose())
    first, broken, last = chosen.tolist()
    assert broken == -1
    assert min(first, last) >= 0


@pytest.fixture
def runner(tiny_folder: Callable[[str], Path]) -> Iterator[ModelRunner]:
    folder = tiny_folder("llama")
    config = ExecutorConfig(
        kv_bytes=1 << 24, block_size=BLOCK, dtype="f32", max_batch=ROWS, tokenizer_file=str(folder / "tokenizer.json")
    )
    executor = CudaDevice("cuda:0").executor(open_checkpoint(folder), config)
    spec = executor.spec
    made = ModelRunner(ModelCard("m", "", spec, ""), executor, SchedulerConfig(spec.context_length, ROWS), BLOCK)
    made.resize(executor.max_blocks)
    yield made
    made.close()


def make_sequences(vocab: int, seed: int, extra: Callable[[int], dict[str, Any]] = lambda at: {}) -> list[Sequence]:
    chance = random.Random(seed)
    made = []
    for at in range(16):
        sampling = msgspec.structs.replace(random_sampling(chance, vocab), max_tokens=STEPS, **extra(at))
        if at % 5 == 0:
            sampling = SamplingParams(STEPS, at, temperature=1.2, grammar=LIST, stop_token_ids=(256,))
        prompt = [chance.randrange(vocab) for _ in range(chance.randrange(1, 30))]
        made.append(Sequence(100 * seed + at, f"{seed}-{at}", 0, prompt, len(prompt), sampling))
    return made


def texts_of(runner: ModelRunner, sequences: list[Sequence], goes_on: bool) -> list[list[int]]:
    for sequence in sequences:
        runner.scheduler.enter(sequence)
    going, was_ahead = list(sequences), 0
    while going:
        completed = runner.iterate(going, goes_on=goes_on)
        was_ahead += runner.was_ahead
        assert all(event.error is None for event in completed.events)
        ended = {(event.request_id, event.choice) for event in completed.events if event.finish is not None}
        going = [one for one in going if (one.request_id, one.choice) not in ended]
    assert (was_ahead > STEPS // 2) == goes_on
    runner.scheduler.pool.drop_cache()
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


@pytest.mark.parametrize("seed", range(4))
def test_texts_computed_ahead_are_those_of_one_step_after_the_other(runner: ModelRunner, seed: int) -> None:
    vocab = runner.card.spec.vocab_size
    plain = texts_of(runner, make_sequences(vocab, seed), goes_on=False)
    assert texts_of(runner, make_sequences(vocab, seed), goes_on=True) == plain
    assert runner.executor._sampler._known == {}, "what is kept of a sequence goes with it"


def test_each_token_is_the_hosts_choice_from_the_same_logits(runner: ModelRunner) -> None:
    """Step by step, over texts that grow: penalties count what was drawn."""
    executor, vocab = runner.executor, runner.card.spec.vocab_size
    grammars = Grammars(Path(), vocab, ())
    sequences = [one for one in make_sequences(vocab, 9) if one.sampling.grammar is None]
    for sequence in sequences:
        runner.scheduler.enter(sequence)
    runner.iterate(sequences)
    for _ in range(STEPS - 2):
        rows = tuple(
            TurnRow(one.id, list(one.tokens), len(one.tokens) - 1, 1, one.blocks, one.num_prompt, one.sampling, True)
            for one in sequences
        )
        if any(len(row.blocks) * BLOCK < row.end for row in rows):
            runner.iterate(sequences)  # the scheduler finds them blocks
            continue
        logits = executor.logits(Turn(rows))
        wanted = sample(torch.stack([logits[row.sequence] for row in rows]), list(rows), grammars)
        runner.iterate(sequences)
        assert [one.tokens[-1] for one in sequences] == [outcome.token for outcome in wanted]


def test_log_probabilities_are_those_of_the_host(runner: ModelRunner) -> None:
    executor, vocab = runner.executor, runner.card.spec.vocab_size
    kinds = [{"logprobs": 0}, {"logprobs": 7}, {"logprobs": 0, "logprob_token_ids": (9, 2)}, {}]
    rows = tuple(
        TurnRow(
            at, [5, 6, 7 + at], 0, 3, [2 * at], 3, SamplingParams(9, at, top_k=50, presence_penalty=1.0, **kind), True
        )
        for at, kind in enumerate(kinds)
    )
    logits = executor.logits(Turn(rows))
    wanted = sample(torch.stack([logits[at] for at in range(4)]), list(rows), Grammars(Path(), vocab, ()))
    found = {row.sequence: row for row in executor.run(Turn(rows)).rows}
    for outcome in wanted:
        ours, theirs = found[outcome.sequence].logprobs, outcome.logprobs
        assert found[outcome.sequence].token == outcome.token
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-3)
            told, wanted_told = ({one.token: one.logprob for one in each.top} for each in (ours, theirs))
            assert told == pytest.approx(wanted_told, abs=1e-3)


def test_what_was_counted_by_an_iteration_that_is_dropped_is_counted_once(runner: ModelRunner) -> None:
    """Somebody joins: the iteration that was launched ahead is computed again."""
    vocab = runner.card.spec.vocab_size
    plain = texts_of(runner, make_sequences(vocab, 5), goes_on=False)
    sequences = make_sequences(vocab, 5)
    for sequence in sequences:
        runner.scheduler.enter(sequence)
    going = list(sequences)
    for step in range(3 * STEPS):
        some = going if step % 3 else going[: max(len(going) - 1, 1)]
        completed = runner.iterate(some, goes_on=True)
        ended = {event.request_id for event in completed.events if event.finish is not None}
        going = [one for one in going if one.request_id not in ended]
        if not going:
            break
    assert [sequence.tokens[sequence.num_prompt :] for sequence in sequences] == plain
