"""The record of a request saves work, and changes no answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.cpu import uses as uses_module
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.uses import RequestUse

NUM_BLOCKS = 12
DOCUMENTS, LENGTH = 3, 8


class Forgetful(RequestUse):
    """Looks up its keys again at every call."""

    seen_at = property(lambda self: -1, lambda self, value: None)


def keys_of(document: int, length: int) -> list[OffloadKey]:
    return [make_offload_key(b"%d %d" % (document, n), 0) for n in range(length)]


class Life:
    """Requests that begin, use, store and finish, and all answers of the manager."""

    def __init__(self, policy: str, use_cls: type[RequestUse], patch: pytest.MonkeyPatch) -> None:
        self._use_cls, self._patch = use_cls, patch
        self.manager = CPUOffloadingManager(NUM_BLOCKS, policy, enable_events=True)
        self.answers: list[object] = []
        self._writing: dict[int, list[OffloadKey]] = {}

    def load(self, keys: list[OffloadKey], context: ReqContext) -> None:
        num_hits, is_final = self.manager.lookup_prefix(keys, context)
        if num_hits and is_final:
            self.answers.append(self.manager.prepare_load(keys[:num_hits], context))
            self.manager.complete_load(set(keys[:num_hits]), context)

    def store(self, request: int, keys: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        self.answers.append(output and (output.keys_to_store, output.evicted_keys))
        if output is not None and output.keys_to_store:
            self._writing[request] = output.keys_to_store

    def do(self, what: str, request: int, document: int, length: int) -> None:
        self._patch.setattr(uses_module, "RequestUse", self._use_cls)
        manager, context, keys = self.manager, ReqContext(str(request)), keys_of(document, length)
        if what == "begin":
            manager.on_new_request(context)
        elif what == "touch":
            manager.touch(keys, context)
        elif what == "look up":
            self.answers.append(manager.lookup_prefix(keys, context))
        elif what == "load":
            self.load(keys, context)
        elif what == "store" and request not in self._writing:
            self.store(request, keys, context)
        elif what in ("stored", "not stored") and request in self._writing:
            manager.complete_store(self._writing.pop(request), context, what == "stored")
        elif what == "finish":
            manager.on_request_finished(context)
        elif what == "step":
            manager.on_schedule_end(ScheduleEndContext((), ()))
        elif what == "reset":
            manager.reset_cache()
            self._writing = {}
        self.answers.append([(event.keys, event.removed) for event in manager.take_events()])
        self.answers.append(sorted(manager.resident_keys()))


USES = ["touch", "look up", "load", "store"]
ENDS = ["stored", "not stored", "finish", "step", "reset"]
DEEDS = ["begin", *USES, *USES, *ENDS]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(DEEDS),
        st.integers(0, 2),
        st.integers(0, DOCUMENTS - 1),
        st.integers(1, LENGTH),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(steps=STEPS)
def test_to_remember_what_was_there_changes_no_answer(
    policy: str, steps: list[tuple[str, int, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        one, other = Life(policy, RequestUse, patch), Life(policy, Forgetful, patch)
        for step in steps:
            one.do(*step)
            other.do(*step)
    told = [getattr(answer, "block_ids", answer) for answer in one.answers]
    expected = [getattr(answer, "block_ids", answer) for answer in other.answers]
    assert list(map(str, told)) == list(map(str, expected))


def test_it_is_known_only_of_the_first_keys_and_as_long_as_nothing_changes() -> None:
    use = RequestUse(ReqContext("any"))
    keys = keys_of(0, 4)
    use.keys = dict.fromkeys(keys, 1)
    use.seen_at, use.all_here = 7, True
    assert use.is_known_to_have(keys, 7)
    assert use.is_known_to_have(keys[:2], 7)
    assert not use.is_known_to_have(keys, 8)
    assert not use.is_known_to_have(keys[1:], 7)
    assert not use.is_known_to_have([*keys, *keys_of(1, 1)], 7)
    use.bring(dict.fromkeys(keys_of(1, 1), 0))
    assert not use.is_known_to_have(keys, 7)
