"""`batch`: files of requests, answered by a running server when it has time."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
import typer

from dovetail.cli.models import AsJson
from dovetail.cli.output import human_age, print_json, print_table
from dovetail.cli.ps import DEFAULT_URL, Url, ask, error_message, key_header
from dovetail.errors import DovetailError

app = typer.Typer(help="Have files of requests answered when there is time.", no_args_is_help=True)

_POLL_S = 0.5
_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0  # for one piece of a file, and for the server to sync it
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_SHOWN_PROBLEMS = 20
_PIECE_BYTES = 1 << 20

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="An id from `dovetail batch list`.")]


@app.callback()
def _group() -> None:
    """Have files of requests answered when there is time."""


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="A request a line, as for OpenAI's batches and vLLM's run-batch.")],
    endpoint: Annotated[
        str | None, typer.Option(help="Where its lines go.  [default: the url of the first line]")
    ] = None,
    window: Annotated[str, typer.Option(help="Until when it is to be done, as 90m, 24h or 7d.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended; shows how it gets on.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --wait: write the answers to this file.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Upload a file of requests and have it answered.

    Example: dovetail batch submit questions.jsonl --wait -o answers.jsonl
    """
    endpoint = endpoint or _endpoint_in(file)
    uploaded = _upload(url, file)
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    batch = ask(url, "/v1/batches", timeout_s=_TIMEOUT_S, method="POST", body=body)
    if wait or output is not None:
        _finish(url, batch["id"], output, as_json=as_json)
    elif as_json:
        print_json(batch)
    else:
        typer.echo(batch["id"])


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(help="The newest so many.", min=1, max=100)] = 20,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List batches, the newest first.

    Example: dovetail batch list
    """
    found = ask(url, f"/v1/batches?limit={limit}", timeout_s=_TIMEOUT_S)["data"]
    if as_json:
        print_json(found)
        return
    now = time.time()
    print_table(
        ("BATCH", "STATUS", "DONE", "FAILED", "OF", "ENDPOINT", "CREATED"),
        [
            (
                batch["id"],
                batch["status"],
                *(str(batch["request_counts"][key]) for key in ("completed", "failed", "total")),
                batch["endpoint"],
                human_age(now - batch["created_at"]),
            )
            for batch in found
        ],
    )


@app.command()
def show(batch: BatchId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show one batch: how far it is, what holds it back, and what is wrong with its file.

    Example: dovetail batch show batch_1f0c…
    """
    found = _batch(url, batch)
    if as_json:
        print_json(found)
        return
    for line in describe(found):
        typer.echo(line)


@app.command()
def cancel(batch: BatchId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End a batch; what is answered is kept.

    Example: dovetail batch cancel batch_1f0c…
    """
    found = ask(url, f"{_path(batch)}/cancel", timeout_s=_TIMEOUT_S, method="POST")
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found['id']} is {found['status']}")


@app.command()
def wait(
    batch: BatchId,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answers to this file.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Return when a batch has ended; an interrupt ends the waiting, not the batch. Fails where a line did.

    Example: dovetail batch wait batch_1f0c… -o answers.jsonl
    """
    _finish(url, batch, output, as_json=as_json)


@app.command()
def results(
    batch: BatchId,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file.  [default: print them]")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed, not the answers.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Fetch the answers of a batch that has ended, a JSON line each, in the order in which they came.

    Example: dovetail batch results batch_1f0c… -o answers.jsonl
    """
    found = _batch(url, batch)
    file = found["error_file_id" if errors else "output_file_id"]
    if file is not None:
        _download(url, file, output)
    elif found["status"] not in _ENDED:
        raise DovetailError(f"{batch} is {found['status']}; its files are there when it has ended")
    elif output is not None:
        output.write_bytes(b"")


def describe(batch: dict[str, Any]) -> list[str]:
    counts, progress = batch["request_counts"], batch.get("progress") or {}
    lines = [f"{batch['id']}: {batch['status']}, {batch['endpoint']}"]
    lines.append(f"{counts['completed']} of {counts['total']} lines answered, {counts['failed']} failed")
    if batch["status"] not in _ENDED:
        lines.append(in_words(progress))
    for key, what in (("output_file_id", "answers"), ("error_file_id", "errors")):
        if batch[key] is not None:
            lines.append(f"{what}: {batch[key]}")
    problems = (batch["errors"] or {}).get("data", [])
    lines += [f"line {one['line']}: {one['message']}" for one in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    return lines


def in_words(progress: dict[str, Any]) -> str:
    """How a batch gets on."""
    parts = []
    if progress.get("lines_running"):
        parts.append(f"{progress['lines_running']} running")
    if progress.get("tokens_per_second"):
        parts.append(f"{progress['tokens_per_second']:.0f} tokens/s")
    if progress.get("eta_seconds"):
        parts.append(f"about {_duration(progress['eta_seconds'])} left")
    if progress.get("held_by"):
        parts.append(str(progress["held_by"]))
    return ", ".join(parts) or "waiting"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _endpoint_in(file: Path) -> str:
    with file.open("rb") as lines:
        first = lines.readline(_PIECE_BYTES).removeprefix(b"\xef\xbb\xbf")
    try:
        return str(msgspec.json.decode(first)["url"])
    except (msgspec.DecodeError, KeyError, TypeError):
        raise DovetailError(
            f"{file}: line 1 is no request (custom_id, method, url, body); --endpoint says where the lines go"
        ) from None


def _upload(url: str, file: Path) -> Any:
    address = url.rstrip("/") + "/v1/files"
    try:
        with file.open("rb") as content:
            answer = httpx.post(
                address,
                files={"file": (file.name, content)},
                data={"purpose": "batch"},
                headers=key_header(url),
                timeout=_UPLOAD_TIMEOUT_S,
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DovetailError(f"{file} could not be sent to {url}: {error or type(error).__name__}") from error
    if not answer.is_success:
        raise DovetailError(f"{url} answers {answer.status_code}: {error_message(answer)}")
    return answer.json()


def _download(url: str, file_id: str, output: Path | None) -> None:
    address = f"{url.rstrip('/')}/v1/files/{file_id}/content"
    try:
        with httpx.stream("GET", address, headers=key_header(url), timeout=_TIMEOUT_S) as answer:
            if not answer.is_success:
                answer.read()
                raise DovetailError(f"{url} answers {answer.status_code}: {error_message(answer)}")
            if output is None:
                for piece in answer.iter_bytes(_PIECE_BYTES):
                    sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
                return
            part = output.with_name(output.name + ".part")
            with part.open("wb") as out:
                for piece in answer.iter_bytes(_PIECE_BYTES):
                    out.write(piece)
            shutil.move(part, output)
    except httpx.HTTPError as error:
        raise DovetailError(f"{file_id} could not be fetched: {error or type(error).__name__}") from error


def _finish(url: str, batch_id: str, output: Path | None, *, as_json: bool) -> None:
    """Exit code 1 unless each line was answered."""
    batch = _follow(url, batch_id, shown=not as_json and sys.stderr.isatty())
    if output is not None and batch["output_file_id"] is not None:
        _download(url, batch["output_file_id"], output)
    if as_json:
        print_json(batch)
    else:
        for line in describe(batch):
            typer.echo(line)
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise typer.Exit(1)


def _follow(url: str, batch_id: str, *, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bars:
        task = bars.add_task("", total=None, note="")
        while True:
            batch = _batch(url, batch_id)
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            note = in_words(batch.get("progress") or {})
            bars.update(task, description=batch["status"], completed=done, total=counts["total"] or None, note=note)
            if batch["status"] in _ENDED:
                return batch
            time.sleep(_POLL_S)


def _batch(url: str, batch_id: str) -> Any:
    return ask(url, _path(batch_id), timeout_s=_TIMEOUT_S)


def _path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"
