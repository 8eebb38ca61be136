"""The obj tier: blocks in an object store."""
