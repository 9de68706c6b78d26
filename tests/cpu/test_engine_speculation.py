"""Speculative decoding changes when tokens come, never which: every answer is compared with the one without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drive import make_executor

from dovetail.engine.devices import Peaks
from dovetail.engine.executor import CpuExecutor
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.sequence import Sequence, sequences_of
from dovetail.sched.turn import Outcome, Turn
from dovetail.types import AdapterRef, Grammar, ModelCard, Request, SamplingParams, Speculation, TokenEvent
from dovetail.worker.draft_model import DraftModel
from dovetail.worker.runner import ModelRunner
from dovetail.worker.speculation import Costs, Speculator

PROMPT = tuple([72, 101, 108, 108, 111] * 3)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "top_p": 0.9},
    "the whole vocabulary": {"temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9, "temperature": 0.8},
    "barred ends": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 300, 2)), "temperature": 0.9},
    "ends": {"stop_token_ids": tuple(range(0, 300, 7)), "temperature": 0.9},
    "log-probabilities": {"logprobs": 3, "temperature": 1.0},
    "a bias": {"logit_bias": {7: 3.0, 9: 2.0}, "temperature": 0.0},
    "a grammar": {"grammar": Grammar("regex", "(ab|cd)[0-9]{20}"), "temperature": 2.0},
    "a word that must not be": {"bad_words": ((7, 9), (11,)), "temperature": 1.0},
}


class Oracle:
    """Knows the answer, and says it wrongly now and then: drafts of every kind of length and fault."""

    def __init__(self, answers: dict[int, list[int]], seed: int) -> None:
        self._answers = answers
        self._random = random.Random(seed)

    def drafts(self, sequences: list[Sequence]) -> dict[int, list[int]]:
        made = {}
        for one in sequences:
            rest = self._answers[one.choice][one.num_generated :][: self._random.randrange(7)]
            rest += [self._random.randrange(300) for _ in range(self._random.randrange(3))]
            if rest and self._random.random() < 0.5:
                rest[self._random.randrange(len(rest))] = self._random.randrange(300)
            made[one.id] = rest
        return made


def make_runner(executor: CpuExecutor, num_blocks: int = 200, speculator: Speculator | None = None) -> ModelRunner:
    card = ModelCard("m", "", executor.spec, "")
    limits = SchedulerConfig(executor.spec.context_length, max_batch=16, max_turn_tokens=64)
    runner = ModelRunner(card, executor, limits, executor._cache.block_size, speculator=speculator)
    runner.resize(num_blocks)
    return runner


def answers_of(
    runner: ModelRunner,
    request: Request,
    drafts: Callable[[list[Sequence]], dict[int, list[int]]] = lambda _: {},
    preempt_every: int = 0,
) -> dict[int, list[TokenEvent]]:
    """By choice. Preempted sequences lose their blocks and come back with the tokens they have."""
    open_ones = sequences_of(request, 0)
    for one in open_ones:
        runner.scheduler.enter(one)
    events: dict[int, list[TokenEvent]] = {one.choice: [] for one in open_ones}
    for turn in range(1, 500):
        if not open_ones:
            return events
        if preempt_every and turn % preempt_every == 0:
            runner.drop(open_ones[0])
            runner.scheduler.enter(open_ones[0])
        decoding = [one for one in open_ones if one.num_pending == 1 and one.num_generated]
        completed = runner.iterate(open_ones, drafts=drafts(decoding))
        runner.scheduler.pool.check()
        for one in open_ones:
            assert len(one.blocks) <= runner.scheduler.pool.blocks_for(max(len(one.tokens), 1)), "more than is needed"
        for event in completed.events:
            assert event.error is None, event.error
            events[event.choice].append(event)
        open_ones = [one for one in open_ones if events[one.choice][-1:] == [] or not events[one.choice][-1].finish]
    raise AssertionError("it never came to an end")


def told(answers: dict[int, list[TokenEvent]]) -> dict[int, list[Any]]:
    return {choice: [(e.token, e.finish, e.logprobs) for e in events] for choice, events in answers.items()}


def make_request(choices: int = 2, max_tokens: int = 24, **sampling: Any) -> Request:
    return Request("r", "m", PROMPT, SamplingParams(max_tokens=max_tokens, seed=11, **sampling), num_choices=choices)


@pytest.fixture(scope="module", params=["auto", "torch"])
def executor(tiny_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> CpuExecutor:
    folder = tiny_folder("llama")
    options = {"tokenizer_file": str(folder / "tokenizer.json"), "eos_token_ids": (256,), "level": request.param}
    # Torch's products depend on how many rows there are, in the last bits; in float64 these decide nothing.
    return make_executor(folder, dtype="f64" if request.param == "torch" else "f32", **options)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_with_drafts_is_the_answer_without(executor: CpuExecutor, way: str) -> None:
    request = make_request(**WAYS[way])
    plain = answers_of(make_runner(executor), request)
    known = {choice: [event.token or 0 for event in events] for choice, events in plain.items()}
    for seed in range(3):
        oracle = Oracle(known, seed)
        drafted = answers_of(make_runner(executor), request, oracle.drafts, preempt_every=5 * seed)
        assert known == {choice: [event.token for event in events] for choice, events in drafted.items()}
        if executor.level != "torch":
            assert told(drafted) == told(plain)
        firsts = [event for events in drafted.values() for event in events if event.proposed]
        assert sum(event.accepted for event in firsts) < sum(event.proposed for event in firsts)


def test_right_drafts_save_iterations_and_the_pool_need_not_hold_them(executor: CpuExecutor) -> None:
    request = make_request(choices=1, max_tokens=40, temperature=0.0)
    plain = answers_of(make_runner(executor), request)
    known = [event.token or 0 for event in plain[0]]

    def drafts(sequences: list[Sequence]) -> dict[int, list[int]]:
        return {one.id: known[one.num_generated :][:9] for one in sequences}

    roomy, tight = make_runner(executor), make_runner(executor, num_blocks=-(-(len(PROMPT) + 40) // 4))
    assert told(answers_of(roomy, request, drafts))[0] == told(plain)[0] or executor.level == "torch"
    assert roomy.meter.turns == 1 + -(-39 // 10)
    assert [event.token for event in answers_of(tight, request, drafts)[0]] == known


def test_a_block_of_rejected_tokens_is_no_prefix_for_anyone(executor: CpuExecutor) -> None:
    request = make_request(choices=1, max_tokens=24, temperature=0.0)
    plain = answers_of(make_runner(executor), request)
    known = [event.token or 0 for event in plain[0]]
    runner = make_runner(executor)
    wrong = [(token + 1) % 200 for token in known]
    answers_of(runner, request, lambda some: {one.id: wrong[one.num_generated :][:9] for one in some})
    pool = runner.scheduler.pool
    blocks, _ = pool.match([*PROMPT, known[0], *wrong[1:]], 64)
    assert len(blocks) == (len(PROMPT) + 1) // pool.block_size
    whole, _ = pool.match([*PROMPT, *known], 64)
    assert len(whole) == (len(PROMPT) + len(known) - 1) // pool.block_size


def test_lookup_finds_the_repetitions_of_a_text_and_changes_nothing(executor: CpuExecutor) -> None:
    request = make_request(choices=1, max_tokens=60, temperature=0.0, logit_bias={7: 50.0})
    plain = answers_of(make_runner(executor), request)
    speculator = Speculator(Speculation("always"))
    runner = make_runner(executor, speculator=speculator)
    costs = Costs(lambda rows: 1.0, 1.0)
    drafted = answers_of(runner, request, lambda some: speculator.propose(some, len(some), lambda: costs))
    assert [event.token for event in drafted[0]] == [event.token for event in plain[0]]
    assert speculator.accepted > 40
    assert runner.meter.turns < 20
    assert sum(event.proposed for event in drafted[0]) == speculator.proposed


# A draft model


def save_layers(folder: Path, count: int, seed: int = 0) -> Path:
    """A model of four layers of which the last ones say little; its first `count` of them."""
    from tiny import save_tiny_tokenizer, tiny_model

    model = tiny_model("llama", seed, num_hidden_layers=4)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data.mul_(0.4)
        layer.mlp.down_proj.weight.data.mul_(0.4)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:count]
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layers")
    kinds = {"itself": (4, 0), "its first layers": (2, 0)}
    return {name: save_layers(root / name.replace(" ", "-"), *which) for name, which in kinds.items()}


class Pair:
    """A model and its draft, with a clock that both move: a row of the model takes a second, one of the draft less."""

    def __init__(self, model: Path, draft: Path, row_s: float = 0.1, dtype: str = "f32", **speculation: Any) -> None:
        options = {"tokenizer_file": str(model / "tokenizer.json"), "eos_token_ids": (256,), "kv_bytes": 1 << 26}
        self.now, self.row_s = 0.0, row_s
        self.model, self.executor = make_executor(model, dtype=dtype, **options), make_executor(draft, **options)
        self.rows: list[int] = []  # of the draft's iterations
        self._run, self.executor.run = self.executor.run, self._timed  # type: ignore[method-assign]
        spec = self.executor.spec
        decode = Surface([(64, Curve([(1, row_s), (64, row_s * 2)]))])
        latency = LiveLatency(LatencyModel(Curve([(1, row_s), (512, row_s * 8)]), decode))
        self.draft = DraftModel(
            self.executor, latency, spec.context_length, (spec.vocab_size, self.model.spec.vocab_size), lambda: self.now
        )
        self.speculator = Speculator(Speculation(**{"mode": "auto", "tokens": 5} | speculation), self.draft)
        self.runner = make_runner(self.model, speculator=self.speculator)

    def _timed(self, turn: Turn) -> Outcome:
        self.now += self.row_s
        self.rows.append(turn.num_tokens)
        return self._run(turn)

    def drafts(self, sequences: list[Sequence]) -> dict[int, list[int]]:
        costs = Costs(lambda rows: 1.0 + 0.05 * rows, 100.0)
        return self.runner.propose(sequences, len(sequences), lambda: costs)

    def answer(self, request: Request, preempt_every: int = 0) -> dict[int, list[TokenEvent]]:
        drafted = answers_of(self.runner, request, self.drafts, preempt_every)
        assert self.runner.scheduler.pool.num_held == 0
        assert not self.draft._progress, "it keeps nothing of an answer that has ended"
        return drafted

    @property
    def acceptance(self) -> float:
        return self.speculator.accepted / max(self.speculator.proposed, 1)


DRAFTED = [*((way, "its first layers") for way in WAYS), ("drawn", "itself"), ("penalties", "itself")]


@pytest.mark.parametrize(("way", "draft"), DRAFTED)
def test_an_answer_that_a_model_drafts_is_the_answer_without(layers: dict[str, Path], draft: str, way: str) -> None:
    request = make_request(**WAYS[way])
    pair = Pair(layers["itself"], layers[draft], mode="always")
    plain = answers_of(make_runner(pair.model), request)
    assert told(pair.answer(request, preempt_every=9)) == told(plain)
    if way == "a grammar":
        assert not pair.rows, "it knows no grammar"
    else:
        assert 0 < pair.speculator.accepted <= pair.speculator.proposed
        assert pair.acceptance < 0.95 or draft == "itself"
    assert draft != "itself" or pair.acceptance > 0.9  # drawn by the same numbers, the same is drawn


def test_a_draft_that_is_right_saves_iterations_also_while_its_blocks_move(layers: dict[str, Path]) -> None:
    request = make_request(choices=1, max_tokens=60, temperature=0.8)
    pair = Pair(layers["itself"], layers["itself"])
    plain = answers_of(make_runner(pair.model), request)
    held = pair.runner.scheduler.pool.allocate(100)  # so that what follows lies beyond them
    assert held is not None
    drafts, resizes = pair.drafts, iter([150, 120, 60, 40, 100])

    def moving(sequences: list[Sequence]) -> dict[int, list[int]]:
        nonlocal held
        if held is not None and sequences and sequences[0].num_generated > 8:
            pair.runner.scheduler.pool.release(held)
            held = None
        if held is None and (size := next(resizes, None)) is not None:
            pair.runner.resize(size)
        return drafts(sequences)

    pair.drafts = moving  # type: ignore[method-assign]
    assert told(pair.answer(request)) == told(plain)
    assert pair.acceptance == 1.0, "keys and values of the draft have moved with the blocks"
    assert pair.runner.meter.turns < 30
    pair.runner.release_pages()
    assert pair.executor.kv_committed_bytes == pair.runner.stats(0, 0).kv_committed_bytes // 2
    pair.runner.close()


def test_smollm2_leaves_a_draft_that_knows_nothing(smollm2: ModelCard, tmp_path: Path) -> None:
    from tiny import tiny_model

    tiny_model("llama", vocab_size=smollm2.spec.vocab_size, num_hidden_layers=1).save_pretrained(tmp_path)
    pair = Pair(Path(smollm2.path), tmp_path, dtype=smollm2.dtype)
    request = make_request(choices=1, max_tokens=24, temperature=1.3)
    plain = answers_of(make_runner(pair.model), request)
    assert told(pair.answer(request)) == told(plain)
    tried = len(pair.rows)
    pair.answer(request)
    assert 0 < tried < 60
    assert len(pair.rows) - tried < 8, "what it is worth is known by now"


def test_the_memory_of_a_draft_is_its_models(layers: dict[str, Path]) -> None:
    from dovetail.engine.devices.opening import open_device
    from dovetail.messages import Load
    from dovetail.store import describe
    from dovetail.worker.hosting import Profiles
    from dovetail.worker.instances import hosting_of, instance_config
    from dovetail.worker.loading import build_runner
    from dovetail.worker.process import WorkerConfig

    model, draft = (describe(layers[name], name) for name in ("itself", "its first layers"))
    names = WorkerConfig.__dataclass_fields__
    config = WorkerConfig(**dict.fromkeys(names, 0) | {"block_size": 16, "max_batch": 4, "verify": "off"})
    device = open_device("cpu", 1)
    profiles = Profiles(None, device)
    profiles._peaks = dict.fromkeys([("f32", "f32"), ("bf16", "f32"), ("f16", "f32")], Peaks(1e9, 1e9, 1.0, 0.0, 0.0))
    alone, load = (Load(model, "f32", speculation=Speculation("auto", 4, one)) for one in (None, draft))
    made = instance_config(load, config, device, 1 << 24, profiles)
    runner, loaded = build_runner(made, device)
    hosting = hosting_of(made, profiles, 1.0, 0.0)
    plain = hosting_of(instance_config(alone, config, device, 1 << 24, profiles), profiles, 1.0, 0.0)
    assert hosting.weight_bytes == loaded.weight_bytes > plain.weight_bytes
    assert hosting.kv_bytes_per_token == plain.kv_bytes_per_token * 6 // 4  # two layers beside four
    runner.resize(3)
    assert runner.stats(0, 0).kv_committed_bytes >= 3 * 16 * hosting.kv_bytes_per_token
    assert runner.speculator is not None
    assert runner.speculator.model is not None
    assert runner.speculator.model.executor.max_blocks == runner.executor.max_blocks
    runner.close()


def test_an_answer_with_an_adapter_is_drafted_for_by_the_bare_model(layers: dict[str, Path], tmp_path: Path) -> None:
    from tiny_adapters import save_adapter

    from dovetail.engine.adapters import read_matrices
    from dovetail.store.hf.adapter_parts import open_adapter

    pair = Pair(layers["itself"], layers["itself"], mode="always")
    if pair.model.level == "torch":
        pytest.skip("adapters need native kernels")
    adapter = AdapterRef("a", str(save_adapter(tmp_path / "a", layers["itself"], rank=2, seed=1)), "1")
    weights = open_adapter(Path(adapter.path), pair.model.spec)
    pair.model.add_adapter(adapter.key, read_matrices(weights))
    weights.close()
    bare = make_request(temperature=0.7)
    request = msgspec.structs.replace(bare, adapter=adapter)
    plain = answers_of(make_runner(pair.model), request)
    assert told(plain) != told(answers_of(make_runner(pair.model), bare))
    assert told(pair.answer(request)) == told(plain)
    assert pair.rows
    assert pair.acceptance < 1.0
    assert told(pair.answer(bare)) == told(answers_of(make_runner(pair.model), bare)), "no prefix is the other's"
