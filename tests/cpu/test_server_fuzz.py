"""The live server against its own OpenAPI document: whatever is sent, it never answers 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from server_fixture import Server

HERE = Path(__file__).parent
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_generated_requests_get_the_answers_that_the_document_promises(tiny_server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    options = ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--max-examples", "14", "--seed", "1"]
    # It learns the names of models from answers, and would remove those that other tests still need.
    options += ["--exclude-path-regex", "^/api/models/"]
    done = subprocess.run(
        [*command, f"{tiny_server.url}/openapi.json", *options, "--request-timeout", "30"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,  # it writes reports and a database of examples
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert tiny_server.get("/health").status_code == 200
    assert tiny_server.status()["unfinished"] == 0
