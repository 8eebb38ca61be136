"""Memory on the device that is nobody else's."""

from __future__ import annotations

from contextlib import suppress

from kvtier.cpu.cuda.driver import CudaDriver, CudaError

__all__ = ["DeviceMemory", "zeros_of"]


class DeviceMemory:
    """Of the device that is current when it is made. Any thread.

    Not torch's: what that gives out while an engine makes its KV caches may belong to them, and is
    lost with their contents when the engine goes to sleep (vLLM's sleep mode).
    """

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Raises `CudaError`."""
        self._driver = driver
        self.address = driver.allocate(num_bytes)
        self._is_free = False

    def write(self, content: memoryview) -> None:
        """Returns when it is there, for all streams."""
        self._driver.upload(content, self.address)

    def free(self) -> None:
        """While nobody uses it any more. Idempotent."""
        if not self._is_free:
            self._is_free = True
            with suppress(CudaError):  # a device that has failed has none any more
                self._driver.free(self.address)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process there may be no driver any more
            self.free()


def zeros_of(driver: CudaDriver, num_bytes: int) -> DeviceMemory:
    """So many bytes, all of them zero. Raises `CudaError`."""
    memory = DeviceMemory(driver, num_bytes)
    memory.write(memoryview(bytes(num_bytes)))
    return memory
