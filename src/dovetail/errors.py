"""Every exception that Dovetail raises on purpose, and the one place that says which HTTP status each means.

DovetailError
├── RequestError                 the caller's request is at fault, or cannot be served now
│   ├── InvalidRequest           400  malformed or out of range; names the parameter
│   │   └── ContextTooLong       400  prompt and answer do not fit the model's context
│   ├── Unauthenticated          401  no key, or an unknown one
│   ├── ModelNotFound            404  no such model in the catalogue
│   ├── NodeNotFound             404  no such node
│   ├── ResponseNotFound         404  no such response is kept
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


class DovetailError(Exception):
    """Root of the tree. The message is one line that a user can act on."""


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
