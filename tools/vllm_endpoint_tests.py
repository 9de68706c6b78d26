"""Runs vLLM's own endpoint tests against a Dovetail server, with a small model in place of theirs.

The tests are read from a checkout of vLLM that you have (`--vllm`); none of it is here. Its package is not installed
either: modules of it that a test imports are stand-ins, and a test that works with vLLM's own classes, not over HTTP,
is not applicable. Needs pytest-asyncio, requests, regex and pybase64 beside what `make install` installs:

    python tools/vllm_endpoint_tests.py --vllm ../vllm [--json FILE] [-k PATTERN]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).resolve().parent
# What speaks to a server over HTTP about text, by the area it belongs to.
AREAS = {
    "chat": "entrypoints/openai/chat_completion/*.py",
    "completions": "entrypoints/openai/completion/*.py",
    "tokens": "entrypoints/openai/test_*token*.py entrypoints/openai/test_chunked_prompt.py",
    "models": "entrypoints/openai/models/*.py",
    "responses": "entrypoints/openai/responses/*.py",
    "messages": "entrypoints/anthropic/test_messages.py",
    "tokenising": "entrypoints/serve/tokenize/test_tokenization.py",
    "health": "entrypoints/serve/instrumentator/test_basic.py",
    "tools": "tool_use/*.py",
    "embeddings": "entrypoints/pooling/embed/test_online*.py",
    "reranking": "entrypoints/pooling/scoring/test_*_online.py",
}
OUTCOMES = ("passed", "failed", "not applicable")

SHARED = ("entrypoints/conftest.py", "entrypoints/openai/utils.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, required=True, help="a checkout of vLLM's sources")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="served in place of every model of theirs")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--json", type=Path, help="write every case with its outcome and reason to this file")
    parser.add_argument("-k", dest="pattern", default="", help="as pytest's")
    options = parser.parse_args()
    if not (options.vllm / "tests" / "entrypoints").is_dir():
        parser.error(f"{options.vllm}: no tests/entrypoints here; --vllm names a checkout of vLLM")
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as folder:
        cases = run_tests(options, Path(folder))
    print_report(cases)
    return 0 if cases else 1


def run_tests(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    files = lay_out(options.vllm / "tests", folder, options.areas)
    outcome = options.json or folder / "cases.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_tests.plugin", "--rootdir", str(folder)]
    command += ["--continue-on-collection-errors", "-o", "asyncio_mode=strict", "--timeout", "180"]
    command += ["-k", options.pattern] if options.pattern else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "DOVETAIL_VLLM": str(options.vllm.resolve()),
        "DOVETAIL_TESTED_MODEL": options.model,
        "DOVETAIL_TEST_CASES": str(outcome.resolve()),
    }
    subprocess.run([*command, *map(str, files)], cwd=folder, env=environment, check=False)
    cases: list[dict[str, Any]] = json.loads(outcome.read_text()) if outcome.exists() else []
    return cases


def lay_out(tests: Path, folder: Path, areas: list[str]) -> list[Path]:
    """The files as a package `tests` of its own, without vLLM's own set-up around them; returns what is to be run."""
    chosen = [
        path for area in areas for pattern in AREAS[area].split() for path in sorted(tests.glob(pattern))
    ]  # fmt: skip
    for path in [*chosen, *tests.glob("entrypoints/**/__init__.py"), *(tests / name for name in SHARED)]:
        target = folder / "tests" / path.relative_to(tests)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(
        "from vllm_tests.server import *\nfrom vllm_tests.server import missing as __getattr__\n"
    )
    named = [path for path in chosen if path.name.startswith("test_")]
    return [folder / "tests" / path.relative_to(tests) for path in dict.fromkeys(named)]


def print_report(cases: list[dict[str, Any]]) -> None:
    counts = Counter((area_of(case["id"]), case["outcome"]) for case in cases)
    print("\n| area | " + " | ".join(OUTCOMES) + " |\n| --- | --- | --- | --- |")
    for area in [*AREAS, ""]:
        row = [counts[area, outcome] for outcome in OUTCOMES]
        if any(row):
            print(f"| {area or 'other'} | " + " | ".join(map(str, row)) + " |")
    total = [sum(case["outcome"] == outcome for case in cases) for outcome in OUTCOMES]
    print("| all | " + " | ".join(map(str, total)) + " |")
    if applicable := total[0] + total[1]:
        print(f"\nof {applicable} that apply {100 * total[0] / applicable:.1f} % pass")
    print_reasons(cases)


def print_reasons(cases: list[dict[str, Any]]) -> None:
    failed = Counter((case["reason"], case["id"].partition("[")[0]) for case in cases if case["outcome"] == "failed")
    if failed:
        print("\nfailed:")
    for (reason, test), count in sorted(failed.items()):
        print(f"  {count:3} {test}: {reason}")
    reasons = Counter(case["reason"].partition(" (")[0] for case in cases if case["outcome"] == "not applicable")
    if reasons:
        print("\nnot applicable, because the case:")
    for reason, count in reasons.most_common():
        print(f"  {count:3} {reason}")


def area_of(case: str) -> str:
    """The first whose patterns have its file."""
    path = PurePosixPath(case.partition("::")[0].removeprefix("tests/"))
    return next((area for area, patterns in AREAS.items() if any(map(path.match, patterns.split()))), "")


if __name__ == "__main__":
    sys.exit(main())
