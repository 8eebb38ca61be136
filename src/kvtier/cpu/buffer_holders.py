"""Finds the objects that still refer to mapped memory, to name them in a warning. Best effort.

The garbage collector does not track arrays, so it cannot list the arrays of that memory. The search
instead visits every object that the collector tracks and every running function, and keeps those
that refer to an array or a memoryview of the memory.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["describe_holders"]

_MAX_NAMED = 8
_MAX_HOPS = 3
_PLAIN_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Types of objects between the memory and its holder. The warning does not name them.
_BUFFER_TYPES = ("memoryview", "managedbuffer")


class _Local(NamedTuple):
    """A local variable of a function that is running."""

    value: Any
    place: str


def describe_holders(address: int, length: int) -> list[str]:
    """One phrase for each object that refers to memory from `address` to `address + length`.

    Slow, because it visits every live object: call it only if the memory cannot be unmapped because
    an object still refers to it.
    Reads no attributes of the objects, not even `__class__`, because that may run code or raise.
    """
    running = list(_locals_of_running_functions())
    phrases: dict[str, None] = {}
    for local in running:
        if address <= _address_of(local.value) < address + length:
            phrases[f"{type(local.value).__name__} {local.place}"] = None
    for container in gc.get_objects():
        if type(container).__name__ in _BUFFER_TYPES or _is_of_this_walk(container):
            continue
        for held in gc.get_referents(container):
            if address <= _address_of(held) < address + length:
                phrases[f"{type(held).__name__} in {_place(container, held, running)}"] = None
    named = list(phrases)
    if len(named) > _MAX_NAMED:
        return [*named[:_MAX_NAMED], f"{len(named) - _MAX_NAMED} more"]
    return named


def _is_of_this_walk(container: Any) -> bool:
    kind = type(container)
    if kind is FrameType:
        return bool(container.f_code.co_filename == __file__)
    return kind is _Local


def _locals_of_running_functions() -> Iterator[_Local]:
    thread_names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            # Skips module code: its variables are found through the module object.
            if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename != __file__:
                place = (
                    f"in {code.co_qualname}() ({code.co_filename}:{frame.f_lineno}, thread "
                    f"{thread_names.get(ident, ident)})"
                )
                for name, value in _take_locals(frame).items():
                    yield _Local(value, f"{name!r} {place}")
            frame = frame.f_back


def _take_locals(frame: FrameType) -> dict[str, Any]:
    snapshot = frame.f_locals
    values = dict(snapshot)
    if sys.version_info < (3, 13):
        # Before Python 3.13 the frame keeps the snapshot, which would itself become a holder.
        snapshot.clear()
    return values


def _address_of(candidate: Any) -> int:
    """The data address of an array, a memoryview or a tensor; -1 for any other object."""
    kind = type(candidate)
    try:
        if kind is memoryview:
            return int(np.asarray(candidate).ctypes.data)
        if issubclass(kind, np.ndarray):
            return int(candidate.ctypes.data)
        if kind.__name__ == "Tensor" and kind.__module__ == "torch":
            return int(candidate.data_ptr())
    except (ValueError, TypeError, RuntimeError):
        pass  # a released view, a format that numpy does not support, or no storage
    return -1


def _place(container: Any, held: Any, running: list[_Local]) -> str:
    """Describe where `container` is: in which plain containers, up to an object with a name."""
    hops = []
    for _ in range(_MAX_HOPS):
        owner = _owner_of_attributes(container) if type(container) is dict else container
        if type(owner) not in _PLAIN_CONTAINERS:
            hops.append(_qualified_name(owner) + _attribute_suffix(owner, held))
            break
        hops.append(f"a {type(container).__name__}")
        for local in running:
            if local.value is container:
                return f"{' in '.join(hops)} {local.place}"
        held = container
        container = _named_referrer_of(container)
        if container is None:
            break
    return " in ".join(hops)


def _named_referrer_of(container: Any) -> Any:
    for referrer in gc.get_referrers(container):
        # Of the plain containers, only dicts count: a list or a tuple may belong to this search.
        kind = type(referrer)
        if kind is dict or kind not in (FrameType, _Local, *_PLAIN_CONTAINERS):
            return referrer
    return None


def _owner_of_attributes(attributes: dict[str, Any]) -> Any:
    for referrer in gc.get_referrers(attributes):
        if _attributes_of(referrer) is attributes:
            return referrer
    return attributes


def _attributes_of(owner: Any) -> Any:
    """The object's `__dict__`, read without running code of its class."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None


def _qualified_name(owner: Any) -> str:
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return str(owner.__name__)
    if kind is FrameType:
        return f"the frame of {owner.f_code.co_qualname}(), which a traceback keeps"
    return f"{kind.__module__}.{kind.__qualname__}"


def _attribute_suffix(owner: Any, held: Any) -> str:
    attributes = _attributes_of(owner)
    if type(attributes) is dict:
        for name, value in attributes.items():
            if value is held:
                return f".{name}"
    return ""
