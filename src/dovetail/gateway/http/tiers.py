"""Classes of requests, as clients name them (`service_tier`, `priority`) and as they are served."""

from __future__ import annotations

from typing import Literal

from dovetail.types import ServiceClass

# How a request is served, whatever it asked for.
ServiceTier = Literal["default", "flex", "priority"]

_TIERS: dict[ServiceClass, ServiceTier] = {
    ServiceClass.LATENCY_SENSITIVE: "default",
    ServiceClass.BEST_EFFORT: "flex",
    ServiceClass.PRIORITY: "priority",
}


def class_asked(tier: str | None, priority: int | None, of_model: ServiceClass) -> ServiceClass:
    """Best effort if the request or its model is; first only among those that are waited for."""
    if tier == "flex" or priority or of_model is ServiceClass.BEST_EFFORT:
        return ServiceClass.BEST_EFFORT
    return ServiceClass.PRIORITY if tier == "priority" else of_model


def tier_of(asked: str | None, served: ServiceClass) -> ServiceTier | None:
    """For a request that asked for a tier, as OpenAI's answers say it: what it has got."""
    return None if asked is None else _TIERS[served]
