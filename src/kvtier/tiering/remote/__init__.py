"""What tiers on servers have in common: the scheduler's side, the I/O threads, the uses."""
