"""Iterations of decodes and chunks of prompts together: by graphs what is computed kernel by kernel, and contexts of
any lengths in one batch as torch reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_sampling import random_sampling
from tiny import VOCAB_SIZE

from dovetail.engine.executor import ExecutorConfig
from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import sample
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda import attention, splits, whole_prompts
    from dovetail.engine.devices.cuda.device import CudaDevice

BLOCK, SINGLES = 4, 40
GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


def make_executor(folder: Path) -> Any:
    config = ExecutorConfig(kv_bytes=1 << 25, block_size=BLOCK, dtype="f32", max_batch=SINGLES)
    executor = CudaDevice("cuda:0").executor(open_checkpoint(folder), config)
    executor.resize(executor.max_blocks)
    return executor


def mixture(chance: random.Random, singles: int, chunks: int, num_blocks: int) -> list[TurnRow]:
    """Decodes of contexts short and long, and whole prompts, parts that end one, and parts that do not."""
    free = list(range(num_blocks))
    chance.shuffle(free)
    rows = []
    for at in range(singles + chunks):
        length = chance.choice((1, 2, 17, 60, 200)) if at < singles else chance.randrange(2, 120)
        count = 1 if at < singles else chance.choice((1, 2, length, chance.randrange(1, length + 1)))
        unfinished = at >= singles and chance.random() < 0.3
        tokens = [chance.randrange(VOCAB_SIZE) for _ in range(length + 3 * unfinished)]
        blocks = [free.pop() for _ in range(-(-len(tokens) // BLOCK))]
        start = min(length, len(tokens)) - count
        rows.append(TurnRow(at, tokens, start, count, blocks, len(tokens), GREEDY, samples=not unfinished))
    chance.shuffle(rows)
    return rows


def fill_cache(executor: Any, rows: list[TurnRow]) -> None:
    for row in rows:
        if row.start:
            before = TurnRow(row.sequence, row.tokens, 0, row.start, row.blocks, row.num_prompt, GREEDY, samples=False)
            executor.run(Turn((before,)))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "opt"])
def test_any_mixture_has_the_same_logits_by_graphs_and_by_kernels(
    family: str, tiny_folder: Callable[[str], Path]
) -> None:
    by_graphs, by_kernels = (make_executor(tiny_folder(family)) for _ in range(2))
    for buckets in (by_kernels._chunk._buckets, by_kernels._chunk._buckets_beside):
        buckets.clear()
    for seed in range(10):
        chance = random.Random(seed)
        shape = (1, 1) if seed == 0 else (chance.randrange(1, SINGLES + 1), chance.randrange(1, 9))
        rows = mixture(chance, *shape, min(by_graphs.max_blocks, 3000))
        for executor in (by_graphs, by_kernels):
            fill_cache(executor, rows)
        wanted = by_kernels.logits(Turn(tuple(rows)))
        for _ in range(3):  # the first by kernels, the second is captured, the third replayed
            found = by_graphs.logits(Turn(tuple(rows)))
            assert sorted(found) == sorted(wanted) == sorted(row.sequence for row in rows if row.samples)
            for sequence, logits in wanted.items():
                assert (found[sequence] - logits).abs().max().item() < 2e-4
        tokens = {one.sequence: one.token for one in by_graphs.run(Turn(tuple(rows))).rows}
        assert tokens == {sequence: int(logits.argmax()) for sequence, logits in found.items()}
    assert any(" beside " in name for name in by_graphs._steps._graphs)
    assert not any("chunk" in name for name in by_kernels._steps._graphs)
    for executor in (by_graphs, by_kernels):
        executor.close()


def test_a_mixture_of_sampling_parameters_draws_what_the_host_draws(tiny_folder: Callable[[str], Path]) -> None:
    executor, grammars = make_executor(tiny_folder("llama")), Grammars(Path(), VOCAB_SIZE, ())
    for seed in range(6):
        chance = random.Random(100 + seed)
        plain = mixture(chance, 20, 4, min(executor.max_blocks, 3000))
        fill_cache(executor, plain)
        rows = [
            TurnRow(
                one.sequence, one.tokens, one.start, one.count, one.blocks, one.num_prompt,
                random_sampling(chance, VOCAB_SIZE), one.samples,
            )
            for one in plain
        ]  # fmt: skip
        for _ in range(2):  # from then on by a graph, with the same rounding every time
            logits = executor.logits(Turn(tuple(rows)))
        sampled = [row for row in rows if row.samples]
        wanted = sample(torch.stack([logits[row.sequence] for row in sampled]), sampled, grammars)
        found = {one.sequence: one.token for one in executor.run(Turn(tuple(rows))).rows}
        assert found == {one.sequence: one.token for one in wanted}
        for row in rows:
            executor.forget(row.sequence)
    executor.close()


def test_decodes_go_on_after_a_mixture_with_the_tables_that_they_had(tiny_folder: Callable[[str], Path]) -> None:
    """Rows keep their places or change them, and lists of blocks grow, between iterations of either kind."""
    executor = make_executor(tiny_folder("llama"))
    chance = random.Random(4)
    texts = [[chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(3, 30))] for _ in range(9)]
    tables = [list(range(40 * at, 40 * at + 40)) for at in range(9)]

    def row(at: int, tokens: list[int], start: int) -> TurnRow:
        used = -(-len(tokens) // BLOCK)
        return TurnRow(at, tokens, start, len(tokens) - start, tables[at][:used], 1, GREEDY, samples=True)

    alone = [list(text) for text in texts]
    for at, text in enumerate(alone):
        text.append(executor.run(Turn((row(at, text, 0),))).rows[0].token)
        for _ in range(24):
            text.append(executor.run(Turn((row(at, text, len(text) - 1),))).rows[0].token)
    going: list[int] = []
    for step in range(33):
        if step % 3 == 0 and step < 27:
            going.insert(chance.randrange(len(going) + 1), step // 3)  # a prompt comes to those who answer
        rows = [row(at, texts[at], 0 if at == step // 3 and step % 3 == 0 else len(texts[at]) - 1) for at in going]
        for one in executor.run(Turn(tuple(rows))).rows:
            texts[one.sequence].append(one.token)
    for text, whole in zip(texts, alone, strict=True):
        assert text[: len(whole)] == whole[: len(text)]
    executor.close()


@pytest.mark.parametrize(("heads", "kv_heads", "size", "window"), [(32, 8, 128, 0), (14, 2, 64, 0), (8, 1, 256, 500)])
def test_contexts_of_any_lengths_are_read_as_torch_reads_them(
    heads: int, kv_heads: int, size: int, window: int
) -> None:
    torch.manual_seed(0)
    page, device = 16, torch.device("cuda")
    shape = attention.AttentionShape(heads, kv_heads, size, size**-0.5, None, window)
    for lengths in ([256] * 31 + [20_000], [9000], [1, 0, 5000, 2] * 4, [300] * 128):
        longest = max(lengths)
        blocks = [-(-length // page) for length in lengths]
        cache = torch.randn(sum(blocks) + 1, 2, page, kv_heads, size, device=device)
        table = torch.zeros(len(lengths), -(-longest // page), dtype=torch.int32, device=device)
        order, first = torch.randperm(sum(blocks), device=device).int(), 0
        for at, count in enumerate(blocks):
            table[at, :count] = order[first : first + count]
            first += count
        q, out = (torch.randn(len(lengths), heads * size, device=device) for _ in range(2))
        on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
        scratch = attention.DecodeScratch(len(lengths), shape, 132, device)
        for plan in (splits.plan(on_device, shape, 132), None):
            out.fill_(float("nan"))
            attention.decode(q, cache, table, on_device, shape, plan, scratch, out)
            for at, length in enumerate(lengths):
                if length == 0:
                    assert out[at].abs().max() == 0
                    continue
                kept = cache[table[at, : blocks[at]].long()]
                begin = max(length - window, 0) if window else 0
                keys, values = (
                    kept[:, part].reshape(-1, kv_heads, size)[begin:length].repeat_interleave(heads // kv_heads, 1)
                    for part in (0, 1)
                )
                query = q[at].view(heads, size)
                weights = (torch.einsum("hd,khd->hk", query, keys) * shape.scale).softmax(-1)
                wanted = torch.einsum("hk,khd->hd", weights, values).reshape(-1)
                assert (out[at] - wanted).abs().max().item() < 2e-4


def test_attention_of_whole_prompts_is_that_of_torch_in_float32() -> None:
    shape, device = splits.AttentionShape(6, 2, 64, 0.125, None, 0), torch.device("cuda")
    for length, prepared in ((1000, 1024), (1024, 1024), (1500, 1536), (2900, 2944)):
        qkv = torch.randn(length, 10 * 64, device=device)
        assert whole_prompts.attend_whole(qkv, shape) is None, "float32 is not cuDNN's"
        narrow = qkv.bfloat16()
        if length >= 1024:
            whole_prompts.prepare(prepared, shape, torch.bfloat16, device)
        found = whole_prompts.attend_whole(narrow, shape)
        if length < 1024:
            assert found is None
            continue
        q, k, v = narrow.float().view(length, 10, 64).transpose(0, 1)[None].split((6, 2, 2), dim=1)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True
        )
        assert (found.float() - wanted[0].transpose(0, 1).reshape(length, -1)).abs().max().item() < 0.02
    assert whole_prompts.attend_whole(torch.randn(1100, 640, device=device).bfloat16(), shape) is None, "not prepared"
