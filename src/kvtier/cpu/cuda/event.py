"""Marks in streams."""

from __future__ import annotations

from contextlib import suppress

from kvtier.cpu.cuda.driver import CudaDriver

__all__ = ["Event"]


class Event:
    """As torch's, but for this: of what is done with it, only `synchronize` lets go of the
    interpreter, and whoever lets go of it in the middle of a job may have to wait for milliseconds
    until it goes on.

    Of the device that is current when it is made. Any thread.
    """

    def __init__(self, driver: CudaDriver, *, is_timed: bool = False) -> None:
        self._driver = driver
        self._handle = driver.create_event(is_timed=is_timed)

    def record(self, stream: int) -> None:
        self._driver.record_event(self._handle, stream)

    def hold(self, stream: int) -> None:
        """Have a stream wait for the last record; not at all if there is none."""
        self._driver.wait_event(stream, self._handle)

    def is_reached(self) -> bool:
        """Whether all is done that was given to the stream before the last record."""
        return self._driver.is_reached(self._handle)

    def synchronize(self) -> None:
        """Return when it is reached."""
        self._driver.synchronize_event(self._handle)

    def seconds_since(self, start: Event) -> float:
        return self._driver.seconds_between(start._handle, self._handle)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process there may be no driver any more
            self._driver.destroy_event(self._handle)
