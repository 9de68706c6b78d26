"""How long a cold worker takes to its first token, and where the time goes. Runs alternate with the peer's, in turns.

process start --import--> Hello --load--> Loaded --first token--> Tokens
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from dovetail import messages
from dovetail.types import ModelCard, Request, SamplingParams
from dovetail_bench.peers import PeerFailed
from dovetail_bench.worker_process import WorkerDied, WorkerProcess

PROMPT_TOKENS = 128

_IMPORT_TORCH = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
_TRANSFORMERS = """
import sys, time
t = time.perf_counter()
import torch, transformers
i = time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
l = time.perf_counter()
with torch.inference_mode():
    model(torch.arange(1, int(sys.argv[2]) + 1)[None]).logits[0, -1].argmax().item()
print(i - t, l - i, time.perf_counter() - l)
"""


class ColdStart(msgspec.Struct, frozen=True):
    """Seconds of one start."""

    engine: str
    import_s: float
    load_s: float
    first_token_s: float
    total_s: float  # from the start of the process

    @property
    def parts(self) -> tuple[float, float, float, float]:
        return self.import_s, self.load_s, self.first_token_s, self.total_s


class Summary(msgspec.Struct, frozen=True):
    engine: str
    runs: int
    import_s: float  # medians
    load_s: float
    first_token_s: float
    total_s: float
    total_spread_s: float  # slowest minus fastest


def start_worker(card: ModelCard) -> ColdStart:
    with WorkerProcess() as worker:
        worker.wait_for(messages.Hello)
        imported = time.monotonic()
        worker.offer(card)
        worker.submit(_request(card))
        worker.wait_for(messages.Loaded)
        loaded = time.monotonic()
        tokens = worker.wait_for(messages.Tokens)
        ended = time.monotonic()
    if tokens.events[0].error:
        raise WorkerDied(tokens.events[0].error)
    return ColdStart("dovetail", imported - worker.started, loaded - imported, ended - loaded, ended - worker.started)


def start_transformers(folder: str) -> ColdStart:
    """The peer in this environment, on an HF folder of the same shape, in float32."""
    started = time.monotonic()
    command = [sys.executable, "-c", _TRANSFORMERS, folder, str(PROMPT_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True)
    total_s = time.monotonic() - started
    if done.returncode != 0:
        raise PeerFailed(f"transformers on {folder}: {done.stderr.strip().splitlines()[-1]}")
    import_s, load_s, first_s = (float(word) for word in done.stdout.split()[-3:])
    return ColdStart("transformers", import_s, load_s, first_s, total_s)


def import_torch_s() -> float:
    """What a plain `import torch` costs by itself."""
    output = subprocess.run([sys.executable, "-c", _IMPORT_TORCH], check=True, capture_output=True, text=True).stdout
    return float(output)


def compare(
    starts: list[Callable[[], ColdStart]], runs: int, report: Callable[[int, int], None] = lambda done, total: None
) -> list[Summary]:
    """Each contender in turn, `runs` times over."""
    results: dict[str, list[ColdStart]] = {}
    total = runs * len(starts)
    for turn in range(total):
        start = starts[turn % len(starts)]()
        results.setdefault(start.engine, []).append(start)
        report(turn + 1, total)
    return [_summary(engine, each) for engine, each in results.items()]


def _summary(engine: str, starts: list[ColdStart]) -> Summary:
    columns = zip(*(start.parts for start in starts), strict=True)
    import_s, load_s, first_token_s, total_s = (statistics.median(column) for column in columns)
    totals = [start.total_s for start in starts]
    return Summary(engine, len(starts), import_s, load_s, first_token_s, total_s, max(totals) - min(totals))


def _request(card: ModelCard) -> Request:
    prompt = tuple(1 + i % (card.spec.vocab_size - 1) for i in range(PROMPT_TOKENS))
    return Request("bench", card.name, prompt, SamplingParams(max_tokens=1, seed=0, temperature=0.0))
