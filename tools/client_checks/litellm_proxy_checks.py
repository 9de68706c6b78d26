"""LiteLLM's proxy before the server, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from common import MODEL, QUESTION, URL, WANTED, check, run

with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]
KEY = f"sk-{secrets.token_hex(32)}"  # without one the proxy does not start
FILE = Path(tempfile.mkdtemp()) / "config.yaml"
ENTRY = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
FILE.write_text(json.dumps({"model_list": [{"model_name": "here", "litellm_params": ENTRY}]}))


@check("chat")
def chat_and_stream() -> None:
    program = str(Path(sys.executable).with_name("litellm"))
    command = [program, "--config", str(FILE), "--host", "127.0.0.1", "--port", str(PORT)]
    env = os.environ | {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
    proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=5)
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline, "the proxy does not answer"
                time.sleep(1)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY, timeout=120)
        asked = {"model": "here", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        assert WANTED in client.chat.completions.create(**asked, max_tokens=40).choices[0].message.content  # type: ignore[call-overload]
        chunks = client.chat.completions.create(**asked, max_tokens=40, stream=True)  # type: ignore[call-overload]
        assert WANTED in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finally:
        proxy.terminate()
        proxy.wait(30)


run("litellm")
