"""What `/api/models` says of each model: its state and tier on the nodes, its settings, what its requests got."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.config import ModelConfig
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.admin.api import ModelState, PullState, State, Tier
from dovetail.gateway.admin.pulls import Pull
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.types import ModelCard


def model_states(admin: Admin, models: Sequence[ServedModel]) -> list[ModelState]:
    """Of these, and of those that are on their way."""
    in_host = admin.in_host_memory([model.card for model in models])
    there = [_of_model(admin.service, one, in_host=one.card.name in in_host) for one in models]
    return [*there, *(model_state(admin, name) for name in admin.service.models.arriving())]


def model_state(admin: Admin, name: str) -> ModelState:
    service = admin.service
    name = service.models.resolve(name)
    entry = service.models.arriving().get(name)
    if entry is not None:
        pull = pull_state(entry.pull) if entry.pull is not None else None
        return _described(service, name, entry.config, None, pull, in_host=False)
    model = service.models.get(name)
    in_host = bool(admin.in_host_memory([model.card]))
    return _of_model(service, model, in_host=in_host)


def _of_model(service: Service, model: ServedModel, *, in_host: bool) -> ModelState:
    """An adapter is where its model is; what is counted of its requests is its own."""
    pull = service.models.pull_of(model.name)
    arriving = pull_state(pull) if pull is not None else None
    state = _described(service, model.name, model.config, model.card, arriving, in_host)
    if pull is not None and state.tier == "disk":
        state.tier = "remote"
    if model.adapter is None:
        return state
    base = _described(service, model.host, model.config, model.card, None, in_host)
    same = {"state": base.state, "tier": base.tier, "node": base.node}
    return state.model_copy(update=same | {"parent": model.host, "source": model.adapter.source, "size_bytes": 0})


def _described(
    service: Service,
    name: str,
    config: ModelConfig,
    card: ModelCard | None,
    pull: PullState | None,
    in_host: bool,
) -> ModelState:
    model_metrics = service.metrics.of_model(name)
    state = ModelState(
        name=name,
        aliases=list(config.aliases),
        source=config.source,
        state="host" if in_host else "absent",
        tier="host" if in_host else "disk" if card is not None else "remote",
        service_class=config.service_class,
        slo=config.slo,
        keep_alive=config.keep_alive,
        preload=config.preload,
        default_max_tokens=config.default_max_tokens or service.limits.default_max_tokens,
        size_bytes=card.size_bytes if card is not None else 0,
        requests=model_metrics.num_requests,
        attainment=model_metrics.attainment,
        ttft_p50_s=model_metrics.ttft_p50_s,
        tpot_p50_s=model_metrics.tpot_p50_s,
        pull=pull,
    )
    if service.cluster.is_in_use(name):
        _add_instances(state, service)
    return state


def _add_instances(state: ModelState, service: Service) -> None:
    hosted = service.cluster.models[state.name]
    state.node = ", ".join(service.cluster.nodes_of(state.name)) or None
    state.unfinished = hosted.num_requests
    state.state, state.tier = _life(hosted, state.tier)
    if hosted.loaded is not None:
        state.weight_bytes = hosted.loaded.weight_bytes
    for node in service.link.nodes.values():
        for stats in node.stats.instances if node.stats is not None else ():
            if stats.model == state.name:
                state.kv_bytes += stats.kv_committed_bytes


def _life(hosted: HostedModel, before: Tier) -> tuple[State, Tier]:
    if hosted.loaded is None:
        return "loading", before
    if hosted.num_requests:
        return "serving", "device"
    return ("idle" if hosted.has_served else "ready"), "device"


def pull_state(pull: Pull) -> PullState:
    return PullState(
        name=pull.name,
        source=pull.source,
        state=pull.state,
        stage=pull.stage,
        done_bytes=pull.done_bytes,
        total_bytes=pull.total_bytes,
        started=pull.started,
        error=pull.error,
    )
