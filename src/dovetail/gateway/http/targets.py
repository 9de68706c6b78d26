"""The targets of one HTTP request: its own headers, then its model's."""

from __future__ import annotations

import math

from fastapi import Request

from dovetail.errors import InvalidRequest
from dovetail.gateway.models import ServedModel
from dovetail.types import Slo

_MAX_SLO_MS = 1e9


def targets_of(request: Request, model: ServedModel) -> Slo:
    configured = model.config.slo
    ttft_s = _header_seconds(request, "x-slo-ttft-ms")
    tpot_s = _header_seconds(request, "x-slo-tpot-ms")
    return Slo(configured.ttft if ttft_s is None else ttft_s, configured.tpot if tpot_s is None else tpot_s)


def _header_seconds(request: Request, name: str) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= _MAX_SLO_MS:  # false for nan too
        raise InvalidRequest(f"{name} must be a positive number of milliseconds", param=name)
    return milliseconds / 1000
