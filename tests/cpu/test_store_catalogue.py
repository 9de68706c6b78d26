"""The catalogue: pulling, finding, removing, two at once, and names that lead nowhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import logits_of, make_executor
from tiny_gguf import Q, save_tiny_gguf

from dovetail import machine
from dovetail.engine.devices.cpu import CpuDevice
from dovetail.errors import CheckpointError, InvalidRequest, ModelNotFound, SourceError
from dovetail.machine import default_root, preferred_dtype
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.format.manifest import partition_files
from dovetail.store.paths import source_key
from dovetail.store.watched import WatchedCatalogue
from dovetail.worker.hosting import Profiles

TinyFolder = Callable[[str], Path]


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "store")


def test_a_pulled_folder_can_be_listed_opened_and_removed(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    assert catalogue.cards() == []
    card = catalogue.pull(str(tiny_folder("qwen2")), name="mine")
    assert catalogue.cards() == [card] == [catalogue.get("mine")]
    assert (card.name, card.dtype, card.source) == ("mine", preferred_dtype(), str(tiny_folder("qwen2")))
    assert open_checkpoint(card.path).spec == card.spec
    assert catalogue.remove("mine") >= card.size_bytes
    assert catalogue.cards() == []


def test_sixteen_bits_stay_sixteen_where_the_kernels_read_them(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Q.BF16, Q.F16, Q.F32):
        save_tiny_gguf("llama", tmp_path / f"{kind.name}.gguf", kind)
    monkeypatch.setattr(machine, "has_kernels", lambda: True)
    monkeypatch.setattr(machine, "read_cpu", lambda: machine.Cpu("plain", "aarch64", frozenset(), 2))
    kept = {kind: catalogue.pull(str(tmp_path / f"{kind}.gguf"), name=kind).dtype for kind in ("BF16", "F16", "F32")}
    assert kept == {"BF16": "bf16", "F16": "f32", "F32": "f32"}
    again = catalogue.pull(str(tmp_path / "BF16.gguf"))
    assert again == catalogue.get("BF16"), "what is here is not pulled again"
    monkeypatch.setattr(machine, "has_kernels", lambda: False)
    assert catalogue.pull(str(tmp_path / "BF16.gguf"), name="without", force=True).dtype == "f32"
    halves = machine.Cpu("with float16", "aarch64", frozenset({"asimdhp", "asimddp"}), 2)
    monkeypatch.setattr(machine, "read_cpu", lambda: halves)
    assert catalogue.pull(str(tmp_path / "BF16.gguf"), name="without-too", force=True).dtype == "f32"
    monkeypatch.setattr(machine, "has_kernels", lambda: True)
    assert catalogue.pull(str(tmp_path / "BF16.gguf"), name="halves", force=True).dtype == "f16"


@pytest.mark.skipif(not machine.has_kernels(), reason="the native kernels were not built")
def test_a_model_kept_in_bf16_gives_the_logits_of_the_same_in_float32(catalogue: Catalogue, tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf", Q.BF16)
    found = []
    for dtype in ("bf16", "f32"):
        card = catalogue.pull(str(tmp_path / "m.gguf"), name=dtype, dtype=dtype)
        executor = make_executor(Path(card.path), dtype="f32")
        assert executor.copied_bytes == 0
        counted = Profiles(None, CpuDevice(1)).weight_bytes(card, "f32")
        assert counted == pytest.approx(executor.weight_bytes, rel=0.2), "as the node counts it"
        found.append(torch.stack(logits_of(executor, list(range(12)), [4])))
        executor.close()
    assert torch.equal(*found)


def test_a_pulled_gguf_has_a_tokenizer_and_a_name_of_its_own(catalogue: Catalogue, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    save_tiny_gguf("llama", tmp_path / "Tiny Llama-0.1B.Q8_0.gguf", Q.F16)
    card = catalogue.pull(str(tmp_path / "Tiny Llama-0.1B.Q8_0.gguf"), dtype="bf16")
    assert (card.name, card.dtype, card.eos_token_ids) == ("tiny-llama-0.1b", "bf16", (256,))
    assert Tokenizer.from_file(card.tokenizer_file).encode("ab").ids == [ord("a"), ord("b")]


def test_stages_are_reported_to_the_end(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    seen: list[tuple[str, int, int]] = []
    catalogue.pull(str(tiny_folder("opt")), progress=lambda *stage: seen.append(stage))
    assert seen[-1][0] == "convert"
    assert seen[-1][1] == seen[-1][2] > 0


def test_pulling_again_does_nothing_until_the_source_changes_or_it_is_forced(
    catalogue: Catalogue, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "source"))
    for path in (*source.iterdir(), source):
        os.utime(path, (time.time() - 100,) * 2)
    first = catalogue.pull(str(source))
    manifest = Path(first.path) / "manifest.json"
    written = [manifest.stat().st_mtime_ns]
    assert catalogue.pull(str(source)) == first
    assert manifest.stat().st_mtime_ns == written[-1]
    catalogue.pull(str(source), force=True)
    written.append(manifest.stat().st_mtime_ns)
    os.utime(source / "config.json", (time.time() + 100,) * 2)
    catalogue.pull(str(source))
    written.append(manifest.stat().st_mtime_ns)
    assert written == sorted(set(written))


def test_a_model_is_known_again_by_its_source(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    card = catalogue.pull(str(tiny_folder("llama")), name="mine")
    assert catalogue.find(str(tiny_folder("llama"))) == card
    assert catalogue.find("pypi:something") is None


def test_an_unknown_model_is_answered_with_near_names(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    with pytest.raises(ModelNotFound, match="nothing is pulled yet"):
        catalogue.get("smollm")
    catalogue.pull(str(tiny_folder("llama")), name="smollm2-135m-instruct")
    with pytest.raises(ModelNotFound, match="did you mean smollm2-135m-instruct"):
        catalogue.get("smollm2-135m")
    with pytest.raises(ModelNotFound, match="there are smollm2-135m-instruct"):
        catalogue.remove("zzz")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a..b", "a b", "-x", "x" * 200, "ü"])
def test_a_name_that_could_lead_elsewhere_is_refused(name: str, catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    for action in (catalogue.get, catalogue.remove, lambda name: catalogue.pull(str(tiny_folder("llama")), name=name)):
        with pytest.raises(InvalidRequest, match="model name"):
            action(name)


def test_a_symbolic_link_in_the_store_is_not_followed(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    card = catalogue.pull(str(tiny_folder("llama")), name="real")
    (Path(card.path).parent / "link").symlink_to(card.path)
    assert [found.name for found in catalogue.cards()] == ["real"]
    with pytest.raises(InvalidRequest, match="symbolic link"):
        catalogue.remove("link")


def test_a_source_that_cannot_be_read_leaves_nothing_behind(catalogue: Catalogue, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        catalogue.pull(str(tmp_path / "empty"))
    assert catalogue.cards() == []
    assert list((catalogue.root / "models").iterdir()) == []


def test_a_store_that_cannot_be_written_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match="cannot be written to"):
        Catalogue(tmp_path / "file").pull(str(tiny_folder("llama")))


def test_an_unknown_type_is_refused(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    with pytest.raises(SourceError, match="dtype 'int3' is not one of auto, f32, bf16, f16"):
        catalogue.pull(str(tiny_folder("llama")), dtype="int3")


def test_a_damaged_model_is_left_out_of_the_list_and_explained_when_asked_for(
    catalogue: Catalogue, tiny_folder: TinyFolder
) -> None:
    card = catalogue.pull(str(tiny_folder("llama")), name="mine")
    ((blob, _),) = partition_files(Path(card.path))
    blob.unlink()
    assert catalogue.cards() == []
    with pytest.raises(CheckpointError, match=rf"{blob}: missing"):
        catalogue.get("mine")
    assert [entry.problem for entry in catalogue.entries()] == [f"{blob}: missing"]
    catalogue.remove("mine")
    assert catalogue.entries() == []


PULL = """
import sys
from pathlib import Path
from dovetail.store import Catalogue
print("started", flush=True)
card = Catalogue(sys.argv[1]).pull(sys.argv[2], name="shared")
print((Path(card.path) / "manifest.json").stat().st_mtime_ns)
"""


def test_of_two_pulls_at_once_one_does_the_work(catalogue: Catalogue, tiny_folder: TinyFolder) -> None:
    command = [sys.executable, "-c", PULL, str(catalogue.root), str(tiny_folder("llama"))]
    with catalogue.paths.lock(f"source-{source_key(str(tiny_folder('llama')))}"):  # both must wait here
        pulls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for pull in pulls:
            assert pull.stdout is not None
            assert pull.stdout.readline() == "started\n"
        time.sleep(0.3)
    written = [pull.communicate(timeout=60)[0].strip() for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0]
    assert written[0] == written[1] != ""


def test_the_package_exports_what_others_may_use() -> None:
    import dovetail.store

    assert dovetail.store.__all__ == ["Catalogue", "describe", "open_checkpoint"]


def test_the_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    assert default_root() == tmp_path == Catalogue().root
    assert Catalogue(tmp_path / "x").root == tmp_path / "x"
    monkeypatch.delenv("DOVETAIL_HOME")
    assert default_root() == Path.home() / ".cache" / "dovetail"


def test_a_server_asks_for_unknown_models_without_reading_the_others_again(
    catalogue: Catalogue, tiny_folder: TinyFolder
) -> None:
    for name in ("one", "two"):
        catalogue.pull(str(tiny_folder("qwen2")), name=name)
    watched = WatchedCatalogue(catalogue)
    cards = watched.cards()
    opened: list[str] = []
    watching = True
    root = str(catalogue.root)
    sys.addaudithook(lambda event, args: opened.append(args[0]) if watching and _opens(event, args, root) else None)
    for _ in range(3):
        assert watched.get("one") == cards[0]
        for unknown in ("tow", "nothing-like-it", "x" * 128):
            with pytest.raises(ModelNotFound):
                watched.get(unknown)
    watching = False
    assert opened == []
    with pytest.raises(ModelNotFound, match="did you mean two"):
        watched.get("tow")
    catalogue.pull(str(tiny_folder("llama")), name="one", force=True)
    assert watched.get("one") == catalogue.get("one") != cards[0]
    catalogue.remove("two")
    assert [card.name for card in watched.cards()] == ["one"]
    with pytest.raises(ModelNotFound, match="there are one"):
        watched.get("nothing-like-it")


def _opens(event: str, args: tuple[object, ...], root: str) -> bool:
    return event == "open" and isinstance(args[0], str) and args[0].startswith(root)


def test_an_unknown_model_of_a_store_that_cannot_be_written_is_unknown(catalogue: Catalogue) -> None:
    catalogue.paths.models.mkdir(parents=True)
    (catalogue.root / "locks").write_text("")  # as good as a file system that is read only, also for root
    for each in (catalogue, WatchedCatalogue(catalogue)):
        with pytest.raises(ModelNotFound):
            each.get("nothing")
