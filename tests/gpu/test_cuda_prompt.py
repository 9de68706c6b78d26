"""What a prompt's own tokens come to on a GPU, against transformers: embeddings and log-probabilities, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.engine.executor import ExecutorConfig
from dovetail.sched.turn import RowOutcome, Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.device import CudaDevice

PROMPT = [(7 * i) % 251 for i in range(150)]
BLOCK = 4


def read(executor: Any, chunks: list[int], **sampling: Any) -> RowOutcome:
    params = SamplingParams(**({"max_tokens": 1, "seed": 0, "temperature": 0.0} | sampling))
    blocks, start = list(range(-(-len(PROMPT) // BLOCK))), 0
    outcomes: tuple[RowOutcome, ...] = ()
    for count in chunks:
        assert not outcomes
        samples = start + count == len(PROMPT)
        row = TurnRow(0, PROMPT, start, count, blocks, len(PROMPT), params, samples)
        outcomes = executor.run(Turn((row,))).rows
        start += count
    (outcome,) = outcomes
    executor.forget(0)
    return outcome


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "opt", "mixtral"])
def test_prompts_are_read_as_transformers_reads_them(family: str, tiny_folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]), output_hidden_states=True)
    states = output.hidden_states[-1][0]
    logprobs = torch.log_softmax(output.logits[0].double(), dim=-1)
    config = ExecutorConfig(kv_bytes=1 << 24, block_size=BLOCK, dtype="f32", max_batch=16)
    executor = CudaDevice("cuda:0").executor(open_checkpoint(folder), config)
    executor.resize(executor.max_blocks)
    for chunks in ([150], [64, 64, 22], [149, 1]):
        for pooling, wanted in (("last", states[-1]), ("mean", states.mean(dim=0))):
            embedding = read(executor, chunks, pooling=pooling).embedding or b""
            found = torch.from_numpy(np.frombuffer(embedding, dtype=np.float32).copy())
            torch.testing.assert_close(found, wanted, atol=5e-4, rtol=5e-4)
        scored = read(executor, chunks, prompt_logprobs=2)
        chosen = [entry.chosen for entry in scored.prompt_logprobs or ()]
        wanted = [float(logprobs[at, token]) for at, token in enumerate(PROMPT[1:])]
        assert chosen == pytest.approx(wanted, abs=5e-4)
        assert scored.token == int(logprobs[-1].argmax())
    executor.close()
