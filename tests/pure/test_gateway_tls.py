"""Certificates that are read, and the mistakes in them that are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from certificates import Authority

from dovetail.cli.tls import tls_config
from dovetail.config import Config, ServerConfig, TlsConfig, parse_config
from dovetail.errors import ConfigError
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.http.tls import read_certificate


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    config = TlsConfig(cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    Authority(tmp_path).sign(config.cert, config.key)
    return config


def refusal(config: TlsConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        read_certificate(config)
    return str(caught.value)


def test_files_that_are_missing_or_no_files_are_named_with_their_key(files: TlsConfig, tmp_path: Path) -> None:
    gone = tmp_path / "gone.pem"
    assert refusal(files.model_copy(update={"cert": gone})) == f"server.tls.cert: {gone} is not there"
    assert refusal(files.model_copy(update={"key": tmp_path})) == f"server.tls.key: {tmp_path} is not a file"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(files.model_copy(update={"key": pipe})) == f"server.tls.key: {pipe} is not a file"


def test_files_of_another_kind_and_keys_of_another_certificate_are_named(files: TlsConfig, tmp_path: Path) -> None:
    other, other_key = tmp_path / "other.pem", tmp_path / "other.key"
    Authority(tmp_path).sign(other, other_key)
    assert "server.tls.key" in refusal(files.model_copy(update={"key": other_key}))
    assert f"{other_key} is not the key of the first certificate in {files.cert}" in refusal(
        files.model_copy(update={"key": other_key})
    )
    text = tmp_path / "text"
    text.write_text("not PEM")
    assert str(text) in refusal(files.model_copy(update={"cert": text}))
    files.key.write_text(files.key.read_text().replace("M", "!", 20))
    assert str(files.key) in refusal(files)


def test_a_key_with_a_passphrase_is_refused_with_a_remedy_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = TlsConfig(cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    Authority(tmp_path).sign(files.cert, files.key, passphrase=b"secret")
    assert "openssl pkey -in KEY -out PLAIN" in refusal(files)


def test_half_of_the_configuration_is_an_error_that_names_the_other_half(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls\.key: Field required"):
        parse_config({"server": {"tls": {"cert": "a.pem"}}}, "dovetail.yaml")
    with pytest.raises(ConfigError, match="--tls-cert without --tls-key"):
        tls_config(tmp_path / "a.pem", None)
    with pytest.raises(ConfigError, match="--tls-key without --tls-cert"):
        tls_config(None, tmp_path / "a.key")
    assert tls_config(None, None) is None


def test_a_file_with_a_certificate_that_cannot_be_read_changes_nothing(files: TlsConfig, tmp_path: Path) -> None:
    settings = Settings(Config(server=ServerConfig(tls=files)))
    broken = Config(server=ServerConfig(tls=files.model_copy(update={"cert": tmp_path / "gone.pem"})))
    with pytest.raises(ConfigError, match=r"server\.tls\.cert: .*gone\.pem is not there"):
        settings.check(broken)
    assert settings.config.server.tls == files


def test_turning_https_on_or_off_takes_a_restart_and_a_new_path_does_not(files: TlsConfig, tmp_path: Path) -> None:
    plain = Settings(Config())
    plain.check(Config(server=ServerConfig(tls=files)))
    plain.accept(Config(server=ServerConfig(tls=files)))
    assert plain.needs_restart == ("server.tls",)
    assert plain.config.server.tls is None
    secure = Settings(Config(server=ServerConfig(tls=files)))
    moved = TlsConfig(cert=tmp_path / "moved.pem", key=tmp_path / "moved.key")
    Authority(tmp_path).sign(moved.cert, moved.key)
    for tls, restart in ((moved, ()), (None, ("server.tls",))):
        config = Config(server=ServerConfig(tls=tls))
        secure.check(config)
        secure.accept(config)
        assert secure.needs_restart == restart
        assert secure.config.server.tls == moved
