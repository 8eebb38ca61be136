"""All tests here go both ways."""

from tests.tiering.ways import _both_ways

__all__ = ["_both_ways"]
