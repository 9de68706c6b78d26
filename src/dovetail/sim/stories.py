"""What becomes of every request of a simulation: one record of each choice, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.cluster.decisions import RequestRejected
from dovetail.node.events import FirstToken
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import RequestRecord, Work
from dovetail.sim.device import Device
from dovetail.sim.metrics import Fate, Record
from dovetail.sim.trace import Arrival


class Stories:
    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.records: list[Record] = []  # numbered as the controller numbers choices
        self.open = 0  # requests that have arrived and not ended
        for one in arrivals:
            for _ in one.produced:
                record = Record(len(self.records), one.model, one.arrival_s, one.input_tokens, one.output_tokens)
                record.is_best_effort, record.goes_first = one.is_best_effort, one.goes_first
                self.records.append(record)

    def entered(self, device: Device, instance: int, work: Work, now: float) -> None:
        """It can be computed. Before that it waited for its start, or had been interrupted since its last token."""
        record = self.records[work.id]
        if work.hold:
            return  # it goes on elsewhere meanwhile
        if work.last_token_s is None:
            record.started_s = now
        else:
            latency = device.node.instances[instance].hosting.latency
            record.paused_s += now - work.last_token_s + latency.prefill_s(work.pending_tokens)

    def resumed(self, work: Work, now: float) -> None:
        if work.last_token_s is not None:
            self.records[work.id].paused_s += now - work.last_token_s

    def first_token(self, device: Device, said: FirstToken, now: float) -> None:
        record = self.records[said.work.id]
        record.first_token_s = now
        record.grace_s = said.grace_s
        record.on_gpu = device.node.kind is DeviceKind.GPU

    def refuse(self, refused: RequestRejected, now: float) -> None:
        unserved = Fate.REJECTED if refused.reason in ("hardware", "too_large") else Fate.DROPPED
        self.end(refused.work, unserved if refused.work.produced == 0 else Fate.FAILED, refused.reason, now)

    def end(self, work: Work | RequestRecord, fate: Fate, reason: str, now: float) -> None:
        record = self.records[work.id]
        assert record.fate is None, f"request {work.id} ended twice: {record.fate}, then {fate}"
        record.fate = fate
        record.reason = reason
        record.end_s = now
        record.late_tokens = work.late_tokens
        record.moves = work.moves
        record.silence_s = work.silence_s
        self.open -= 1
