"""The mooncake tier: blocks in a Mooncake Store, a pool of memory that many hosts lend."""
