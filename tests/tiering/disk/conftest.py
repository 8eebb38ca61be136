"""All tests here run with bounce buffers and zero-copy."""

from tests.tiering.ways import _both_ways

__all__ = ["_both_ways"]
