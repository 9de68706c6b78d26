"""GuideLLM: short benchmarks through its command line, of the paths that it knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, QUESTION, URL, check, run


def benchmark(path: str, profile: str, stream: str = "true") -> None:
    """Four requests, all of which succeed."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        data.write_text("".join(json.dumps({"prompt": f"{number}. {QUESTION}"}) + "\n" for number in range(8)))
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        backend = f"kind=openai_http,target={URL},model={MODEL},request_format={path},stream={stream},max_tokens=8"
        command += ["--backend", backend]
        command += ["--profile", profile, "--constraint", "kind=max_requests,count=4"]
        command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
        # Ten processes that import torch each would take longer to start than the benchmark takes.
        environment = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert answer.returncode == 0, (answer.stderr or answer.stdout)[-300:]
        (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0), totals


@check("chat")
def whole() -> None:
    benchmark("/v1/chat/completions", "kind=synchronous", stream="false")


@check("stream")
def chats_one_after_the_other() -> None:
    benchmark("/v1/chat/completions", "kind=synchronous")


@check("stream")
def completions_two_at_a_time() -> None:
    benchmark("/v1/completions", "kind=concurrent,streams=2")


@check("stream")
def responses() -> None:
    benchmark("/v1/responses", "kind=synchronous")


run("guidellm")
