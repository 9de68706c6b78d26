"""Every exception that Dovetail raises on purpose, and the one place that says which HTTP status each means.

DovetailError
├── RequestError                 the caller's request is at fault, or cannot be served now
│   ├── InvalidRequest           400  malformed or out of range; names the parameter
│   │   └── ContextTooLong       400  prompt and answer do not fit the model's context
│   ├── Unauthenticated          401  no key, or an unknown one
│   ├── ModelNotFound            404  no such model in the catalogue
│   ├── NodeNotFound             404  no such node
│   ├── ResponseNotFound         404  no such response is kept
│   ├── RecordNotFound           404  no such file or batch, or another key's
│   ├── PermissionDenied         403  this key, or this client without one, may not do that
│   ├── RequestTimeout           408  the client did not send the rest of its request
│   ├── Conflict                 409  the name is taken, or the model is in use
│   ├── PayloadTooLarge          413  request body over the limit
│   ├── UnsupportedMediaType     415  a body that is not announced as JSON
│   ├── MisdirectedRequest       421  addressed to a name that is not this server's
│   ├── Unprocessable            422  well formed, but cannot be honoured (a schema that does not compile)
│   ├── QuotaExceeded            429  this key's quota is spent; says when to come back
│   ├── EngineFailed             500  the worker failed while serving this request
│   │   └── WorkerLost           500  the worker died; what is left of the request can be served by another
│   └── Overloaded               503  no capacity now, or draining; says when to come back
├── ConfigError                  a configuration value is wrong; names the key
│   └── Unusable                 this machine cannot do what a setting asks of a node: no retry mends it
├── CheckpointError              model files cannot be used; names the file
│   ├── UnsupportedModel         the architecture or a feature of it is not known here
│   └── DamagedCheckpoint        truncated, missing or inconsistent files
├── SourceError                  `pull` cannot fetch what was asked for
├── OutOfMemory                  an arena or budget cannot hold what was asked for
└── DeviceLost                   a GPU does not answer any longer; its worker ends and is started again
"""

from __future__ import annotations

from typing import NamedTuple


class DovetailError(Exception):
    """Root of the tree. The message is one line that a user can act on."""


class OverloadCode(NamedTuple):
    """Why a request is not served now, and what its caller or the operator can do. The reference has the same table."""

    cause: str
    remedy: str


# By the code of a 503 or a 429: every refusal that is worth another try has one of these.
OVERLOAD_CODES = {
    "overloaded": OverloadCode(
        "No node can keep the targets of the request, or has memory for it; the message names each node's reason.",
        "Try again after `Retry-After`, ask for later targets or `service_tier: flex`, or add a node.",
    ),
    "queue_full": OverloadCode(
        "`max_queue` answers are unfinished, or the key has its share, or conversations wait for their template.",
        "Try again after `Retry-After`, send fewer at once, or raise `server.max_queue`.",
    ),
    "background_full": OverloadCode(
        "Background responses hold the memory that stored responses may take.",
        "Try again when some have ended, or send the request without `background`.",
    ),
    "bodies_full": OverloadCode(
        "The bodies that are being received take `max_body_memory`.", "Try again, or raise `server.max_body_memory`."
    ),
    "texts_full": OverloadCode("Too many long texts wait to be tokenised.", "Try again, or send shorter texts."),
    "grammars_waiting": OverloadCode(
        "Too many new grammars wait to be checked.", "Try again; a known grammar does not wait."
    ),
    "grammar_check_timeout": OverloadCode(
        "The machine was too busy to check the grammar in time; nothing is known of the grammar.", "Try again."
    ),
    "template_timeout": OverloadCode("The machine was too busy to render the conversation in time.", "Try again."),
    "mcp_unavailable": OverloadCode(
        "An MCP server whose tools the request wants did not list them.",
        "See the message; mend the server or `mcp.servers` in `dovetail.yaml`, or leave its tools out.",
    ),
    "model_pulling": OverloadCode(
        "The model is being downloaded or converted; the message says how far.",
        "Try again; `dovetail ps` shows progress.",
    ),
    "model_changing": OverloadCode(
        "The gateway that leads has another version of the model.", "Try again when both have read the configuration."
    ),
    "no_node": OverloadCode(
        "No worker has joined yet, or every node is drained or has failed.",
        "`dovetail nodes` and `dovetail ps` say why; undrain or mend a node.",
    ),
    "no_worker": OverloadCode(
        "The last worker ended and none has come up for 30 s.", "See `dovetail logs` for why it ended."
    ),
    "worker_restarting": OverloadCode(
        "The worker of the request ended and was not back within `resume_timeout`, or it is given a pause.",
        "Try again after `Retry-After`; see `dovetail logs` if it happens again.",
    ),
    "storage_full": OverloadCode(
        "Files and batches cannot be written: the disk is full, or `batch.max_storage` is used.",
        "Delete files (`DELETE /v1/files/ID`), free the disk, or raise `batch.max_storage`; batches go on then.",
    ),
    "batches_unavailable": OverloadCode(
        "This gateway keeps no batches: another server has their folder, or it is a front.",
        "Ask the gateway that the message names, or set `batch.folder`.",
    ),
    "uploads_full": OverloadCode("Too many files are being uploaded.", "Try again when one has ended."),
    "too_many_batches": OverloadCode(
        "The key has `batch.max_batches` batches that have not ended.", "Wait for one to end, or cancel it."
    ),
    "not_leading": OverloadCode("Another gateway leads, or etcd cannot be written.", "Use the gateway that leads."),
    "state": OverloadCode(
        "The change is in force and could not be written to the durable state yet.", "Look at the disk or at etcd."
    ),
    "draining": OverloadCode(
        "The server is shutting down; running answers finish.", "Try another gateway, or again later."
    ),
    "rate_limit_exceeded": OverloadCode(
        "The key has used its requests or tokens of this minute.", "Wait for `Retry-After`, or raise the key's quota."
    ),
    "concurrency_limit_exceeded": OverloadCode(
        "The key has `max_unfinished` unfinished answers.", "Wait for one to end, or raise the key's quota."
    ),
    "too_many_guesses": OverloadCode("Too many unknown keys came from this address.", "Wait, then send a valid key."),
}


class RequestError(DovetailError):
    """Becomes an HTTP response in OpenAI's shape; subclasses fix status and type."""

    status = 500
    kind = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Unauthenticated(RequestError):
    status = 401
    kind = "authentication_error"


class ModelNotFound(RequestError):
    status = 404
    kind = "not_found_error"


class NodeNotFound(RequestError):
    status = 404
    kind = "not_found_error"


class ResponseNotFound(RequestError):
    status = 404
    kind = "not_found_error"


class RecordNotFound(RequestError):
    status = 404
    kind = "not_found_error"


class PermissionDenied(RequestError):
    status = 403
    kind = "permission_error"


class RequestTimeout(RequestError):
    status = 408
    kind = "invalid_request_error"


class Conflict(RequestError):
    status = 409
    kind = "invalid_request_error"


class UnsupportedMediaType(RequestError):
    status = 415
    kind = "invalid_request_error"


class PayloadTooLarge(RequestError):
    status = 413
    kind = "invalid_request_error"


class MisdirectedRequest(RequestError):
    status = 421
    kind = "invalid_request_error"


class Unprocessable(RequestError):
    status = 422
    kind = "invalid_request_error"


class QuotaExceeded(RequestError):
    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        assert code in OVERLOAD_CODES, f"the code {code} has no cause and no remedy"
        super().__init__(message, code=code, retry_after_s=retry_after_s)


class EngineFailed(RequestError):
    status = 500
    kind = "server_error"


class WorkerLost(EngineFailed):
    def __init__(self, message: str, suspects: frozenset[str] = frozenset(), *, is_cut: bool = False) -> None:
        super().__init__(message)
        self.suspects = suspects  # requests of the iteration that it died in; empty = it died between two
        self.is_cut = is_cut  # it lives, but cannot be reached: no request is to blame


class Overloaded(RequestError):
    status = 503
    kind = "overloaded_error"

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        assert code in OVERLOAD_CODES, f"the code {code} has no cause and no remedy"
        super().__init__(message, code=code, retry_after_s=retry_after_s)


class ConfigError(DovetailError):
    pass


class Unusable(ConfigError):
    pass


class CheckpointError(DovetailError):
    pass


class UnsupportedModel(CheckpointError):
    pass


class DamagedCheckpoint(CheckpointError):
    pass


class SourceError(DovetailError):
    pass


class OutOfMemory(DovetailError):
    pass


class DeviceLost(DovetailError):
    pass
