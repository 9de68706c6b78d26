"""GuideLLM: a short benchmark through its command line, with chat and with completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, QUESTION, URL, check, run


def benchmark(*options: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{number}. {QUESTION}"}) + "\n" for number in range(8)))
        report = Path(folder) / "benchmarks.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", URL]
        command += ["--model", MODEL, "--data", str(data), "--max-requests", "4", "--output-path", str(report)]
        answer = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
        assert answer.returncode == 0, (answer.stderr or answer.stdout)[-300:]
        return json.loads(report.read_text())


def completed(report: dict[str, object]) -> int:
    return report["benchmarks"][0]["metrics"]["request_totals"]["successful"]


@check("chat")
def chat_one_after_the_other() -> None:
    assert completed(benchmark("--profile", "synchronous", "--request-type", "chat_completions")) == 4


@check("stream")
def completions_two_at_a_time() -> None:
    options = ("--profile", "concurrent", "--rate", "2", "--request-type", "text_completions")
    assert completed(benchmark(*options)) == 4


run("guidellm")
