"""Kernels of GPUs, compiled ahead of their use and kept on disk: by `doctor --prepare` for all models that are here, by
`pull` for the one that has come."""

from __future__ import annotations

import time
from collections.abc import Iterable

import typer

from dovetail.errors import DovetailError
from dovetail.types import ModelCard


def prepare_kernels(gpu: str, cards: Iterable[ModelCard]) -> None:
    """Of all sizes of batches and lengths of prompts; a model that this GPU cannot serve is left out, and said."""
    from dovetail.engine.devices.cuda.device import CudaDevice
    from dovetail.engine.devices.opening import open_device
    from dovetail.store import open_checkpoint

    device = open_device(gpu, threads=1)
    assert isinstance(device, CudaDevice)
    for card in cards:
        started = time.monotonic()
        checkpoint = open_checkpoint(card.path)
        try:
            device.prepare(checkpoint, device.compute_dtype("auto", card.dtype or "f32"))
        except DovetailError as error:
            typer.echo(f"{card.name}: no kernels for {device.label}: {error}", err=True)
            continue
        finally:
            checkpoint.close()
        typer.echo(f"{card.name}: kernels for {device.label} are ready ({time.monotonic() - started:.1f} s)", err=True)
