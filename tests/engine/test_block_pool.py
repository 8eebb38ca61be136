"""Users of blocks, and the order of reuse."""

from __future__ import annotations

from kvtier.engine.block_manager import BlockPool


def test_blocks_have_the_ids_of_their_group() -> None:
    pool = BlockPool(first_id=10, num_blocks=3)
    assert sorted(pool.allocate() for _ in range(3)) == [10, 11, 12]
    assert pool.num_unused == 0


def test_a_released_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(0, 1)
    block = pool.allocate()
    pool.cache(block, b"a")
    pool.release([block])
    assert pool.find(b"a") == block
    assert pool.allocate() == block
    assert pool.find(b"a") is None
    assert pool.num_cached == 0


def test_a_found_block_has_several_users() -> None:
    pool = BlockPool(0, 2)
    block = pool.allocate()
    pool.cache(block, b"a")
    pool.use(block)
    pool.release([block])
    assert pool.num_unused == 1
    pool.release([block])
    assert pool.num_unused == 2


def test_the_longest_unused_is_reused_first_and_the_worthless_before_it() -> None:
    pool = BlockPool(0, 4)
    a, b, c, nothing = (pool.allocate() for _ in range(4))
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.cache(block, name)
    pool.release([b, a, c, nothing])
    pool.use(b)
    pool.release([b])
    assert [pool.allocate() for _ in range(4)] == [nothing, a, c, b]


def test_the_first_of_two_equal_blocks_is_found() -> None:
    pool = BlockPool(0, 2)
    first, second = pool.allocate(), pool.allocate()
    pool.cache(first, b"a")
    pool.cache(second, b"a")
    assert pool.find(b"a") == first
    pool.release([second])
    assert pool.allocate() == second
    assert pool.find(b"a") == first


def test_dropping_the_cache_leaves_users_alone() -> None:
    pool = BlockPool(0, 2)
    block = pool.allocate()
    pool.cache(block, b"a")
    pool.drop_cache()
    assert pool.find(b"a") is None
    assert pool.num_unused == 1
    pool.cache(block, b"b")
    assert pool.find(b"b") == block
