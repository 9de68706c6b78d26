"""Compositions by name: faithful SLINFER and its ablations, the baselines of two papers (S12), and Dovetail."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.compositions import Composition
from dovetail.policy.knobs import Admission, MakeWay
from dovetail.policy.parameters import TurnOrder

SLINFER = Composition("slinfer")
SLLM_C = Composition("sllm+c").having(
    admission=Admission.CONCURRENCY,
    whole_node_kv=True,
    sharing=False,
    proactive=False,
    round_robin=True,
)
SLLM = SLLM_C.named("sllm").having(use_cpu=False)
SLLM_CS = SLLM_C.named("sllm+c+s").having(sharing=True, shares=2)
# ServerlessLLM's own evaluation: a model has a GPU to itself, and the schedulers differ in where one starts (L6, L7).
SERVERLESSLLM = SLLM.named("serverlessllm").having(
    slo_scale=1.0,
    round_robin=False,
    free_resize=True,
    retry_on_change=True,
    start_soonest=True,
    make_way=MakeWay.MIGRATE,
)
SHEPHERD = SERVERLESSLLM.named("shepherd*").having(make_way=MakeWay.PREEMPT)
LOCALITY = SERVERLESSLLM.named("locality").having(make_way=MakeWay.NEVER, start_waits=True)
RANDOM = SERVERLESSLLM.named("random").having(start_soonest=False, start_random=True, make_way=MakeWay.NEVER)
# Each improvement over SLINFER by name, so that its share can be shown.
IMPROVEMENTS: dict[str, dict[str, object]] = {
    "in-place resize": {"free_resize": True},
    "memory decides, not slots": {"slots_limited": False, "weights_share": 0.75},
    "run what frees most": {"turn_order": TurnOrder.DRAIN},
    "memory by the model's answers": {"lengths_by_model": True},
    "answers go on": {"max_silence_s": 2.0, "guard_decodes": True, "finish_begun": True},
    "ask again on change": {"retry_on_change": True},
    "more weights where requests are short": {"short_requests": 5},
}
DOVETAIL = SLINFER.named("dovetail")
for _changes in IMPROVEMENTS.values():
    DOVETAIL = DOVETAIL.having(**_changes)

POLICIES = {
    one.name: one
    for one in (
        *(SLINFER, SLLM, SLLM_C, SLLM_CS, DOVETAIL),
        *(SERVERLESSLLM, SHEPHERD, LOCALITY, RANDOM),
    )
}

# Parts that --without switches off.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-cpu": {"use_cpu": False},
    "no-sharing": {"sharing": False},
    "no-consolidation": {"proactive": False, "reactive": False},
    "watermark-0": {"watermark": 0.0},
    "pd": {"disaggregate": True},
}


def policy(name: str, ablations: tuple[str, ...] = (), **parameters: object) -> Composition:
    if name not in POLICIES:
        raise ConfigError(f"--policy {name}: unknown, expected one of {', '.join(POLICIES)}")
    composition = POLICIES[name]
    for ablation in ablations:
        if ablation not in ABLATIONS:
            raise ConfigError(f"--without {ablation}: unknown, expected one of {', '.join(ABLATIONS)}")
        composition = composition.having(**ABLATIONS[ablation])
    return composition.having(**parameters)
