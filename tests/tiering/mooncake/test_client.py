"""When the client is set up, called and closed, with a client that records it: the real one stops
the whole process if it is called at the wrong time."""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.mooncake import manager
from kvtier.tiering.mooncake import pool as pool_module
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.mooncake.pool import Pool
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from tests.tiering.mooncake.harness import ROW_BYTES
from tests.tiering.patience import PATIENCE_S, wait_until


class Peer:
    """A server that gives one answer to whatever it is sent, and hangs up."""

    def __init__(self, answer: bytes = b"") -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._serve()

    def _serve(self) -> None:
        self._thread = threading.Thread(target=self._run, args=(self._listener,), daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1000)
                connection.sendall(self._answer)

    def die(self) -> None:
        """Nobody listens any more. Idempotent."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()

    def come_back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()


class Recorder:
    """In place of the library and its clients."""

    def __init__(self) -> None:
        self.num_setups = self.num_closes = 0
        self.result_of_a_store = 0
        self.is_whole = True
        self.MooncakeDistributedStore = lambda: self
        self.ReplicateConfig = SimpleNamespace

    def setup(self, *_: object) -> int:
        self.num_setups += 1
        return 0

    def get_hostname(self) -> str:
        return "127.0.0.1"

    def close(self) -> int:
        self.num_closes += 1
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys)

    def batch_put_from_multi_buffers(self, keys: Sequence[str], *_: object) -> list[int]:
        return [self.result_of_a_store] * len(keys) if self.is_whole else []

    def get(self, key: str) -> bytes:
        return b""

    def upsert(self, *_: object) -> int:
        return 0


@pytest.fixture
def library() -> Recorder:
    return Recorder()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(answer: bytes = b"") -> Peer:
        made.append(Peer(answer))
        return made[-1]

    yield make
    for peer in made:
        peer.die()


@contextmanager
def joined(library: Recorder, **keys: Any) -> Iterator[Pool]:
    pool = Pool(MooncakeOptions.parse(keys), library, memoryview(bytearray(8)))
    try:
        pool.start()
        yield pool
    finally:
        pool.interrupt()
        pool.close()
        atexit.unregister(pool._end_with_the_process)


def doubt(pool: Pool) -> threading.Thread:
    """A lane whose transfer has failed after a minute."""
    with pool.use() as membership:
        pass
    lane = threading.Thread(target=pool.replace_if_in_doubt, args=(membership, 60.0), daemon=True)
    lane.start()
    return lane


def test_a_client_is_replaced_when_the_master_is_there(
    library: Recorder, peers: Callable[..., Peer]
) -> None:
    master = peers()
    with joined(library, master=master.address) as pool:
        doubt(pool).join(PATIENCE_S)
        assert library.num_closes == 1
        wait_until(lambda: library.num_setups == 2, "there is a new client")
    assert library.num_closes == 2


def test_a_client_is_not_closed_while_the_master_is_gone(
    library: Recorder, peers: Callable[..., Peer]
) -> None:
    """That would take 15 s, in which no thread of the engine runs."""
    master = peers()
    with joined(library, master=master.address) as pool:
        master.die()
        lane = doubt(pool)
        with pytest.raises(ServerFailure, match="being replaced"):
            pool.ask(lambda client: client.batch_is_exist([]))
        lane.join(0.5)
        assert lane.is_alive(), "the slots may still be written"
        assert library.num_closes == 0
        master.come_back()
        lane.join(PATIENCE_S)
        assert not lane.is_alive()
        wait_until(lambda: library.num_setups == 2, "there is a new client")
        master.die()
    assert library.num_closes == 1, "the last one is left to the end of the process"


def test_with_several_masters_a_client_is_never_closed(
    library: Recorder, peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """That takes 30 s whenever etcd has named the master."""
    etcd = peers(b"HTTP/1.0 200 OK\r\n\r\n")
    with joined(library, master=f"etcd://{etcd.address}", hostname="127.0.0.1") as pool:
        lane = doubt(pool)
        wait_until(lambda: "restart it to use the pool again" in caplog.text, "it is logged")
        assert lane.is_alive()
    assert (library.num_setups, library.num_closes) == (1, 0)


def test_a_client_is_not_set_up_while_etcd_is_gone(
    library: Recorder, peers: Callable[..., Peer]
) -> None:
    etcd, other = peers(b"HTTP/1.0 200 OK\r\n\r\n"), peers(b"HTTP/1.0 200 OK\r\n\r\n")
    other.die()
    both = f"etcd://{other.address};{etcd.address}"
    with joined(library, master=both, hostname="127.0.0.1"):
        assert library.num_setups == 1, "one etcd is enough"
    etcd.die()
    with (
        pytest.raises(ServerFailure, match="no connection to etcd"),
        joined(library, master=both, hostname="127.0.0.1"),
    ):
        pass
    assert library.num_setups == 1


def test_a_client_is_not_set_up_with_something_else_than_a_master(
    library: Recorder, peers: Callable[..., Peer]
) -> None:
    other = peers(b"HTTP/1.0 200 OK\r\n\r\n")
    with (
        pytest.raises(ServerFailure, match="another server") as raised,
        joined(library, master=other.address),
    ):
        pass
    assert raised.value.kind is FailureKind.REFUSED
    assert library.num_setups == 0


def test_questions_are_asked_again_when_there_are_threads_again(
    library: Recorder, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with joined(library, master=peers().address) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(20):
                with pytest.raises(RuntimeError):
                    pool.ask(lambda client: client.batch_is_exist([]))
        assert pool.ask(lambda client: client.batch_is_exist(["a"])) == [0]


@contextmanager
def tier_over(
    library: Recorder, master: Peer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TierHarness]:
    monkeypatch.setattr(manager, "load_library", lambda: library)
    with TierHarness(
        lambda spec, view: MooncakeSecondaryTierManager(
            spec, view, "mooncake", master=master.address
        ),
        row_bytes=ROW_BYTES,
        patience_s=PATIENCE_S,
    ) as engine:
        yield engine


def test_errors_that_nobody_knows_are_counted_and_logged(
    library: Recorder,
    peers: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.result_of_a_store = -1234
    with tier_over(library, peers(), monkeypatch) as engine:
        (report,) = engine.wait_for(engine.store(engine.keys(3)))
        assert not report.result.success
        stats = engine.tier.get_stats()
    assert stats is not None
    assert stats.counters["kvtier_mooncake_failures_refused"] == 1
    assert "error -1234" in caplog.text


def test_a_late_answer_that_is_none_leaves_the_slots_in_doubt(
    library: Recorder, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.is_whole = False
    monkeypatch.setattr(pool_module, "_IN_DOUBT_AFTER_S", 0.0)
    with tier_over(library, peers(), monkeypatch) as engine:
        (report,) = engine.wait_for(engine.store(engine.keys(3)))
        assert not report.moved
        assert library.num_closes == 1
