"""Seeing an engine's cache tensors as arrays of pages, without a copy and without torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCaches, CanonicalKVCacheTensor

__all__ = ["device_pages"]


def device_pages(kv_caches: CanonicalKVCaches) -> list[NDArray[np.uint8]]:
    """The memory of every tensor as an array (num_blocks, page_size_bytes), with its own strides.

    Takes numpy arrays and torch tensors in host memory. Raises `TypeError` for any other, and
    `ValueError` if a tensor does not consist of pages or a group refers to what is not there.
    """
    _check_refs(kv_caches)
    return [_pages(tensor) for tensor in kv_caches.tensors]


def _check_refs(kv_caches: CanonicalKVCaches) -> None:
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
    if array.ndim != 2 or array.itemsize != 1 or not 0 < page <= array.shape[1]:
        raise ValueError(
            f"a canonical tensor of shape {array.shape} and type {array.dtype} with "
            f"page_size_bytes={page}: give an array of bytes (int8 or uint8) of shape "
            "(num_blocks, page_size_bytes or more)"
        )
    if page > 1 and array.strides[1] != 1:
        raise ValueError(
            f"a canonical tensor with strides {array.strides}: give one in which the bytes of a "
            "page follow each other, so that the second stride is 1"
        )
    if not array.flags.writeable:
        raise ValueError("a canonical tensor is read-only: blocks must be loaded into it")
    return array[:, :page].view(np.uint8)


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
