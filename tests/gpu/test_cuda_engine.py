"""Models on a GPU against transformers: every family, any chunking, mixed batches, graphs, resizes, several at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY_CONFIGS, VOCAB_SIZE

from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import OutOfMemory, UnsupportedModel
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.arena import RECLAIMER
    from dovetail.engine.devices.cuda.device import CudaDevice

LENGTH = 40
BLOCK = 4
GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)
# One token of one sequence after the other's: sums in other orders than transformers', in float32.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def device() -> Any:
    return CudaDevice("cuda:0")


# Families that run on CPUs only, and what of them the GPU's layers lack.
REFUSED = {"olmo2": "pre_norm", "olmo3": "pre_norm", "cohere": "parallel_block", "cohere2": "parallel_block"}
REFUSED |= {"gpt_oss": "attention_sinks", "deepseek_v2": "mla"}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_needs_what_a_gpu_lacks_is_refused_by_name(
    name: str, device: Any, tiny_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedModel, match=f"family {name}.*{REFUSED[name]}"):
        make_executor(tiny_folder(name), device)


@pytest.fixture(params=sorted(TINY_CONFIGS.keys() - REFUSED.keys()), scope="module")
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def executor(folder: Path, device: Any) -> Iterator[Any]:
    made = make_executor(folder, device)
    yield made
    made.close()


def make_executor(folder: Path, device: Any, **options: Any) -> Any:
    options = {"kv_bytes": 1 << 24, "block_size": BLOCK, "dtype": "f32", "max_batch": 16} | options
    executor = device.executor(open_checkpoint(folder), ExecutorConfig(**options))
    executor.resize(executor.max_blocks)
    return executor


def make_tokens(seed: int, length: int = LENGTH) -> list[int]:
    return [random.Random(seed + i).randrange(VOCAB_SIZE) for i in range(length)]


def make_row(sequence: int, tokens: list[int], start: int, count: int, blocks: list[int], **options: Any) -> TurnRow:
    options = {"num_prompt": len(tokens), "sampling": GREEDY} | options
    return TurnRow(sequence, tokens, start, count, blocks, samples=start + count == len(tokens), **options)


def reference_logits(reference: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    difference = (ours - theirs).abs().max().item()
    assert difference < tolerance, f"logits differ by {difference:.2e}"


def decode_greedily(executor: Any, sequences: list[list[int]], tables: list[list[int]], count: int) -> None:
    """Append `count` tokens to each, all in one batch."""
    for _ in range(count):
        rows = [
            make_row(i, tokens, len(tokens) - 1, 1, tables[i][: -(-len(tokens) // BLOCK)], num_prompt=1)
            for i, tokens in enumerate(sequences)
        ]
        for tokens, result in zip(sequences, executor.run(Turn(tuple(rows))).rows, strict=True):
            assert result.error is None
            tokens.append(result.token)


def test_iterations_launched_ahead_choose_the_same_tokens(executor: Any) -> None:
    sequences = [make_tokens(seed, 8 + seed) for seed in range(5)]
    tables = [list(range(20 * i, 20 * i + 20)) for i in range(5)]
    for i, tokens in enumerate(sequences):
        executor.run(Turn((make_row(i, tokens, 0, len(tokens), tables[i]),)))
    plain = [list(tokens) for tokens in sequences]
    decode_greedily(executor, plain, tables, 12)

    def rows(ahead: int, which: list[int]) -> Turn:
        return Turn(
            tuple(
                TurnRow(i, sequences[i], len(sequences[i]) - 1 + ahead, 1, tables[i], 1, GREEDY, samples=True)
                for i in which
            )
        )

    def take(which: list[int]) -> None:
        found = {result.sequence: result.token for result in executor.collect().rows}
        for i in which:
            sequences[i].append(found[i])

    here = list(range(5))
    executor.launch(rows(0, here))
    for step in range(11):
        left = [i for i in here if step < 6 or i != 2]  # one of them ends on the way
        assert executor.launch_next(rows(1, left))
        take(here)
        here = left
    take(here)
    assert all(sequences[i] == plain[i][: len(sequences[i])] for i in range(5))
    assert [len(sequences[i]) - 8 - i for i in range(5)] == [12, 12, 7, 12, 12]
    executor.launch(rows(0, here))
    executor.launch_next(rows(1, here))
    take(here)
    executor.discard()  # and then once more, as if it had not been
    decode_greedily(executor, plain, tables, 2)
    executor.launch(rows(0, here))
    take(here)
    assert all(sequences[i] == plain[i] for i in here)


@pytest.mark.parametrize(
    "chunks",
    [[LENGTH], [1] * LENGTH, [7, 20, 13], [16, 16, 8], [39, 1], [30] + [1] * 10],
    ids=["whole", "token by token", "odd chunks", "even chunks", "one decode", "ten decodes"],
)
def test_logits_equal_transformers_in_any_chunking(
    executor: Any, reference: torch.nn.Module, chunks: list[int]
) -> None:
    tokens = make_tokens(1)
    theirs = reference_logits(reference, tokens)
    blocks = list(range(-(-LENGTH // BLOCK)))
    for _ in range(3):  # the second and third time by graphs
        start = 0
        for count in chunks:
            row = make_row(0, tokens[: start + count], start, count, blocks)
            ours = executor.logits(Turn((row,)))[0]
            start += count
            assert_close(ours, theirs[start - 1])


def test_logits_of_a_mixed_batch_equal_each_alone(executor: Any, reference: torch.nn.Module) -> None:
    lengths, counts = [40, 23, 23, 9, 1, 31], [1, 1, 5, 9, 1, 1]
    tables = [[i * 12 + 11 - j for j in range(12)] for i in range(len(lengths))]
    sequences = [make_tokens(100 + i, length) for i, length in enumerate(lengths)]
    for i, (tokens, count) in enumerate(zip(sequences, counts, strict=True)):
        if len(tokens) > count:
            executor.run(Turn((make_row(i, tokens, 0, len(tokens) - count, tables[i]),)))
    rows = tuple(
        make_row(i, tokens, len(tokens) - count, count, tables[i])
        for i, (tokens, count) in enumerate(zip(sequences, counts, strict=True))
    )
    for _ in range(3):  # the second and third time by graphs
        ours = executor.logits(Turn(rows))
        for i, tokens in enumerate(sequences):
            assert_close(ours[i], reference_logits(reference, tokens)[-1])


def test_parts_of_several_prompts_in_one_iteration_equal_each_alone(executor: Any, reference: torch.nn.Module) -> None:
    """Some whole, some continued, some left unfinished: those have no token, and go on in the next."""
    lengths, first_ends = [40, 17, 33, 40, 5], [40, 17, 16, 20, 5]
    tables = [[i * 12 + 11 - j for j in range(12)] for i in range(len(lengths))]
    sequences = [make_tokens(200 + i, length) for i, length in enumerate(lengths)]
    expected = [reference_logits(reference, tokens)[-1] for tokens in sequences]
    for _ in range(3):  # the second and third time by graphs
        begun = tuple(
            TurnRow(i, tokens, 0, end, tables[i], len(tokens), GREEDY, samples=end == len(tokens))
            for i, (tokens, end) in enumerate(zip(sequences, first_ends, strict=True))
        )
        ours = executor.logits(Turn(begun))
        assert sorted(ours) == [0, 1, 4]
        rest = tuple(make_row(i, sequences[i], first_ends[i], lengths[i] - first_ends[i], tables[i]) for i in (2, 3))
        ours |= executor.logits(Turn(rest))
        for i, logits in enumerate(expected):
            assert_close(ours[i], logits)
        tokens_of = {row.sequence: row.token for row in executor.run(Turn(begun)).rows}
        assert tokens_of == {i: int(expected[i].argmax()) for i in (0, 1, 4)}


def test_greedy_text_equals_transformers(executor: Any, reference: torch.nn.Module) -> None:
    prompts = [make_tokens(7, 5), make_tokens(8, 33), make_tokens(9, 70)]
    tables = [list(range(i * 40, i * 40 + 40)) for i in range(3)]
    sequences = [list(prompt) for prompt in prompts]
    for i, tokens in enumerate(sequences):
        result = executor.run(Turn((make_row(i, tokens, 0, len(tokens), tables[i]),))).rows[0]
        tokens.append(result.token)
    decode_greedily(executor, sequences, tables, 47)
    for prompt, tokens in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            whole = reference.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False, pad_token_id=0)
        assert tokens == whole[0].tolist()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bits_are_as_close_to_float32_as_those_of_transformers(
    folder: Path, reference: torch.nn.Module, device: Any, dtype: str
) -> None:
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype], **plain).eval()
    executor = make_executor(folder, device, dtype=dtype)
    ours, theirs = [], []
    for seed in range(8):
        tokens = make_tokens(seed)
        exact = reference_logits(reference, tokens)[-1]
        logits = executor.logits(Turn((make_row(0, tokens, 0, LENGTH, list(range(10))),)))[0]
        ours.append(((logits - exact).norm() / exact.norm()).item())
        theirs.append(((reference_logits(narrow, tokens)[-1] - exact).norm() / exact.norm()).item())
    executor.close()
    assert sorted(ours)[4] < 1.5 * sorted(theirs)[4], f"relative errors {ours} against {theirs}"


def test_a_resize_keeps_what_is_cached_and_moves_blocks(tiny_folder: Callable[[str], Path], device: Any) -> None:
    executor = make_executor(tiny_folder("llama"), device)
    tokens = make_tokens(3)
    high = [executor.max_blocks - 1 - i for i in range(14)]
    wanted = _continued(executor, tokens, high, 10)
    executor.run(Turn((make_row(0, tokens, 0, LENGTH, high),)))
    moves = [(block, at) for at, block in enumerate(high)]
    executor.resize(16, moves)
    assert executor.kv_committed_bytes < executor.max_blocks * executor._cache.block_bytes
    moved = [at for _, at in moves]
    again = [list(tokens)]
    result = executor.logits(Turn((make_row(0, tokens, LENGTH - 1, 1, moved),)))[0]
    again[0].append(int(result.argmax()))
    decode_greedily(executor, again, [moved], 9)
    assert again[0] == wanted
    executor.resize(executor.max_blocks)
    executor.close()


def _continued(executor: Any, tokens: list[int], blocks: list[int], count: int) -> list[int]:
    sequence = list(tokens)
    sequence.append(executor.run(Turn((make_row(0, sequence, 0, len(sequence), blocks),))).rows[0].token)
    decode_greedily(executor, [sequence], [blocks], count - 1)
    return sequence


def test_two_models_take_turns_and_do_not_disturb_each_other(tiny_folder: Callable[[str], Path], device: Any) -> None:
    names = ["llama", "qwen3"]
    alone = []
    for name in names:
        executor = make_executor(tiny_folder(name), device)
        alone.append(_continued(executor, make_tokens(5), list(range(20)), 20))
        executor.close()
    both = [make_executor(tiny_folder(name), device) for name in names]
    texts = [make_tokens(5) for _ in names]
    for executor, text in zip(both, texts, strict=True):
        text.append(executor.run(Turn((make_row(0, text, 0, LENGTH, list(range(20))),))).rows[0].token)
    for _ in range(19):
        for executor, text in zip(both, texts, strict=True):
            decode_greedily(executor, [text], [list(range(20))], 1)
    assert texts == alone
    for executor in both:
        executor.close()


def test_sampling_on_the_device_draws_what_it_draws_on_the_host(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    from dovetail.engine.grammar import Grammars
    from dovetail.engine.sampler import sample

    executor = make_executor(tiny_folder("llama"), device)
    tokens = make_tokens(11)
    for _ in range(2):  # from then on by graphs, with the same rounding every time
        executor.logits(Turn((make_row(0, tokens, 0, LENGTH, list(range(10))),)))
    for seed in range(20):
        sampling = SamplingParams(max_tokens=9, seed=seed, temperature=0.9, top_p=0.8, top_k=50, presence_penalty=0.5)
        row = make_row(0, tokens, 0, LENGTH, list(range(10)), sampling=sampling)
        logits = executor.logits(Turn((row,)))[0][None].clone()
        wanted = sample(logits, [row], Grammars(Path(), VOCAB_SIZE, ()))[0].token
        assert executor.run(Turn((row,))).rows[0].token == wanted
        executor.forget(0)
    executor.close()


def test_what_does_not_fit_on_the_device_is_said_and_leaves_nothing_behind(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    before = torch.cuda.mem_get_info()[0]
    executor = make_executor(tiny_folder("llama"), device, kv_bytes=1 << 24)
    executor.close()
    config = ExecutorConfig(kv_bytes=2 * device.memory_bytes, block_size=BLOCK, dtype="f32", max_batch=4)
    executor = device.executor(open_checkpoint(tiny_folder("llama")), config)
    with pytest.raises(OutOfMemory, match=r"no .* bytes left"):
        executor.resize(executor.max_blocks)
    executor.resize(64)
    assert len(executor.run(Turn((make_row(0, make_tokens(1), 0, LENGTH, list(range(10))),))).rows) == 1
    executor.close()
    RECLAIMER.wait()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - (256 << 20)
