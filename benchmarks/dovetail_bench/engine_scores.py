"""How exact an engine of `bench engines` is: its predictions over a text, against float32 weights of the same file.

Milliseconds of engines that round differently are no comparison; so what each class of weights costs in accuracy stands
beside them. All engines read the same tokens; the reference is computed by ours, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dovetail.store.format.manifest import TOKENIZER
from dovetail_bench.engine_models import EngineModels
from dovetail_bench.peers import PeerProcess

if TYPE_CHECKING:
    import torch  # slow to import, and not needed where nothing is scored

_TOPICS = ("compound", "dynamic-features", "exceptions", "execmodel", "import", "objects", "types")


class Score(msgspec.Struct, frozen=True):
    tokens: int
    kl: float  # nats per token, of float32 weights against the engine's
    same_first: float  # share of positions where both prefer the same token


class Scorer:
    """Of one model: the tokens, and what float32 makes of them, computed once."""

    def __init__(self, models: EngineModels, model: str, count: int, folder: Path) -> None:
        self._path = models.stored(model, "plain", dtype="f32")
        self._vocab_size = models.spec(model).vocab_size
        self.tokens = text_tokens(self._path, count, self._vocab_size)
        self._folder = folder
        self._reference: torch.Tensor | None = None

    def command(self) -> dict[str, object]:
        """What an engine is prepared with to compute the reference."""
        sizes = {"longest": len(self.tokens), "most": 1, "each": len(self.tokens)}
        return {"do": "prepare", "path": str(self._path), "weights": "f32", "vocab_size": self._vocab_size, **sizes}

    def reference_by(self, starting: AbstractContextManager[PeerProcess]) -> None:
        """Our engine, just started, computes it."""
        with starting as process:
            process.ask(self.command())
            self._reference = self._logits(process)

    def score(self, process: PeerProcess) -> Score:
        from dovetail_bench.fidelity import compare_logits

        assert self._reference is not None, "the reference comes first"
        found = compare_logits(self._reference, self._logits(process), self.tokens)
        return Score(len(self.tokens), found.mean_kl, found.same_first)

    def _logits(self, process: PeerProcess) -> torch.Tensor:
        import numpy as np
        import torch

        target = self._folder / "logits.npy"
        try:
            process.ask({"do": "score", "tokens": list(self.tokens), "target": str(target)})
            return torch.from_numpy(np.load(target))
        finally:
            target.unlink(missing_ok=True)


def text_tokens(path: Path, count: int, vocab_size: int) -> Sequence[int]:
    """Prose that comes with every Python: its reference manual."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n".join(topics[topic] for topic in _TOPICS)
    tokens = Tokenizer.from_file(str(path / TOKENIZER)).encode(text).ids[:count]
    return [token % vocab_size for token in tokens]
