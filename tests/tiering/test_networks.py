"""The networks of the tests do what they say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.tiering.networks import Host, Lan, Link, Namespace, lan, private_network

SIZE = 200_000


@pytest.fixture(scope="module")
def network() -> Iterator[Lan]:
    with lan(3) as made:
        yield made


@pytest.fixture
def hosts(network: Lan) -> Iterator[list[Host]]:
    yield network.hosts
    for host in network.hosts:
        host.link(Link())


@contextmanager
def connection(server: Host, client: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        with server.entered():
            listener = stack.enter_context(socket.create_server((server.address, 0)))
        with client.entered():
            out = socket.create_connection(listener.getsockname(), timeout=30)
        stack.enter_context(out)
        accepted, _ = listener.accept()
        yield out, stack.enter_context(accepted)


def seconds_to_send(source: socket.socket, sink: socket.socket, num_bytes: int) -> float:
    started = time.monotonic()
    sending = threading.Thread(target=source.sendall, args=(bytes(num_bytes),))
    sending.start()
    received = 0
    while received < num_bytes:
        received += len(sink.recv(1 << 16))
    sending.join()
    return time.monotonic() - started


def test_a_private_network_has_loopback_alone_and_is_left_at_the_end() -> None:
    before = {name for _, name in socket.if_nameindex()}
    with private_network():
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
        elsewhere: list[str] = []
        thread = threading.Thread(
            target=lambda: elsewhere.extend(name for _, name in socket.if_nameindex())
        )
        thread.start()
        thread.join()
        assert elsewhere == ["lo"]
    assert {name for _, name in socket.if_nameindex()} == before


def test_hosts_reach_each_other(hosts: list[Host]) -> None:
    with connection(hosts[0], hosts[1]) as (one, other):
        seconds_to_send(one, other, SIZE)
        seconds_to_send(other, one, SIZE)


def test_a_link_delays(hosts: list[Host]) -> None:
    hosts[1].link(Link(delay_s=0.05))
    with connection(hosts[0], hosts[1]) as (one, other):
        assert seconds_to_send(one, other, 1) >= 0.05
        hosts[0].link(Link(delay_s=0.05))
        assert seconds_to_send(one, other, 1) >= 0.1


def test_a_link_limits_the_rate_of_its_host_alone(hosts: list[Host]) -> None:
    hosts[1].link(Link(bytes_per_s=1e6))
    with connection(hosts[0], hosts[1]) as (one, other):
        assert seconds_to_send(one, other, SIZE) >= 0.15
        assert seconds_to_send(other, one, SIZE) >= 0.15
    with connection(hosts[0], hosts[2]) as (one, other):
        seconds_to_send(one, other, SIZE)


def test_what_is_lost_is_sent_again(hosts: list[Host]) -> None:
    hosts[1].link(Link(loss=0.05))
    with connection(hosts[0], hosts[1]) as (one, other):
        seconds_to_send(one, other, SIZE)


def test_a_host_that_is_cut_off_gets_what_was_sent_after_it_is_back(hosts: list[Host]) -> None:
    with connection(hosts[0], hosts[1]) as (one, other):
        with hosts[1].cut_off():
            one.sendall(b"x")
            other.settimeout(0.2)
            with pytest.raises(TimeoutError):
                other.recv(1)
        other.settimeout(30)
        assert other.recv(1) == b"x"


def test_the_network_of_the_test_can_be_a_host() -> None:
    with private_network() as here:
        with lan(2, first=here) as made:
            assert {name for _, name in socket.if_nameindex()} == {"lo", "eth0"}
            with connection(made.hosts[1], made.hosts[0]) as (one, other):
                seconds_to_send(one, other, SIZE)
        assert {name for _, name in socket.if_nameindex()} == {"lo"}


def test_a_namespace_ends() -> None:
    namespace = Namespace()
    namespace.close()
    with pytest.raises(OSError, match="setns"), namespace.entered():
        raise AssertionError("not reached")
