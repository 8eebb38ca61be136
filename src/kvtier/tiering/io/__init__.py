"""What tiers that keep blocks in files share: pages, the work queue, and I/O threads (lanes)."""
