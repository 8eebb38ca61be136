"""What commands learn from a pool that does not answer, lies, or keeps something else."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.mooncake import inspector as inspector_module
from kvtier.tiering.mooncake.admin import MasterAdmin
from kvtier.tiering.mooncake.inspector import open_pool
from kvtier.tiering.mooncake.namespaces import block_name
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.remote.inspector import RemoteStorage

NAME = block_name("0" * 32, OffloadKey(b"key"))
NO_CONNECTION, TRANSFER_FAILED, NOT_THERE = -900, -800, -704


class _Handler(http.server.BaseHTTPRequestHandler):
    endless = False
    paths: Sequence[str] = ()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/get_all_keys":
            self.wfile.write(f"{NAME}\n".encode())
        self.wfile.write(b"master_key_count 5\n")
        try:
            while self.endless:
                self.wfile.write(b"master_key_count 6\n" * 65_536)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def admin_server(*, endless: bool = False) -> Iterator[tuple[str, int]]:
    handler = type("Handler", (_Handler,), {"endless": endless})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield ("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_proxy_for_the_internet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with admin_server() as address:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        assert MasterAdmin(address).use().num_objects == 5


def test_an_answer_without_an_end_is_a_failure() -> None:
    with (
        admin_server(endless=True) as address,
        pytest.raises(ServerFailure, match="does not end"),
    ):
        MasterAdmin(address).use()


class Answers:
    """A client that gives the same answers always."""

    def __init__(self, code: int) -> None:
        self._code = code

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        return {}

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [self._code] * len(keys)

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        return [self._code] * len(keys)

    def batch_get_into(self, keys: Sequence[str], *_: object) -> list[int]:
        return [self._code] * len(keys)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], RemoteStorage]]:
    """What a command sees if all results of the client are one number."""
    with admin_server() as (host, port):

        def opening(code: int) -> RemoteStorage:
            @contextmanager
            def client(_: object) -> Iterator[Answers]:
                yield Answers(code)

            monkeypatch.setattr(inspector_module, "plain_client", client)
            found = open_pool(f"mooncake://{host}:{port}?admin={host}:{port}")
            assert found is not None
            return found._storage

        yield opening


def test_blocks_of_a_master_that_has_ended_are_not_taken_for_evicted(
    opened: Callable[[int], RemoteStorage],
) -> None:
    with pytest.raises(ServerFailure, match="no connection"):
        list(opened(NO_CONNECTION).scan())
    assert not list(opened(0).scan())


def test_what_could_not_be_removed_is_not_reported_as_removed(
    opened: Callable[[int], RemoteStorage],
) -> None:
    with pytest.raises(ServerFailure, match="no connection"):
        opened(NO_CONNECTION).remove([NAME])
    opened(NOT_THERE).remove([NAME])


def test_a_block_that_cannot_be_read_is_not_taken_for_evicted(
    opened: Callable[[int], RemoteStorage],
) -> None:
    assert opened(NOT_THERE).read(NAME, 256) is None
    with pytest.raises(ServerFailure, match="-800"):
        opened(TRANSFER_FAILED).read(NAME, 256)


def test_what_is_longer_than_any_block_is_not_read(
    opened: Callable[[int], RemoteStorage],
) -> None:
    with pytest.raises(ServerFailure) as raised:
        opened(0).read(NAME, 1 << 40)
    assert raised.value.kind is FailureKind.GARBAGE
