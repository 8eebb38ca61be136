"""The crash kit for the disk tier: lives on one slab, one after the other."""
