"""For mkdocs: README and SECURITY as pages of the site, other files that pages link to as files of it."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md"}
ASSETS = ("deploy/grafana-dashboard.json",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=text))
    for asset in ASSETS:
        files.append(File.generated(config, asset, content=(ROOT / asset).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Pages of docs/ are one folder nearer to the repository's root here than they are there."""
    nearer = re.sub(r"\]\(\.\./((?:\.\./)*(?:README|SECURITY)\.md|(?:\.\./)*deploy/)", r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", nearer)
