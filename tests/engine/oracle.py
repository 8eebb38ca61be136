"""The result of a request that has the engine to itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvtier.engine import Engine, EngineConfig, ModelConfig, RequestResult

_MOST_TOKENS = 12


@lru_cache(maxsize=1024)
def expected(
    model: ModelConfig, prompt: tuple[int, ...], num_tokens: int = _MOST_TOKENS
) -> RequestResult:
    """All at once, on an empty device with room for everything, and with blocks of other sizes."""
    num_groups = len(model.groups)
    engine = EngineConfig(
        block_tokens=(32,) * num_groups, num_blocks=(80,) * num_groups, token_budget=1024
    )
    return Engine(model, engine).generate([prompt], num_tokens, keep_logits=True)[0]


def assert_same(result: RequestResult, model: ModelConfig, prompt: Sequence[int]) -> None:
    """Tokens, and logits to the last bit."""
    num = len(result.token_ids)
    right = expected(model, tuple(prompt), max(num, _MOST_TOKENS))
    assert result.token_ids == right.token_ids[:num]
    assert result.logits is not None
    assert right.logits is not None
    assert [logits.tobytes() for logits in result.logits] == [
        logits.tobytes() for logits in right.logits[:num]
    ]
