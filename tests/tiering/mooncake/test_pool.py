"""A real pool: what its processes do when they end, stand still and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.mooncake.pool import Master, Segment, mooncake_master, segment
from tests.tiering.networks import Namespace, lan
from tests.tiering.patience import wait_until
from tests.tiering.processes import free_port

SEGMENT = 64 << 20
VALUE = bytes(range(256)) * 256


@pytest.fixture(scope="module")
def master(network: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with mooncake_master(tmp_path_factory.mktemp("mooncake"), network) as running:
        yield running


@contextmanager
def client(master: Master, address: str = "127.0.0.1") -> Iterator[Any]:
    """A client that lends nothing."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    own = f"{address}:{free_port()}"
    assert store.setup(own, master.metadata_url, 0, 16 << 20, "tcp", "", master.address) == 0
    try:
        yield store
    finally:
        store.close()


def in_a_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_what_one_process_lends_another_uses(master: Master, network: Namespace) -> None:
    with segment(master, SEGMENT, network) as lent, client(master) as store:
        assert store.put("shared", VALUE) == 0
        assert store.get("shared") == VALUE
        assert master.keys() == ["shared"]
        assert master.segments() == [lent.name]
        lent.close()
        assert master.segments() == []
        assert store.get("shared") == b""


def test_a_killed_segment_is_forgotten(master: Master, network: Namespace) -> None:
    with segment(master, SEGMENT, network) as lent, client(master) as store:
        assert store.put("gone", VALUE) == 0
        lent.kill()
        assert store.get("gone") == b""
        wait_until(lambda: store.is_exist("gone") == 0, "the master has forgotten the segment")
        wait_until(lambda: master.segments() == [], "the segment is not listed")


def test_a_segment_that_stood_still_goes_on(master: Master, network: Namespace) -> None:
    with segment(master, SEGMENT, network) as lent, client(master) as store:
        assert store.put("still", VALUE) == 0
        with lent.standing_still():
            thread, answers = in_a_thread(lambda: store.get("still"))
        thread.join()
        assert answers in ([VALUE], [b""])
        wait_until(lambda: lent.name in master.segments(), "the segment is lent again")


def test_a_restarted_master_gets_its_segments_back(tmp_path: Path, network: Namespace) -> None:
    with mooncake_master(tmp_path, network) as master:
        lent = Segment(master, SEGMENT, network)
        with client(master) as store:
            assert store.put("forgotten", VALUE) == 0
            master.kill()
            master.start()
            wait_until(lambda: lent.name in master.segments(), "the segment is lent again")
            assert store.get("forgotten") == b""
            wait_until(lambda: store.put("new", VALUE) == 0, "the pool stores again")
            assert store.get("new") == VALUE
        lent.kill()


def test_a_pool_on_three_hosts(tmp_path: Path, network: Namespace) -> None:
    with lan(3, first=network) as hosts:
        here, central, lender = hosts.hosts
        with (
            mooncake_master(tmp_path, central, address=central.address) as master,
            segment(master, SEGMENT, lender, lender.address),
            client(master, here.address) as store,
        ):
            assert store.put("far", VALUE) == 0
            assert store.get("far") == VALUE
