"""Seeing an engine's cache tensors on a CUDA device as pages at addresses."""

from __future__ import annotations

from typing import Any

from kvtier.base import CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.cpu.cuda.page_table import DeviceTensor
from kvtier.cpu.device_pages import require_pages, require_refs

__all__ = ["device_of", "device_tensors"]


def device_of(kv_caches: CanonicalKVCaches) -> Any:
    """The device that all tensors are on. Raises `ValueError` if they are on several."""
    devices = {canonical.tensor.device for canonical in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the caches are on {names}: give those of one device, one worker each")
    return devices.pop()


def device_tensors(kv_caches: CanonicalKVCaches) -> list[DeviceTensor]:
    """Where their pages are. Raises `ValueError` if a tensor does not consist of pages or a group
    refers to what is not there."""
    require_refs(kv_caches)
    return [_device_tensor(canonical) for canonical in kv_caches.tensors]


def _device_tensor(canonical: CanonicalKVCacheTensor) -> DeviceTensor:
    tensor, page = canonical.tensor, canonical.page_size_bytes
    item = tensor.element_size()
    row_bytes = tensor.shape[-1] * item if tensor.ndim else 0
    strides = tuple(stride * item for stride in tensor.stride())
    require_pages((*tensor.shape[:-1], row_bytes), strides, item, page)
    return DeviceTensor(tensor.data_ptr(), tensor.shape[0], strides[0], page)
