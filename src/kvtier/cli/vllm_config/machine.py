"""Where the checks look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

__all__ = ["Machine"]

_NVIDIA_GPU = re.compile(r"nvidia\d+")
_NAMES_OF_OTHERS = ("kfd", "accel", "habanalabs", "davinci_manager")
"""In /dev: of AMD's GPUs, and of accelerators that are none."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as its files show it."""

    shared_memory: Path = Path("/dev/shm")
    devices: Path = Path("/dev")
    process_status: Path = Path("/proc/self/status")
    cgroup_membership: Path = Path("/proc/self/cgroup")
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    environment: Mapping[str, str] = field(default_factory=lambda: environ)

    @property
    def num_nvidia_gpus(self) -> int:
        """As many as a process in this container can open."""
        return sum(_NVIDIA_GPU.fullmatch(path.name) is not None for path in self.devices.iterdir())

    @property
    def other_accelerators(self) -> list[str]:
        return [name for name in _NAMES_OF_OTHERS if (self.devices / name).exists()]
