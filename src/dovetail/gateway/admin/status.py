"""What `/api/ps` says: nodes, their models, and what each holds right now."""

from __future__ import annotations

import dovetail
from dovetail.gateway.admin.node_states import condition
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.http.replies import LoadedModel, ModelStatus, NodeStatus, ServerStatus
from dovetail.gateway.model_metrics import ModelMetrics
from dovetail.gateway.service import Service
from dovetail.gateway.workers.client import WorkerState
from dovetail.messages import InstanceStats, Loaded, Loading, Stats


def server_status(service: Service) -> ServerStatus:
    nodes = [_node_status(service, node) for node in service.link.nodes.values()]
    return ServerStatus(
        version=dovetail.__version__,
        draining=service.is_draining,
        unfinished=service.unfinished,
        refused=service.cluster.controller.num_refused,
        unanswered=service.cluster.controller.seeker.decisions.num_silent,
        nodes=nodes,
        models=[
            _loaded(model, on_gpu=service.link.nodes[node.name].config.device != "cpu")
            for node in nodes
            for model in node.models
            if model.state == "loaded"
        ],
    )


def _loaded(model: ModelStatus, *, on_gpu: bool) -> LoadedModel:
    size = (model.weight_bytes or 0) + model.kv_committed_bytes
    return LoadedModel(
        name=model.name,
        model=model.name,
        size=size,
        size_vram=size if on_gpu else 0,
        details={"quantization_level": model.dtype or ""},
    )


def _node_status(service: Service, node: WorkerState) -> NodeStatus:
    link, model_metrics, hosted = service.link, service.metrics.of_model, service.cluster.models
    supervisor = link.supervisors[node.name]
    stats = {item.model: item for item in node.stats.instances} if node.stats else {}
    status = NodeStatus(
        name=node.name,
        device=node.hello.device if node.hello else node.config.device,
        state=condition(service.cluster, node),
        problem=supervisor.unusable,
        pid=supervisor.pid,
        starts=supervisor.starts,
        import_s=node.hello.import_s if node.hello else None,
        resident_bytes=None,
        models=[
            _model_status(name, loaded, hosted.get(name), stats.get(name), model_metrics(name), node.loading.get(name))
            for name, loaded in node.instances.items()
        ],
    )
    if node.stats is not None:
        _take_over(node.stats, status)
    return status


def _model_status(
    name: str,
    loaded: Loaded | None,
    hosted: HostedModel | None,
    stats: InstanceStats | None,
    model_metrics: ModelMetrics,
    loading: Loading | None,
) -> ModelStatus:
    status = ModelStatus(
        name=name,
        state="loaded" if loaded else "loading",
        unfinished=hosted.num_requests if hosted is not None else 0,
        attainment=model_metrics.attainment,
        ttft_p50_s=model_metrics.ttft_p50_s,
        tpot_p50_s=model_metrics.tpot_p50_s,
    )
    if loading is not None and loaded is None:
        status.arrived_bytes, status.total_bytes = loading.done_bytes, loading.total_bytes
    if loaded is not None:
        status.dtype, status.weight_bytes, status.mapped = loaded.dtype, loaded.weight_bytes, loaded.mapped
        status.kv_capacity_tokens = loaded.kv_capacity_tokens
        status.open_s, status.build_s = loaded.times.open_s, loaded.times.build_s
    if stats is not None:
        _take_over(stats, status)
    return status


def _take_over(stats: InstanceStats | Stats, status: ModelStatus | NodeStatus) -> None:
    """The numbers that both have under one name."""
    for field in stats.__struct_fields__:
        if field in type(status).model_fields:
            setattr(status, field, getattr(stats, field))
