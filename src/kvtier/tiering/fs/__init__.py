"""The fs tier: one sealed file per block in a directory that several engines share."""
