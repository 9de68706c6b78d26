"""Whether this machine has what its nodes are configured to take: threads, memory, host pool. Limits of control groups
count as the machine's."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.config import Config, NodeConfig
from dovetail.errors import ConfigError
from dovetail.machine import memory_bytes, usable_cores

MIN_MEMORY_BYTES = 32 * 2**20  # less holds no model


def check_sizes(config: Config) -> None:
    """Raises ConfigError with the key, the limit and the remedy. A GPU's memory is its driver's to know."""
    check_nodes(config.nodes)
    total = memory_bytes()[0]
    if config.store.host_pool is not None and config.store.host_pool > total:
        raise ConfigError(
            f"store.host_pool: {_gib(config.store.host_pool)} asked, this machine has {_gib(total)}; "
            "leave it out for half of that"
        )


def check_nodes(nodes: Sequence[NodeConfig]) -> None:
    cores, total = usable_cores(), memory_bytes()[0]
    for node in nodes:
        key = f"nodes.{node.name}"
        if node.threads > cores:
            raise ConfigError(
                f"{key}.threads: {node.threads} asked, this machine has {cores} cores; leave it out (or 0) for all"
            )
        if node.memory and node.memory < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"{key}.memory: {node.memory} bytes asked, a node takes at least {MIN_MEMORY_BYTES // 2**20}MiB; leave "
                "it out (or 0) for three quarters of the machine's"
            )
    ours = [node for node in nodes if node.device == "cpu"]
    asked = sum(node.memory for node in ours)
    if asked > total:
        keys = " + ".join(f"nodes.{node.name}.memory" for node in ours if node.memory)
        raise ConfigError(
            f"{keys}: {_gib(asked)} asked, this machine has {_gib(total)}; leave it out (or 0) for three quarters of it"
        )
    for node in ours:
        limit = node.memory or total
        if node.kv_cache > limit:
            raise ConfigError(
                f"nodes.{node.name}.kv_cache: {_gib(node.kv_cache)} asked, the node has {_gib(limit)}; leave it out "
                "(or 0) for what is left beside the weights"
            )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}GiB"
