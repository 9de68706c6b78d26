"""Write two random Llamas with the tokenizer of a model that is here: one whose later layers add little, and its first
layers alone, which therefore guess what it says. For measuring what a draft model brings, where acceptance is chosen.

    python tools/draft_pair.py FOLDER --strength 0.02
    dovetail pull FOLDER/target --layout int8; dovetail pull FOLDER/draft --layout int8
    dovetail bench speculation target --draft draft --temperature 0.7 --only story,explain
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dovetail.store import Catalogue

HEAD_DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--drafting", type=int, default=1, help="layers of the draft")
    parser.add_argument("--strength", type=float, default=0.0, help="of later layers; 0 = the draft is always right")
    parser.add_argument("--sharpness", type=float, default=4.0, help="standard deviation of the logits")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a name from `dovetail list`")
    options = parser.parse_args()
    card = Catalogue().get(options.tokenizer)
    tensors = make_tensors(options, card.spec.vocab_size)
    for name, layers in (("target", options.layers), ("draft", options.drafting)):
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in tensors.items() if not is_beyond(key, layers)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config_of(options, layers, card.spec.vocab_size)))
        for file in ("tokenizer.json", "chat_template.jinja"):
            shutil.copy(Path(card.path) / file, folder)
        special = {"eos_token": card.eos_token, "bos_token": card.bos_token}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))


def is_beyond(name: str, layers: int) -> bool:
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= layers


def make_tensors(options: argparse.Namespace, vocab_size: int) -> dict[str, np.ndarray[Any, Any]]:
    generator, hidden = np.random.default_rng(0), options.hidden

    def draw(rows: int, columns: int, scale: float) -> np.ndarray[Any, Any]:
        return (generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": draw(vocab_size, hidden, options.sharpness / hidden**0.5),
        "model.norm.weight": np.ones(hidden, np.float16),
    }
    for layer in range(options.layers):
        strength = 1.0 if layer < options.drafting else options.strength
        prefix = f"model.layers.{layer}"
        for name, rows, columns, scale in matrices(hidden):
            tensors[f"{prefix}.{name}.weight"] = draw(rows, columns, columns**-0.5 * (strength if scale else 1.0))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float16)
    return tensors


def matrices(hidden: int) -> list[tuple[str, int, int, bool]]:
    """Name, rows, columns, and whether it writes to the residual stream."""
    narrow, wide = hidden // 4, hidden * 4
    return [
        ("self_attn.q_proj", hidden, hidden, False),
        ("self_attn.k_proj", narrow, hidden, False),
        ("self_attn.v_proj", narrow, hidden, False),
        ("self_attn.o_proj", hidden, hidden, True),
        ("mlp.gate_proj", wide, hidden, False),
        ("mlp.up_proj", wide, hidden, False),
        ("mlp.down_proj", hidden, wide, True),
    ]


def config_of(options: argparse.Namespace, layers: int, vocab_size: int) -> dict[str, Any]:
    heads = options.hidden // HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


if __name__ == "__main__":
    main()
