"""The valkey tier: blocks in a Valkey or Redis server, or a cluster of them."""
