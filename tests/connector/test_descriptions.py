"""What is remembered of offloaded blocks for routers, and kept with them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import Medium, OffloadingEvent, OffloadKey, make_offload_key
from kvtier.connector.descriptions import (
    BlockDescription,
    DescribedRun,
    DescriptionBook,
    decode,
    encode,
)
from kvtier.connector.events import EventStream, StoredBlocks


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def run_of(first: int, num_blocks: int, tokens_per_block: int) -> DescribedRun:
    return DescribedRun(
        array("I", range(num_blocks * tokens_per_block)),
        [number.to_bytes(32, "big") for number in range(first, first + num_blocks)],
        None,
        1,
        tokens_per_block,
        "full",
    )


hashes = st.binary(min_size=16, max_size=16)
extra = st.none() | st.lists(st.text() | st.binary() | st.integers(-(2**53), 2**53), max_size=3)


@st.composite
def descriptions(draw: st.DrawFn) -> BlockDescription:
    num_blocks = draw(st.integers(1, 4))
    size = draw(st.integers(1, 20))
    num_tokens = num_blocks * size
    return BlockDescription(
        draw(st.lists(hashes, min_size=num_blocks, max_size=num_blocks)),
        draw(st.none() | hashes),
        array(
            "I", draw(st.lists(st.integers(0, 2**32 - 1), min_size=num_tokens, max_size=num_tokens))
        ),
        size,
        draw(st.none() | st.text()),
        draw(st.none() | st.integers(1, 10**6)),
        draw(st.none() | st.text()),
        draw(st.none() | st.integers(0, 100)),
        draw(st.none() | st.lists(extra, min_size=num_blocks, max_size=num_blocks)),
    )


@given(descriptions())
def test_a_description_survives_being_stored(block: BlockDescription) -> None:
    stored_key = make_offload_key(block.block_hashes[-1], 3)
    assert decode(stored_key, encode(block)) == block


@given(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.booleans())
def test_a_run_encodes_each_of_its_blocks(
    per_chunk: int, num_chunks: int, has_parent: bool, has_extra: bool
) -> None:
    num_blocks = per_chunk * num_chunks
    run = DescribedRun(
        array("I", range(4 * num_blocks)),
        [number.to_bytes(16, "big") for number in range(num_blocks)],
        b"the block before" if has_parent else None,
        per_chunk,
        4,
        "full",
        extra_keys=[["salt"], *[None] * (num_blocks - 1)] if has_extra else None,
    )
    for chunk in range(num_chunks):
        last = run.block_hashes[(chunk + 1) * per_chunk - 1]
        assert decode(make_offload_key(last, 0), run.encoded(chunk)) == run[chunk]


@given(descriptions(), st.data())
def test_damage_is_no_error(block: BlockDescription, data: st.DataObject) -> None:
    stored_key = make_offload_key(block.block_hashes[-1], 0)
    whole = bytearray(encode(block))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    decode(stored_key, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@given(st.binary(max_size=200))
def test_other_bytes_are_no_description(data: bytes) -> None:
    found = decode(key(1), data)
    assert found is None or found.block_hashes[-1] == key(1)[:-4]


def test_a_book_keeps_what_fits_into_host_memory_and_not_much_more() -> None:
    book = DescriptionBook(num_tokens=0)
    per_run, size = 1 << 10, 1 << 7
    num_runs = 64  # of 131,072 tokens each: four times the size of a half
    for number in range(num_runs):
        first = number * per_run
        book.add([key(first + n) for n in range(per_run)], run_of(first, per_run, size))
    kept = [number for number in range(num_runs * per_run) if book.find(key(number)) is not None]
    assert kept == list(range(kept[0], num_runs * per_run))
    assert (1 << 21) // size <= len(kept) <= 2 * (1 << 21) // size + per_run
    run, chunk = book.find(key(kept[-1])) or (run_of(0, 1, 1), 0)
    found = run[chunk]
    assert found.parent == key(kept[-2])[:-4]
    assert list(found.token_ids) == list(range((per_run - 1) * size, per_run * size))


def test_a_block_described_by_an_earlier_engine_comes_after_its_parent_from_a_request() -> None:
    """Consumers drop a block whose parent they do not know."""
    book = DescriptionBook()
    book.add([key(0), key(1)], run_of(0, 2, 4))
    child = run_of(2, 1, 4)
    child.parent = (1).to_bytes(32, "big")
    stream = EventStream(book, names_tiers=False, keeps_residences=False)
    event = OffloadingEvent(
        [key(0), key(1), key(2)],
        Medium.STORAGE,
        removed=False,
        descriptions=[None, None, child[0]],
    )
    (stored,) = stream.read([event])
    assert isinstance(stored, StoredBlocks)
    reported = [name for _, block in stored.described for name in block.block_hashes]
    assert reported == [number.to_bytes(32, "big") for number in range(3)]
