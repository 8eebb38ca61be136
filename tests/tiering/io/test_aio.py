"""Asynchronous reads and writes through the kernel: the right bytes, and errors by number."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvtier.tiering.io.aio import AioQueue, AioUnavailable, address_of

PAGE = 4096
DEPTH = 16


@pytest.fixture
def queue() -> Iterator[AioQueue]:
    queue = AioQueue(DEPTH, 4)
    yield queue
    queue.close()
    queue.close()  # a second call does nothing


@pytest.fixture(params=["page cache", "O_DIRECT"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(bytes(256 * PAGE))
    flags = os.O_RDWR | (os.O_DIRECT if request.param == "O_DIRECT" else 0)
    try:
        fd = os.open(path, flags)
    except OSError:
        pytest.skip("no O_DIRECT on this file system")
    yield fd
    os.close(fd)


def reap_all(queue: AioQueue) -> dict[int, int]:
    ended: dict[int, int] = {}
    while queue.num_in_flight:
        for tag, result in queue.reap():
            assert tag not in ended, "reported twice"
            ended[tag] = result
    return ended


def submit_all(queue: AioQueue, tags: list[int]) -> None:
    while tags:
        count, error = queue.submit(tags)
        assert not error
        tags = tags[count:]


def test_scattered_pieces_are_written_and_read_in_order(queue: AioQueue, fd: int) -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    content = os.urandom(len(memory))
    memory[:] = content
    base = address_of(memory)
    pieces = (base + 9 * PAGE, PAGE, base + 2 * PAGE, 3 * PAGE, base, PAGE)
    expected = content[9 * PAGE : 10 * PAGE] + content[2 * PAGE : 5 * PAGE] + content[:PAGE]
    queue.prepare(0, fd, True, 7 * PAGE, pieces)
    submit_all(queue, [0])
    assert reap_all(queue) == {0: 5 * PAGE}
    target = mmap.mmap(-1, 5 * PAGE)
    queue.prepare(3, fd, False, 7 * PAGE, (address_of(target), 5 * PAGE))
    submit_all(queue, [3])
    assert reap_all(queue) == {3: 5 * PAGE}
    assert target[:] == expected
    del pieces


def test_many_at_once_each_bring_their_own(queue: AioQueue, fd: int) -> None:
    chance = Random(5)
    memory = mmap.mmap(-1, DEPTH * PAGE)
    base = address_of(memory)
    for page in range(200):
        os.pwritev(fd, [_aligned(b"%04d" % page)], page * PAGE)
    for _ in range(20):
        places = chance.sample(range(200), DEPTH)
        for tag, place in enumerate(places):
            queue.prepare(tag, fd, False, place * PAGE, (base + tag * PAGE, PAGE))
        submit_all(queue, chance.sample(range(DEPTH), DEPTH))
        assert queue.num_in_flight == DEPTH
        assert reap_all(queue) == dict.fromkeys(range(DEPTH), PAGE)
        found = [memory[tag * PAGE : tag * PAGE + 4] for tag in range(DEPTH)]
        assert found == [b"%04d" % place for place in places]


def _aligned(start: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, PAGE)
    memory[: len(start)] = start
    return memory


def test_it_waits_for_as_many_as_are_wanted(queue: AioQueue, fd: int) -> None:
    memory = mmap.mmap(-1, 8 * PAGE)
    for tag in range(8):
        queue.prepare(tag, fd, False, tag * PAGE, (address_of(memory) + tag * PAGE, PAGE))
    submit_all(queue, list(range(8)))
    assert len(queue.reap(5)) >= 5
    assert len(queue.reap(100)) <= 3  # more than are in flight
    assert queue.reap() == []


def test_the_end_of_the_file_gives_fewer_bytes(queue: AioQueue, fd: int) -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    queue.prepare(0, fd, False, 254 * PAGE, (address_of(memory), 4 * PAGE))
    queue.prepare(1, fd, False, 999 * PAGE, (address_of(memory), PAGE))
    submit_all(queue, [0, 1])
    assert reap_all(queue) == {0: 2 * PAGE, 1: 0}


def test_a_bad_descriptor_is_refused_by_number(queue: AioQueue, fd: int) -> None:
    """The ones before it are started, and the ones behind it can be."""
    memory = mmap.mmap(-1, 3 * PAGE)
    base = address_of(memory)
    for tag, where in enumerate((fd, 10**6, fd)):
        queue.prepare(tag, where, False, 0, (base + tag * PAGE, PAGE))
    assert queue.submit([0, 1, 2]) == (1, 0)
    assert queue.submit([1, 2]) == (0, errno.EBADF)
    assert queue.submit([2]) == (1, 0)
    assert reap_all(queue) == {0: PAGE, 2: PAGE}


def test_memory_that_is_not_there_is_an_error_and_not_a_crash(queue: AioQueue, fd: int) -> None:
    queue.prepare(0, fd, False, 0, (0x1000, PAGE))
    count, error = queue.submit([0])
    results = reap_all(queue)
    assert error == errno.EFAULT or (count == 1 and results[0] in (-errno.EFAULT, 0))


def test_closing_waits_for_what_is_under_way(fd: int) -> None:
    memory = mmap.mmap(-1, DEPTH * PAGE)
    queue = AioQueue(DEPTH, 1)
    for tag in range(DEPTH):
        queue.prepare(tag, fd, True, tag * PAGE, (address_of(memory) + tag * PAGE, PAGE))
    submit_all(queue, list(range(DEPTH)))
    queue.close()
    memory.close()  # not used any more


def test_more_than_the_kernel_allows_is_refused_with_the_remedy() -> None:
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    with pytest.raises(AioUnavailable, match=r"fs\.aio-max-nr.*fewer I/O threads"):
        AioQueue(2 * most, 1)


def test_an_unknown_machine_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(AioUnavailable, match="pdp11"):
        AioQueue(4, 1)
