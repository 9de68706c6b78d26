"""Calls functions of the page's modules that know no DOM, in node: the same files that browsers get."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dovetail.gateway.console

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here (Debian: nodejs)")
SOURCE = Path(dovetail.gateway.console.__file__).parent
TIMEOUT_S = 60.0  # what does not end is ended
_PROGRAM = """
import { readFileSync } from "node:fs";
const [module, name, calls, isKept] = JSON.parse(readFileSync(0, "utf-8"));
const found = (await import(`./${module}`))[name];
const answer = calls.map((given) => (typeof found === "function" ? found(...given) : found));
process.stdout.write(JSON.stringify(isKept ? answer : answer.length));
"""


@cache
def _folder() -> Path:
    """A browser takes these files for modules because the page says so, node because of a file beside them."""
    folder = Path(tempfile.mkdtemp(prefix="page-modules-"))
    for file in SOURCE.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "call.js").write_text(_PROGRAM)
    return folder


def call(module: str, name: str, *given: Any) -> Any:
    return call_many(module, name, [given])[0]


def call_many(module: str, name: str, calls: list[Any], *, keep: bool = True) -> Any:
    """The results, or how many there are."""
    assert NODE is not None
    asked = json.dumps([module, name, calls, keep])
    done = subprocess.run(
        [NODE, _folder() / "call.js"], input=asked, capture_output=True, text=True, timeout=TIMEOUT_S, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
