"""A process that cannot open anything more."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_more_descriptors"]


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """EMFILE for whoever opens something in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 16, hard))
    try:
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
