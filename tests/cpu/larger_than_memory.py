"""A model of 1.5 times what a control group has of memory, on a CPU node: the text of the same model with enough
memory, tokens per second beside the speed of the disk, and what a neighbour's clients notice of it.

Run by `make limited`: python tests/cpu/larger_than_memory.py [GIB] [TIMES] [FOLDER]. Needs the right to make a group,
and disk for the model twice. Fails if a text is another, anything was killed, or a token took less than the disk does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from limited_memory import forget, limited, measure

from dovetail.machine import default_root, preferred_dtype, usable_cores
from dovetail.modelspec import DTYPE_BYTES, ModelSpec, RopeSpec
from dovetail.store.format.manifest import partition_files
from dovetail.store.loading.layer_reader import measure_speed
from dovetail_bench.fleet import Fleet, FleetModel
from dovetail_bench.gaps import Side, ask_clients, warm
from dovetail_bench.load import Mix
from dovetail_bench.servers import Running, our_server, running

PROMPT, TOKENS = "The layers of this model are read from the disk, one after another,", 16
MIX = Mix(minutes=0.5, rate_per_s=0.7, cv=1.0, output_tokens=(32, 64))
READERS = 12


def spec_of(size_bytes: float) -> ModelSpec:
    """About so large as it is kept here."""
    value = DTYPE_BYTES[preferred_dtype()]
    layer = value * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    layers = -(-int(size_bytes - value * 49_152 * 2048) // layer)
    return ModelSpec(
        "llama", 49_152, 2048, layers, 32, 8, 64, 8192, 8192, tied_embeddings=True, rope=RopeSpec(theta=5e5)
    )


def make(gib: float, times: float, folder: Path) -> tuple[FleetModel, FleetModel]:
    fleet = Fleet(folder)
    (small,) = fleet.make(1, 0)
    spec = spec_of(gib * times * 2**30)
    return fleet.make_random(f"larger-{spec.num_layers}", spec, seed=1), small


def config_of(models: list[FleetModel]) -> dict[str, Any]:
    return {
        "models": {model.name: {"source": model.name, "keep_alive": "10m"} for model in models},
        "nodes": [{"name": "cpu-0", "threads": usable_cores()}],
        "store": {"path": str(Path(models[0].card.path).parents[1])},
    }


def complete(server: Running, model: str, prompt: str = PROMPT, tokens: int = TOKENS) -> tuple[str, list[float]]:
    """The text, and when its pieces came."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    began, text, times = time.monotonic(), "", []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                times.append(time.monotonic() - began)
    return text, times


@contextmanager
def streaming(server: Running, model: str) -> Iterator[list[float]]:
    """One answer of the model after another; when each of their tokens came."""
    is_over, times = threading.Event(), []

    def ask() -> None:
        number = 0
        while not is_over.is_set():
            began = time.monotonic()
            times.extend(began + at for at in complete(server, model, f"{number} {PROMPT}", TOKENS)[1])
            number += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()


def tokens_per_s(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def inside(large: FleetModel, small: FleetModel, folder: Path) -> dict[str, Any]:
    """In the group."""
    path = large.blobs[0]
    forget(path)
    found: dict[str, Any] = {"disk_bytes_per_s": [measure_speed(path, path.stat().st_size, "auto", READERS)]}
    with running(our_server(config_of([large, small]), folder / "limited.yaml"), folder / "limited.log") as server:
        found["text"], first = complete(server, large.name)
        found["cold_first_s"] = first[0]
        again, times = complete(server, large.name)
        assert again == found["text"], "it is greedy"
        found["first_s"], found["tokens_per_s"] = times[0], tokens_per_s(times)
        warm(server, [small], MIX)
        found["alone"] = msgspec.to_builtins(ask_clients(server, [small], MIX))
        with streaming(server, large.name) as times:
            time.sleep(5.0)
            began = time.monotonic()
            found["beside"] = msgspec.to_builtins(ask_clients(server, [small], MIX))
            ended = time.monotonic()
        own = [at for at in times if began <= at <= ended]
        found["beside_tokens_per_s"] = len(own) / (ended - began)
    found["disk_bytes_per_s"].append(measure_speed(path, path.stat().st_size, "auto", READERS))
    return found


def report(found: dict[str, Any], large: FleetModel, limit: int, log: str) -> None:
    alone, beside = (msgspec.convert(found[side], Side) for side in ("alone", "beside"))
    disk = " and ".join(f"{speed / 1e9:.2f}" for speed in found["disk_bytes_per_s"])
    print(f"{large.card.size_bytes / 1e9:.2f} GB in {limit / 1e9:.2f} GB of memory; disk {disk} GB/s before and after")
    print(next((line for line in log.splitlines() if "is larger than the node" in line), "the worker said nothing"))
    print(f"first piece of {TOKENS} tokens {found['cold_first_s']:.2f} s cold, {found['first_s']:.2f} s warm")
    print(f"{found['tokens_per_s']:.3f} tokens/s alone, {found['beside_tokens_per_s']:.3f} beside the neighbour")
    for name, side in (("alone", alone), ("beside", beside)):
        print(
            f"neighbour {name}: {side.attained} of {side.requests} in time, first token {side.first_p95_s:.3f} s, "
            f"gap {side.gap_p99_s * 1e3:.1f} ms (95 and 99 %)"
        )


def main(gib: float = 4.0, times: float = 1.5, folder: str = "") -> int:
    root = Path(folder) if folder else default_root() / "bench" / "larger"
    large, _ = make(gib, times, root)
    with running(our_server(config_of([large]), root / "free.yaml"), root / "free.log") as server:
        wanted, _ = complete(server, large.name)
    for path, _ in partition_files(Path(large.card.path)):
        forget(path)
    limit = int(gib * 2**30)
    command = [sys.executable, __file__, "inside", str(gib), str(times), str(root)]
    try:
        with limited(limit) as group:
            run, peak, kills = measure(group, command)
    except PermissionError as error:
        print(f"not run: {error}")
        return 0
    if run.returncode:
        return 1
    found = json.loads(run.stdout.splitlines()[-1])
    report(found, large, limit, (root / "limited.log").read_text())
    print(f"at most {peak.held / 1e9:.2f} GB without the page cache, {kills} processes killed")
    print("the same text" if found["text"] == wanted else f"another text: {found['text']!r} instead of {wanted!r}")
    return 1 if kills or found["text"] != wanted else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        gib, times, root = float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
        print(json.dumps(inside(*make(gib, times, root), root)))
        sys.exit(0)
    sys.exit(main(*[kind(text) for kind, text in zip((float, float, str), sys.argv[1:], strict=False)]))
