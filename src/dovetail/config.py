"""`dovetail.yaml` as frozen records: unknown keys are errors, every error names its key, `${env.X}` is filled in.

Each component takes the few scalars it needs from here; nothing below the CLI reads the file.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dovetail.daytime import parse_hours
from dovetail.errors import ConfigError
from dovetail.machine import default_root
from dovetail.modelspec import KvKind
from dovetail.types import ServiceClass

FROM_FILE = {"origin": "file"}  # the context of a validation in which sizes and durations need units
_SIZE = TypeAdapter(ByteSize)
_DURATION = re.compile(r"^\s*(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$")
_SECONDS = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DEFAULT_MAX_TOKENS = 2048  # of a chat that names no limit: a model that does not stop would fill its whole context
_LOGIN = re.compile(r"^(etcds?://)[^@]*:.*@")  # of a state that several gateways share
_ENV = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")


def parse_size(value: object) -> int:
    """Bytes from 2147483648, "2GiB", "2GB" or "512M"; units as pydantic's ByteSize has them. A text needs one, but for
    0."""
    if isinstance(value, str) and value.strip().isdecimal() and int(value):
        raise ValueError(_needs_unit("size", value.strip(), ("MiB", "GiB", "B")))
    try:
        return int(_SIZE.validate_python(value, strict=not isinstance(value, str)))
    except ValidationError:
        raise ValueError(f"expected a size such as 512MiB or 2GB, got {value!r}") from None


def parse_duration(value: object) -> float:
    """Seconds from 30, "10m", "500ms" or "-1". A text needs a unit, but for 0 and less (at once, never)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected a duration such as 10m, 30s or 0, got {value!r}")
    if match.group(2) is None and float(match.group(1)) > 0:
        raise ValueError(_needs_unit("duration", match.group(1), ("ms", "s", "m")))
    return float(match.group(1)) * _SECONDS[match.group(2)]


def _needs_unit(what: str, number: str, units: tuple[str, str, str]) -> str:
    first, second, third = (f"{number}{unit}" for unit in units)
    return f"expected a {what} with its unit, got {number}: write {first}, {second} or {third}"


def _parse_with_unit(parse: Callable[[object], Any], value: object, info: ValidationInfo) -> Any:
    """What stands in a file needs a unit; records that are made by code have plain numbers of seconds and bytes."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return parse(f"{value:.15g}" if is_number and info.context is FROM_FILE else value)


def is_secret_state(state: str) -> bool:
    return _LOGIN.match(state) is not None


def _without_password(state: str | None) -> str | None:
    return None if state is None else _LOGIN.sub(r"\1***@", state)


def _parse_size(value: object, info: ValidationInfo) -> Any:
    return _parse_with_unit(parse_size, value, info)


def _parse_duration(value: object, info: ValidationInfo) -> Any:
    return _parse_with_unit(parse_duration, value, info)


Size = Annotated[int, BeforeValidator(_parse_size, json_schema_input_type=int | str), Field(ge=0)]
Duration = Annotated[float, BeforeValidator(_parse_duration, json_schema_input_type=float | str)]


def _parse_switch(value: object) -> object:
    """YAML reads a bare on and off as booleans."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _parse_off(value: object) -> object:
    """YAML reads a bare off as false."""
    return "off" if value is False else value


Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(_parse_switch, json_schema_input_type=Literal["auto", "on", "off"] | bool),
]

REMOVED = {"policy": "a server has one policy and this option is gone (others: dovetail sim run --policy)"}


_ADAPTER_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} {twice[0]!r} is given twice")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SloConfig(_Section):
    """Targets in seconds; what is left out follows the default rule min(max(0.5, input/512), 8) and 0.25 (S1)."""

    ttft: Duration | None = None  # time to the first token
    tpot: Duration | None = None  # time for each further token


class SpeculativeConfig(_Section):
    """Speculative decoding: tokens proposed from what the text had before, or by a smaller model, several verified in
    one iteration."""

    mode: Literal["auto", "always", "off"] = "auto"  # auto = where it is expected to be faster
    tokens: int = Field(default=8, ge=1, le=64)  # proposed at a time for an answer, at most
    draft: str | None = Field(default=None, min_length=1)  # name of a model of the same vocabulary, which proposes too


def _parse_speculative(value: object) -> object:
    """A mode alone is short for it; YAML reads a bare off as false."""
    value = _parse_off(value)
    return {"mode": value} if isinstance(value, str) else value


Speculative = Annotated[
    SpeculativeConfig,
    BeforeValidator(
        _parse_speculative, json_schema_input_type=Literal["auto", "always", "off", False] | SpeculativeConfig
    ),
]


ModelClass = Literal[ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT]  # of all that a model or a key has


class ModelConfig(_Section):
    source: str  # a name in the store, or a source as for `pull`
    slo: SloConfig = SloConfig()  # targets of requests that bring none
    # ls = latency-sensitive, be = best effort
    service_class: ModelClass = Field(default=ServiceClass.LATENCY_SENSITIVE, alias="class")
    keep_alive: Duration = 600.0  # time without requests after which it leaves; 0 = at once, negative = never
    preload: bool = False  # load it when the server starts, not at its first request
    dtype: str = "auto"  # of the weights that are kept: auto (what this machine multiplies fastest), bf16, f16, f32
    kv: KvKind = "auto"  # keys and values: in the type that is computed in, or int8 (CPUs only)
    # Share of its layers that a GPU keeps. The others are streamed from host memory with every iteration, which takes
    # at least as long as the link does. auto = all that fit into the node's memory, as always on CPUs, which read the
    # others from the disk.
    resident_share: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    layout: Literal["auto", "plain", "int8", "int4", "gguf"] = "auto"  # when pulled; auto = GGUF's blocks as they are
    aliases: tuple[str, ...] = ()  # further names, under which clients may ask for it
    adapters: dict[str, str] = {}  # LoRA adapters, each a model of this name: a PEFT folder, or one that was pulled
    # Of its embeddings: the last token's state, the mean of all, or (encoders) the first's; None = the model's own,
    # which for decoders is the last.
    pooling: Literal["last", "mean", "cls"] | None = None
    default_max_tokens: int | None = Field(default=None, ge=1)  # None = the server's
    # Whether an answer that is asked to be longer than the context is clamped to it, or refused; None = a chat is
    # clamped, a completion refused. `clamp_max_tokens` of a request comes first.
    clamp_max_tokens: bool | None = None
    speculative: Speculative = SpeculativeConfig(mode="off")  # drafts of several tokens, verified together


class TlsConfig(_Section):
    """Files in PEM, read again with the configuration, so that a renewed certificate needs no restart."""

    cert: Path  # the server's certificate, then those of its issuers
    key: Path  # of the server's certificate, without a passphrase


class ServerConfig(_Section):
    host: str = "127.0.0.1"  # address to listen on
    port: int = Field(default=8000, ge=0, le=65535)  # 0 = any free one
    tls: TlsConfig | None = None  # serve HTTPS; None = HTTP
    max_queue: int = Field(default=512, ge=1)  # unfinished requests in the whole server; more are answered 503
    max_body_bytes: Size = 2 * 1024 * 1024  # of a request's body; a larger one is answered 413
    max_body_memory: Size = 64 * 1024 * 1024  # of all bodies that are being received and read; more are answered 503
    max_tokenize_bytes: Size = 256 * 1024  # of a text for /tokenize, which takes 200 times that for a moment
    # Beyond so many, the connection that has waited longest for its client is closed.
    max_connections: int = Field(default=2048, ge=1)
    header_timeout: Duration = Field(default=10.0, gt=0)  # from the connection, or the first byte, to the last header
    body_timeout: Duration = Field(default=30.0, gt=0)  # from the last header to the end of the body
    # Without keys, requests must be addressed to this machine: by a loopback name, an address, or one of these names.
    # Given together with keys they are checked too; "*" = any.
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # pages that may call from a browser, as https://chat.example.org
    open_to_network: bool = False  # listen beyond this machine although there are no keys
    access_log: Path | None = None  # a JSON line per request, without prompts; "-" = standard error
    audit_log: Path | None = None  # a JSON line per act of administration; they are in the log in any case
    vllm_metrics: bool = False  # /metrics has what vLLM has too under its names (vllm:…) as well, for its dashboards
    traces: str | None = None  # OpenTelemetry: a collector's OTLP address, as http://127.0.0.1:4318/v1/traces
    # Of a chat without max_tokens, within the context; a model may have its own.
    default_max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1)
    drain_timeout: Duration = 120.0  # how long SIGTERM waits for streams
    # How often a request whose worker dies goes on elsewhere, from the tokens that it has; one more death is an error.
    max_resumptions: int = Field(default=2, ge=0)
    resume_timeout: Duration = Field(default=4.0, ge=0)  # how long a stream waits for the new worker before an error
    # Folder of what survives a server that is killed, or etcd://[USER:PASSWORD@]HOST:PORT[,HOST2:PORT]/PREFIX for
    # several gateways of which one leads: its workers wait for the next one, with their models, and are found by what
    # is written here. None = they end with it.
    state: Annotated[str | None, PlainSerializer(_without_password, when_used="json")] = Field(default=None, repr=False)
    outlive: Duration = Field(default=60.0, gt=0)  # how long workers wait for the next gateway, with `state`


class NodeConfig(_Section):
    name: str = Field(default="cpu-0", min_length=1, max_length=64)  # as `ps`, logs and metrics show it
    # cpu, cuda:N, or the driver's name of a GPU or of a slice of one (`nvidia-smi -L`)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?|(GPU|MIG)-[0-9A-Za-z/-]+)$")
    threads: int = Field(default=0, ge=0)  # 0 = every core
    memory: Size = 0  # weights and KV of all that is ready; 0 = 3/4 of the machine's memory, 9/10 of a GPU's
    kv_cache: Size = 0  # at most per model; 0 = what the node has
    # Token times of its own that an answer waits on a CPU for work of other models, as nearly as layers allow. More:
    # prompts that were promised no time are answered sooner beside it.
    max_stall: float = Field(default=2.0, ge=1.5)
    event_log: Path | None = None  # every decision, in the simulator's format
    max_batch: int = Field(default=0, ge=0)  # sequences in one iteration; 0 = 64, on a GPU 256
    max_turn_tokens: int = Field(default=0, ge=0)  # tokens in one iteration, a prefill's chunk; 0 = 512, on a GPU 8192
    max_adapters: int = Field(default=0, ge=0)  # LoRA adapters in one iteration; 0 = any number
    block_size: int = Field(default=16, ge=1)  # tokens in a block of the KV cache
    # A worker that does nothing for this long, and four times what its iteration should take, is killed; 0 = never.
    hang_timeout: Duration = Field(default=30.0, ge=0)


class StoreConfig(_Section):
    path: Path | None = None  # default: $DOVETAIL_HOME, then ~/.cache/dovetail
    max_size: Size | None = None  # of all models on disk; those not served go, least recently used first; None = any
    host_pool: Size | None = None  # memory for models between uses; default: half of the machine's; 0 = map files
    host_keep_alive: Duration = 600.0  # pool memory unused for this long is given back; negative = never
    direct_io: Switch = "auto"  # auto = where the file system allows it and the cache is cold
    readers: int = Field(default=12, ge=1, le=256)  # threads that read the disk
    # When weights are compared with their checksums: when they are loaded, while the server is idle, or never.
    verify: Annotated[Literal["load", "background", "off"], BeforeValidator(_parse_off)] = "background"
    pull_memory: Size = 4 * 1024**3  # of each pull of a running server, beside the files that it maps
    pull_timeout: Duration = Field(default=180.0, gt=0)  # a pull that gets no further byte for this long is ended

    @property
    def profiles(self) -> Path:
        """Where measured profiles of devices are kept."""
        return (self.path.expanduser() if self.path is not None else default_root()) / "profiles"


def _not_empty(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise ValueError("the key is empty")  # a variable that is set to nothing, say
    return key


class KeyConfig(_Section):
    name: str = Field(min_length=1, max_length=128)  # as logs show it; a quota belongs to it
    key: Annotated[SecretStr, AfterValidator(_not_empty)]  # what clients send as bearer token
    # More are answered 429. Each prompt counts as often as it is answered (n).
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)  # of prompts and answers
    max_unfinished: int | None = Field(default=None, ge=1)  # answers at a time; None = its share of the queue
    # be = all its requests are best effort; ls = as they or their models say
    service_class: ModelClass = Field(default=ServiceClass.LATENCY_SENSITIVE, alias="class")
    priority: bool = False  # its requests may go before others' (service_tier: priority)
    admin: bool = False  # may use /api: look, add, change and remove models
    metrics: bool = False  # may read /metrics, which speak of every tenant's requests; an admin may, too


def _distinct_keys(keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
    _check_distinct("the name", (key.name for key in keys))  # a quota belongs to a name
    return keys


def _distinct_nodes(nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
    if not nodes:
        raise ValueError("at least one node is needed")
    _check_distinct("the name", (node.name for node in nodes))
    return nodes


def _distinct_names(models: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
    further = [name for model in models.values() for name in (*model.aliases, *model.adapters)]
    _check_distinct("the name or alias", [*models, *further])
    for name in (adapter for model in models.values() for adapter in model.adapters):
        if not _ADAPTER_NAME.match(name):
            raise ValueError(f"the adapter {name!r} needs a name of letters, digits, '.', '_' and '-'")
    return models


_MCP_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")


class McpServerConfig(_Section):
    """A server of tools that models may call through this one: a command on this machine, or an address."""

    command: tuple[str, ...] = ()  # started with the first call; speaks over its standard input and output
    env: dict[str, SecretStr] = {}  # beside PATH, HOME and the like; nothing else of this server's is passed on
    url: str | None = Field(default=None, pattern=r"^https?://")  # streamable HTTP
    headers: dict[str, SecretStr] = {}
    tools: tuple[str, ...] = Field(min_length=1)  # those that may be called; "*" = all that the server has
    keys: tuple[str, ...] | None = None  # names of API keys that may use it; None = all
    timeout: Duration = Field(default=30.0, gt=0, le=600)  # of one call
    max_result: Size = Field(default=64 * 1024, ge=256)  # of what a call says; the rest is cut off

    @model_validator(mode="after")
    def _check_transport(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers are sent to a url; a command has env")
        if self.url is not None and self.env:
            raise ValueError("env is a command's; a url has headers")
        return self


def _named_mcp_servers(servers: dict[str, McpServerConfig]) -> dict[str, McpServerConfig]:
    for name in servers:
        if not _MCP_NAME.match(name):
            raise ValueError(f"the MCP server {name!r} needs a name of at most 32 letters, digits, '_' and '-'")
    return servers


class McpConfig(_Section):
    """Model Context Protocol: tools that the server itself calls for `/v1/responses` and its page."""

    servers: Annotated[dict[str, McpServerConfig], AfterValidator(_named_mcp_servers)] = {}  # none = off
    max_calls: int = Field(default=16, ge=1, le=256)  # of one response; `max_tool_calls` of a request may say less


def _checked_hours(text: str) -> str:
    parse_hours(text)
    return text


class AuthConfig(_Section):
    keys: Annotated[tuple[KeyConfig, ...], AfterValidator(_distinct_keys)] = ()  # none = open


class BatchConfig(_Section):
    """Files and batches: `/v1/files`, `/v1/batches`, and Anthropic's `/v1/messages/batches`."""

    # Where they are kept; None = `batches` in `server.state`, else in the store. One server at a time has a folder.
    folder: Path | None = None
    # Lines begin within these hours of the server's local time, as "22:00-06:00"; None = at any time.
    hours: Annotated[str, AfterValidator(_checked_hours)] | None = None
    max_in_flight: int = Field(default=0, ge=0)  # lines at a time; 0 = as many as the nodes' max_batch
    max_file: Size = Field(default=1024**3, ge=1024)  # of one file
    max_lines: int = Field(default=1_000_000, ge=1)  # of one batch
    max_storage: Size = 16 * 1024**3  # of all files; a key may have as much as is left for the others
    max_batches: int = Field(default=100, ge=1)  # of one key that have not ended
    keep: Duration = Field(default=30 * 86400.0, gt=0)  # files without a time of their own, and batches that have ended


class Config(_Section):
    models: Annotated[dict[str, ModelConfig], AfterValidator(_distinct_names)] = {}
    server: ServerConfig = ServerConfig()
    nodes: Annotated[tuple[NodeConfig, ...], AfterValidator(_distinct_nodes)] = (NodeConfig(),)
    store: StoreConfig = StoreConfig()
    auth: AuthConfig = AuthConfig()
    mcp: McpConfig = McpConfig()
    batch: BatchConfig = BatchConfig()

    @model_validator(mode="after")
    def _check_mcp_keys(self) -> Config:
        known = {key.name for key in self.auth.keys}
        for name, server in self.mcp.servers.items():
            unknown = [key for key in server.keys or () if key not in known]
            if unknown:
                raise ValueError(f"mcp.servers.{name}.keys: {unknown[0]!r} is no name in auth.keys")
        return self


def load_config(path: Path) -> Config:
    try:
        raw = _fill_environment(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(raw).__name__}")
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], origin: str) -> Config:
    try:
        config = Config.model_validate(raw, context=FROM_FILE)
        check_drafts(config.models)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    return config


def check_drafts(models: Mapping[str, ModelConfig]) -> None:
    """As far as names tell: raises ConfigError for a draft model that is not there, or that nothing can come of."""
    for name, model in models.items():
        draft, key = model.speculative.draft, f"models.{name}.speculative.draft"
        if draft is None:
            continue
        if draft == name:
            raise ConfigError(f"{key}: a model cannot draft for itself; it takes a smaller one of the same vocabulary")
        if draft not in models:
            known = ", ".join(other for other in models if other != name) or "none"
            raise ConfigError(f"{key}: {draft!r} is no model of this configuration; there are: {known}")
        circle = _circle_of(name, models)
        if circle:
            raise ConfigError(f"{key}: the drafts go round in a circle: {' -> '.join(circle)}")


def _circle_of(name: str, models: Mapping[str, ModelConfig]) -> list[str]:
    """Names from this one along the drafts back to it; empty if they do not come back."""
    met = [name]
    while (draft := models[met[-1]].speculative.draft) in models and draft is not None:
        met.append(draft)
        if draft in met[:-1]:
            return met if draft == name else []
    return []


_EXAMPLES = {"slo": "{ttft: 2s, tpot: 100ms}"}


def describe(error: ValidationError) -> str:
    """One line per problem, each with the dotted key."""
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in item["loc"]) or "(top)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("model_type", "dict_type"):
            message = f"expected {_EXAMPLES.get(key.rpartition('.')[2], '{key: value, …}')}"
        if item["type"] == "extra_forbidden":
            message = REMOVED.get(str(item["loc"][-1]), "unknown key")
        elif isinstance(item["input"], int | float) and ", got " not in message:  # not of a text: it may be a secret
            message += f", got {item['input']}"
        problems.append(f"{key}: {message}")
    return "; ".join(problems)


def _fill_environment(value: Any, origin: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill_environment(item, origin) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_environment(item, origin) for item in value]
    if isinstance(value, str):
        return _ENV.sub(lambda match: _environment(match.group(1), origin), value)
    return value


def _environment(name: str, origin: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"{origin}: ${{env.{name}}} is used but {name} is not set")
    return os.environ[name]
