"""Adapters where no weights are needed: whose prefixes are shared, where requests with one may go, what memory they
count for, and who may load one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver_builders import Listener

from dovetail import messages
from dovetail.cluster.open_requests import OpenRequest
from dovetail.config import parse_config
from dovetail.errors import ConfigError, UnsupportedModel
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.node.device import Device
from dovetail.node.protocol import Warm
from dovetail.node.residency import Residency
from dovetail.policy.placement import DeviceKind
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.sequence import sequences_of
from dovetail.sched.turn import Outcome, RowOutcome
from dovetail.sim.compositions import SLINFER
from dovetail.store.hf.adapter_parts import adapted_targets
from dovetail.types import AdapterRef, Request, SamplingParams

A, B = AdapterRef("a", "/a", "1"), AdapterRef("b", "/b", "1")
LLAMA = ModelSpec("llama", 100, 8, 2, 2, 1, 4, 16, 64)


def make_request(adapter: AdapterRef | None = None, salt: str = "", id: str = "r") -> Request:
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    return Request(id, "m", tuple(range(9)), sampling, adapter=adapter, cache_salt=salt)


def test_prefixes_are_shared_within_an_adapter_and_a_salt_only() -> None:
    scheduler = FcfsScheduler(SchedulerConfig(64), BlockPool(100, 4))

    def cached(request: Request) -> int:
        scheduler.add(request)
        turn = scheduler.next_turn()
        assert turn is not None
        (row,) = turn.rows
        assert row.adapter == (request.adapter.key if request.adapter is not None else "")
        (event,) = scheduler.complete(Outcome((RowOutcome(row.sequence, 7),))).events
        return event.cached_tokens

    again = msgspec.structs.replace(A, digest="2")  # read again under the same name: other weights
    requests = [make_request(), make_request(A), make_request(B), make_request(A, "s"), make_request(again)]
    requests.append(make_request(salt=A.key))  # a salt is nobody's adapter
    assert [cached(request) for request in requests] == [0] * 6
    assert [cached(request) for request in requests] == [8] * 6


def test_every_choice_and_what_is_left_of_a_request_keeps_its_adapter() -> None:
    request = msgspec.structs.replace(make_request(A), num_choices=2, generated=((5,), (6, 7)))
    first, second = sequences_of(request, 3)
    assert first.adapter == second.adapter == A.key
    assert first.root == second.root
    second_choice = OpenRequest(request, Listener(), 0).choices[1]
    second_choice.tokens.append(8)
    elsewhere = second_choice.body()  # what another node is given
    assert (elsewhere.adapter, elsewhere.generated) == (A, (None, (6, 7, 8)))
    ask = messages.Ask(1, Warm("m"), elsewhere)
    assert messages.decode_for_worker(messages.encode(ask)) == ask


def test_an_adapter_counts_in_the_ledger_until_it_goes() -> None:
    device = Device("node", DeviceKind.CPU, 100, {}, SLINFER)
    residency = Residency(device)
    assert residency.keep_adapter(1, 60)
    assert not residency.keep_adapter(2, 41)
    assert residency.keep_adapter(2, 40)
    assert residency.keep_adapter(3, 0)  # one that could not be read
    assert (device.ledger.planned, device.ledger.held) == (100, 100)
    for number in (1, 3, 2):
        residency.drop_adapter(number)
    assert (device.ledger.planned, device.ledger.held, device.ledger.waiting) == (0, 0, 0)


def test_layers_of_transformers_are_found_in_the_fused_matrices() -> None:
    names = [
        f"model.layers.1.{module}.lora_A.weight" for module in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    targets = adapted_targets(names, LLAMA, Path("f"))
    assert [(target.tensor, target.row, target.rows, target.columns) for target in targets.values()] == [
        ("layers.1.qkv.weight", 8, 4, 8),
        ("layers.1.gate_up.weight", 16, 16, 8),
        ("layers.1.down.weight", 0, 8, 16),
    ]


@pytest.mark.parametrize(
    "name", ["lm_head", "model.embed_tokens", "model.layers.2.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"]
)
def test_layers_that_the_model_lacks_are_named(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"f.safetensors: {name}.lora_B.weight is for no matrix"):
        adapted_targets([f"{name}.lora_B.weight"], LLAMA, Path("f.safetensors"))


def test_experts_have_no_adapters_and_the_attention_beside_them_has() -> None:
    spec = msgspec.structs.replace(LLAMA, family="qwen3_moe", moe=MoeSpec(2, 1, 4, True))
    assert adapted_targets(["model.layers.0.self_attn.q_proj.lora_A.weight"], spec, Path("f"))
    with pytest.raises(UnsupportedModel):
        adapted_targets(["model.layers.0.mlp.experts.0.up_proj.lora_A.weight"], spec, Path("f"))


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ({"m": {"source": "s", "adapters": {"m": "x"}}}, "'m' is given twice"),
        ({"m": {"source": "s", "adapters": {"a": "x"}}, "n": {"source": "s", "adapters": {"a": "y"}}}, "'a' is given"),
        ({"m": {"source": "s", "aliases": ["a"], "adapters": {"a": "x"}}}, "'a' is given twice"),
        ({"m": {"source": "s", "adapters": {"a/b": "x"}}}, "the adapter 'a/b' needs a name"),
    ],
)
def test_names_of_adapters_are_nobody_elses(models: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"models": models}, "dovetail.yaml")
