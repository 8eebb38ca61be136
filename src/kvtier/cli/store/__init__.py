"""`kvtier store`: lists, counts, verifies and clears what a tier keeps on disk."""
