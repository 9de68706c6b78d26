"""What a server prints when it is ready: its address, and a request to try."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.local_token import KEY_VARIABLE
from dovetail.machine import process_age_s

if TYPE_CHECKING:
    from dovetail.types import ModelCard

PROMPT = "Please name the capital of Germany."  # no token of the answer hangs on a near tie, in any precision


def _example(card: ModelCard | None) -> tuple[str, dict[str, Any]]:
    """What a model of this kind can be asked. Greedy and bounded: a small model at the API's default temperature may
    ramble to the end of its context."""
    bounds = {"temperature": 0, "max_tokens": 64}
    if card is not None and card.spec.encoder is not None:
        return "embeddings", {"input": PROMPT}
    if card is not None and card.chat_template is None:
        return "completions", {"prompt": PROMPT, **bounds}
    return "chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **bounds}


def announce(address: str, names: Sequence[str], card: ModelCard | None, *, has_keys: bool, as_json: bool) -> None:
    """`card`: of the first of them, where it is here."""
    seconds = process_age_s()
    if as_json:
        print(json.dumps({"url": address, "models": names, "seconds": round(seconds, 3)}), flush=True)
        return
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    print(f"Serving {listed or 'no model yet (dovetail pull)'} at {address} (ready after {seconds:.1f} s). Try:\n")
    path, body = _example(card)
    body = {"model": names[0] if names else "MODEL", **body}
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_keys else ""
    command = f"curl {address}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    print(f"  {command}\n", flush=True)
