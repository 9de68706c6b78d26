"""The policies by name: faithful SLINFER, its ablations, the ServerlessLLM baselines (S12), and Dovetail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.knobs import Admission, Knobs, MakeWay, TurnOrder

SLINFER = Knobs(name="slinfer")
SLLM_C = Knobs(
    name="sllm+c",
    admission=Admission.CONCURRENCY,
    whole_node_kv=True,
    sharing=False,
    proactive=False,
    round_robin=True,
)
SLLM = replace(SLLM_C, name="sllm", use_cpu=False)
SLLM_CS = replace(SLLM_C, name="sllm+c+s", sharing=True, shares=2)
# ServerlessLLM's own evaluation: a model has a GPU to itself, and the schedulers differ in where one starts (L6, L7).
SERVERLESSLLM = replace(
    SLLM,
    name="serverlessllm",
    slo_scale=1.0,
    round_robin=False,
    free_resize=True,
    retry_on_change=True,
    start_soonest=True,
    make_way=MakeWay.MIGRATE,
)
SHEPHERD = replace(SERVERLESSLLM, name="shepherd*", make_way=MakeWay.PREEMPT)
LOCALITY = replace(SERVERLESSLLM, name="locality", make_way=MakeWay.NEVER, start_waits=True)
RANDOM = replace(SERVERLESSLLM, name="random", start_soonest=False, start_random=True, make_way=MakeWay.NEVER)
# Each improvement over SLINFER by name, so that its share can be shown.
IMPROVEMENTS: dict[str, dict[str, object]] = {
    "in-place resize": {"free_resize": True},
    "memory decides, not slots": {"slots_limited": False, "weights_share": 0.75},
    "run what frees most": {"turns": TurnOrder.DRAIN},
    "memory by the model's answers": {"lengths_by_model": True},
    "answers go on": {"max_silence_s": 2.0, "guard_decodes": True, "finish_begun": True},
    "ask again on change": {"retry_on_change": True},
    "more weights where requests are short": {"short_requests": 5},
}
DOVETAIL = replace(SLINFER, name="dovetail")
for _changes in IMPROVEMENTS.values():
    DOVETAIL = replace(DOVETAIL, **_changes)  # type: ignore[arg-type]

POLICIES = {
    knobs.name: knobs
    for knobs in (
        *(SLINFER, SLLM, SLLM_C, SLLM_CS, DOVETAIL),
        *(SERVERLESSLLM, SHEPHERD, LOCALITY, RANDOM),
    )
}

# Switches that --set understands beside any field of Knobs.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-cpu": {"use_cpu": False},
    "no-sharing": {"sharing": False},
    "no-consolidation": {"proactive": False, "reactive": False},
    "watermark-0": {"watermark": 0.0},
    "pd": {"disaggregate": True},
}


def policy(name: str, ablations: tuple[str, ...] = (), **changes: object) -> Knobs:
    if name not in POLICIES:
        raise ConfigError(f"--policy {name}: unknown, expected one of {', '.join(POLICIES)}")
    knobs = POLICIES[name]
    for ablation in ablations:
        if ablation not in ABLATIONS:
            raise ConfigError(f"--without {ablation}: unknown, expected one of {', '.join(ABLATIONS)}")
        knobs = replace(knobs, **ABLATIONS[ablation])
    return replace(knobs, **changes) if changes else knobs  # type: ignore[arg-type]
