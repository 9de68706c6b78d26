"""What a newcomer does first: start the server, paste the line that it prints."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from server_fixture import COMMAND, STOP_TIMEOUT_S

from dovetail.types import ModelCard


def test_the_line_that_the_server_prints_gets_an_answer(smollm2: ModelCard) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = [*COMMAND, "serve", smollm2.name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(text.strip() for text in server.stdout if text.strip().startswith("curl "))
            answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=True).stdout
        finally:
            server.terminate()
            assert server.wait(STOP_TIMEOUT_S) == 0
    assert json.loads(answer)["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
