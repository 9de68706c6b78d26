"""Open WebUI, whose server asks ours on behalf of its page: its models, a chat whole and streamed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from common import MODEL, QUESTION, URL, WANTED, check, run

with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]
FOLDER = tempfile.mkdtemp(prefix="open-webui-")
# Without accounts, and without what it would fetch from elsewhere at its start.
SETTINGS = {
    "DATA_DIR": FOLDER,
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": "none",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_OLLAMA_API": "false",
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": "none",
}


@check("chat")
def models_and_a_chat_whole_and_streamed() -> None:
    program = str(Path(sys.executable).with_name("open-webui"))
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": FOLDER}
    served = subprocess.Popen(command, env=os.environ | SETTINGS, **quiet)  # type: ignore[call-overload]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
            wait_for(client)
            signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
            client.headers["authorization"] = f"Bearer {signed_in['token']}"
            assert MODEL in [model["id"] for model in client.get("/api/models").json()["data"]]
            asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
            whole = client.post("/api/chat/completions", json=asked | {"stream": False}).json()
            assert WANTED in whole["choices"][0]["message"]["content"], whole
            lines = client.post("/api/chat/completions", json=asked | {"stream": True}).text.splitlines()
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
            chunks = [chunk for line in data for chunk in json.loads(line).get("choices", ())]
            assert WANTED in "".join(chunk["delta"].get("content") or "" for chunk in chunks), lines
    finally:
        served.terminate()
        served.wait(60)


def wait_for(client: httpx.Client) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            client.get("/health", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(1)


run("open-webui")
