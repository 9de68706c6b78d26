"""A fleet behind Ray Serve as its documentation shows it: a deployment per model that scales to zero, and an ingress
that finds the model's and streams. Runs under the peer's interpreter and imports nothing of ours.

Its argument is a JSON file: port, replicas that fit, seconds of idleness after which one goes, threads, context, and
the GGUF file of each model.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse


class Model:
    """A replica: llama.cpp, one answer at a time."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from llama_cpp import Llama

        options = {"n_ctx": context, "n_batch": 512, "n_threads": threads, "n_threads_batch": threads}
        self._llama = Llama(path, verbose=False, **options)
        self._lock = asyncio.Lock()
        self._never = {self._llama.token_eos(): -1e9}  # as many tokens as were asked for

    async def generate(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        async with self._lock:
            pieces = self._llama.create_completion(
                prompt, max_tokens=max_tokens, temperature=0.0, stream=True, logit_bias=self._never
            )
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                if piece["choices"][0]["finish_reason"] is None:  # else it is the end, not a token
                    yield piece["choices"][0]["text"]


class Ingress:
    def __init__(self, models: dict[str, Any]) -> None:
        self._models = {name: handle.options(stream=True) for name, handle in models.items()}

    async def __call__(self, request: Request) -> Response:
        if request.url.path != "/v1/completions":
            return JSONResponse({})
        body = await request.json()
        handle = self._models.get(body["model"])
        if handle is None:
            return JSONResponse({"error": "no such model"}, 404)
        pieces = handle.generate.remote(body["prompt"], body["max_tokens"])
        return StreamingResponse(_events(pieces), media_type="text/event-stream")


async def _events(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    count = 0
    async for text in pieces:
        count += 1
        yield f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': count}})}\n\ndata: [DONE]\n\n"


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    # A logical CPU stands for the room of one model; proxy, controller and ingress take none.
    own = {"address": "local", "include_dashboard": False, "logging_level": "ERROR", "configure_logging": False}
    ray.init(num_cpus=config["replicas"], **own)
    serve.start(http_options={"host": "127.0.0.1", "port": config["port"]})
    scaling = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0.0}
    scaling["downscale_delay_s"] = config["keep_alive_s"]
    models = {}
    for name, path in config["models"].items():
        options = {"name": name, "autoscaling_config": scaling, "max_ongoing_requests": 64}
        deployment = serve.deployment(Model).options(**options, ray_actor_options={"num_cpus": 1})
        models[name] = deployment.bind(path, config["threads"], config["context"])
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    serve.run(ingress.bind(models))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
