"""Half of the generated bodies name a model that is there, so that they reach the engine."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 2:
        body["model"] = "llama"
    return body
