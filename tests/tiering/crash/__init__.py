"""The crash kit: engines that are killed at any moment, and an oracle that knows what must be left.

A *run* is several *lives* on one slab or root, all drawn from one seed. A life is one engine
process: it gets `Orders`, reports what it does, and ends with SIGKILL or a shutdown. The kit has
what is the same for every tier; `tests.tiering.disk.crash` and `tests.tiering.fs.crash` have the
rest:

    processes   forks lives, kills them, and collects their reports
    points      places in the code at which a life can be killed
    mutants     planted bugs that a run has to notice
    oracle      follows reports and raises `Violation`
    runs        how a run ended, and the command for runs
    checks      the tests
"""
