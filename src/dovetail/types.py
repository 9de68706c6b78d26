"""Records that cross package or process boundaries: requests, their sampling, their tokens, a served model's card.

Plain data, no behaviour beyond what derives from the fields. Turns and outcomes of one iteration live in `sched.turn`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from dovetail.modelspec import ModelSpec

# Of each choice: one comes of computing everything that is known again, the next of a decoding step as it was then.
ISOLATED_TOKENS = 2


class FinishReason(StrEnum):
    """Why a choice ended. The first two are OpenAI's; the others never reach a client as a finished text."""

    STOP = "stop"  # end-of-sequence, a stop token, a stop string, or a complete grammar
    LENGTH = "length"  # max_tokens or the context is used up
    ABORTED = "aborted"  # the client went away
    ERROR = "error"  # the engine failed; TokenEvent.error says how


class ServiceClass(StrEnum):
    """O1: latency-sensitive work has SLOs, that of priority goes first, best-effort work has throughput."""

    LATENCY_SENSITIVE = "ls"
    PRIORITY = "priority"
    BEST_EFFORT = "be"


class Slo(msgspec.Struct, frozen=True):
    """S1: targets of one request, in seconds. None leaves it to the model's config or the default."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the text, compiled by llguidance in the worker."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""  # the schema as JSON text, the expression, or the grammar; empty for json_object


class ThinkingLimit(msgspec.Struct, frozen=True):
    """A model that thinks aloud at the start of its output is made to end its thoughts."""

    max_tokens: int  # of thoughts
    closing: tuple[int, ...]  # tokens that end them; once the output has them, there is no limit any more
    opening: tuple[
        int, ...
    ] = ()  # an output that does not begin with these has no thoughts; empty = the prompt has them


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens of one request are chosen. `seed` is always set: the gateway draws one where the client gave none,
    so that a resumed or migrated request repeats itself exactly."""

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None = off, k = the chosen token and the k likeliest
    stop_token_ids: tuple[int, ...] = ()  # end the choice; end-of-sequence tokens of the model included by the gateway
    min_tokens: int = 0  # stop_token_ids are barred before this many
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # no other is chosen; empty = any
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the output never has
    thinking: ThinkingLimit | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: these and the chosen one are told of, not the likeliest
    # The answer is no text but the prompt's state behind the final norm: of its last token, or the mean of all, or (of
    # an encoder) of its first; or the score of an encoder that compares the two texts of a prompt.
    pooling: Literal["last", "mean", "cls", "score"] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_whole_prompt(self) -> bool:
        """What is in the prefix cache must be computed again, because more than its keys and values is wanted."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls", "score")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Speculation(msgspec.Struct, frozen=True):
    """Speculative decoding of one model: tokens that are proposed and verified several at a time."""

    mode: Literal["auto", "always", "off"] = "auto"  # auto = where it is expected to be faster
    tokens: int = 8  # proposed for a sequence in an iteration, at most
    draft: ModelCard | None = None  # a smaller model of the same vocabulary, which proposes


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter of a model, as requests name it: whoever computes them reads it from where it lies."""

    name: str  # what clients call it
    path: str  # folder, in PEFT's form or the store's
    digest: str  # of its content: read again under the same name it is another

    @property
    def key(self) -> str:
        return f"{self.name}@{self.digest}"


class Request(msgspec.Struct, frozen=True):
    """One prompt, `num_choices` answers, as the worker sees it: tokens only, no text."""

    id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    slo: Slo = Slo()
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    # What each choice has said already, where the request goes on after its worker died; None = that choice has ended.
    # These tokens are output: limits, penalties, grammars and draws count them as if they had been made here.
    generated: tuple[tuple[int, ...] | None, ...] = ()
    # It took part in an iteration that ended a worker: until it has made ISOLATED_TOKENS its iterations are its own, so
    # that one that is fatal again ends nobody else's work and says whose fault it is.
    isolated: bool = False
    adapter: AdapterRef | None = None  # on top of the model; None = the model as it is
    # Prefixes are shared among requests of one adapter and one salt only: by the salt the gateway keeps tenants apart.
    # Empty = no salt.
    cache_salt: str = ""
    traced: bool = False  # its turns are reported with its id
    # Several tokens of it may be computed at once, where that is expected to be faster. What it says is the same.
    speculates: bool = True
    prediction: tuple[int, ...] = ()  # what its caller expects the answer to be like: a source of drafts

    @property
    def open_choices(self) -> tuple[int, ...]:
        """Choices that are still to be answered; only these have events."""
        return tuple(choice for choice in range(self.num_choices) if self.generated_by(choice) is not None)

    def generated_by(self, choice: int) -> tuple[int, ...] | None:
        return self.generated[choice] if self.generated else ()


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities under the model itself, before penalties and temperature."""

    chosen: float
    top: tuple[TokenLogprob, ...] = ()  # likeliest first
    rank: int = 0  # of the chosen, 1 = the likeliest; of prompt tokens only


class TokenEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):  # hundreds in an iteration
    """What one iteration did for one choice of one request: a token, an end, or both."""

    request_id: str
    choice: int
    # None: the choice ended without a further token. A token of sampling.stop_token_ids ends the choice and is no part
    # of its text; any other token is, also when the choice ends with it.
    token: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; on the first token only
    proposed: int = 0  # tokens of a draft that were verified with this one; on the first of its iteration only
    accepted: int = 0  # of these: what was chosen; the events that follow in the same iteration
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = (
        None  # of the prompt's tokens after the first; on the first token
    )
    embedding: bytes | None = None  # float32, the whole answer of a request with `pooling`; it has no token
    grace_s: float = 0.0  # cold start that the first token had to wait for (S1); on the first token only
    error: str | None = None  # with FinishReason.ERROR: one line for the client
    # With FinishReason.ERROR: the caller's fault (a schema that does not compile), so 422 rather than 500.
    unprocessable: bool = False
    # With FinishReason.ERROR: refused for want of capacity, so 503; seconds after which it is worth asking again.
    retry_after_s: float | None = None


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What the model's authors recommend; a request's own values win."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """A model in the catalogue: all that the gateway needs to talk to it, and where its weights lie."""

    name: str
    path: str  # folder of the checkpoint
    spec: ModelSpec
    tokenizer_file: str  # absolute path of tokenizer.json
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False  # put bos before a plain completion prompt (tokenizer.json may already do it)
    defaults: GenerationDefaults = GenerationDefaults()
    source: str = ""  # what `pull` was given
    dtype: str = ""  # storage type of the matrices
    layout: str = "plain"  # how the matrices lie in memory, see `dovetail.layouts`
    partitions: int = 1  # files that hold the weights, one per device of a tensor-parallel group
    size_bytes: int = 0  # of the weights on disk
    created: int = 0  # Unix seconds of the pull
    tokenizer_digest: str = ""  # SHA-256 of its file; empty = not known
    digest: str = ""  # checksum of its manifest, which names all its bytes; empty = not in the store's form
