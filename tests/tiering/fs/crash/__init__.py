"""The crash kit for the fs tier: lives that share one root."""
