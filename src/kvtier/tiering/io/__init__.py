"""What tiers that keep blocks in files share: pages, jobs, and threads with a kernel queue each."""
