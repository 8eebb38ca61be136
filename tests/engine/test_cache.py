"""Where keys and values stand in a rank's arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cpu.worker import device_pages
from kvtier.engine import EngineConfig, ModelConfig
from kvtier.engine.cache import KVCache, first_block_ids
from tests.engine.models import FULL, HYBRID

ENGINE = EngineConfig(block_tokens=(8, 4), num_blocks=(5, 30), token_budget=8, world_size=2)


def test_groups_share_arrays_and_no_block() -> None:
    assert first_block_ids(ENGINE) == (0, 5)
    caches = KVCache(HYBRID, ENGINE).canonical(1)
    # One layer looks at everything, three have a window; one KV head of 16 floats per rank.
    assert [len(refs) for refs in caches.group_data_refs] == [1, 3]
    token_bytes = 2 * 16 * 4
    assert [tensor.tensor.shape for tensor in caches.tensors] == [
        (35, 8 * token_bytes),
        (35, 4 * token_bytes),
        (35, 4 * token_bytes),
    ]
    assert [ref.page_size_bytes for ref in caches.group_data_refs[1]] == [4 * token_bytes] * 3
    assert len(device_pages(caches)) == 3


def test_what_is_written_is_in_the_pages_of_its_rank() -> None:
    cache = KVCache(HYBRID, ENGINE)
    keys = np.arange(3 * 2 * 16, dtype=np.float32).reshape(3, 2, 16)
    cache.write(1, 2, [-1, 7, 9], 6, keys, -keys)
    for rank in range(2):
        pages = cache.canonical(rank).tensors[2].tensor.view(np.float32).reshape(35, 2, 1, 4, 16)
        np.testing.assert_array_equal(pages[7, 0, 0, 2:], keys[:2, rank])
        np.testing.assert_array_equal(pages[9, 1, 0, 0], -keys[2, rank])
        assert np.count_nonzero(pages) == np.count_nonzero(keys[:, rank]) * 2


def test_what_is_not_there_is_read_as_zeros() -> None:
    cache = KVCache(HYBRID, ENGINE)
    keys = np.ones((8, 2, 16), np.float32)
    cache.write(0, 0, [3], 0, keys, keys)
    read_keys, read_values = cache.read(0, 0, [3], (2, 5), (0, 16))
    assert read_keys.shape == (2, 16, 16)
    assert read_keys[:, 2:5].all()
    assert np.count_nonzero(read_keys) == np.count_nonzero(read_values) == 2 * 3 * 16


@pytest.mark.parametrize(
    ("model", "engine", "complaint"),
    [
        (HYBRID, EngineConfig(), r"block_tokens=\(16,\): the model has 2"),
        (FULL, EngineConfig(world_size=4), "world_size=4 with num_kv_heads=2"),
        (FULL, EngineConfig(token_budget=0), "token_budget=0"),
        (
            HYBRID,
            EngineConfig(block_tokens=(8, 8), num_blocks=(9, 9), token_budget=64),
            "needs 21 blocks of 8 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    model: ModelConfig, engine: EngineConfig, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        engine.check_against(model)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"num_kv_heads": 3}, "num_heads=8 with num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"window": 8}, "give both, or neither"),
        ({"window": 0, "windowed_layers": (1,)}, "window=0"),
        ({"window": 8, "windowed_layers": (4,)}, r"names \[4\], but the layers are 0 to 3"),
    ],
)
def test_a_model_that_cannot_be_is_refused(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelConfig(**wrong)  # type: ignore[arg-type]
