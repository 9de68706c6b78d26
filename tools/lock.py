"""Writes `requirements.lock`: the packages of constraints.txt, each with the digests that the index publishes of all
files of that version, so that it holds on every platform. `make lock` runs it, `make install-locked` uses it.

Needs nothing but Python and pip, whose own idea of the index is used.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pip._internal.models.index import PyPI

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)$")
LINK = re.compile(r"""<a[^>]*href=["']([^"'#]+)#sha256=([0-9a-f]{64})["']""", re.IGNORECASE)
BY_MACHINE = {"torch"}  # which build of it is wanted depends on the machine, and so does the index that has it
HEAD = """# Written by `make lock` from constraints.txt: what the package index publishes for these versions.
# pip install --require-hashes --no-deps -r requirements.lock
"""


def main() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [match.groups() for line in lines if (match := PIN.match(line.split("#")[0].strip()))]
    pins = [(name, version) for name, version in pins if name not in BY_MACHINE]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pin: digests(*pin), pins))
    missing = [f"{name}=={version}" for (name, version), ours in zip(pins, found, strict=True) if not ours]
    if missing:
        sys.exit(f"the index publishes no digests for {', '.join(missing)}")
    entries = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in ours)])
        for (name, version), ours in zip(pins, found, strict=True)
    ]
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(entries) + "\n")
    print(f"requirements.lock: {len(entries)} packages, {sum(map(len, found))} files")


def digests(name: str, version: str) -> list[str]:
    with urllib.request.urlopen(f"{index()}/{normalised(name)}/", timeout=60) as answer:
        page = answer.read().decode()
    found = {digest: urllib.parse.unquote(html.unescape(url)) for url, digest in LINK.findall(page)}
    return sorted(digest for digest, url in found.items() if is_of(url.rsplit("/", 1)[-1], name, version))


def is_of(file: str, name: str, version: str) -> bool:
    stem = re.sub(r"\.(whl|tar\.gz|zip)$", "", file)
    parts = stem.split("-")
    if file.endswith(".whl"):
        return normalised(parts[0]) == normalised(name) and parts[1] == version
    return normalised(stem.rpartition("-")[0]) == normalised(name) and parts[-1] == version


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def index() -> str:
    """As pip is configured here."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    asked = subprocess.run(command, capture_output=True, text=True)
    return (asked.stdout.strip() or PyPI.simple_url).rstrip("/")


if __name__ == "__main__":
    main()
