"""How many tokens of a request can be loaded, over all of its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import LookupResult

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager, OffloadKey
    from kvtier.connector.geometry import Geometry
    from kvtier.connector.request_state import RequestGroupState, RequestOffloadState


class Match(NamedTuple):
    """The answer."""

    end: int
    """Tokens of the request, from its start, that could be on the device. At most what is there
    already: no match."""
    is_pending: bool
    """Whether some of it is not known, or not readable, yet."""


class DeviceRange(NamedTuple):
    """The device blocks of one group that a load fills, and what it fills them with."""

    first_block: int
    end_block: int
    keys: list[OffloadKey]


def device_range(state: RequestGroupState, start: int, end: int) -> DeviceRange:
    """What has to be loaded of a group, so that a request can go on at `end`, having `start`."""
    geometry = state.geometry
    first_token = max(start, geometry.first_needed_token(end))
    first_block = first_token // geometry.tokens_per_block
    end_block = -(-end // geometry.tokens_per_block)
    first_chunk = first_block // geometry.blocks_per_chunk
    end_chunk = -(-end_block // geometry.blocks_per_chunk)
    return DeviceRange(first_block, end_block, state.keys[first_chunk:end_chunk])


class Matcher:
    """Asks the manager. Scheduler thread only."""

    def __init__(self, manager: OffloadingManager, geometry: Geometry) -> None:
        self._manager = manager
        self._alignment = geometry.alignment

    def match(self, state: RequestOffloadState, start: int, limit: int) -> Match:
        """The longest match that begins at `start` tokens and has at most `limit`.

        Groups that need all earlier tokens come first: they bound the others. A group with a window
        may shorten the match, and then the others have to fit the shorter one.
        """
        prefixes = [group for group in state.group_states if group.geometry.is_prefix]
        end, is_pending = self._match_prefixes(prefixes, state, start, self._aligned(limit))
        windowed = [group for group in state.group_states if not group.geometry.is_prefix]
        while end > start:
            before, windows_pending = end, False
            for group in windowed:
                matched = self._match_window(group, state, start, end)
                end = self._aligned(matched.end)
                windows_pending = windows_pending or matched.is_pending
                if end <= start:
                    return Match(end, is_pending=False)
            if end == before:
                return Match(end, is_pending or windows_pending)
            if is_pending:
                # What is not known may be behind the end.
                end, is_pending = self._match_prefixes(prefixes, state, start, end)
        return Match(end, is_pending)

    def _match_prefixes(
        self, groups: list[RequestGroupState], state: RequestOffloadState, start: int, end: int
    ) -> Match:
        """The same for the groups that need all earlier tokens, up to `end`."""
        is_pending = False
        for group in groups:
            if end > start:
                matched = self._match_prefix(group, state, start, end)
                end = self._aligned(matched.end)
                is_pending = is_pending or matched.is_pending
        return Match(end, is_pending)

    def _aligned(self, tokens: int) -> int:
        return tokens // self._alignment * self._alignment

    def _match_prefix(
        self, group: RequestGroupState, state: RequestOffloadState, start: int, end: int
    ) -> Match:
        per_chunk = group.geometry.tokens_per_chunk
        first = start // per_chunk
        keys = group.keys[first : end // per_chunk]
        num_hits, is_final = self._manager.lookup_prefix(keys, state.req_context)
        return Match((first + num_hits) * per_chunk, not is_final)

    def _match_window(
        self, group: RequestGroupState, state: RequestOffloadState, start: int, end: int
    ) -> Match:
        """The longest match up to `end` whose whole window is there, looked up backwards."""
        per_chunk = group.geometry.tokens_per_chunk
        is_pending = False
        while end > start:
            needed = max(start, group.geometry.first_needed_token(end))
            for chunk in range(end // per_chunk - 1, needed // per_chunk - 1, -1):
                result = self._manager.lookup(group.keys[chunk], state.req_context)
                if result is LookupResult.MISS:
                    # No window that has this block in it will do, whatever else is not known.
                    end, is_pending = self._aligned(chunk * per_chunk), False
                    break
                is_pending = is_pending or result is not LookupResult.HIT
            else:
                return Match(end, is_pending)
        return Match(0, is_pending=False)
