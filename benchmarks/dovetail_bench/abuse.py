"""A server with noisy neighbours: what a well-behaved client sees before and during each kind of noise, and what the
gateway's memory does. A real server process with two models and two keys; probe and attackers in processes of their
own, the attackers' at low priority."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from dovetail.errors import EngineFailed
from dovetail.store import Catalogue
from dovetail_bench.abuse_cases import CASES, cold_models
from dovetail_bench.abuse_probe import Samples
from dovetail_bench.safetensors_writer import write_safetensors
from dovetail_bench.sample_checkpoints import Shape
from dovetail_bench.servers import workers_of

_NOISY, _PROBED = "noisy", "probed"
_LOOPING = "bench-abuse-looping"
_SETTLE_S = 2.0
_LOOK_S = 0.05  # how often the gateway's memory is looked at
_ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
_START_TIMEOUT_S = 120.0


class Seen(msgspec.Struct, frozen=True):
    """Milliseconds, of one phase."""

    live_p50: float
    live_p99: float
    live_max: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    gap_p99_alone: float  # without what the attackers' own computing took from each, at most
    failures: int


class CaseResult(msgspec.Struct, frozen=True):
    name: str
    what: str
    before: Seen
    during: Seen
    memory_before: int  # bytes of the gateway
    memory_peak: int
    memory_after: int  # some seconds later

    @property
    def token_ms(self) -> float:
        """What a token of the stream takes, alone."""
        return max(self.before.gap_p50, 0.01)

    @property
    def p99_tokens(self) -> float:
        """The 99th percentile of its gaps during the noise, in that."""
        return self.during.gap_p99 / self.token_ms

    @property
    def p99_alone_tokens(self) -> float:
        """The same without what the attackers' own computing took."""
        return self.during.gap_p99_alone / self.token_ms

    @property
    def longest_tokens(self) -> float:
        """The longest of them, likewise."""
        return self.during.gap_max / self.token_ms


Step = Callable[[CaseResult], None]  # told as soon as a case is over
MakeNoise = Callable[[str, float], Callable[[], bool]]  # a case for so long; what comes back waits a little for its end


def run_cases(
    model: str, names: Sequence[str], seconds: float, step: Step, *, tpot_ms: float = 0.0, threads: int = 0
) -> list[CaseResult]:
    """`model`: a name from the catalogue, served twice; `tpot_ms`: what the probed one promises, 0 = the default;
    `threads`: that compute, 0 = one per core."""
    cold = cold_models(_LOOPING) if "cold-tokenizers" in names else []
    with tempfile.TemporaryDirectory() as name, ExitStack() as made:
        for number, small in enumerate([_LOOPING, *cold]):
            made.enter_context(_small_model(model, small, Path(name), number))
        served = _served([model, _LOOPING, *cold], Path(name), tpot_ms, threads)
        return _run_all(served, _LOOPING, Path(name), names, seconds, step)


def _run_all(
    served: AbstractContextManager[tuple[subprocess.Popen[str], str]],
    looping: str,
    folder: Path,
    names: Sequence[str],
    seconds: float,
    step: Step,
) -> list[CaseResult]:
    with (
        served as (process, url),
        _attackers(url, looping, folder) as (attackers, make_noise),
        _probe(url, (attackers, process.pid, *(one.pid for one in workers_of(process.pid)))) as ask,
    ):
        gateway = psutil.Process(process.pid)
        ask()
        time.sleep(2 * _SETTLE_S)  # both models are loaded by now
        results = []
        for name in names:
            results.append(_run_case(name, make_noise, seconds, ask, gateway))
            step(results[-1])
        return results


def _run_case(
    name: str, make_noise: MakeNoise, seconds: float, ask: Callable[[], Samples], gateway: psutil.Process
) -> CaseResult:
    ask()
    time.sleep(seconds)
    before, memory_before = ask(), gateway.memory_info().rss
    is_over, peak = make_noise(name, seconds), 0
    while not is_over():
        peak = max(peak, gateway.memory_info().rss)
    during = ask()
    time.sleep(_SETTLE_S)
    memory_after = gateway.memory_info().rss
    return CaseResult(name, CASES[name][0], _seen(before), _seen(during), memory_before, peak, memory_after)


def _seen(samples: Samples) -> Seen:
    alone = [max(gap - taken, 0.0) for gap, taken in zip(samples.gaps, samples.taken, strict=True)]
    found = ([1000 * value for value in sorted(each)] or [0.0] for each in (samples.live, samples.gaps, alone))
    live, gaps, alone = found
    live_p50, live_p99, live_max = (_at(live, share) for share in (0.5, 0.99, 1.0))
    gap_p50, gap_p99, gap_max = (_at(gaps, share) for share in (0.5, 0.99, 1.0))
    alone_p99 = _at(alone, 0.99)
    return Seen(live_p50, live_p99, live_max, gap_p50, gap_p99, gap_max, alone_p99, samples.failures)


def _at(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)


@contextmanager
def _small_model(model: str, name: str, folder: Path, number: int) -> Iterator[None]:
    """A model of next to no weights with the tokenizer of the other, in a file of its own unless the number is 0, and a
    template that does not end; in the catalogue for as long as it is needed."""
    catalogue = Catalogue()
    card = catalogue.get(model)
    shape = Shape(8, 1, 1, 1, 8, 8, vocab_size=card.spec.vocab_size)
    source = folder / name
    source.mkdir()
    (source / "config.json").write_text(json.dumps(shape.config()))
    (source / "tokenizer.json").write_bytes(Path(card.tokenizer_file).read_bytes() + b"\n" * number)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": _ENDLESS}))
    tensors = {name: ("bf16", sizes) for name, sizes in shape.model_tensors()}
    write_safetensors(
        source / "model.safetensors", tensors, (bytes(2 * prod(sizes)) for _, sizes in shape.model_tensors())
    )
    catalogue.pull(str(source), name=name, force=True)  # one may be left of a run that was killed
    try:
        yield
    finally:
        catalogue.remove(name)


@contextmanager
def _served(
    sources: Sequence[str], folder: Path, tpot_ms: float, threads: int
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    keys = [{"name": "noisy", "key": "sk-noisy"}, {"name": "probe", "key": "sk-probe", "admin": True}]
    models: dict[str, dict[str, Any]] = {
        name: {"source": sources[0], "keep_alive": -1, "preload": True} for name in (_NOISY, _PROBED)
    }
    models |= {source: {"source": source} for source in sources[1:]}
    if tpot_ms:
        models[_PROBED] |= {"slo": {"tpot": f"{tpot_ms:g}ms"}}
    config = folder / "dovetail.yaml"
    nodes = [{"name": "local", "threads": threads}]
    config.write_text(json.dumps({"models": models, "auth": {"keys": keys}, "nodes": nodes}))
    command = [sys.executable, "-m", "dovetail", "serve", "--config", str(config), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EngineFailed(f"the server ended with code {process.wait(_START_TIMEOUT_S)} before it was ready")
        yield process, str(json.loads(line)["url"])
    finally:
        process.terminate()
        process.wait(_START_TIMEOUT_S)


@contextmanager
def _probe(url: str, pids: tuple[int, ...]) -> Iterator[Callable[[], Samples]]:
    """A function that says what the probe has seen since it was last asked; `pids`: of attackers, gateway, workers."""
    command = [sys.executable, "-m", "dovetail_bench.abuse_probe", url, "sk-probe", _PROBED, *map(str, pids)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    pipes: tuple[IO[str], IO[str]] = (process.stdin, process.stdout)

    def ask() -> Samples:
        print(file=pipes[0], flush=True)
        return msgspec.json.decode(pipes[1].readline(), type=Samples)

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait(_START_TIMEOUT_S)


@contextmanager
def _attackers(url: str, looping: str, folder: Path) -> Iterator[tuple[int, MakeNoise]]:
    """Their process, and how they are told."""
    command = [sys.executable, "-m", "dovetail_bench.abuse_noise"]
    command += [url, "sk-noisy", _NOISY, looping, "sk-probe", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    said, heard = process.stdin, process.stdout

    def make_noise(name: str, seconds: float) -> Callable[[], bool]:
        print(name, seconds, file=said, flush=True)
        return is_over

    def is_over() -> bool:
        if not select.select([heard], [], [], _LOOK_S)[0]:
            return False
        if not heard.readline():
            raise EngineFailed(f"the attackers ended with code {process.wait(_START_TIMEOUT_S)}")
        return True

    try:
        yield process.pid, make_noise
    finally:
        said.close()
        process.wait(_START_TIMEOUT_S)
