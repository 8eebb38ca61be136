"""Encodes events as this vLLM does. Runs in vLLM's process."""

from __future__ import annotations

from typing import Any


def encoded(batches: list[tuple[float, list[dict[str, Any]]]]) -> list[str]:
    """These batches in hexadecimal digits. For each: its time, and for each event the fields and
    the type. Fields that this release does not have are left out."""
    return [_encoded(ts, events) for ts, events in batches]


def _encoded(ts: float, events: list[dict[str, Any]]) -> str:
    import msgspec
    from vllm.distributed import kv_events

    made = []
    for event in events:
        cls = getattr(kv_events, event["type"])
        known = {name: event[name] for name in cls.__struct_fields__ if name in event}
        if "extra_keys" in known:
            known["extra_keys"] = [list(map(_as_sent, keys)) for keys in known["extra_keys"]]
        made.append(cls(**known))
    batch = kv_events.KVEventBatch(ts=ts, events=made, data_parallel_rank=0)
    return bytes(msgspec.msgpack.encode(batch)).hex()


def _as_sent(key: Any) -> Any:
    return bytes.fromhex(key["hex"]) if isinstance(key, dict) else key


def framing() -> dict[str, Any]:
    """How this vLLM answers a replay: the frames that a consumer gets, in hexadecimal digits."""
    import tempfile
    import time

    import zmq
    from vllm.distributed import kv_events

    with tempfile.TemporaryDirectory() as folder:
        publisher = kv_events.ZmqEventPublisher(
            0, f"ipc://{folder}/events", f"ipc://{folder}/replay"
        )
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.connect(f"ipc://{folder}/replay")
            publisher.publish(kv_events.KVEventBatch(ts=1.5, events=[]))
            frames: list[list[bytes]] = []
            while len(frames) < 2:  # until the batch was sent
                asking.send_multipart((b"", bytes(8)))
                frames = []
                while not frames or frames[-1][-1]:
                    assert asking.poll(10_000)
                    frames.append(asking.recv_multipart())
                time.sleep(0.05)
        publisher.shutdown()
    return {"frames": [[frame.hex() for frame in answer] for answer in frames]}
