"""`kvtier demo`: the reference engine, with and without offloading, on this machine."""
