"""An engine that notes every key that vLLM gives the adapter, and every key that the adapter gives
kvtier's manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.e2e.vllm.scenarios.hints_and_events import HintedEngine

_OF_ONE_KEY = ("lookup",)
_OF_MANY_KEYS = (
    "lookup_prefix",
    "note_wanted",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "touch",
)
_FROM_VLLM = ("begin_prefix", "lookup", "prepare_load", "prepare_store", "complete_store")


class KeyWatchedEngine(HintedEngine):
    """Notes keys by the method that was called with them."""

    def __init__(self, model: str, kvtier: dict[str, Any], **engine_args: Any) -> None:
        super().__init__(model, kvtier, **engine_args)
        self._given: dict[str, set[str]] = {}
        self._passed_on: dict[str, set[str]] = {}
        adapter = self._engine._scheduler.connector.connector_scheduler.manager
        manager = adapter.inner
        for name in _FROM_VLLM:
            self._note(adapter, name, self._given, many=name not in _OF_ONE_KEY)
        for name in (*_OF_ONE_KEY, *_OF_MANY_KEYS):
            self._note(manager, name, self._passed_on, many=name not in _OF_ONE_KEY)
        self._note(manager, "note_prompt", self._passed_on, many=True)
        adapter._lookup = manager.lookup
        queue = manager.on_request_queued

        def on_request_queued(context: Any, find_blocks: Callable[[], Any], **named: Any) -> None:
            def find() -> Any:
                keys = find_blocks()
                self._passed_on.setdefault("on_request_queued", set()).update(
                    key.hex() for key in keys
                )
                return keys

            queue(context, find, **named)

        manager.on_request_queued = on_request_queued

    def _note(self, owner: Any, name: str, into: dict[str, set[str]], *, many: bool) -> None:
        call = getattr(owner, name)

        def noted(keys: Any, *arguments: Any, **named: Any) -> Any:
            if many:
                keys = keys if isinstance(keys, (list, set, frozenset)) else list(keys)
                into.setdefault(name, set()).update(key.hex() for key in keys)
            else:
                into.setdefault(name, set()).add(keys.hex())
            return call(keys, *arguments, **named)

        setattr(owner, name, noted)

    def seen(self) -> tuple[list[str], dict[str, list[str]]]:
        """All keys that vLLM has given since the last call, and those that the manager got."""
        given = set().union(*self._given.values())
        passed_on = {name: sorted(keys) for name, keys in self._passed_on.items()}
        self._given.clear()
        self._passed_on.clear()
        return sorted(given), passed_on
