"""What benches write for the servers that they start is a configuration that those take."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gateway_builders import make_card

from dovetail.cli.node_sizes import MIN_MEMORY_BYTES
from dovetail.config import load_config
from dovetail_bench.fleet import FleetModel
from dovetail_bench.servers import Settings, dovetail, with_adapters


@pytest.mark.parametrize("kind", ["models", "adapters"])
def test_a_contenders_configuration_is_read_with_its_sizes_and_durations(tmp_path: Path, kind: str) -> None:
    card = make_card(tmp_path, "copy-00")
    card = msgspec.structs.replace(card, path=str(tmp_path / "store" / "models" / "copy-00"))
    fleet = [FleetModel(card, Path("copy.gguf"))]
    settings = Settings(tmp_path, 2, 0.5, keep_alive_s=12.5, host_keep_alive_s=1.0)
    if kind == "adapters":
        contender = with_adapters(fleet, settings, card, {"copy-00-a": str(tmp_path)})
    else:
        contender = dovetail(fleet, settings)
    config = load_config(Path(contender.command[contender.command.index("--config") + 1]))
    assert config.models["copy-00"].keep_alive == 12.5
    assert (config.store.host_keep_alive, config.store.host_pool) == (1.0, contender.memory_bytes)
    assert config.nodes[0].memory == contender.memory_bytes >= MIN_MEMORY_BYTES
