"""The model is a transformer, and its bits do not depend on how it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.model import Span
from kvtier.engine.weights import TILE, Array, Product
from tests.engine.dense import dense_logits
from tests.engine.models import MODELS, Sequences, random_tokens, spans_of, whole

LENGTHS = st.integers(1, 100)
CUTS = st.lists(st.integers(0, 100), max_size=12)
NAMES = st.sampled_from(sorted(MODELS))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [1, 31, 33, 150])
def test_it_is_a_transformer(name: str, num_tokens: int) -> None:
    config = MODELS[name]
    tokens = random_tokens(num_tokens, num_tokens)
    expected = dense_logits(config, tokens)
    logits, _ = whole(config, tokens)
    np.testing.assert_allclose(logits, expected[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_token_counts(name: str) -> None:
    """Otherwise equal logits would prove nothing about the cache."""
    config = MODELS[name]
    tokens = random_tokens(1, 60)
    logits, _ = whole(config, tokens)
    # The last tokens reach it in any case; earlier ones through the layers that see them.
    for position in (0, 17, 40, 58, 59):
        changed = list(tokens)
        changed[position] = (changed[position] + 1) % 101
        assert whole(config, changed)[0].tobytes() != logits.tobytes()


@given(NAMES, LENGTHS, CUTS, st.integers(0, 2**16))
@settings(max_examples=60)
def test_any_chunks_give_the_same_bits(
    name: str, num_tokens: int, cuts: list[int], seed: int
) -> None:
    config = MODELS[name]
    tokens = random_tokens(seed, num_tokens)
    logits, kv = whole(config, tokens)
    sequences = Sequences(config, seed=seed)
    tables = sequences.tables(num_tokens)
    *others, last = spans_of(tokens, [cut for cut in cuts if cut < num_tokens], tables)
    for span in others:
        sequences.run(span)
    assert sequences.run(last)[0].tobytes() == logits.tobytes()
    assert sequences.kv(tables, num_tokens) == kv


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_gives_the_same_bits_at_every_token(name: str) -> None:
    config = MODELS[name]
    tokens = random_tokens(5, 70)
    sequences = Sequences(config)
    tables = sequences.tables(len(tokens))
    for position in range(len(tokens)):
        logits = sequences.run(Span([tokens[position]], position, tables))[0]
        assert logits.tobytes() == whole(config, tokens[: position + 1])[0].tobytes()
    assert sequences.kv(tables, len(tokens)) == whole(config, tokens)[1]


@given(NAMES, st.lists(st.tuples(LENGTHS, CUTS), min_size=2, max_size=3), st.integers(0, 2**16))
@settings(max_examples=40)
def test_neighbours_change_nothing(
    name: str, others: list[tuple[int, list[int]]], seed: int
) -> None:
    config = MODELS[name]
    sequences = Sequences(config, seed=seed)
    runs = []
    for index, (num_tokens, cuts) in enumerate(others):
        tokens = random_tokens(seed + index, num_tokens)
        tables = sequences.tables(num_tokens)
        fitting = [cut for cut in cuts if cut < num_tokens]
        runs.append((tokens, tables, spans_of(tokens, fitting, tables)))
    last: dict[int, Array] = {}
    for batch in zip_longest(*(spans for _, _, spans in runs)):
        present = [index for index, span in enumerate(batch) if span is not None]
        logits = sequences.run(*(span for span in batch if span is not None))
        last.update(zip(present, logits, strict=True))
    for index, (tokens, tables, _) in enumerate(runs):
        logits, kv = whole(config, tokens)
        assert last[index].tobytes() == logits.tobytes()
        assert sequences.kv(tables, len(tokens)) == kv


@given(NAMES, LENGTHS, st.integers(0, 99), st.integers(0, 2**16))
@settings(max_examples=40)
def test_kv_from_elsewhere_gives_the_same_bits(
    name: str, num_tokens: int, prefix: int, seed: int
) -> None:
    """A prefix that another sequence has computed, in the blocks of that sequence."""
    config = MODELS[name]
    shared = min(prefix, num_tokens - 1)
    tokens = random_tokens(seed, num_tokens)
    sequences = Sequences(config, seed=seed)
    tables = sequences.tables(num_tokens)
    sequences.run(Span([*tokens[:shared], 7], 0, tables))
    logits = sequences.run(Span(tokens[shared:], shared, tables))[0]
    assert (logits.tobytes(), sequences.kv(tables, num_tokens)) == (
        whole(config, tokens)[0].tobytes(),
        whole(config, tokens)[1],
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_change_nothing(world_size: int) -> None:
    config = MODELS["hybrid"]
    tokens = random_tokens(3, 90)
    sequences = Sequences(config, world_size)
    tables = sequences.tables(len(tokens))
    *others, last = spans_of(tokens, [13, 50, 51], tables)
    for span in others:
        sequences.run(span)
    logits, kv = whole(config, tokens)
    assert sequences.run(last)[0].tobytes() == logits.tobytes()
    assert sequences.kv(tables, len(tokens)) == kv


_PROGRAM = """
from hashlib import blake2b
from kvtier.engine import Engine, EngineConfig, ModelConfig
engine = Engine(ModelConfig(max_tokens=512), EngineConfig(token_budget={budget}))
[result] = engine.generate([list(range(250))], 3, keep_logits=True)
print(blake2b(b"".join(logits.tobytes() for logits in result.logits)).hexdigest())
"""


def test_neither_threads_nor_processes_change_anything() -> None:
    """With the sizes of the demo, whose products are large enough for BLAS to share out."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(budget=budget)],
            env=os.environ
            | {"OPENBLAS_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads, budget in ((1, 512), (2, 100), (4, 33))
    }
    assert len(digests) == 1


def test_a_window_needs_only_its_blocks() -> None:
    """Blocks behind the window may be gone, or hold anything."""
    config = MODELS["hybrid"]
    tokens = random_tokens(4, 80)
    sequences = Sequences(config)
    tables = sequences.tables(len(tokens))
    sequences.run(Span(tokens[:70], 0, tables))
    window_tokens = sequences.engine.block_tokens[1]
    first_needed = (70 - 24 + 1) // window_tokens
    tables[1][:first_needed] = [-1] * first_needed
    logits = sequences.run(Span(tokens[70:], 70, tables))[0]
    assert logits.tobytes() == whole(config, tokens)[0].tobytes()
    tables[1][first_needed] = -1
    with pytest.raises(RuntimeError, match="are needed"):
        sequences.run(Span(tokens[70:], 70, tables))


@given(
    st.integers(1, 300), st.integers(1, 130), st.integers(1, 5), st.integers(0, TILE - 1), st.data()
)
@settings(max_examples=60)
def test_a_row_of_a_product_depends_on_itself_and_its_place_alone(
    summands: int, columns: int, num_tiles: int, row: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    weight = generator.standard_normal((summands, columns), np.float32)
    product = Product(weight)
    tiles = generator.standard_normal((num_tiles, TILE, summands), np.float32)
    alone = np.full((1, TILE, summands), np.nan, np.float32)
    alone[0, row] = tiles[-1, row]
    expected = product(tiles)[-1, row]
    assert product(alone)[0, row].tobytes() == expected.tobytes()
    np.testing.assert_allclose(expected, tiles[-1, row] @ weight, rtol=0, atol=1e-3)


def test_greedy_output_is_varied() -> None:
    """A model that says the same thing for ever would hide a wrong cache."""
    config = MODELS["full"]
    tokens = random_tokens(9, 20)
    sequences = Sequences(config)
    tables = sequences.tables(100)
    logits = sequences.run(Span(tokens, 0, tables))[0]
    generated: list[int] = []
    for position in range(20, 60):
        generated.append(int(logits.argmax()))
        logits = sequences.run(Span([generated[-1]], position, tables))[0]
    assert len(set(generated)) > 15
