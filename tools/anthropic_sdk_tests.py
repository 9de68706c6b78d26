"""Runs the cases of Anthropic's Python SDK for messages, tokens and models against a Dovetail server.

The cases are read from a checkout of the SDK that you have (`--sdk`, at the version whose cases are wanted); none of
it is here. They ask for models by Anthropic's names, which the server has as aliases, and look at the shape of answers:
the server is `scripted_server.py`, whose model follows a script, unless `--url` names another. Their environment is
made with pip the first time (build/clients/anthropic-sdk-tests):

    python tools/anthropic_sdk_tests.py --sdk ../anthropic-sdk-python [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from clients import scripted_server

CASES = ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py")
# Names that the cases ask for; those of older models, which one of them asks for in turn, the SDK knows.
NAMES = ["claude-opus-4-6", "claude-sonnet-4-5-20250929", "model_id"]
OLDER = "from anthropic.resources.messages.messages import DEPRECATED_MODELS; print(*DEPRECATED_MODELS)"
PACKAGES = (
    "pytest", "pytest-asyncio", "inline-snapshot", "http-snapshot[httpx]==0.1.9", "httpx-aiohttp", "respx", "rich"
)  # fmt: skip
# What fails by decision, by the status that the failure has.
DIFFERENT = {"422": "a tool or a format is described by a schema that is none, which is refused"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sdk", type=Path, required=True, help="a checkout of the SDK's sources")
    parser.add_argument("--url", help="a server that is there, with the models' names as aliases")
    parser.add_argument("--environment", type=Path, default=Path("build/clients/anthropic-sdk-tests"))
    parser.add_argument("--json", type=Path, help="write every case with its outcome and reason to this file")
    options = parser.parse_args()
    if not (options.sdk / "tests" / "api_resources").is_dir():
        parser.error(f"{options.sdk}: no tests/api_resources here; --sdk names a checkout of the SDK")
    python = prepare(options.environment.resolve(), options.sdk.resolve())
    with tempfile.TemporaryDirectory(prefix="sdk-tests-") as folder, ExitStack() as servers:
        url = options.url or servers.enter_context(scripted_server(Path(folder), names(python)))
        cases = run_cases(python, options.sdk.resolve(), url, Path(folder) / "cases.xml")
    if options.json:
        options.json.write_text(json.dumps(cases, indent=1))
    print_report(cases)
    return 0 if cases else 1


def prepare(folder: Path, sdk: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES, "-e", str(sdk)], check=True)
        (folder / "ready").touch()
    return python


def names(python: Path) -> list[str]:
    older = subprocess.run([python, "-c", OLDER], check=True, capture_output=True, text=True).stdout.split()
    return list(dict.fromkeys([*NAMES, *older]))


def run_cases(python: Path, sdk: Path, url: str, report: Path) -> list[dict[str, str]]:
    """Each with its outcome, and why it failed."""
    files = [str(Path("tests/api_resources") / name) for name in CASES]
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-o", "addopts=", "-o", "filterwarnings=default"]
    environment = os.environ | {"TEST_API_BASE_URL": url}
    command = [str(python), "-m", "pytest", *options, f"--junitxml={report}", *files]
    subprocess.run(command, cwd=sdk, env=environment, check=False, stdout=subprocess.DEVNULL)
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        failure = next((part for kind in ("failure", "error") for part in case.iter(kind)), None)
        reason = why(failure.get("message") or failure.text or "") if failure is not None else ""
        outcome = "failed" if failure is not None else "skipped" if case.find("skipped") is not None else "passed"
        found.append({"id": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome, "reason": reason})
    return found


def why(message: str) -> str:
    status = re.search(r"Error code: (\d+)", message)
    return DIFFERENT.get(status[1] if status else "", " ".join(message.split())[:240])


def print_report(cases: list[dict[str, str]]) -> None:
    outcomes = Counter(case["outcome"] for case in cases)
    print(f"{outcomes['passed']} of {len(cases) - outcomes['skipped']} pass")
    for reason, count in Counter(case["reason"] for case in cases if case["outcome"] == "failed").most_common():
        print(f"{count:5d} {reason}")


if __name__ == "__main__":
    sys.exit(main())
