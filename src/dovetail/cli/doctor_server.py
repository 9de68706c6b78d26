"""`doctor --server URL`: asks a running server for all that it shows, and says which sections of the runbook apply.

What is wrong is `symptoms`' to say; this fetches and prints.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families

from dovetail import __version__
from dovetail.cli.output import print_json
from dovetail.cli.ps import error_message, key_header
from dovetail.cli.symptoms import Finding, Look, Sample, findings
from dovetail.errors import DovetailError

PREFIX = "dovetail:"
TIMEOUT_S = 30.0
LOG_LINES = 1000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Diagnosis(msgspec.Struct, frozen=True):
    url: str
    version: str  # the server's
    findings: list[Finding]
    not_seen: dict[str, str]  # what could not be looked at, and why


def diagnose_and_print(url: str, as_json: bool) -> None:
    """Exit code 1 where something was found."""
    diagnosis = diagnose(url)
    if as_json:
        known = msgspec.to_builtins(diagnosis)
        for shown, finding in zip(known["findings"], diagnosis.findings, strict=True):
            shown["section"] = finding.section
        print_json(known)
    else:
        _print(diagnosis)
    if diagnosis.findings:
        raise typer.Exit(1)


def diagnose(url: str) -> Diagnosis:
    look, not_seen = look_at(url)
    return Diagnosis(url, look.server_version, findings(look), not_seen)


def look_at(url: str) -> tuple[Look, dict[str, str]]:
    """What can be seen with the key from the environment or, on the server's machine, with its token."""
    with httpx.Client(base_url=url.rstrip("/"), headers=key_header(url), timeout=TIMEOUT_S) as client:
        health = _health(client, url)
        not_seen: dict[str, str] = {}

        def get(path: str) -> Any:
            try:
                response = client.get(path)
            except httpx.HTTPError as error:
                not_seen[path] = f"{error or type(error).__name__}"
                return {}
            if not response.is_success:
                not_seen[path] = f"{response.status_code}: {error_message(response)}"
                return {}
            return response.text if path == "/metrics" else response.json()

        config = get("/api/config")
        look = Look(
            version=__version__,
            health=health.json(),
            health_code=health.status_code,
            server_version=str(get("/version").get("version", "")),
            ps=get("/api/ps"),
            nodes=tuple(get("/api/nodes").get("data", ())),
            models=tuple(get("/api/models").get("data", ())),
            pulls=tuple(get("/api/pulls").get("data", ())),
            config=config,
            logs=tuple(get(f"/api/logs?limit={LOG_LINES}").get("data", ())),
            samples=parse_metrics(get("/metrics") or ""),
            store_free_bytes=_free_bytes(url, config),
        )
    return look, not_seen


def _health(client: httpx.Client, url: str) -> httpx.Response:
    try:
        response = client.get("/health")
        if response.status_code == 401:  # an unknown key; without any, health is everybody's
            response = httpx.get(str(response.url), timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DovetailError(
            f"no server at {url}: {error or type(error).__name__}. Look whether its process runs and what it printed "
            "last; docs/guide/runbook.md#no-answer has more"
        ) from error
    try:
        if isinstance(response.json().get("status"), str):
            return response
    except (ValueError, AttributeError):
        pass
    raise DovetailError(f"{url} is not a Dovetail server: /health answers {response.status_code} without a status")


def parse_metrics(text: str) -> tuple[Sample, ...]:
    return tuple(
        Sample(sample.name.removeprefix(PREFIX), dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def _free_bytes(url: str, config: dict[str, Any]) -> int | None:
    """Where the models of a server of this machine are kept."""
    from dovetail.machine import default_root

    if urlsplit(url).hostname not in LOOPBACK or not config:
        return None
    path = Path(config.get("config", {}).get("store", {}).get("path") or default_root())
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    version = f" (dovetail {diagnosis.version})" if diagnosis.version else ""
    count = len(diagnosis.findings)
    said = "nothing of the runbook applies" if not count else f"{count} {'findings' if count > 1 else 'finding'}"
    console.print(f"{diagnosis.url}{version}: {said}")
    for finding in diagnosis.findings:
        console.print(f"{'!' if finding.is_urgent else '·'} {finding.symptom}: {finding.seen}")
        console.print(f"  do: {finding.do}")
        console.print(f"  more: {finding.section}")
    for path, why in diagnosis.not_seen.items():
        console.print(f"  not looked at: {path}: {why}")
