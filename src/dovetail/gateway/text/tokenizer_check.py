"""Whether a tokenizer can be read and is of bounded cost: asked when a model is added, not by its first request."""

from __future__ import annotations

import asyncio

from dovetail.errors import EngineFailed, InvalidRequest
from dovetail.gateway.models import ServedModel
from dovetail.gateway.text.tokenizer_child import BYTES_PER_FILE_BYTE, SPARE_BYTES

_PROBE = "".join(map(chr, range(32, 127))) + " aA0" * 8
_TIMEOUT_S = 10.0
_MAX_TOKENS = 16 * len(_PROBE)
_ALLOWED = f"{SPARE_BYTES >> 20} MiB beyond {BYTES_PER_FILE_BYTE} times its file"


async def check_tokenizer(model: ServedModel) -> None:
    """Raises InvalidRequest."""
    await _prepare(model)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            tokens = await model.encode(_PROBE, add_special_tokens=False)
    except TimeoutError:
        problem = f"takes more than {_TIMEOUT_S:g} s for {len(_PROBE)} characters"
    except EngineFailed as error:
        problem = f"{error.message}, over {len(_PROBE)} characters; it may take {_ALLOWED}"
        raise InvalidRequest(f"source: {problem}. Use the model's own tokenizer.json", param="source") from error
    else:
        if len(tokens) <= _MAX_TOKENS:
            return
        problem = f"makes {len(tokens)} tokens of {len(_PROBE)} characters, more than {_MAX_TOKENS}"
    raise InvalidRequest(f"source: the tokenizer of '{model.name}' {problem}", param="source")


async def _prepare(model: ServedModel) -> None:
    try:
        await model.prepare()
    except EngineFailed as error:
        raise InvalidRequest(f"source: {error.message}", param="source") from error
