"""Several options that may be repeated, and whose order among each other counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

__all__ = ["ORDER", "InGivenOrder"]

ORDER = "kvtier.cli.vllm_config.tier_order"
"""Where, in the context's `meta`, stands the list of (name of the parameter, what was given)."""


class InGivenOrder(TyperCommand):
    """A command that remembers in which order options were given.

    The parser knows it, and what it hands to the command has one list for each option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called once, before the command's function."""
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[ORDER] = list(_pairs(values, [str(param.name) for param in order]))
        return super().parse_args(ctx, args)


def _pairs(values: dict[str, Any], names: list[str]) -> Iterator[tuple[str, str]]:
    num_seen: defaultdict[str, int] = defaultdict(int)
    for name in names:
        given = values.get(name)
        if isinstance(given, list):
            yield name, given[num_seen[name]]
            num_seen[name] += 1
