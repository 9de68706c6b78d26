"""What the host does for a burst of requests to one model: processor time of admission and of each iteration.

Node, driver and scheduler are a worker's own; the device is a clock that says how long a small model takes on a large
GPU. No sockets and no text: what those cost is the gateway's. Run it with

    python tests/cpu/burst_cost.py [REQUESTS] [PROMPT TOKENS] [ANSWER TOKENS]
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from dovetail.modelspec import ModelSpec
from dovetail.node import protocol
from dovetail.node.events import StartLoad
from dovetail.policy.compositions import SERVED
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.work import Work
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.turn import Outcome, RowOutcome, Turn
from dovetail.sim.metrics import percentile
from dovetail.types import ModelCard, Request, SamplingParams
from dovetail.worker.driver import NodeDriver
from dovetail.worker.runner import ModelRunner

MODEL, BLOCK_TOKENS, MAX_TOKENS = "small", 16, 1 << 22
KV_BYTES = 12 * 1024  # of a token
HEARD_AT_ONCE = 32  # proposals that arrive during an iteration
TTFT_S, TPOT_S, SLO_SCALE = 8.0, 0.25, 0.95
# Half a billion parameters on an H200, rounded: seconds of a prompt, and of an iteration by batch at two contexts.
PROMPTS = Curve([(16, 0.003), (128, 0.0035), (512, 0.006), (2048, 0.02), (8192, 0.08)])
SHORT, LONG = Curve([(1, 0.0018), (256, 0.0024)]), Curve([(1, 0.0019), (256, 0.0045)])
SPEC = ModelSpec("llama", 100, 8, 1, 1, 1, 8, 8, 256)


class HostTime(msgspec.Struct, frozen=True):
    """Processor time of one thread; the device's is none of it."""

    requests: int
    accepted: int
    admission_ms: float  # all requests together
    admission_p50_ms: float
    admission_p99_ms: float
    prompts_ms: float  # all iterations until the last prompt was computed
    decodes: int  # iterations of nearly all who were accepted
    decode_p50_ms: float | None  # one of them; None = nobody decoded


class ClockedDevice:
    """Takes as long as a device would, by a clock of its own, and makes the same token for everybody."""

    dtype = "bf16"
    weight_bytes = 1 << 30
    copied_bytes = kv_committed_bytes = 0
    is_pipelined = was_typical = True

    def __init__(self, latency: LatencyModel) -> None:
        self.now = 0.0
        self.host_s = 0.0  # spent here, which no real device does
        self._latency = latency
        self._launched: deque[Turn] = deque()

    def __call__(self) -> float:
        return self.now

    def launch(self, turn: Turn) -> None:
        self._launched.append(turn)

    def launch_next(self, turn: Turn) -> bool:
        self._launched.append(turn)
        return True

    def discard(self) -> None:
        self._launched.clear()

    def collect(self) -> Outcome:
        began = time.thread_time()
        rows = self._launched.popleft().rows
        tokens = sum([row.count for row in rows])
        if tokens > len(rows):
            self.now += self._latency.prefill_s(tokens)
        else:
            self.now += self._latency.decode_s(len(rows), sum([row.end for row in rows]))
        outcome = Outcome(tuple([RowOutcome(row.sequence, 7) for row in rows if row.samples]))
        self.host_s += time.thread_time() - began
        return outcome

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None: ...

    def forget(self, sequence: int) -> None: ...

    def close(self) -> None: ...


class Worker:
    """A node with one model that is ready."""

    def __init__(self) -> None:
        latency = LatencyModel(PROMPTS, Surface([(128, SHORT), (2048, LONG)]))
        self.device = ClockedDevice(latency)
        composition, memory_bytes = SERVED, 64 << 30
        self.driver = NodeDriver("burst", DeviceKind.GPU, memory_bytes, composition, self, self.device)
        hosting = Hosting(1 << 30, KV_BYTES, LiveLatency(latency), BLOCK_TOKENS, max_kv_tokens=MAX_TOKENS, load_s=0.1)
        self.driver.register(MODEL, hosting)
        answer = self.driver.ask(protocol.Warm(MODEL))
        assert isinstance(answer, protocol.Accepted)
        assert answer.instance is not None
        self.instance = answer.instance
        self.driver.carry_out()

    def load(self, command: StartLoad) -> None:
        config = SchedulerConfig(8192, max_batch=512, max_turn_tokens=8192, max_tokens=MAX_TOKENS - BLOCK_TOKENS)
        runner = ModelRunner(ModelCard(MODEL, "", SPEC, ""), self.device, config, BLOCK_TOKENS)
        self.driver.loaded(command.instance, runner)

    def propose(self, id: int, prompt: int, tokens: int) -> tuple[bool, float]:
        """Whether it was accepted, and what that took."""
        work = Work(id, MODEL, prompt, self.device.now, TTFT_S * SLO_SCALE, TPOT_S * SLO_SCALE, SLO_SCALE)
        work.mean_tokens = float(tokens)
        sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)
        request = Request(str(id), MODEL, tuple((id * 31 + index) % 97 for index in range(prompt)), sampling)
        question = protocol.Propose(work.record(), self.instance)
        began = time.thread_time()
        answer = self.driver.ask(question, request)
        self.driver.carry_out()
        return isinstance(answer, protocol.Accepted), time.thread_time() - began

    @property
    def num_waiting(self) -> int:
        return len(self.driver.home.node.instances[self.instance].waiting)

    @property
    def num_running(self) -> int:
        return len(self.driver.home.node.instances[self.instance].running)

    def iterate(self) -> float:
        began, self.device.host_s = time.thread_time(), 0.0
        self.driver.take_turn()
        self.driver.take_report()
        return time.thread_time() - began - self.device.host_s


def measure_burst(requests: int = 256, prompt: int = 128, tokens: int = 256) -> HostTime:
    worker = Worker()
    gc.collect()
    gc.freeze()  # as a worker does when it has started
    admissions_s: list[float] = []
    prompts_s = 0.0
    accepted = 0
    for id in range(requests):
        is_in, seconds = worker.propose(id, prompt, tokens)
        admissions_s.append(seconds)
        accepted += is_in
        if not (id + 1) % HEARD_AT_ONCE:
            prompts_s += worker.iterate()
    while worker.num_waiting:
        prompts_s += worker.iterate()
    decodes_s = []
    while (running := worker.num_running) and running >= 0.9 * accepted:
        decodes_s.append(worker.iterate())
    gc.unfreeze()
    admissions_s.sort()
    decodes_s.sort()
    return HostTime(
        requests,
        accepted,
        1e3 * sum(admissions_s),
        1e3 * percentile(admissions_s, 0.5),
        1e3 * percentile(admissions_s, 0.99),
        1e3 * prompts_s,
        len(decodes_s),
        1e3 * percentile(decodes_s, 0.5) if decodes_s else None,
    )


if __name__ == "__main__":
    seen = msgspec.to_builtins(measure_burst(*[int(text) for text in sys.argv[1:4]]))
    print(*(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in seen.items()))
