"""A process that has run out of file descriptors."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_more_descriptors"]

_REST_S = 0.5
"""Threads that had a file open when the limit was set have closed it by then."""


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Every open in this process fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 16, hard))
    try:
        last_taken = time.monotonic()
        while time.monotonic() < last_taken + _REST_S:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
                last_taken = time.monotonic()
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
