"""`python -m dovetail.worker`: arguments, signals, and the import of torch before the first message."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from dovetail.errors import ConfigError, DeviceLost, OutOfMemory
from dovetail.machine import usable_cores
from dovetail.pulse import UNUSABLE_CODE, reason_file

SWITCH_S = 0.0001  # that the thread which loads may keep the interpreter while the one of the turns waits for it


def _die_with_parent() -> None:
    """Linux: be killed when the gateway dies, however it dies. Elsewhere the loop notices within a second."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dovetail.worker", description="One device of a Dovetail server.")
    parser.add_argument("--node", default="cpu-0")
    parser.add_argument("--connect", required=True, help="ZeroMQ address of the gateway")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="0 = every core that it may use")
    parser.add_argument("--max-batch", type=int, default=0, help="0 = what suits the device")
    parser.add_argument("--max-turn-tokens", type=int, default=0, help="0 = what suits the device")
    parser.add_argument("--max-adapters", type=int, default=0, help="in one iteration; 0 = any number")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int, default=0, help="most per model; 0 = what the node has")
    parser.add_argument("--memory-bytes", type=int, default=0, help="weights and KV; 0 = three quarters of the machine")
    parser.add_argument("--idle-release-s", type=float, default=30.0)
    parser.add_argument("--max-stall", type=float, default=2.0, help="token times that answers wait for other models")
    parser.add_argument("--profiles", default="", help="folder of measured profiles")
    parser.add_argument("--event-log", default="", help="file to append decisions to")
    parser.add_argument("--pool", type=int, default=-1, help="inherited descriptor of the host pool; -1 = none")
    parser.add_argument("--host-keep-alive", type=float, default=600.0, help="of pool memory that nobody uses")
    parser.add_argument("--direct-io", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--readers", type=int, default=12, help="threads that read the disk")
    parser.add_argument("--verify", default="off", choices=["load", "off"], help="compare weights with their checksums")
    parser.add_argument("--pulse", default="", help="file in which it shows that it lives")
    parser.add_argument("--parent", type=int, default=0, help="leave when this process is gone")
    parser.add_argument("--outlive", type=float, default=0.0, help="seconds to wait for a gateway that comes back")
    return parser.parse_args(arguments)


def _import_engine() -> None:
    """torch and what is built on it. What an import makes stays: looking through it for garbage meanwhile takes an
    eighth of the time, and looking again in the middle of a burst would be no better."""
    gc.disable()
    from dovetail.engine.torch_import import import_torch_for_worker

    import_torch_for_worker()
    import dovetail.engine.executor
    import dovetail.store
    import dovetail.worker.process  # noqa: F401

    gc.freeze()
    gc.enable()


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    arguments = parse_arguments()
    # A signal to the whole group is the gateway's to answer (a Ctrl-C in the terminal is for it, which lets streams
    # finish, then says Shutdown): the worker has a group of its own, and ignores what came before it had.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal may stop whoever logs from behind
    with suppress(OSError):  # the leader of a session has one
        os.setpgid(0, 0)
    if arguments.parent:
        _die_with_parent()
    arguments.threads = arguments.threads or usable_cores()
    _import_engine()
    import torch

    from dovetail.worker.process import Worker, WorkerConfig

    torch.set_num_threads(arguments.threads)
    sys.setswitchinterval(SWITCH_S)
    try:
        Worker(WorkerConfig(**vars(arguments))).run()
    except ConfigError as error:
        _end_unusable(arguments.node, arguments.pulse, str(error))
    except (DeviceLost, OutOfMemory) as error:  # nothing to be done about it in this process
        logging.getLogger("dovetail.worker").error("%s: %s", arguments.node, error)
        os._exit(1)  # a library that lost its device may never come to an end


def _end_unusable(node: str, pulse: str, reason: str) -> None:
    """Started again, it would end again: whoever started this process is told, and says it once."""
    try:
        reason_file(Path(pulse)).write_text(reason)
    except OSError:
        logging.getLogger("dovetail.worker").error("%s: %s", node, reason)
    os._exit(UNUSABLE_CODE)


if __name__ == "__main__":
    main()
