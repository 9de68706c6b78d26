"""What exchanging models on a GPU costs the stream of another model: three models of one shape on a card with room for
two, one of which streams while the others are called in turns and arrive from host memory each time.

Through HTTP, with random weights. Every text is compared with the text of the same prompt before anything was moved:
in float32 (`dtype: f32`) they are equal; in 16 bits a near tie may go another way in other company.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from dovetail.errors import ConfigError
from dovetail.store import Catalogue
from dovetail.types import ModelCard
from dovetail_bench.gpu_sampling import byte_tokenizer
from dovetail_bench.safetensors_writer import write_safetensors
from dovetail_bench.sample_checkpoints import SHAPES, Shape
from dovetail_bench.servers import Contender, our_server, running

NAMES = ("streaming", "first", "second")  # the last two take turns
ROOM = 2.5  # times the weights of one model: two of them, with their keys and values
_PROMPT, _ANSWER, _STREAM = 128, 8, 3000  # tokens
_PROMPTS = 4  # different ones of each model
_SETTLING = 8  # switches before memory is compared
_ALONE_S = 2.0
_LINK_BYTES = 1 << 30

Say = Callable[[str], None]


class Switches(msgspec.Struct, frozen=True):
    """Times are milliseconds."""

    shape: str
    dtype: str
    gpu: str
    switches: int
    weight_bytes: int  # of each model, as they are on the device
    wire_ms: float  # copying so many bytes from pinned memory, nothing else running
    first_text_ms: dict[str, float]  # after the call of a model that is not on the card: p50, p99, max
    token_ms: float  # of the stream alone, median
    gap_ms: dict[str, float]  # between two tokens of the stream while models are exchanged: p50, p99, max
    long_gaps: int  # longer than two token times
    texts: int
    equal_texts: int  # as before anything was moved
    used_bytes: tuple[int, int]  # of the card, after a few switches and after the last
    errors: list[str]


class Heard(msgspec.Struct):
    first_s: float | None = None
    times: list[float] = []
    text: str = ""
    error: str = ""


def make_models(folder: Path, shape: str, say: Say) -> list[ModelCard]:
    with ThreadPoolExecutor(len(NAMES)) as threads:
        made = [threads.submit(make_model, folder, name, shape, seed, say) for seed, name in enumerate(NAMES)]
        return [one.result() for one in made]


def make_model(folder: Path, name: str, shape: str, seed: int, say: Say) -> ModelCard:
    """Pulls a random model of the shape, unless the folder has it."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape: {shape!r} is none of {', '.join(SHAPES)}")
    catalogue = Catalogue(folder / "store")
    if name not in {card.name for card in catalogue.cards()}:
        say(f"making {name}, {shape}")
        source = _write_checkpoint(folder / name, SHAPES[shape], seed)
        catalogue.pull(str(source), name=name)
        (source / "model.safetensors").unlink()
    return catalogue.get(name)


def _write_checkpoint(folder: Path, shape: Shape, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config() | {"bos_token_id": 1, "eos_token_id": 2}))
    byte_tokenizer(folder, shape.vocab_size).rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tensors = dict(shape.model_tensors())
    named = {name: ("bf16", dims) for name, dims in tensors.items()}
    write_safetensors(folder / "model.safetensors", named, _random_values(tensors, seed))
    return folder


def _random_values(tensors: dict[str, tuple[int, ...]], seed: int) -> Iterator[memoryview]:
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, dims in tensors.items():
        values = torch.ones(dims, dtype=torch.bfloat16)
        if "norm" not in name:
            values = torch.empty(dims, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=generator).cpu()
        yield values.view(torch.uint8).reshape(-1).numpy().data


class SwitchBench:
    def __init__(self, folder: Path, shape: str, dtype: str, say: Say) -> None:
        self._folder, self._shape, self._dtype, self._say = folder, shape, dtype, say
        self._cards = make_models(folder, shape, say)
        self._weight_bytes = self._cards[0].spec.weight_bytes("bf16" if dtype == "auto" else dtype)

    def run(self, switches: int) -> Switches:
        wire_s = self._weight_bytes / _link_bytes_per_s()
        with running(self._server(), self._folder / "server.log") as server:
            self._say(f"ready after {server.ready_s:.1f} s")
            measured = asyncio.run(_Measurement(server.contender.port, self._say).run(switches))
        return Switches(
            shape=self._shape,
            dtype=self._dtype,
            gpu=torch.cuda.get_device_name(),
            switches=switches,
            weight_bytes=self._weight_bytes,
            wire_ms=round(wire_s * 1e3, 1),
            **measured,
        )

    def _server(self) -> Contender:
        memory = int(ROOM * self._weight_bytes)
        config = {
            "models": {card.name: {"source": card.name, "dtype": self._dtype} for card in self._cards},
            "nodes": [{"name": "gpu-0", "device": "cuda:0", "memory": f"{memory}B"}],
            "store": {"path": str(self._folder / "store"), "host_pool": f"{4 * self._cards[0].size_bytes}B"},
        }
        return our_server(config, self._folder / "switches.yaml", self._dtype)


class _Measurement:
    def __init__(self, port: int, say: Say) -> None:
        self._port, self._say = port, say
        self._is_over = False
        self._gaps: list[float] = []
        self._errors: list[str] = []

    async def run(self, switches: int) -> dict[str, Any]:
        wanted = {(name, at): (await self._ask(name, at)).text for name in NAMES for at in range(_PROMPTS)}
        for name in NAMES:  # what compiles and captures has done so
            await self._ask(name, 0)
        streaming = asyncio.create_task(self._stream())
        await asyncio.sleep(_ALONE_S)
        self._gaps.clear()
        await asyncio.sleep(_ALONE_S)
        token_s = median(self._gaps)
        self._gaps.clear()
        firsts, texts, equal, used = [], 0, 0, 0
        for switch in range(switches):
            name, at = NAMES[1 + switch % 2], switch // 2 % _PROMPTS
            heard = await self._ask(name, at)
            if heard.first_s is not None:
                firsts.append(heard.first_s)
                texts, equal = texts + 1, equal + (heard.text == wanted[name, at])
            if switch == min(_SETTLING, switches - 1):
                used = _used_bytes()
        gaps = list(self._gaps)
        self._is_over = True
        await streaming
        return {
            "first_text_ms": _spread(firsts),
            "token_ms": round(token_s * 1e3, 2),
            "gap_ms": _spread(gaps),
            "long_gaps": sum(gap > 2 * token_s for gap in gaps),
            "texts": texts,
            "equal_texts": equal,
            "used_bytes": (used, _used_bytes()),
            "errors": self._errors[:5],
        }

    async def _stream(self) -> None:
        """The streaming model answers, one long answer after the other."""
        while not self._is_over and not self._errors:
            heard = await ask(self._port, NAMES[0], 99, _PROMPT, _STREAM, self._note)
            self._errors += [heard.error] if heard.error else []

    def _note(self, gap_s: float) -> bool:
        self._gaps.append(gap_s)
        return not self._is_over

    async def _ask(self, name: str, at: int) -> Heard:
        heard = await ask(self._port, name, at, _PROMPT, _ANSWER)
        self._errors += [heard.error] if heard.error else []
        return heard


async def ask(
    port: int,
    name: str,
    at: int,
    prompt_tokens: int,
    answer_tokens: int,
    on_gap: Callable[[float], bool] = lambda gap: True,
) -> Heard:
    """A greedy answer of so many tokens to the `at`-th prompt; `on_gap` is called with the time between two pieces of
    it, and says whether to go on."""
    prompt = [3 + (at * 31 + place * 7 + at * place) % 250 for place in range(prompt_tokens)]
    body = {"model": name, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "stream": True}
    content = json.dumps(body | {"ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    started = last = time.perf_counter()
    writer.write(head.encode() + content)
    heard = Heard()
    goes_on = True
    while goes_on and (line := await reader.readline()):
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if heard.first_s is None:
                heard.first_s = now - started
            else:
                goes_on = on_gap(now - last)
            last = now
            heard.text += json.loads(line[6:])["choices"][0]["text"] if b'"choices"' in line else ""
        elif line.startswith(b"data: [DONE]"):
            break
        elif b'"error"' in line:
            heard.error = f"{name}: {line[:300].decode(errors='replace')}"
    writer.close()
    return heard


def _spread(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s) or [float("nan")]
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": -1}
    return {name: round(ordered[place] * 1e3, 2) for name, place in at.items()}


def _link_bytes_per_s() -> float:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del host, device
    torch.cuda.empty_cache()
    return _LINK_BYTES / float(min(times))


def _used_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(shown.split()[0]) << 20
