"""Machines on one machine: a network namespace for each, joined by a bridge in the caller's own, which has no way out
(`unshare --net`): what is sent stays on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

BRIDGE, SUBNET = "dovetail", "10.77.0"
HEAD = f"{SUBNET}.1"


def is_possible() -> bool:
    """Whether the caller may make namespaces, and is in one that has loopback alone."""
    names = {name for _, name in socket.if_nameindex()}
    return os.geteuid() == 0 and shutil.which("ip") is not None and names == {"lo"}


class Network:
    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # namespace by machine; those of several tests at once are told apart
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{HEAD}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")

    def add(self, machine: str) -> str:
        """Its address."""
        if machine not in self._names:
            space = self._names[machine] = f"dovetail-{os.getpid()}-{machine}"
            number = len(self._names) + 1
            _ip("netns", "add", space)
            _ip("link", "add", f"to-{machine}", "type", "veth", "peer", "name", "up0", "netns", space)
            _ip("link", "set", f"to-{machine}", "master", BRIDGE, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("address", "add", f"{SUBNET}.{number}/24", "dev", "up0"),
                ("link", "set", "up0", "up"),
            ):
                _ip("-netns", space, *words)
        return f"{SUBNET}.{list(self._names).index(machine) + 2}"

    def within(self, machine: str) -> list[str]:
        """What a command begins with to run on that machine."""
        return ["ip", "netns", "exec", self._names[machine]]

    def close(self) -> None:
        for space in self._names.values():
            _ip("netns", "delete", space)
        _ip("link", "delete", BRIDGE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)
