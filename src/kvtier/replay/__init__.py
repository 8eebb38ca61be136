"""Request traces through the real managers, in virtual time: hits, bytes and times to first token.

`trace` reads a trace. `caches` builds the managers, with tiers that keep keys and no bytes, and the
engine's own cache above them. `engine` serves the requests, with or without time. `calibration`
measures this machine. `plan` replays many sizes.
"""
