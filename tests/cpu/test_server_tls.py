"""HTTPS from a real server to real clients, and a certificate that is renewed while a stream is read."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Authority
from cryptography import x509
from server_fixture import Server, eventually, run_command, running_server

HANDSHAKE_S = 2.0


class Secured:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key, self.log = folder / "server.pem", folder / "server.key", folder / "log"
        self.number = self.renew()
        self.trusted = ssl.create_default_context(cafile=self.authority.file)

    def renew(self) -> int:
        self.number = self.authority.sign(self.cert, self.key)
        return self.number

    def reload(self, server: Server, *, says: str) -> None:
        before = len(self.log.read_text())
        server.hang_up()
        eventually(lambda: says in self.log.read_text()[before:])

    def shown(self, url: str, *, name: str | None = "localhost") -> int:
        """The number of the certificate that a new connection gets; without a name the client asks for none."""
        address = httpx.URL(url)
        context = self.trusted
        if name is None:
            context = ssl.create_default_context(cafile=self.authority.file)
            context.check_hostname = False
        with (
            socket.create_connection((address.host, address.port or 0), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            found = secure.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("secured"))


@pytest.fixture(scope="module")
def server(secured: Secured, tiny_folder: Callable[[str], Path]) -> Iterator[Server]:
    file = secured.cert.parent / "dovetail.yaml"
    tls = f"{{cert: {secured.cert}, key: {secured.key}}}"
    models = f"models: {{llama: {{source: {tiny_folder('llama')}}}}}"
    file.write_text(f"{models}\nserver: {{tls: {tls}, header_timeout: {HANDSHAKE_S:g}s}}\n")
    options = ("--config", file, "--threads", "1", "--kv-cache", "16MiB")
    environment = {"DOVETAIL_HOME": str(secured.cert.parent / "home")}
    with running_server(*options, log=secured.log, environment=environment) as running:
        yield running


def test_clients_that_know_the_authority_are_served_and_others_refuse(server: Server, secured: Secured) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=secured.trusted, timeout=120) as trusting:
        client = server.client(http_client=trusting)
        whole = client.completions.create(model="llama", prompt="a", max_tokens=5, temperature=0)
        stream = client.completions.create(model="llama", prompt="a", max_tokens=5, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        assert trusting.get(f"{server.url}/health").status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/live", timeout=30)
    with pytest.raises(openai.APIConnectionError):
        server.client().models.list()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url.replace('https', 'http')}/live", timeout=30)


def test_our_own_commands_reach_it_with_the_authority_in_the_environment(server: Server, secured: Secured) -> None:

    environment = {**os.environ, "SSL_CERT_FILE": str(secured.authority.file)}
    done = run_command("ps", "--url", server.url, "--json", env=environment)
    assert done.returncode == 0, done.stderr


def test_a_certificate_is_renewed_by_sighup_and_open_connections_go_on(server: Server, secured: Secured) -> None:
    before = secured.number
    assert secured.shown(server.url) == secured.shown(server.url, name=None) == before
    text = {"model": "llama", "prompt": "go on", "max_tokens": 200, "temperature": 0}
    idle = httpx.Client(verify=secured.trusted, timeout=120, limits=httpx.Limits(keepalive_expiry=300))
    with idle, httpx.Client(verify=secured.trusted, timeout=120) as reading:
        assert number_of(idle.get(f"{server.url}/live")) == before
        client = server.client(http_client=reading)
        whole = client.completions.create(**text, extra_body={"ignore_eos": True}).choices[0].text
        stream = client.completions.create(**text, extra_body={"ignore_eos": True}, stream=True)
        pieces = [next(stream).choices[0].text]
        after = secured.renew()
        assert secured.shown(server.url) == before, "files are read at SIGHUP, not while they are being written"
        secured.reload(server, says="reloaded")
        assert secured.shown(server.url) == secured.shown(server.url, name=None) == after != before
        pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == whole
        assert number_of(idle.get(f"{server.url}/live")) == before, "the connection was kept, with its certificate"
    with httpx.Client(verify=secured.trusted, timeout=120) as newcomer:
        assert number_of(newcomer.get(f"{server.url}/live")) == after


def number_of(response: httpx.Response) -> int:
    """Of the certificate of the connection that the answer came over."""
    secure = response.extensions["network_stream"].get_extra_info("ssl_object")
    return x509.load_der_x509_certificate(secure.getpeercert(True)).serial_number


def test_a_broken_renewal_is_named_and_the_old_certificate_stays(server: Server, secured: Secured) -> None:
    good, number = secured.key.read_bytes(), secured.number
    other = secured.key.with_name("other.key")
    secured.authority.sign(secured.key.with_name("other.pem"), other)
    secured.key.write_bytes(other.read_bytes())
    secured.reload(server, says=f"not reloaded: server.tls.key: {secured.key} is not the key of")
    assert secured.shown(server.url) == number
    secured.key.unlink()
    secured.reload(server, says=f"not reloaded: server.tls.key: {secured.key} is not there")
    assert secured.shown(server.url) == number
    secured.key.write_bytes(good)
    secured.reload(server, says="reloaded")


def test_a_client_that_begins_no_handshake_is_sent_away(server: Server) -> None:
    address = httpx.URL(server.url)
    began = time.monotonic()
    with socket.create_connection((address.host, address.port or 0), timeout=30) as silent:
        assert silent.recv(1) == b""
    assert time.monotonic() - began >= HANDSHAKE_S / 2


def test_a_server_without_its_certificate_does_not_start(tmp_path: Path) -> None:
    missing = tmp_path / "gone.pem"
    done = run_command("serve", "--tls-cert", missing, "--tls-key", missing, "--port", "0")
    assert done.returncode == 1
    assert f"server.tls.cert: {missing} is not there" in done.stderr
    assert "Traceback" not in done.stderr
