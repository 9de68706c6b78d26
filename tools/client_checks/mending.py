"""What the checks of agents from PyPI share: a folder with a file to mend, a tool for commands in it, and what must
have come of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = f"{os.environ['DOVETAIL_SCRIPTED_URL']}/v1"
MODEL = "scripted"
KEY = "none"
TASK = "Mend calc.py and run its test."
DONE = "Mended: the test passes"
FOLDER = Path(tempfile.mkdtemp(prefix="agent-"))
OUTPUTS: list[str] = []  # of the commands that the agent had run

(FOLDER / "calc.py").write_text("def add(a, b):\n    return a - b\n")
(FOLDER / "test_calc.py").write_text("from calc import add\nassert add(2, 3) == 5\nprint('passed')\n")
os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": URL, "OPENAI_API_BASE": URL}


def bash(command: str, description: str) -> str:
    """Run a command in the folder of the task.

    Args:
        command: what the shell is given
        description: what it is for
    """
    done = subprocess.run(["bash", "-c", command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    OUTPUTS.append(done.stdout + done.stderr)
    return OUTPUTS[-1] or "done"


def check_mended(said: object) -> None:
    assert "a + b" in (FOLDER / "calc.py").read_text(), f"not mended; it said {said!r}"
    assert OUTPUTS[-1:] == ["passed\n"], OUTPUTS
    assert DONE in str(said), said


def command(*arguments: str, **environment: str) -> str:
    """Of a program that was installed beside this interpreter, in the folder."""
    program = Path(sys.executable).with_name(arguments[0])
    env = os.environ | {"HOME": str(FOLDER), "CI": "1"} | environment
    done = subprocess.run(
        [str(program), *arguments[1:]], cwd=FOLDER, env=env, capture_output=True, text=True, timeout=500, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, (done.stderr + done.stdout)[-600:]
    return done.stdout
