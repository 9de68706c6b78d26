"""How a model is hosted on this node: what its instances are built of, and what they take of the node's memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail import messages
from dovetail.engine.devices import Device
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.streaming import KEPT_TOKENS
from dovetail.types import ModelCard
from dovetail.worker.hosting import Profiles
from dovetail.worker.loading import DraftConfig, InstanceConfig

if TYPE_CHECKING:
    from dovetail.worker.process import WorkerConfig

log = logging.getLogger("dovetail.worker")


def instance_config(
    message: messages.Load, config: WorkerConfig, device: Device, capacity: int, profiles: Profiles
) -> InstanceConfig:
    """`capacity`: of the node's memory."""
    spec = message.card.spec
    stored = "f32" if message.card.spec.encoder is not None else message.card.dtype or "f32"
    dtype = device.compute_dtype(message.dtype, stored)
    draft = _draft_of(message, device)
    draft_dtype = device.compute_dtype("auto", draft.dtype or "f32") if draft is not None else ""
    max_batch = config.max_batch or device.max_batch
    block_bytes = spec.kv_bytes_per_token(dtype, message.kv) * config.block_size
    draft_block_bytes = draft.spec.kv_bytes_per_token(draft_dtype, message.kv) * config.block_size if draft else 0
    asked_bytes = message.kv_bytes or config.kv_bytes
    kept_bytes = spec.kv_bytes_per_token(dtype, message.kv) * min(spec.context_length, KEPT_TOKENS)
    kept_bytes = min(asked_bytes, kept_bytes) if asked_bytes else kept_bytes
    residency = profiles.residency(message.card, dtype, capacity, kept_bytes, message.resident_share)
    weight_bytes = profiles.weight_bytes(message.card, dtype, residency)
    unloaded = message.card.size_bytes - weight_bytes if residency is not None and device.kind is DeviceKind.CPU else 0
    weight_bytes += profiles.weight_bytes(draft, draft_dtype) if draft is not None else 0
    if unloaded > 0:
        log.info("%s", profiles.explain_streaming(message.card, dtype, residency))
    room = max(capacity - weight_bytes, 0)
    kv_bytes = min(asked_bytes or room, room)
    blocks = kv_bytes // (block_bytes + draft_block_bytes)
    blocks = min(blocks, -(-max_batch * spec.context_length // config.block_size) + 1)
    drafted = None
    if draft is not None:
        latency = profiles.latency(draft, draft_dtype, message.kv)
        drafted = DraftConfig(draft, draft_dtype, blocks * draft_block_bytes, latency)
    return InstanceConfig(
        card=message.card,
        dtype=dtype,
        kv_bytes=blocks * block_bytes,
        block_size=config.block_size,
        max_batch=max_batch,
        max_turn_tokens=config.max_turn_tokens or device.max_turn_tokens,
        max_tokens=max(blocks - 1, 0) * config.block_size,  # a sequence always has a block to spare
        kv=message.kv,
        verify=config.verify == "load",
        max_adapters=config.max_adapters,
        speculation=message.speculation,
        draft=drafted,
        residency=residency,
        unloaded_bytes=max(unloaded, 0),
        files=profiles.files,
    )


def _draft_of(message: messages.Load, device: Device) -> ModelCard | None:
    draft = message.speculation.draft
    if draft is None or message.speculation.mode == "off" or message.card.spec.encoder is not None:
        return None
    if device.kind is not DeviceKind.CPU:
        log.warning("%s: its draft model %s is of use on CPUs only, and left out", message.card.name, draft.name)
        return None
    return draft


def hosting_of(config: InstanceConfig, profiles: Profiles, keep_alive_s: float, load_s: float) -> Hosting:
    """What a draft model takes is taken with its model: weights, and keys and values of the same tokens."""
    hosting = profiles.hosting(
        config.card,
        config.dtype,
        config.kv,
        block_size=config.block_size,
        max_kv_tokens=config.max_tokens + config.block_size,
        keep_alive_s=keep_alive_s,
        load_s=load_s,
        residency=config.residency,
    )
    draft = config.draft
    if draft is None:
        return hosting
    return replace(
        hosting,
        weight_bytes=hosting.weight_bytes + profiles.weight_bytes(draft.card, draft.dtype),
        kv_bytes_per_token=hosting.kv_bytes_per_token + draft.card.spec.kv_bytes_per_token(draft.dtype, config.kv),
    )
