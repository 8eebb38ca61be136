"""Pinning the shared region, so that the device reaches it without a copy in between."""

from __future__ import annotations

import logging
import resource
import time

from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["pin_region"]

logger = logging.getLogger(__name__)


def pin_region(region: SharedOffloadRegion, driver: CudaDriver) -> bool:
    """Pin all of a region for this process's device; False, and a warning, if it cannot be.

    Every rank does so for itself: ranks share the memory, but not their devices' mappings. Cells of
    a rank lie in all rows, so it is the whole region.
    """
    began = time.perf_counter()
    try:
        driver.register_host(region.address, region.size_bytes)
    except CudaError as error:
        logger.warning(
            "The shared region (%s) could not be pinned: %s. Blocks are copied through the "
            "driver's own buffers, many times slower than the bus, so offloading may not pay. %s",
            _told(region.size_bytes),
            error,
            _remedy(region.size_bytes),
        )
        return False
    logger.info(
        "Pinned the shared region, %s, in %.1f s",
        _told(region.size_bytes),
        time.perf_counter() - began,
    )
    return True


def _told(size_bytes: int) -> str:
    gibibytes = size_bytes / 2**30
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{size_bytes / 2**20:.1f} MiB"


def _remedy(size_bytes: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        return (
            f"This process may lock {limit} bytes of memory: raise that with `ulimit -l unlimited`,"
            " LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (Docker)"
        )
    return (
        "Its limit on locked memory does not seem to be the reason. Give a smaller "
        "cpu_bytes_to_use, or look for the driver's own words in the kernel log (dmesg)"
    )
