"""A consumer of KV-cache events that follows vLLM's protocol, and knows nothing of kvtier."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

__all__ = ["EventConsumer"]

Place = tuple[str | None, str | None, int | None]
"""Medium, owner and group."""


class EventConsumer:
    """Keeps an index, and asks for batches that it has missed."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        loses: Callable[[], bool] = lambda: False,
    ) -> None:
        """`loses`: asked for each batch that arrives; True: it counts as never received."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.setsockopt(zmq.RECONNECT_IVL, 10)
        self._live.connect(endpoint)
        self._asked = self._context.socket(zmq.DEALER)
        self._asked.setsockopt(zmq.RECONNECT_IVL, 10)
        self._asked.connect(replay_endpoint)
        self._loses = loses
        self.index: dict[Place, dict[int, dict[str, Any]]] = {}
        self.last_seq = -1
        self.num_replays = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read_until(self, is_enough: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Take in batches until there is enough."""
        deadline = time.monotonic() + timeout_s
        while not is_enough():
            assert time.monotonic() < deadline, f"read up to {self.last_seq}"
            self.read(0.05)

    def read(self, seconds: float = 0.0) -> None:
        """Take in the batches that are there. Waits for the first one, if there is none."""
        wait_ms = int(seconds * 1000)
        while self._live.poll(wait_ms):
            wait_ms = 0
            _, seq_bytes, payload = self._live.recv_multipart()
            if self._loses():
                continue
            seq = int.from_bytes(seq_bytes, "big")
            if seq > self.last_seq + 1:
                self._replay(self.last_seq + 1)
            if seq > self.last_seq:
                self._apply(payload)
                self.last_seq = seq

    def _replay(self, start: int) -> None:
        self.num_replays += 1
        self._asked.send_multipart((b"", start.to_bytes(8, "big")))
        while self._asked.poll(10_000):
            empty, _, seq_bytes, payload = self._asked.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(seq_bytes, "big", signed=True) == -1
                return
            seq = int.from_bytes(seq_bytes, "big")
            assert seq > self.last_seq
            self._apply(payload)
            self.last_seq = seq
        raise AssertionError("the replay has no end")

    def status(self) -> dict[str, Any]:
        """What kvtier's publisher says about itself."""
        self._asked.send_multipart((b"", b"status"))
        assert self._asked.poll(10_000)
        return dict(msgspec.msgpack.decode(self._asked.recv_multipart()[3]))

    def _apply(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.index.clear()
                continue
            place = (event["medium"], event.get("ownership"), event.get("group_idx"))
            here = self.index.setdefault(place, {})
            hashes = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                for block_hash in hashes:
                    here.pop(block_hash, None)
                continue
            size = event["block_size"]
            for number, block_hash in enumerate(hashes):
                here[block_hash] = {
                    "tokens": event["token_ids"][number * size : (number + 1) * size],
                    "parent": hashes[number - 1] if number else event["parent_block_hash"],
                    "kind": event.get("kv_cache_spec_kind"),
                    "locality": event.get("locality"),
                }

    def hashes(self, medium: str) -> set[int]:
        """The blocks of a medium, whatever their tier and group."""
        return {
            block_hash
            for (its, _, _), here in self.index.items()
            if its == medium
            for block_hash in here
        }
