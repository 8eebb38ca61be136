"""Whether answers are right, and came from where they should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Protocol

from kvtier.cli.demo.report import Moved, PhaseRow
from kvtier.cli.demo.server import Served
from kvtier.cli.demo.settings import Prompt, reusable
from kvtier.engine import RequestResult

__all__ = ["Offloader", "References", "Source", "is_identical", "problem_of", "row_of"]

References = Mapping[Prompt, Served]
"""The same prompts, answered without offloading."""


class Source(Enum):
    """Where the reusable part of a prompt should come from."""

    COMPUTED = "computed"
    DEVICE = "the device cache"
    HOST = "host memory"
    TIER = "a tier"


class Offloader(Protocol):
    """What has to be known of an engine to count what it moved."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def tier_types(self) -> Sequence[str]:
        """In lookup order."""


def is_identical(served: Served, references: References) -> bool:
    """Tokens, and logits to the last bit."""
    right = references[served.prompt].result
    return served.result.token_ids == right.token_ids and _bits(served.result) == _bits(right)


def _bits(result: RequestResult) -> list[bytes]:
    assert result.logits is not None
    return [logits.tobytes() for logits in result.logits]


def problem_of(served: Served, source: Source) -> str | None:
    """What is wrong with where a prompt came from; None if nothing is."""
    result = served.result
    wanted = 0 if source is Source.COMPUTED else reusable(served.prompt)
    on_device = wanted if source is Source.DEVICE else 0
    found = (result.num_device_tokens, result.num_loaded_tokens)
    has_others = {
        Source.COMPUTED: served.host_blocks + sum(served.tier_blocks),
        Source.DEVICE: served.host_blocks + sum(served.tier_blocks),
        Source.HOST: sum(served.tier_blocks),
        Source.TIER: served.host_blocks,
    }[source]
    if found == (on_device, wanted - on_device) and not has_others:
        return None
    return (
        f"{wanted} tokens should have come from {source.value}"
        if wanted
        else "all tokens should have been computed"
    ) + (
        f", but {found[0]} came from the device cache and {found[1]} were loaded: "
        f"{served.host_blocks} blocks of host memory and {sum(served.tier_blocks)} of tiers"
    )


def row_of(
    name: str,
    title: str,
    all_served: Sequence[Served],
    references: References,
    engine: Offloader,
    source: Source | None,
) -> PhaseRow:
    """One phase. `source`: where all of it should come from; None if that is judged elsewhere."""
    problems = []
    if source is not None:
        problems = [p for p in (problem_of(served, source) for served in all_served) if p]
    size = engine.block_bytes
    device, host = (
        sum(served.device_blocks for served in all_served),
        sum(served.host_blocks for served in all_served),
    )
    by_tier = [sum(blocks) for blocks in zip(*(s.tier_blocks for s in all_served), strict=True)]
    return PhaseRow(
        name=name,
        title=title,
        prompts=len(all_served),
        cold_s=median(references[served.prompt].first_token_s for served in all_served),
        first_token_s=median(served.first_token_s for served in all_served),
        is_warm=source is not Source.COMPUTED,
        device=Moved("device cache", device, device * size),
        host=Moved("host memory", host, host * size),
        tiers=[
            Moved(tier_type, blocks, blocks * size)
            for tier_type, blocks in zip(engine.tier_types, by_tier, strict=True)
        ],
        identical=all(is_identical(served, references) for served in all_served),
        problems=list(dict.fromkeys(problems)),
    )
