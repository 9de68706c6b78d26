"""What a served model takes beyond the process that serves it, held against its weights and the KV cache in use.

A worker is looked at before it has a model, and again when it has computed a long prompt and a batch. Pages of a mapped
file count as the model's, though they are the page cache's and every process that maps them shares them. What is there
besides weights and cache is scratch memory: activations, logits, and what the allocator keeps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail import messages
from dovetail.types import ModelCard, Request, SamplingParams
from dovetail_bench.process_tree import held_bytes
from dovetail_bench.worker_process import WorkerDied, WorkerProcess

_PROMPT, _NEW = 16, 32  # tokens of a sequence of the batch


class Held(msgspec.Struct, frozen=True):
    """Resident memory of a process, by what is behind it."""

    anonymous: int  # its own: heap, KV cache, copies of weights
    file: int  # mapped files: weights in place, libraries
    shared: int  # memory without a file that several processes map: the host pool

    @property
    def total(self) -> int:
        return self.anonymous + self.file + self.shared


class ServedMemory(msgspec.Struct, frozen=True):
    model: str
    kept: str  # type or layout of the weights
    prompt: int
    batch: int
    weight_bytes: int  # as the executor counts what it was given
    kv_bytes: int  # of the blocks that were written
    idle: Held  # the process without a model
    loaded: Held
    served: Held  # after the prompt and the batch
    growth_bytes: int  # from idle to the highest resident size seen since
    over: float  # the share of growth beyond weights and cache: 0.1 = ten per cent

    @property
    def scratch_bytes(self) -> int:
        return self.growth_bytes - self.weight_bytes - self.kv_bytes


def read_held(pid: int) -> Held:
    sizes = held_bytes(pid)
    shared = sizes.get("Pss_Shmem", 0)
    return Held(sizes["Anonymous"], sizes["Rss"] - sizes["Anonymous"] - shared, shared)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(card: ModelCard, prompt: int = 1024, batch: int = 8, block_size: int = 16) -> ServedMemory:
    with WorkerProcess("--block-size", str(block_size)) as worker:
        pid = worker.wait_for(messages.Hello).pid
        idle = _idle(worker, pid, card)
        forget_peak(pid)
        worker.load(card)
        facts = worker.wait_for(messages.Loaded)
        loaded = read_held(pid)
        _serve(worker, card, [(prompt, 1)])
        _serve(worker, card, [(_PROMPT, _NEW)] * batch)
        served, peak = read_held(pid), peak_bytes(pid)
    blocks = -(-prompt // block_size) + batch * -(-(_PROMPT + _NEW) // block_size)
    kv_bytes = blocks * block_size * card.spec.kv_bytes_per_token(facts.dtype)
    growth = peak - idle.total
    over = growth / (facts.weight_bytes + kv_bytes) - 1
    kept = (card.dtype or facts.dtype) if card.layout == "plain" else card.layout
    return ServedMemory(
        card.name, kept, prompt, batch, facts.weight_bytes, kv_bytes, idle, loaded, served, growth, over
    )


def _idle(worker: WorkerProcess, pid: int, card: ModelCard) -> Held:
    """The worker knows of the model and has looked at its device for it, which takes memory for a moment; it says so by
    answering what it was asked afterwards."""
    worker.offer(card)
    worker.send(messages.Unload("another"))
    worker.wait_for(messages.Unloaded)
    return read_held(pid)


def _serve(worker: WorkerProcess, card: ModelCard, lengths: list[tuple[int, int]]) -> None:
    """Requests of (prompt, new tokens), at once, to their ends."""
    for index, (prompt, new) in enumerate(lengths):
        tokens = tuple(1 + (7 * place + 31 * index + prompt) % (card.spec.vocab_size - 1) for place in range(prompt))
        sampling = SamplingParams(max_tokens=new, seed=0, temperature=0.0)
        worker.submit(Request(f"{prompt}-{index}", card.name, tokens, sampling))
    ended = 0
    while ended < len(lengths):
        for event in worker.wait_for(messages.Tokens, timeout_s=300.0).events:
            if event.error:
                raise WorkerDied(event.error)
            ended += event.finish is not None
