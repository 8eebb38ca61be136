"""The example tier: the one to copy when writing a tier."""
