"""Seeing an engine's cache tensors as arrays of pages, without a copy and without torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCaches, CanonicalKVCacheTensor

__all__ = ["device_pages", "is_on_cuda", "require_pages", "require_refs"]


def is_on_cuda(kv_caches: CanonicalKVCaches) -> bool:
    """Whether these are torch tensors on a CUDA device, the first of them at least."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    first = kv_caches.tensors[0].tensor if kv_caches.tensors else None
    return torch is not None and isinstance(first, torch.Tensor) and bool(first.is_cuda)


def device_pages(kv_caches: CanonicalKVCaches) -> list[NDArray[np.uint8]]:
    """The memory of every tensor as an array (num_blocks, page_size_bytes), with its own strides.

    Takes numpy arrays and torch tensors in host memory. Raises `TypeError` for any other, and
    `ValueError` if a tensor does not consist of pages or a group refers to what is not there.
    """
    require_refs(kv_caches)
    return [_pages(tensor) for tensor in kv_caches.tensors]


def require_refs(kv_caches: CanonicalKVCaches) -> None:
    """Raise `ValueError` if a group refers to a tensor, or to bytes of it, that is not there."""
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(kv_caches.tensors):
                raise ValueError(
                    f"group {group_idx} refers to tensor {ref.tensor_idx}, but there are "
                    f"{len(kv_caches.tensors)} tensors, counted from 0"
                )
            page = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if not 0 < ref.page_size_bytes <= page:
                raise ValueError(
                    f"group {group_idx} refers to {ref.page_size_bytes} bytes of each page of "
                    f"tensor {ref.tensor_idx}, whose pages have {page}"
                )


def _pages(canonical: CanonicalKVCacheTensor) -> NDArray[np.uint8]:
    array = _as_array(canonical.tensor)
    page = canonical.page_size_bytes
    require_pages(_shape_in_bytes(array), array.strides, array.itemsize, page)
    if not array.flags.writeable:
        raise ValueError("a canonical tensor is read-only: blocks must be loaded into it")
    return array.view(np.uint8)[:, :page]


def _shape_in_bytes(array: NDArray[Any]) -> tuple[int, ...]:
    return (*array.shape[:-1], array.shape[-1] * array.itemsize) if array.ndim else ()


def require_pages(
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, page_bytes: int
) -> None:
    """Raise `ValueError` if a tensor of that shape and those strides, both in bytes, does not
    consist of pages."""
    if len(shape) != 2 or not 0 < page_bytes <= shape[1]:
        raise ValueError(
            f"a canonical tensor of shape {shape} in bytes with page_size_bytes={page_bytes}: give "
            "one of shape (num_blocks, page_size_bytes or more)"
        )
    if page_bytes > item_bytes and strides[1] != item_bytes:
        raise ValueError(
            f"a canonical tensor with strides of {strides} bytes: give one in which the bytes of a "
            "page follow each other, so that the second stride is one element"
        )


def _as_array(tensor: Any) -> NDArray[Any]:
    if isinstance(tensor, np.ndarray):
        return tensor
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a canonical tensor is a {type(tensor).__module__}.{type(tensor).__qualname__}: give "
            "a numpy array or a torch tensor on the device 'cpu'"
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"a canonical tensor is on the device {str(tensor.device)!r}, but this worker copies "
            "within host memory: it takes numpy arrays and torch tensors on the device 'cpu'"
        )
    # As bytes first: numpy does not know all of torch's types.
    array: NDArray[Any] = tensor.detach().view(torch.uint8).numpy()
    return array
