"""Ways to move blocks between host memory and a server: kvtier's tiers, and clients used directly.

All of them get the same jobs, and have the same number of threads. The direct clients neither seal
nor verify, and do not ask whether a block is there already.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from kvtier.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.testing.harness import sample_spec
from kvtier.tiering.base import JobResult, PrimaryRows, TransferJob
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.obj.objects import BLOCKS, object_name, open_objects
from kvtier.tiering.obj.options import ObjOptions
from kvtier.tiering.remote.manager import namespace_of
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from kvtier.tiering.valkey.servers import block_key
from tests.bench.disk_subjects import (
    GLIDE,
    OBJ,
    OBSTORE,
    RAW_HTTP,
    RAW_RESP,
    VALKEY,
    VALKEY_PY,
    Case,
    DiskSubject,
)

VALKEY_CONNECTIONS = 2
OBJ_LOADS, OBJ_STORES = 8, 4
_READ_AHEAD = 4096
_REMOVED_AT_ONCE = 500


Unit = Sequence[tuple[bytes, Any]]
"""Blocks of one call: the name of each, and its row."""


def name_of(key: OffloadKey) -> bytes:
    """What a direct client calls a block: different in each process."""
    return b"%d-%b" % (os.getpid(), key)


class Client(ABC):
    """Moves blocks for one thread."""

    @abstractmethod
    def load(self, blocks: Unit) -> None:
        """Read blocks, given as name and row."""

    @abstractmethod
    def store(self, blocks: Unit) -> None:
        """Write blocks, given as name and row."""


class DirectTier:
    """The part of a tier that the load generator calls, over clients with a thread each."""

    def __init__(
        self,
        view: memoryview,
        connect: Callable[[], Client],
        num_threads: tuple[int, int],
        unit: int,
    ) -> None:
        """`num_threads`: for loads and for stores. `unit`: blocks of one call of a client."""
        self._rows = PrimaryRows(view)
        self._unit = unit
        self._ended: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()
        self._work: tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]] = (
            queue.SimpleQueue(),
            queue.SimpleQueue(),
        )
        self._threads = [
            threading.Thread(target=self._run, args=(connect(), is_store), daemon=True)
            for is_store, count in enumerate(num_threads)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client, is_store: int) -> None:
        move = client.store if is_store else client.load
        while (unit := self._work[is_store].get()) is not None:
            job_id, blocks = unit
            move(blocks)
            with self._lock:
                self._left[job_id] -= 1
                is_over = not self._left[job_id]
            if is_over:
                self._ended.put(JobResult(job_id, True))

    def _submit(self, job: TransferJob, is_store: int) -> None:
        rows = map(self._row, job.block_ids.tolist())
        blocks = list(zip(map(name_of, job.keys), rows, strict=True))
        units = [blocks[at : at + self._unit] for at in range(0, len(blocks), self._unit)]
        self._left[job.job_id] = len(units)
        for unit in units:
            self._work[is_store].put((job.job_id, unit))

    def _row(self, row: int) -> Any:
        """What clients are given for a row: the row itself."""
        return self._rows[row]

    def submit_load(self, job: TransferJob) -> None:
        self._submit(job, 0)

    def submit_store(self, job: TransferJob) -> None:
        self._submit(job, 1)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while not self._ended.empty():
            yield self._ended.get()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        return

    def drain_jobs(self) -> None:
        return

    def shutdown(self) -> None:
        for work in self._work:
            for _ in self._threads:
                work.put(None)
        for thread in self._threads:
            thread.join()
        self._rows.release()


# --- Valkey --------------------------------------------------------------------------------------


class RawResp(Client):
    """A bare socket: commands out of the rows, answers into them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def load(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        names = (b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name, _ in blocks)
        self._socket.sendall(b"".join(names))
        for _, row in blocks:
            assert self._line() == b"$%d" % len(row)
            taken = len(self._buffer[: len(row)])
            row[:taken] = self._buffer[:taken]
            self._buffer = self._buffer[taken:]
            rest = row[taken:]
            while rest:
                rest = rest[self._socket.recv_into(rest, 0, socket.MSG_WAITALL) :]
            assert self._line() == b""

    def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        parts: list[bytes | memoryview] = []
        for name, row in blocks:
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(row))
            parts += [head, row, b"\r\n"]
        while parts:
            sent = self._socket.sendmsg(parts[:1024])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]
        for _ in blocks:
            assert self._line() == b"+OK"

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._buffer += self._socket.recv(_READ_AHEAD)
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line


class ValkeyPy(Client):
    """The client library valkey (redis-py's), with pipelines."""

    def __init__(self, url: str) -> None:
        import valkey

        self._client = valkey.Valkey.from_url(url)

    def load(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, _ in blocks:
            pipeline.get(name)
        for (_, row), content in zip(blocks, pipeline.execute(), strict=True):
            row[:] = content

    def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, row in blocks:
            pipeline.set(name, row)
        pipeline.execute()


class Glide(Client):
    """The client library valkey-glide-sync, which receives into a buffer."""

    def __init__(self, url: str) -> None:
        from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

        parts = urlsplit(url)
        address = NodeAddress(parts.hostname or "", parts.port or 6379)
        config = GlideClientConfiguration([address], request_timeout=20_000)
        self._client = GlideClient.create(config)

    def load(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        for name, row in blocks:
            self._client.get(name, buffer=row)

    def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        for name, row in blocks:
            self._client.set(name, row)


def _valkey_peer(
    client: type[RawResp | ValkeyPy | Glide],
) -> Callable[[Case, memoryview], DiskSubject]:
    def make(case: Case, view: memoryview) -> DiskSubject:
        import valkey

        url = json.loads(case.server)["url"]
        threads = (VALKEY_CONNECTIONS, VALKEY_CONNECTIONS)
        tier = DirectTier(view, lambda: client(url), threads, case.job_blocks)
        remover = valkey.Valkey.from_url(url)
        return subject_of(tier, lambda keys: remover.unlink(*map(name_of, keys)))

    return make


# --- object stores -------------------------------------------------------------------------------


class PlainObstore(Client):
    """The client library obstore, called for one object after the other."""

    def __init__(self, options: ObjOptions) -> None:
        self._store = open_objects(options, makes_directory=True)._store

    def load(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        import obstore

        for name, row in blocks:
            row[:] = memoryview(obstore.get(self._store, name.hex()).bytes())

    def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        import obstore

        for name, row in blocks:
            obstore.put(self._store, name.hex(), iter([row]), use_multipart=False)


class RawHttp(Client):
    """HTTP of the standard library with signed URLs, received into the rows."""

    def __init__(self, options: ObjOptions) -> None:
        self._store = open_objects(options, makes_directory=True)._store
        endpoint = urlsplit(options.endpoint or "")
        self._connection = http.client.HTTPConnection(endpoint.netloc)

    def _request(self, method: str, name: bytes, body: memoryview | None = None) -> Any:
        import obstore

        url = urlsplit(obstore.sign(self._store, method, name.hex(), timedelta(hours=1)))
        self._connection.request(method, f"{url.path}?{url.query}", body)
        response = self._connection.getresponse()
        assert response.status == 200, response.status
        return response

    def load(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        for name, row in blocks:
            response = self._request("GET", name)
            rest = row
            while rest:
                rest = rest[response.readinto(rest) :]
            response.read()

    def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        for name, row in blocks:
            self._request("PUT", name, row).read()


def _obj_peer(client: type[PlainObstore | RawHttp]) -> Callable[[Case, memoryview], DiskSubject]:
    def make(case: Case, view: memoryview) -> DiskSubject:
        options = ObjOptions.parse(json.loads(case.server))
        tier = DirectTier(view, lambda: client(options), (OBJ_LOADS, OBJ_STORES), 1)
        objects = open_objects(options, makes_directory=True)
        return subject_of(tier, lambda keys: objects.remove([name_of(key).hex() for key in keys]))

    return make


# --- kvtier --------------------------------------------------------------------------------------


def _kvtier_valkey(case: Case, view: memoryview) -> DiskSubject:
    import valkey

    keys = json.loads(case.server)
    tier = ValkeySecondaryTierManager(spec_of(case, view), view, "valkey", **keys)
    remover = valkey.Valkey.from_url(keys["url"])
    space = namespace_of(tier.fingerprint)
    return subject_of(tier, lambda gone: remover.unlink(*(block_key(space, key) for key in gone)))


def _kvtier_obj(case: Case, view: memoryview) -> DiskSubject:
    keys = json.loads(case.server)
    tier = ObjSecondaryTierManager(spec_of(case, view), view, "obj", **keys)
    objects = open_objects(ObjOptions.parse(keys), makes_directory=True)
    folder = f"{BLOCKS}/{namespace_of(tier.fingerprint)}"
    return subject_of(tier, lambda gone: objects.remove([object_name(folder, key) for key in gone]))


def spec_of(case: Case, view: memoryview) -> OffloadingSpec:
    return sample_spec(case.block_bytes, len(view), "bench", engine_id=f"bench-{os.getpid()}")


def subject_of(tier: Any, remove: Callable[[list[OffloadKey]], object]) -> DiskSubject:
    fingerprint = getattr(tier, "fingerprint", bytes(16))
    tier.enable_kv_events = False

    def make_job(job_id: int, keys: Any, rows: Any, is_load: bool) -> TransferJob:
        return TransferJob(job_id, keys, rows, is_load, ReqContext(f"job-{job_id}"), fingerprint)

    def forget(keys: list[OffloadKey]) -> None:
        for start in range(0, len(keys), _REMOVED_AT_ONCE):
            remove(keys[start : start + _REMOVED_AT_ONCE])

    return DiskSubject(
        tier=tier,
        make_key=make_offload_key,
        make_job=make_job,
        make_context=ReqContext,
        schedule_end=ScheduleEndContext(),
        look_up=getattr(tier, "lookup_batch", None) or (lambda keys, _: ()),
        forget=forget,
    )


MAKERS: dict[str, Callable[[Case, memoryview], DiskSubject]] = {
    VALKEY: _kvtier_valkey,
    RAW_RESP: _valkey_peer(RawResp),
    VALKEY_PY: _valkey_peer(ValkeyPy),
    GLIDE: _valkey_peer(Glide),
    OBJ: _kvtier_obj,
    OBSTORE: _obj_peer(PlainObstore),
    RAW_HTTP: _obj_peer(RawHttp),
}
