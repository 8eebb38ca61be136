"""The disk tier: one preallocated slab file of equal slots on a local disk, owned by one engine."""
