"""`kvtier store`: what a tier keeps on disk, listed, counted, verified and cleared."""
