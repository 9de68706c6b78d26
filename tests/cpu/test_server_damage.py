"""Files of a served model that rot on the disk: nobody is answered by them for long, and they are fetched again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from server_fixture import Server, eventually, running_server
from store_builders import flip_bit, stored, writable_blob

from dovetail.errors import DamagedCheckpoint
from dovetail.store.checking import check_pieces
from dovetail.store.format.manifest import TEMPLATE, TOKENIZER, read_card

CONFIG = """
models: {{m: {{source: m}}}}
store: {{path: {root}, verify: {verify}, host_pool: {pool}}}
nodes: [{{threads: 1, kv_cache: 16MiB}}]
"""


def write_config(folder: Path, root: Path, verify: str, pool: str = "64MiB") -> Path:
    file = folder / "dovetail.yaml"
    file.write_text(CONFIG.format(root=root, verify=verify, pool=pool))
    return file


def answer(server: Server) -> tuple[int, str]:
    found = server.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 8, "temperature": 0})
    return found.status_code, found.json()["choices"][0]["text"] if found.status_code == 200 else found.text


@pytest.fixture
def source(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "source"))


def test_damage_is_found_in_the_background_put_aside_and_fetched_again(source: Path, tmp_path: Path) -> None:
    model = stored(source, tmp_path / "store")
    config, log = write_config(tmp_path, tmp_path / "store", "background"), tmp_path / "log"
    with running_server("--config", config) as server:
        sound = answer(server)
        assert sound[0] == 200
    model.close()
    flip_bit(writable_blob(model.path), 9000)
    assert any(finding.problem for finding in check_pieces(model.path))
    with running_server("--config", config, log=log) as server:
        eventually(lambda: list((tmp_path / "store" / "quarantine").glob("*")), timeout_s=60)
        eventually(lambda: answer(server) == sound, timeout_s=60)
        assert "is damaged" in log.read_text()
        assert not any(finding.problem for finding in check_pieces(model.path))
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize("pool", ["64MiB", "0"])
def test_damage_is_found_when_it_is_loaded_if_that_is_wanted(source: Path, tmp_path: Path, pool: str) -> None:
    model = stored(source, tmp_path / "store")
    flip_bit(writable_blob(model.path), 9000)
    with running_server("--config", write_config(tmp_path, tmp_path / "store", "load", pool)) as server:
        status, text = answer(server)
    assert status == 500
    assert "checksum" in text


@pytest.mark.parametrize("file", [TEMPLATE, TOKENIZER])
def test_small_files_are_always_checked(source: Path, tmp_path: Path, file: str) -> None:
    from dovetail.config import ModelConfig
    from dovetail.errors import EngineFailed
    from dovetail.gateway.models import ServedModel
    from dovetail.gateway.text.fair_executor import TextExecutors

    model = stored(source, tmp_path / "store")
    assert ServedModel(read_card(model.path, "m"), ModelConfig(source="m"), TextExecutors()).tokenizer
    flip_bit(model.path / file, 20)
    with pytest.raises((DamagedCheckpoint, EngineFailed), match="checksum"):
        assert ServedModel(read_card(model.path, "m"), ModelConfig(source="m"), TextExecutors()).tokenizer
