"""How far a preset's roofline is from measured times of one large model split over several devices.

The table has the columns model, hardware, prompt_size, batch_size, token_size, prompt_time, token_time (ms) and
tensor_parallel. A device of n holds an nth of the weights and of the cache; talking to the others is not in the
roofline, so that the comparison is fair for few devices and flatters nobody for many.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from statistics import mean

from dovetail.errors import ConfigError
from dovetail.profiles.hardware import PRESETS, RooflineError, Shape, latency_of

LLAMA_70B = Shape(128.5, 320.0, 80)
NAMES = {"a100-80gb": "a100-80g", "h100-80gb": "h100-80g"}
MODEL = "llama2-70b"


def parallel_errors(path: Path) -> dict[tuple[str, int], RooflineError]:
    """By preset and number of devices: relative deviation at the measured points up to 4,096 tokens of prompt."""
    prefill: dict[tuple[str, int], list[float]] = defaultdict(list)
    decode: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line, row in enumerate(_rows(path), start=2):
        try:
            name, ways = NAMES.get(row["hardware"]), int(row["tensor_parallel"])
            prompt, batch, tokens = (int(row[key]) for key in ("prompt_size", "batch_size", "token_size"))
            prompt_s, token_s = float(row["prompt_time"]) / 1000, float(row["token_time"]) / 1000
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: line {line}: cannot read it: {error}") from error
        if name is None or row["model"] != MODEL or prompt * batch > 4096:
            continue
        shape = Shape(LLAMA_70B.weight_gib / ways, LLAMA_70B.kv_kib_per_token / ways, LLAMA_70B.layers)
        latency = latency_of(PRESETS[name], shape)
        length = prompt + tokens // 2
        prefill[name, ways].append(abs(latency.prefill_s(prompt * batch) / prompt_s - 1))
        decode[name, ways].append(abs(latency.decode_s(batch, batch * length) / token_s - 1))
    return {
        key: RooflineError(mean(prefill[key]), max(prefill[key]), mean(decode[key]), max(decode[key]))
        for key in sorted(prefill)
    }


def _rows(path: Path) -> list[dict[str, str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
