"""One answer in the making: known tokens, and a counter of computed ones that catches up with them.

There is no prefill or decode state. A new sequence, one that was preempted and one that arrived by migration differ
only in how far `num_computed` is behind `len(tokens)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dovetail.sched.blocks import ROOT_KEY, PrefixKey
from dovetail.types import ISOLATED_TOKENS, Request, SamplingParams, ServiceClass

_MASK = (1 << 64) - 1


def mix64(*values: int) -> int:
    """A 64-bit number that depends on every bit of its arguments (the finaliser of splitmix64, chained)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(slots=True, eq=False)
class Sequence:
    id: int
    request_id: str
    choice: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    leader: Sequence | None = None  # the first choice of the same request: its prompt is computed once for all
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_sealed: int = 0  # leading blocks offered for reuse
    adapter: str = ""  # key of its adapter; empty = the model as it is
    root: PrefixKey = ROOT_KEY  # adapter and salt of its request: whose prefixes it may use
    last_key: PrefixKey = ROOT_KEY  # of the last sealed block, set at admission
    longest: int = 0  # tokens that its answer may have, set at admission
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    was_admitted: bool = False
    alone_below: int = 0  # with fewer tokens than this it shares no iteration
    is_held: bool = False  # it runs elsewhere still: everything but its last token is computed, and nothing is sampled
    is_traced: bool = False  # its turns are told one by one
    is_best_effort: bool = False
    speculates: bool = True  # it may have drafts
    prediction: tuple[int, ...] = ()  # what its answer may be like
    aborted: bool = False  # gone while its turn was running; its blocks are freed when the turn is complete

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_alone(self) -> bool:
        return len(self.tokens) < self.alone_below

    @property
    def is_ready(self) -> bool:
        """A follower waits until its leader's prompt is in the cache (or the leader is gone)."""
        return self.leader is None or self.leader.num_computed >= self.num_prompt or not self.leader.blocks


def sequences_of(request: Request, first_id: int) -> list[Sequence]:
    """A sequence per open choice. Choice 0 uses the seed as it is, the others derive theirs from it."""
    made: list[Sequence] = []
    for choice in request.open_choices:
        sampling = request.sampling
        if made:  # the prompt is the same for all: one choice tells of it
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        seed = sampling.seed if choice == 0 else mix64(sampling.seed, choice)
        tokens = [*request.prompt, *(request.generated_by(choice) or ())]
        made.append(
            Sequence(
                id=first_id + len(made),
                request_id=request.id,
                choice=choice,
                tokens=tokens,
                num_prompt=len(request.prompt),
                sampling=msgspec.structs.replace(sampling, seed=seed),
                leader=made[0] if made else None,
                alone_below=len(tokens) + ISOLATED_TOKENS if request.isolated else 0,
                adapter=request.adapter.key if request.adapter is not None else "",
                root=_root_of(request),
                is_traced=request.traced,
                is_best_effort=request.service_class is ServiceClass.BEST_EFFORT,
                speculates=request.speculates,
                prediction=request.prediction,
            )
        )
    return made


def _root_of(request: Request) -> PrefixKey:
    """Keys and values of an adapter's prompt are no other's, whatever the text and the salt."""
    if request.adapter is None:
        return request.cache_salt or ROOT_KEY
    return (request.adapter.key, request.cache_salt)
