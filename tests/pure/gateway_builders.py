"""Builders for tests of the gateway: tokenizers of each kind, a card, a service on the fake worker."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dovetail.config import Config, ModelConfig, NodeConfig
from dovetail.errors import ModelNotFound, SourceError, UnsupportedModel
from dovetail.gateway.admin.admin import Admin, ConfigFile
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.metrics import Metrics
from dovetail.gateway.models import FixedCatalogue, Models
from dovetail.gateway.service import Limits, Service
from dovetail.gateway.workers.client import WorkerClient
from dovetail.modelspec import ModelSpec
from dovetail.types import AdapterRef, ModelCard

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
END = 256
CONTEXT = 512
LIMITS = Limits(max_queue=64)
LOCAL_TOKEN = "at-this-machine"


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, a few words of several bytes, and special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens(["naïve", "Paris 🗼"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: words with ▁ for the space, single bytes as <0xNN>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "日本", "é"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """A decoder that the gateway has no table for."""
    words = ["[UNK]", "[SEP]", "the", "cat", "##s", "sat", "日", "##本", "."]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def make_card(folder: Path, name: str = "fake", **changes: Any) -> ModelCard:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    if not file.exists():
        byte_level_tokenizer().save(str(file))
    spec = ModelSpec("llama", 300, 8, 1, 1, 1, 8, 8, CONTEXT)
    fields = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "eos_token_ids": (END,)} | changes
    return ModelCard(name=name, path=str(folder), spec=spec, tokenizer_file=str(file), **fields)


class FakeStore:
    """Has the models that it is given; pulls the source "remote:name" when `gate` opens, and fails on "remote:bad"."""

    def __init__(self, *cards: ModelCard) -> None:
        self.cards = {card.name: card for card in cards}
        self.gate = threading.Event()
        self.in_host: set[str] = set()

    def in_host_memory(self, cards: Sequence[ModelCard]) -> set[str]:
        return {card.name for card in cards} & self.in_host

    def find(self, source: str, name: str, layout: str) -> ModelCard | None:
        if source.startswith("remote:"):
            return None
        if source not in self.cards:
            raise ModelNotFound(f"{source}: neither a model that is here nor a folder, file or source")
        return msgspec.structs.replace(self.cards[source], name=name)

    def find_adapter(self, source: str, name: str, card: ModelCard) -> AdapterRef:
        if source == "bad":
            raise UnsupportedModel("bad/adapter_model.safetensors: lm_head.lora_A.weight is for no matrix")
        return AdapterRef(name, source, "1")

    def adapter_base(self, source: str) -> str:
        return source

    def pull(
        self,
        source: str,
        name: str,
        layout: str,
        progress: Callable[[str, int, int], None],
        on_servable: Callable[[ModelCard], None],
    ) -> ModelCard:
        progress("download", 25, 100)
        while not self.gate.wait(0.01):
            progress("download", 50, 100)
        progress("convert", 100, 100)
        if source == "remote:bad":
            raise SourceError("remote:bad: no such model")
        return msgspec.structs.replace(next(iter(self.cards.values())), name=name, source=source)


def make_admin(service: Service, config: Config | None = None, file: ConfigFile | None = None) -> Admin:
    store = FakeStore(*(model.card for model in service.models.all()))
    settings = Settings(config or Config(), None if file is None else "dovetail.yaml")
    settings.keys.set_local_token(LOCAL_TOKEN)
    return Admin(service, settings, store, file)


@asynccontextmanager
async def running_service(
    folder: Path,
    *cards: ModelCard,
    limits: Limits = LIMITS,
    keep_alive: float = -1,
    is_worker_first: bool = False,
    **config: Any,
) -> AsyncIterator[Service]:
    """`is_worker_first`: the worker is there before anybody in the gateway listens to it."""
    served = cards or (make_card(folder), make_card(folder, "broken"))
    link = WorkerClient([NodeConfig(**config)], [sys.executable, str(Path(__file__).parent / "fake_worker.py")])
    configs = {card.name: ModelConfig(source="", keep_alive=keep_alive) for card in served}
    if is_worker_first:
        link.start()
        await eventually(link.is_up)
    service = Service(link, Models(FixedCatalogue(list(served)), configs), Metrics(), limits)
    if not is_worker_first:
        link.start()
    try:
        yield service
    finally:
        await link.close()


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")
