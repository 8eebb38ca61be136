"""The engine's own prefix cache: which blocks stay on the device."""

from __future__ import annotations

import pytest

from kvtier.replay.caches import DeviceCache
from tests.replay.oracle import Lru, some_requests
from tests.trace_replay import key_of


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_blocks", [12, 40, 100])
def test_one_request_at_a_time_has_the_hits_of_an_independent_lru(
    seed: int, num_blocks: int
) -> None:
    device, lru = DeviceCache(num_blocks), Lru(num_blocks)
    for request in some_requests(seed, 400, longest=10):
        keys = request.keys
        expected = next((n for n, key in enumerate(keys) if key not in lru.keys), len(keys))
        assert device.num_hits(keys) == expected
        device.release(device.hold(keys))
        lru.write(keys, keys)
        lru.use(keys)
    assert device.num_evicted == lru.num_written - len(lru.keys)


def test_a_tail_leaves_before_its_head() -> None:
    device = DeviceCache(4)
    prompt = [key_of(n) for n in range(4)]
    device.release(device.hold(prompt))
    device.hold([key_of(9)])
    assert device.num_hits(prompt) == 3


def test_what_running_requests_hold_stays_and_others_get_no_room() -> None:
    device = DeviceCache(3)
    running, other = [key_of(1), key_of(2)], [key_of(3), key_of(4)]
    held = [device.hold(running), device.hold(running)]
    assert device.hold(other) == other[:1]
    assert (device.num_hits(running), device.num_hits(other)) == (2, 1)
    device.release(held[0])
    device.release(other[:1])
    assert device.hold([key_of(5), key_of(6)]) == [key_of(5)]
    assert device.num_hits(running) == 2  # the second request still runs
    device.release(held[1])
    assert device.hold([key_of(7)]) == [key_of(7)]
    assert device.num_hits(running) == 1
