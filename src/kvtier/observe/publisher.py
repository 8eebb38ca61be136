"""Publishes the KV-cache events of an engine that is not vLLM, in vLLM's wire format.

    publisher = EventPublisher("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    publisher.publish(engine.take_events())  # after each step

Batches go out on a ZMQ PUB socket with consecutive sequence numbers. A consumer that has missed
some asks for them on a ROUTER socket, as with vLLM. Three things go beyond vLLM, and need no
support of the consumer:

- A replay is complete however far it goes back. If batches are no longer kept, the answer begins
  with `AllBlocksCleared` and everything that was stored at that point.
- The first batch of a publisher clears the consumer's index, and its sequence number is larger than
  those of earlier publishers. So a consumer notices a restart.
- An idle publisher sends an empty batch now and then, so a consumer notices that it has missed the
  last one, or that the engine has ended.

Needs pyzmq and msgspec: install `kvtier[events]`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kvtier.config import AttentionKind
from kvtier.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.observe.published_index import PublishedIndex

if TYPE_CHECKING:
    import zmq

__all__ = ["EventPublisher", "PublisherFigures"]

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay."""
_STATUS = b"status"
_MOST_REQUEST_BYTES = 1024
_SNAPSHOT_BLOCKS = 1000
"""Blocks in one message of a snapshot."""
_WARN_EVERY_S = 60.0
_KINDS = {
    AttentionKind.FULL: "full_attention",
    AttentionKind.SLIDING_WINDOW: "sliding_window",
    AttentionKind.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionKind.STATE_SPACE: "mamba",
}


@dataclass(frozen=True, slots=True)
class PublisherFigures:
    """What a publisher has done so far."""

    num_batches: int
    num_events: int
    num_lost: int
    """Events that were not published because `max_queued` were waiting. Consumers were told to
    clear their index."""
    num_replays: int
    num_snapshots: int
    """Replays that began with a snapshot."""


class EventPublisher:
    """Publishes from a thread of its own. `publish` never waits. Idempotent `close`."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 64 << 20,
        max_queued: int = 100_000,
        heartbeat_s: float = 5.0,
        max_blocks: int = 1 << 18,
        int_hashes: bool = True,
    ) -> None:
        """Bind the sockets and start the thread. Events contain the tokens of prompts: bind to an
        address that only your routers reach.

        `replay_endpoint`: None: consumers cannot ask for batches. A port of 0 stands for any free
        one; `endpoint` and `replay_endpoint` then have the one that was taken. `buffer_batches`,
        `buffer_bytes`: the most batches kept for replays, and their bytes. `max_queued`: events
        that may wait for the thread. `heartbeat_s`: seconds of silence before an empty batch is
        sent; 0: never. `max_blocks`: blocks kept for snapshots, of those that are older than all
        kept batches; the oldest are left out beyond that. `int_hashes`: hashes are published as
        numbers of 64 bits, as vLLM does by default.

        Raises `ModuleNotFoundError` without pyzmq or msgspec, and `zmq.ZMQError` if an endpoint
        cannot be bound.
        """
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"publishing events needs {error.name}: pip install 'kvtier[events]'"
            ) from error
        self._zmq = zmq
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder()
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._int_hashes = int_hashes
        self._heartbeat_s = heartbeat_s
        self._max_queued = max_queued
        self.lifetime = uuid4().hex
        """Identifies this publisher. A consumer finds it in the answer to a status request."""
        self.first_seq = time.time_ns() // 1000
        """Sequence number of the first batch: microseconds since 1970, so that a later publisher
        begins above it."""
        self._next_seq = self.first_seq
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_batches = max(1, buffer_batches)
        self._buffer_bytes = buffer_bytes
        self._num_buffered = 0
        """Bytes in `_buffer`."""
        self._index = PublishedIndex(max_blocks)
        """What was stored when the last batch left `_buffer`."""
        self._queue: deque[Sequence[KVCacheEvent]] = deque()
        self._num_queued = 0
        self._has_lost = False
        self._lock = threading.Lock()  # never held during I/O or encoding
        self._num_events = self._num_lost = self._num_replays = self._num_snapshots = 0
        self._warned_at = -_WARN_EVERY_S
        self._is_closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[Any] | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pub = self._socket(zmq.PUB, endpoint)
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, replay_endpoint)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        # A consumer that does not read loses messages; it notices the gap, and asks again.
        socket.setsockopt(self._zmq.SNDHWM, 10 * self._buffer_batches + 1000)
        if "[" in endpoint:
            socket.setsockopt(self._zmq.IPV6, 1)
        socket.bind(endpoint)
        return socket

    # --- scheduler thread -----------------------------------------------------------------------

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish events as one batch, later. Never waits. The events must not change any more."""
        if not events or self._is_closing:
            return
        with self._lock:
            if self._num_queued + len(events) > self._max_queued:
                # Without these events nobody knows what is stored. After a clear, consumers know
                # too little, but nothing that is wrong.
                self._num_lost += self._num_queued + len(events)
                self._queue.clear()
                self._num_queued = 0
                self._has_lost = True
            else:
                self._queue.append(events)
                self._num_queued += len(events)
        os.eventfd_write(self._wake, 1)

    def figures(self) -> PublisherFigures:
        """What was published so far. Any thread."""
        return PublisherFigures(
            self._next_seq - self.first_seq,
            self._num_events,
            self._num_lost,
            self._num_replays,
            self._num_snapshots,
        )

    def close(self) -> None:
        """Publish what waits, and release the sockets. Batches that a consumer has not received
        yet may be lost."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.destroy(linger=200)
        os.close(self._wake)

    # --- the publisher's thread -----------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        self._send([{"type": "AllBlocksCleared"}])
        last_sent = time.monotonic()
        while True:
            is_last = self._is_closing
            for events in self._take():
                try:
                    self._send([wire for event in events for wire in self._wire_form(event)])
                except Exception:  # an extra key of an unknown type, for example
                    logger.exception("a batch of events is lost: consumers clear their index")
                    self._send([{"type": "AllBlocksCleared"}])
                last_sent = time.monotonic()
            if is_last:
                return
            silence = time.monotonic() - last_sent
            if self._heartbeat_s and silence >= self._heartbeat_s:
                self._send([])
                last_sent, silence = time.monotonic(), 0.0
            wait_ms = int((self._heartbeat_s - silence) * 1000) + 1 if self._heartbeat_s else None
            ready = dict(poller.poll(wait_ms))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._replay in ready:
                self._serve()

    def _take(self) -> Iterator[Sequence[KVCacheEvent]]:
        """The batches that wait."""
        with self._lock:
            batches, self._queue = self._queue, deque()
            self._num_queued = 0
            has_lost, self._has_lost = self._has_lost, False
        if has_lost:
            self._warn_of_loss()
            yield [AllBlocksCleared()]
        yield from batches

    def _send(self, events: list[dict[str, Any]]) -> None:
        payload = self._encoder.encode((time.time(), events, self._rank))
        seq = self._next_seq
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        self._buffer.append((seq, payload))
        self._next_seq = seq + 1
        self._num_events += len(events)
        self._num_buffered += len(payload)
        while len(self._buffer) > 1 and (
            len(self._buffer) > self._buffer_batches or self._num_buffered > self._buffer_bytes
        ):
            _, oldest = self._buffer.popleft()
            self._num_buffered -= len(oldest)
            self._index.apply(self._decoder.decode(oldest)[1])

    def _warn_of_loss(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "more than %d events waited to be published: they are lost, and consumers were "
                "told to clear their index. See what keeps the processor busy",
                self._max_queued,
            )

    # --- replays --------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._replay is not None
        zmq = self._zmq
        try:
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        if len(frames) != 3 or frames[1]:
            return  # not a request; answering could confuse a stranger's client
        client, _, request = frames
        try:
            if request == _STATUS:
                self._answer(client, _END, self._encoder.encode(self._status()))
            elif len(request) == 8:
                self._replay_from(client, int.from_bytes(request, "big"))
        except zmq.ZMQError:
            pass  # the consumer has gone, or does not read: it asks again

    def _answer(self, client: bytes, seq: bytes, payload: bytes) -> None:
        assert self._replay is not None
        self._replay.send_multipart(
            (client, b"", self._topic if payload else b"", seq, payload), self._zmq.NOBLOCK
        )

    def _status(self) -> dict[str, Any]:
        return {
            "lifetime": self.lifetime,
            "first_seq": self.first_seq,
            "first_kept_seq": self._buffer[0][0],
            "next_seq": self._next_seq,
            "heartbeat_s": self._heartbeat_s,
        }

    def _replay_from(self, client: bytes, start: int) -> None:
        self._num_replays += 1
        kept = self._buffer[0][0]
        if kept > self.first_seq and not kept <= start <= self._next_seq:
            self._num_snapshots += 1
            messages = list(self._index.snapshot(_SNAPSHOT_BLOCKS))
            for number, events in enumerate(messages):
                seq = kept - len(messages) + number
                payload = self._encoder.encode((time.time(), events, self._rank))
                self._answer(client, seq.to_bytes(8, "big"), payload)
            start = kept
        elif start > self._next_seq:
            start = kept
        for seq, payload in self._buffer:
            if seq >= start:
                self._answer(client, seq.to_bytes(8, "big"), payload)
        self._answer(client, _END, b"")

    # --- the wire format ------------------------------------------------------------------------

    def _hash(self, block_hash: bytes) -> int | bytes:
        return int.from_bytes(block_hash[-8:], "big") if self._int_hashes else block_hash

    def _wire_form(self, event: KVCacheEvent) -> Iterator[dict[str, Any]]:
        """The event as vLLM encodes it: one for each group, without fields that have their
        default."""
        if isinstance(event, AllBlocksCleared):
            yield {"type": "AllBlocksCleared"}
            return
        where = {
            name: value
            for name, value in (("locality", event.locality), ("ownership", event.tier))
            if value is not None
        }
        for group in dict.fromkeys(event.group_indices):
            hashes = [
                self._hash(block_hash)
                for block_hash, its in zip(event.block_hashes, event.group_indices, strict=True)
                if its == group
            ]
            if isinstance(event, BlockRemoved):
                yield {
                    "type": "BlockRemoved",
                    "block_hashes": hashes,
                    "medium": event.medium,
                    "group_idx": group,
                    **where,
                }
            else:
                yield self._stored(event, group, hashes, where)

    def _stored(
        self, event: BlockStored, group: int, hashes: list[int | bytes], where: dict[str, str]
    ) -> dict[str, Any]:
        parent = event.parent_block_hash
        wire: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
        if event.extra_keys is not None:
            wire["extra_keys"] = event.extra_keys
        wire["group_idx"] = group
        kind = None if event.group_kind is None else _KINDS.get(event.group_kind)
        if kind is not None:
            wire["kv_cache_spec_kind"] = kind
        if event.group_window is not None:
            wire["kv_cache_spec_sliding_window"] = event.group_window
        return wire | where
