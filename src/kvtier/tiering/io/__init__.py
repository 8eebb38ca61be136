"""Shared by tiers that keep blocks in files: pages, the work queue, and I/O threads."""
