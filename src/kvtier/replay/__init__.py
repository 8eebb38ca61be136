"""Request traces through the real managers, in virtual time: hits, bytes and times to first token.

`trace` reads a trace. `caches` builds the managers, with tiers that keep keys and no bytes, and
`device` is the engine's own prefix cache. `counting` serves the requests one after the other,
`engine` many at a time by a clock of its own. `calibration` measures this machine.
"""
