"""SmolLM2 in 1, 2, 3 and 4 processes: whether they say the same, and how far the latency model is from the clock.

Run by `make partitioned`. The model of a token's latency (4.10) is fitted to 2 and 4 stages and judged by 3.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.plan.chains import decoder, even_cuts
from dovetail.plan.decoder_pipeline import DecoderPipeline, TurnRun
from dovetail.plan.fits import fit_line
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.store import Catalogue, open_checkpoint
from dovetail.types import ModelCard, Request, SamplingParams

QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "Why is the sky blue?")
TOKENS, KV_TOKENS, VCPUS = 24, 1024, 1.0


def requests(card: ModelCard) -> list[Request]:
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    chats = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, seed=0)
    prompts = (tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats)
    return [Request(str(n), card.name, tuple(prompt), sampling) for n, prompt in enumerate(prompts)]


def one_process(card: ModelCard) -> dict[str, list[int]]:
    checkpoint = open_checkpoint(card.path)
    kv_bytes = KV_TOKENS * checkpoint.spec.kv_bytes_per_token("f32")
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, dtype="f32", level="torch"))
    executor.resize(executor.max_blocks)
    answers = {}
    for request in requests(card):  # one after another, as the stages have them
        scheduler = FcfsScheduler(SchedulerConfig(checkpoint.spec.context_length), BlockPool(executor.max_blocks, 16))
        scheduler.add(request)
        tokens = answers[request.id] = []
        while (turn := scheduler.next_turn()) is not None:
            tokens += [event.token for event in scheduler.complete(executor.run(turn)).events]
    return answers


async def in_stages(card: ModelCard, stages: int) -> tuple[dict[str, list[int]], list[TurnRun], list[int]]:
    pipeline = await DecoderPipeline.start(Path(card.path), card.spec, stages, VCPUS, KV_TOKENS)
    try:
        answers: dict[str, list[int]] = {}
        for request in requests(card):
            answers |= await pipeline.generate([request])
        decodes = [run for run in pipeline.runs if run.tokens == 1]
        return answers, decodes, [function.memory_bytes for function in pipeline.functions]
    finally:
        await pipeline.close()


def main() -> None:
    torch.set_num_threads(1)
    card = Catalogue().get("smollm2-135m-instruct")
    expected = one_process(card)
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    print("one process:", [tokenizer.decode(answer) for answer in expected.values()])
    costs = [layer.flops for layer in decoder(card.spec).layers]
    flops, seconds, passing, measured = [], [], [], {}
    same = True
    for stages in (2, 3, 4):
        answers, runs, memory = asyncio.run(in_stages(card, stages))
        same &= answers == expected
        measured[stages] = statistics.median(run.seconds for run in runs)
        megabytes = ", ".join(f"{size / 1e6:.0f}" for size in memory)
        said = "the same text" if answers == expected else f"ANOTHER TEXT: {answers}"
        print(f"{stages} stages: {said}; {measured[stages] * 1e3:.1f} ms a token; peak memory {megabytes} MB")
        if stages != 3:
            cuts = even_cuts(costs, stages)
            flops += [sum(costs[first:end]) for first, end in cuts]
            seconds += [statistics.median(run.stages_s[place] for run in runs) for place in range(stages)]
            passing.append(statistics.median(run.passing_s for run in runs) / (stages - 1))
    slope, fixed = fit_line(flops, seconds)
    predicted = slope * sum(costs) + 3 * fixed + 2 * statistics.mean(passing)
    error = abs(predicted - measured[3]) / measured[3]
    print(
        f"3 stages: predicted {predicted * 1e3:.1f} ms, measured {measured[3] * 1e3:.1f} ms a token ({error:.1%} off)"
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
