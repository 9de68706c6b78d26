"""Conversion under adversity: little memory, a kill, a crash at any rename, a full disk; folders of the first form."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from store_builders import flat, stored
from tiny import save_tiny_tokenizer

from dovetail.errors import SourceError
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.collect import collect
from dovetail.store.format.arrays import as_array
from dovetail.store.format.manifest import StoredModel
from dovetail.store.verify import verify

TinyFolder = Callable[[str], Path]
MEGABYTE = 2**20


def synthetic_folder(folder: Path, vocab_size: int, layers: int = 2) -> Path:
    """A model whose weights are holes in a file: large, and written at once. Hidden size 256, float32."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_tiny_tokenizer(folder)
    shapes = {"model.embed_tokens.weight": (vocab_size, 256), "model.norm.weight": (256,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (256, 256),
            "self_attn.k_proj": (128, 256),
            "self_attn.v_proj": (128, 256),
            "self_attn.o_proj": (256, 256),
            "mlp.gate_proj": (512, 256),
            "mlp.up_proj": (512, 256),
            "mlp.down_proj": (256, 512),
            "input_layernorm": (256,),
            "post_attention_layernorm": (256,),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def synthetic_gguf(path: Path, vocab_size: int) -> Path:
    from tiny_gguf import Q, save_tiny_gguf

    rows = np.zeros((vocab_size, 256 // 32 * 34), np.uint8)
    big = {"token_embd.weight": (rows, Q.Q8_0), "output.weight": (rows, Q.Q8_0)}

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_vocab_size(vocab_size)

    save_tiny_gguf(
        "llama", path, Q.Q8_0, metadata, big, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return path


MEASURED_PULL = """
import sys
from dovetail.store import Catalogue
from dovetail.store.convert import Conversion
import dovetail.store.gguf.file
root, source, dtype, layout = sys.argv[1:]
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = peak()
card = Catalogue(root).pull(source, dtype=dtype, layout=layout)
print(peak() - before, card.size_bytes)
"""


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"), [("hf", "f32", "plain"), ("hf", "bf16", "int8"), ("gguf", "bf16", "plain")]
)
def test_memory_does_not_grow_with_the_largest_tensor(kind: str, dtype: str, layout: str, tmp_path: Path) -> None:
    """268 MB of float32 in one tensor (the GGUF has two), converted within 200 MB. The bound is made of slabs and of
    what is mapped before pages are let go of; a 13B model meets the same one."""
    source = synthetic_folder(tmp_path / "m", 2**18) if kind == "hf" else synthetic_gguf(tmp_path / "m.gguf", 2**18)
    line = [sys.executable, "-c", MEASURED_PULL, str(tmp_path / "store"), str(source), dtype, layout]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 64 * MEGABYTE
    assert grown < 200 * MEGABYTE


KILLED_PULL = """
import sys, time
from dovetail.store import Catalogue
def progress(stage, done, total):
    if done > 0.6 * total:
        print(done, total, flush=True)
        time.sleep(60)  # until somebody kills this
Catalogue(sys.argv[1]).pull(sys.argv[2], name="m", dtype="bf16", progress=progress, journal_bytes=1 << 20)
"""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, int, int]:
    """A source whose pull was killed: (its path, bytes that were written, bytes in all)."""
    source = synthetic_folder(tmp_path / "source", 20_000, layers=8)
    line = [sys.executable, "-c", KILLED_PULL, str(tmp_path / "store"), str(source)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    done, total = map(int, process.stdout.readline().split())
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    return source, done, total


def test_a_killed_conversion_goes_on_where_it_was(killed: tuple[Path, int, int], tmp_path: Path) -> None:
    source, done, total = killed
    catalogue = Catalogue(tmp_path / "store")
    assert catalogue.entries() == []
    seen: list[int] = []
    card = catalogue.pull(
        str(source), name="m", dtype="bf16", progress=lambda _, now, __: seen.append(now), journal_bytes=MEGABYTE
    )
    assert seen[0] > done - 3 * MEGABYTE  # what the journal had not noted yet was written again, no more
    assert total - seen[0] < 0.5 * total
    fresh = Catalogue(tmp_path / "fresh").pull(str(source), name="m", dtype="bf16")
    manifests = [StoredModel(Path(found.path)).manifest for found in (card, fresh)]
    assert manifests[0].partitions == manifests[1].partitions
    assert verify([Path(card.path)]).damage == ()
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_what_a_killed_conversion_left_is_not_used_for_other_files_or_forms(
    killed: tuple[Path, int, int], tmp_path: Path
) -> None:
    source, _, _ = killed
    catalogue = Catalogue(tmp_path / "store")
    seen: list[int] = []
    catalogue.pull(str(source), name="m", dtype="f16", progress=lambda _, now, __: seen.append(now))
    assert seen[0] < 17 * MEGABYTE  # the first slab
    assert verify(catalogue.paths.folders()).damage == ()


def test_gc_removes_what_a_killed_conversion_left(killed: tuple[Path, int, int], tmp_path: Path) -> None:
    paths = Catalogue(tmp_path / "store").paths
    done = collect(paths)
    assert [removal.kind for removal in done.removed] == ["staging"]
    assert done.freed_bytes > killed[1] / 2
    assert list(paths.staging.iterdir()) == []


def test_a_crash_at_any_moment_leaves_the_old_model_or_the_new(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    script = Path(__file__).parent / "crash_pull.py"
    sources = [str(tiny_folder("llama")), str(tiny_folder("llama_tied"))]
    line = [sys.executable, str(script), str(tmp_path / "store"), *sources]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    states: list[dict[str, Any]] = json.loads(done.stdout)
    crashed = [state for state in states if state["status"] == 9]
    assert len(crashed) >= 8
    assert {state["state"] for state in crashed} == {"old", "new"}
    assert all(state["sound"] for state in states)
    assert all(state["left"] == [] and state["blobs"] == 1 for state in states)  # gc has cleaned up
    assert len({state["final"] for state in states}) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_reported_and_nothing_is_registered(small_disk: Path, tmp_path: Path) -> None:
    source = synthetic_folder(tmp_path / "source", 20_000)  # 20 MB and some
    catalogue = Catalogue(small_disk / "store")
    hog = small_disk / "hog"

    def progress(stage: str, done: int, total: int) -> None:
        if done > total // 4 and not hog.exists():
            hog.write_bytes(bytes(shutil.disk_usage(small_disk).free - MEGABYTE))

    with pytest.raises(SourceError, match=r"cannot be written to .*No space left on device"):
        catalogue.pull(str(source), dtype="f32", progress=progress)
    assert catalogue.entries() == []
    assert not list((small_disk / "store").glob("blobs/*/*"))
    collect(catalogue.paths)
    assert list((small_disk / "store" / "tmp").iterdir()) == []
    with pytest.raises(SourceError, match=r"needs 2\d\.\d MB, \d+\.\d MB are free"):
        catalogue.pull(str(source), dtype="f32")
    hog.unlink()
    card = catalogue.pull(str(source), dtype="f32")
    assert verify([Path(card.path)]).damage == ()


def version_one_folder(source: Path, folder: Path, name: str) -> Path:
    """As earlier releases wrote them."""
    import msgspec
    from safetensors.numpy import save_file

    checkpoint = open_checkpoint(source)
    tokens, tokenizer = checkpoint.tokenizer()
    folder.mkdir(parents=True)
    arrays = {
        key: flat(checkpoint, key).reshape(shape).copy() for key, shape in checkpoint.spec.tensors()
    }  # fmt: skip
    save_file(arrays, folder / "weights.safetensors")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text(tokens.chat_template or "")
    card = {
        "format": "dovetail-checkpoint",
        "version": 1,
        "spec": checkpoint.spec,
        "tokens": msgspec.structs.replace(tokens, chat_template=None),
        "dtype": "f32",
        "source": name,
        "created": 1_700_000_000,
    }
    (folder / "dovetail.json").write_bytes(msgspec.json.encode(card))
    return folder


def test_a_folder_of_the_first_form_is_read_and_converted_without_a_download(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    catalogue = Catalogue(tmp_path)
    folder = version_one_folder(tiny_folder("qwen2"), tmp_path / "models" / "old", "pypi:not-there")
    card = catalogue.get("old")
    assert catalogue.cards() == [card]
    assert catalogue.find("pypi:not-there") == card
    original, before = open_checkpoint(tiny_folder("qwen2")), open_checkpoint(folder)
    assert verify([folder]).unchecked == ("old",)
    new = catalogue.pull("pypi:not-there", dtype="f32")
    assert (new.name, new.chat_template, new.source) == ("old", card.chat_template, "pypi:not-there")
    after = open_checkpoint(folder)
    assert isinstance(after, StoredModel)
    for name, _ in original.spec.tensors():
        np.testing.assert_array_equal(as_array(after.pieces(name)[0]).reshape(-1), flat(original, name))
        np.testing.assert_array_equal(flat(before, name), flat(original, name))
    assert (folder / "weights.safetensors").exists()  # for an earlier release that may still run
    assert {removal.kind for removal in collect(catalogue.paths).removed} == {"old form"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "manifest.json",
        "tokenizer.json",
        "used",
    ]
    assert verify([folder]).damage == ()


def test_progress_begins_with_what_is_already_there(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("llama"), tmp_path)
    seen: list[tuple[str, int, int]] = []
    Catalogue(tmp_path).pull(
        str(tiny_folder("llama")), name="m", dtype="f32", progress=lambda *step: seen.append(step), force=True
    )
    assert seen[-1] == ("convert", model.manifest.size_bytes, model.manifest.size_bytes)
