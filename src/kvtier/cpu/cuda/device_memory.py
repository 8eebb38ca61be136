"""Memory on the device that is nobody else's."""

from __future__ import annotations

import logging

import torch

from kvtier.cpu.cuda.driver import CudaDriver, CudaError

__all__ = ["DeviceMemory"]

logger = logging.getLogger(__name__)


class DeviceMemory:
    """Of the device that is current when it is made. Any thread.

    Not torch's: what that gives out while an engine makes its KV caches may belong to them, and is
    lost with their contents when the engine goes to sleep (vLLM's sleep mode).
    """

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Holds anything. Raises `CudaError`, with the remedy."""
        self._driver = driver
        try:
            self.address = driver.allocate(num_bytes)
        except CudaError:
            torch.cuda.empty_cache()  # it may have some to spare
            self.address = self._last_chance(num_bytes)
        self._is_free = False

    @classmethod
    def of(cls, driver: CudaDriver, content: memoryview) -> DeviceMemory:
        """Holds this, for all streams. Raises `CudaError`."""
        memory = cls(driver, content.nbytes)
        try:
            driver.upload(content, memory.address)
        except CudaError:
            memory.free()
            raise
        return memory

    @classmethod
    def zeros(cls, driver: CudaDriver, device: torch.device, num_bytes: int) -> DeviceMemory:
        """Of that device, so many bytes. Raises `CudaError`."""
        with torch.cuda.device(device):
            return cls.of(driver, memoryview(bytes(num_bytes)))

    def _last_chance(self, num_bytes: int) -> int:
        try:
            return self._driver.allocate(num_bytes)
        except CudaError as error:
            raise CudaError(
                f"{num_bytes} bytes of device memory are not to be had ({error}). Lower the "
                "engine's share of it (vLLM: --gpu-memory-utilization)"
            ) from error

    def free(self) -> None:
        """When nobody uses it any more. The thread has to do with the device. Idempotent."""
        if self._is_free:
            return
        self._is_free = True
        try:
            self._driver.free(self.address)
        except CudaError as error:  # a device that has failed has none any more
            logger.warning("Memory of the device could not be given back: %s", error)
